//! The GPUs that requests for 1, 2, 4 and 8 GPUs get on every built-in machine with GPUs under every policy of the
//! Topology Manager: on an idle node, and on a node where another pod holds every second GPU, by index. The scope is
//! container, and devices report their own NUMA nodes.
//!
//! A node of linkwise and a kubelet in a box give the answers, and `golden/topology-manager` has the tables. If the
//! Topology Manager leaves a worse set than linkwise would choose of the same free GPUs, the table has both.
//! `INSTA_UPDATE=always cargo test -p linkwise-lab --test lab topology_manager_tables` writes the tables again.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;

use linkwise_core::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, AllocationTables, DeviceId, Value, preferred_allocation,
};
use linkwise_core::state::NumaHints;
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines::{self, Machine};
use linkwise_kubelet_box::{AdmissionError, Admitted, BoxError, Place, Pod, Policy};

use crate::numa_hints::play_on;
use crate::simulate_cluster::check_snapshot;

const GPU: &str = "nvidia.com/gpu";
const POLICIES: [Policy; 4] = [Policy::None, Policy::BestEffort, Policy::Restricted, Policy::SingleNumaNode];
const SIZES: [u32; 4] = [1, 2, 4, 8];
const FOLDER: &str = "golden/topology-manager";

/// The answers under one policy: on the idle node, then on the half full one, each by size.
type Column = Vec<String>;

/// The engine: linkwise's own choice on a machine.
struct Engine {
    tables: AllocationTables,
}

impl Engine {
    fn new(machine: &Machine) -> Self {
        let (topology, _) = NodeTopology::assemble(&machine.observed);
        Self { tables: AllocationTables::new(Arc::new(topology)) }
    }

    /// The GPUs' ids, in NVML's order.
    fn ids(&self) -> Vec<String> {
        let mut gpus: Vec<_> = self.tables.topology().gpus().iter().collect();
        gpus.sort_by_key(|gpu| gpu.index);
        gpus.iter().map(|gpu| gpu.uuid.to_string()).collect()
    }

    fn indices(&self, ids: &BTreeSet<String>) -> String {
        let gpus = self.tables.topology().gpus().iter().filter(|gpu| ids.contains(gpu.uuid.as_str()));
        let indices: BTreeSet<u32> = gpus.map(|gpu| gpu.index).collect();
        indices.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }

    fn choose(&self, free: &BTreeSet<String>, must_include: &BTreeSet<String>, size: u32) -> AllocationReport {
        let ids = |ids: &BTreeSet<String>| ids.iter().cloned().map(DeviceId::from).collect();
        let size = usize::try_from(size).unwrap();
        let request = AllocationRequest { available: ids(free), must_include: ids(must_include), size };
        preferred_allocation(&self.tables, &request, AllocationPolicy::BestEffort).1
    }

    /// The better set that the engine would choose of the same free GPUs, and the value by which it is better.
    fn better(&self, free: &BTreeSet<String>, got: &BTreeSet<String>, size: u32) -> Option<String> {
        let best = self.choose(free, &BTreeSet::new(), size);
        let (ours, theirs) = (best.values?, self.choose(free, got, size).values?);
        let differs = Some(ours.difference(&theirs)).filter(|value| *value != Value::PciAddresses)?;
        let (ours, theirs) = (ours.get(differs), theirs.get(differs));
        assert!(ours > theirs, "the engine alone chooses a worse set");
        let devices = best.devices.iter().map(|gpu| gpu.uuid.to_string()).collect();
        Some(format!("the engine alone: GPU {} ({differs} {ours}, here {theirs})", self.indices(&devices)))
    }
}

