//! `linkwise-lab demo --dra` on every built-in machine.

use futures_util::{StreamExt, stream};
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines::{self, Machine};

use crate::demo::play;
use crate::oracle::Oracle;

/// Adds up the printed collectives of the sets with groups and without. Asserts that they are the oracle's.
fn sum_collectives(machine: &Machine, printed: &str) -> (u64, u64) {
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let oracle = Oracle::new(&topology);
    let collective = |devices: &str| {
        let index = |device: &str| device.strip_prefix("gpu-").unwrap().parse::<u32>().unwrap();
        let place = |device: &str| topology.gpus().iter().position(|gpu| gpu.index == index(device)).unwrap();
        oracle.collective(devices.split(',').fold(0, |set, device| set | 1 << place(device)))
    };
    let (mut with, mut without, mut got) = (0, 0, "");
    for line in printed.lines().map(str::trim) {
        if let Some(gets) = line.strip_prefix("gets ") {
            got = gets.split_once(", ").unwrap().0;
        } else if let Some(line) = line.strip_prefix("collective: ") {
            let (own, rest) = line.split_once(" MB/s; without groups ").unwrap();
            let (singles, other) = rest.strip_suffix(" MB/s").unwrap().split_once(": ").unwrap();
            let (own, other): (u64, u64) = (own.parse().unwrap(), other.parse().unwrap());
            assert_eq!((own, other), (collective(got), collective(singles)), "{}: {got}, {singles}", machine.name);
            (with, without) = (with + own, without + other);
        }
    }
    (with, without)
}

/// The most demos at a time. Each of them waits for the kubelet and for lists of pods most of its time.
const MAX_CONCURRENT: usize = 5;

#[tokio::test]
async fn dra_demo_succeeds_on_each_machine() {
    let load = |name| machines::load(name).unwrap();
    let demos = machines::built_in().map(|it| async move { (it.name, play(load(it.name), &["--dra"]).await) });
    let mut demos = stream::iter(demos).buffer_unordered(MAX_CONCURRENT);
    let mut count = 0;
    while let Some((machine, printed)) = demos.next().await {
        count += 1;
        let gpus = machines::load(machine).unwrap().observed.gpus.len();
        let stored = format!("stores {gpus} devices in a ResourceSlice");
        let always = [
            &stored,
            "notebook wants nvidia.com/gpu: 1: no template for 1, so its extended resource\n  gets gpu-",
            "written them again",
            "tainted gpu.nvidia.com/gpu-lost",
            "the taint is gone",
            "tainted gpu.nvidia.com/xid=79",
            "claims allocated",
            "nothing left behind",
        ];
        for part in always {
            assert!(printed.contains(part), "{machine}: {part}\n{printed}");
        }
        // train-a and train-b want half of the GPUs each. With the notebook's GPU taken too, train-b's claim waits.
        if gpus >= 4 {
            assert!(printed.contains("✗ train-b wants") && printed.contains("in use"), "{machine}\n{printed}");
        }
        assert_eq!(printed.contains("a claim from linkwise-gpus-"), gpus >= 4, "{machine}\n{printed}");
        let (with, without) = sum_collectives(&load(machine), &printed);
        let summary = format!("templates: {with} MB/s in all; of the first free GPUs: {without} MB/s");
        assert_eq!(printed.contains(&summary), gpus >= 4, "{machine}: {summary}\n{printed}");
        assert!(with >= without, "{machine}\n{printed}");
        // In a mesh of NVLinks groups double the bandwidth that the first free GPUs in published order have.
        assert!(machine != "dgx1-v100" || (with, without) == (146_000, 72_000), "{printed}");
    }
    assert_eq!(count, machines::built_in().count());
}

#[tokio::test]
async fn dra_demo_succeeds_with_few_gpus_or_none() {
    for gpus in [0, 1, 3] {
        let mut machine = machines::load("dgx1-v100").unwrap();
        machine.observed.gpus.truncate(gpus);
        let printed = play(machine, &["--dra"]).await;
        let end = if gpus == 0 { "publishes nothing" } else { "nothing left behind" };
        assert!(printed.contains(end), "{gpus}\n{printed}");
    }
}
