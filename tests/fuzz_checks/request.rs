//! Any request on the built-in machines and on a large one: the answer is a set of the requested size with all devices
//! of `must_include`, or the documented fallback. Called by the target `request`; the targets for machines use
//! [`check_answer`] too. `tests/allocation_oracle.rs` and `tests/shared_oracle.rs` compare choices with a brute force.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

use linkwise_core::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, AllocationTables, DeviceId, Explanation,
    PreferredAllocation, preferred_allocation,
};
use linkwise_core::topology::{GpuObservation, NodeObservation, NodeTopology, PciAddress};
use linkwise_host::machines;

use super::bytes::Bytes;

static BUILT_IN: LazyLock<Vec<AllocationTables>> = LazyLock::new(|| {
    let machines = machines::built_in().filter_map(|machine| machines::load(machine.name).ok());
    machines.map(|machine| tables(&machine.observed)).collect()
});

/// The tables of a machine with 20 GPUs, too many for a table of all sets.
static LARGE: LazyLock<AllocationTables> = LazyLock::new(|| {
    let gpu = |index: u8| {
        let pci = PciAddress::new(0, index, 0, 0).expect("a PCI address");
        GpuObservation::new(index.into(), format!("GPU-{index:02}").parse().expect("a UUID"), pci)
    };
    tables(&NodeObservation { gpus: (0..20).map(gpu).collect(), ..NodeObservation::default() })
});

fn tables(observed: &NodeObservation) -> AllocationTables {
    AllocationTables::new(Arc::new(NodeTopology::assemble(observed).0))
}

/// Checks the answer to a request; the bytes choose the request and the machine.
pub fn request(bytes: &[u8]) {
    let bytes = &mut Bytes(bytes);
    let numbers = request_in_numbers(bytes);
    let tables = match bytes.below(32) {
        31 => &*LARGE,
        number => &BUILT_IN[number % BUILT_IN.len()],
    };
    let request = numbers.on(tables.topology());
    let (answer, report) = preferred_allocation(tables, &request, AllocationPolicy::BestEffort);
    check_answer(tables, &request, &answer, &report);
    let mut reordered = request.clone();
    reordered.available.reverse();
    reordered.must_include.reverse();
    reordered.available.extend(request.available.iter().cloned());
    let again = preferred_allocation(tables, &reordered, AllocationPolicy::BestEffort);
    assert_eq!(again, (answer, report), "the order of the request's lists changes the answer");
}

/// Checks an answer without the code that made it.
pub fn check_answer(
    tables: &AllocationTables,
    request: &AllocationRequest,
    answer: &PreferredAllocation,
    report: &AllocationReport,
) {
    let places: BTreeMap<DeviceId, usize> =
        tables.topology().gpus().iter().enumerate().map(|(place, gpu)| (DeviceId::from(&gpu.uuid), place)).collect();
    let must: BTreeSet<&DeviceId> = request.must_include.iter().collect();
    let offered: BTreeSet<&DeviceId> = request.available.iter().chain(&request.must_include).collect();
    let chosen: BTreeSet<&DeviceId> = answer.devices.iter().collect();
    assert_eq!(chosen.len(), answer.devices.len(), "the answer repeats a device");
    assert!(chosen.is_subset(&offered), "the answer has a device that was not offered");
    let known = offered.iter().all(|id| places.contains_key(*id));
    let possible = known && request.size >= must.len().max(1) && request.size <= offered.len();
    match report.fallback {
        None => {
            assert!(possible, "an answer to an impossible request");
            assert_eq!(answer.devices.len(), request.size, "the answer has another size");
            assert!(must.is_subset(&chosen), "the answer lacks a device of must_include");
            assert!(answer.devices.is_sorted_by_key(|id| places.get(id)), "not in the order of PCI addresses");
            assert!(report.values.is_some(), "an answer without values");
        }
        Some(reason) => {
            let few = places.len() <= AllocationTables::EXACT_GPUS;
            assert!(!(possible && few), "a fallback ({reason:?}) though there is an answer");
            let others = offered.difference(&must);
            let expected: Vec<&DeviceId> = must.iter().chain(others).take(request.size).copied().collect();
            assert_eq!(answer.devices.iter().collect::<Vec<_>>(), expected, "not the documented fallback ({reason:?})");
            assert!(!report.exact && report.values.is_none(), "a fallback with values");
        }
    }
    let explanation = Explanation::new(tables, report);
    assert!(!explanation.to_string().is_empty() && !report.to_string().contains('\n'), "no report, or several lines");
    serde_json::to_string(&explanation).expect("the report can be JSON");
}

/// A request whose devices are numbers, because its machine is not known yet.
struct RequestInNumbers {
    available: Vec<usize>,
    must_include: Vec<usize>,
    size: usize,
}

fn request_in_numbers(bytes: &mut Bytes<'_>) -> RequestInNumbers {
    let size = match bytes.byte() {
        size @ 0..=0xef => usize::from(size % 10),
        0xff => usize::MAX,
        size => usize::from(size),
    };
    let (available, must_include) = (bytes.below(24), bytes.below(6));
    let mut some = |count| (0..count).map(|_| bytes.below(256)).collect();
    RequestInNumbers { available: some(available), must_include: some(must_include), size }
}

impl RequestInNumbers {
    /// The request on a machine: numbers below 252 become GPUs, if it has any; others, ids that built-in machines lack.
    fn on(&self, topology: &NodeTopology) -> AllocationRequest {
        let gpus = topology.gpus();
        let id = |&number: &usize| match gpus.get(number % gpus.len().max(1)) {
            Some(gpu) if number < 0xfc => DeviceId::from(&gpu.uuid),
            _ => DeviceId::from(["", "GPU-gone", "\u{0}\u{fffd}", "GPU-00"][number % 4].to_owned()),
        };
        AllocationRequest {
            available: self.available.iter().map(id).collect(),
            must_include: self.must_include.iter().map(id).collect(),
            size: self.size,
        }
    }
}