async fn column(machine: &Machine, engine: &Engine, policy: Policy) -> Result<Column, String> {
    let seen = machine.observed.clone();
    let answers = play_on(seen, policy, NumaHints::Node, async |kubelet, _, report| {
        let ids = engine.ids();
        let mut answers = Vec::new();
        for half_full in [false, true] {
            if half_full {
                let place = Place { pod: "other".into(), container: "main".into(), resource: GPU.into() };
                kubelet.hold(place, ids.iter().skip(1).step_by(2).cloned());
            }
            for size in SIZES {
                let free = kubelet.state().resources[GPU].free();
                let admitted = kubelet.admit(&Pod::single("pod", GPU, size), None).await;
                let last = report.borrow().clone();
                answers.push(answer(engine, &free, size, admitted, last.as_deref()));
                kubelet.remove_pod("pod");
            }
        }
        answers
    });
    match answers.await {
        Ok(answers) => Ok(answers),
        Err(BoxError::Unsupported(why)) => Err(why.to_string()),
        Err(error) => panic!("{error}"),
    }
}

fn answer(
    engine: &Engine,
    free: &BTreeSet<String>,
    size: u32,
    admitted: Result<Admitted, AdmissionError>,
    report: Option<&AllocationReport>,
) -> String {
    let admitted = match admitted {
        Ok(admitted) => admitted,
        Err(AdmissionError::TopologyAffinity(refusal)) => {
            return format!("TopologyAffinityError: {}", refusal.why());
        }
        Err(error @ (AdmissionError::Insufficient { .. } | AdmissionError::NoHealthyDevices { .. })) => {
            return format!("rejected: {error}");
        }
        Err(error) => panic!("{error}"),
    };
    let container = &admitted.containers["main"];
    let grant = &container.resources[GPU];
    let got: BTreeSet<String> = grant.allocation.devices.iter().cloned().collect();
    let mask = container.hint.as_ref().map(|hint| match (hint.mask, hint.preferred) {
        (None, _) => "any NUMA node, ".to_owned(),
        (Some(nodes), preferred) => format!("NUMA {nodes}{}, ", if preferred { "" } else { " not preferred" }),
    });
    let mask = mask.unwrap_or_default();
    let mut text = match &grant.asked {
        None => format!("GPU {}\n{mask}not asked: exactly these are on it", engine.indices(&got)),
        Some(asked) => {
            let taken = match asked.must_include.len() {
                0 => String::new(),
                taken => format!(" with {taken} taken before"),
            };
            let why = report.unwrap();
            format!("GPU {}\n{mask}asked about {}{taken}; {why}", engine.indices(&got), asked.available.len())
        }
    };
    if let Some(better) = engine.better(free, &got, size) {
        text += "\nworse than ";
        text += &better;
    }
    text
}

async fn table(machine: &Machine) -> String {
    let engine = Engine::new(machine);
    let mut text = format!("{}: {}\n", machine.name, machine.title);
    let mut columns = Vec::new();
    for policy in POLICIES {
        match column(machine, &engine, policy).await {
            Ok(column) => columns.push((policy, column)),
            Err(why) => writeln!(text, "\n{why}").unwrap(),
        }
    }
    let questions = ["idle", "every second GPU held"].into_iter().flat_map(|node| SIZES.map(|size| (node, size)));
    for (number, (node, size)) in questions.enumerate() {
        writeln!(text, "\n{node}, {size} GPU{}", if size == 1 { "" } else { "s" }).unwrap();
        let mut before: Option<&String> = None;
        for (policy, column) in &columns {
            let answer = &column[number];
            let outcome = if before == Some(answer) {
                "the same".to_owned()
            } else {
                answer.replace('\n', "\n                      ")
            };
            writeln!(text, "  {:<18}  {outcome}", policy.to_string()).unwrap();
            before = Some(answer);
        }
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn golden_table_matches_each_machine() {
    let mut names = BTreeSet::new();
    for built_in in machines::built_in() {
        let machine = machines::load(built_in.name).unwrap();
        if machine.observed.gpus.is_empty() {
            continue;
        }
        let table = table(&machine).await;
        check_snapshot(FOLDER, built_in.name, &table);
        names.insert(format!("{}.snap", built_in.name));
    }
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lab").join(FOLDER);
    for file in std::fs::read_dir(folder).unwrap() {
        let file = file.unwrap().file_name().into_string().unwrap();
        assert!(names.contains(&file), "{file} belongs to no built-in machine");
    }
}
