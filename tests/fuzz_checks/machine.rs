//! Files that describe machines: any file is refused in one line or makes a topology. Called by the targets `node_file`
//! and `nccl_xml`.

use std::sync::Arc;

use linkwise_core::allocation::{
    AllocationPolicy, AllocationRequest, AllocationTables, DeviceId, preferred_allocation,
};
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines::{Machine, of_bytes};

use super::request::check_answer;

/// The most GPUs for which tables are computed, because tables of more GPUs slow the fuzzer down.
const MAX_GPUS: usize = 12;

pub fn node_file(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Machine::parse(text) {
        Ok(machine) => check_machine(&machine),
        Err(error) => assert_one_line(&error.to_string()),
    }
}

/// Checks a file as `--node FILE` reads it: an NCCL topology dump, a hwloc XML or anything else.
pub fn nccl_xml(bytes: &[u8]) {
    match of_bytes("dumps/fuzz.xml", bytes.to_vec()) {
        Ok(machine) => check_machine(&machine),
        Err(error) => assert_one_line(&error.to_string()),
    }
}

/// Asserts that a message is one line below 4,096 bytes without control characters, even if it repeats input.
pub(super) fn assert_one_line(message: &str) {
    let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    assert!(!message.contains(breaks), "a message with a control character or line break: {message:?}");
    assert!(message.len() < 4096, "a message of {} bytes", message.len());
}

fn check_machine(machine: &Machine) {
    let text = machine.to_yaml().expect("what was read can be written");
    match Machine::parse(&text) {
        Ok(again) => assert_eq!(again, *machine, "read back as another machine:\n{text}"),
        Err(error) => panic!("not read back: {error}\n{text}"),
    }
    let (topology, warnings) = NodeTopology::assemble(&machine.observed);
    for warning in &warnings {
        assert_one_line(&warning.to_string());
    }
    let gpus = topology.gpus();
    assert!(gpus.len() <= machine.observed.gpus.len().min(NodeTopology::MAX_GPUS), "too many GPUs in the topology");
    for a in 0..gpus.len() {
        assert_eq!(topology.position(&gpus[a].uuid), Some(a), "two GPUs have one UUID");
        for b in 0..gpus.len() {
            assert_eq!(topology.symbol(a, b), topology.symbol(b, a), "two levels of one pair");
            assert_eq!(topology.bandwidth(a, b), topology.bandwidth(b, a), "two bandwidths of one pair");
        }
        for nic in topology.nearest_nics(a) {
            assert!(topology.nics()[nic].level.len() == gpus.len(), "a NIC has no level to some GPU");
        }
    }
    if gpus.len() <= MAX_GPUS {
        let available: Vec<DeviceId> = gpus.iter().map(|gpu| DeviceId::from(&gpu.uuid)).collect();
        let size = available.len().div_ceil(2);
        let request = AllocationRequest { available, must_include: Vec::new(), size };
        let tables = AllocationTables::new(Arc::new(topology));
        let (answer, report) = preferred_allocation(&tables, &request, AllocationPolicy::BestEffort);
        check_answer(&tables, &request, &answer, &report);
    }
}
