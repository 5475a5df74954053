//! The demo ends well on every machine under every policy and scope, and stays watchable.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use std::process::Command;
use std::sync::Mutex;

use clap::Parser;
use linkwise::config::{Cli, Command as Linkwise, DemoArgs};
use linkwise::machines::{self, Machine};
use linkwise::topology::{HostObservation, NodeObservation, NumaNodeId, NumaNodeObservation};
use linkwise_kubelet_box::TopologyManager;

const POLICIES: [&str; 4] = ["none", "best-effort", "restricted", "single-numa-node"];
const SCOPES: [&str; 2] = ["container", "pod"];
/// Demos at a time: more would compete for processors.
const AT_ONCE: usize = 8;

fn args(options: &[&str]) -> DemoArgs {
    match Cli::try_parse_from(["linkwise", "demo"].iter().chain(options)).unwrap().command {
        Linkwise::Demo(args) => args,
        other => panic!("{other:?}"),
    }
}

/// What a demo prints.
async fn played(machine: Machine, options: &[&str]) -> String {
    let printed = Mutex::new(String::new());
    let say = |text: &str| {
        printed.lock().unwrap().push_str(text);
        Ok(())
    };
    let name = machine.name.clone();
    let ended = linkwise::demo::demo(&args(options), machine, &say).await;
    let printed = printed.into_inner().unwrap();
    ended.unwrap_or_else(|error| panic!("{name} {options:?}: {error:#}\n{printed}"));
    printed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_succeeds_on_each_machine_policy_and_scope() {
    let mut demos = tokio::task::JoinSet::new();
    for machine in machines::built_in() {
        for (policy, scope) in POLICIES.into_iter().flat_map(|policy| SCOPES.map(|scope| (policy, scope))) {
            let machine = machines::load(machine.name).unwrap();
            if demos.len() == AT_ONCE {
                demos.join_next().await.unwrap().unwrap();
            }
            demos.spawn(async move {
                let nodes = linkwise::demo::numa_nodes(&machine.observed.host).len();
                let (name, gpus) = (machine.name.clone(), machine.observed.gpus.len());
                let printed = played(machine, &["--topology-manager-policy", policy, "--scope", scope]).await;
                assert!(gpus == 0 || printed.contains("nothing left behind"), "{name} {policy} {scope}\n{printed}");
                let refuses = printed.contains("unsupported on machines with more than 8 NUMA nodes");
                assert_eq!(
                    refuses,
                    policy != "none" && nodes > TopologyManager::MAX_NODES,
                    "{name} {policy}\n{printed}"
                );
            });
        }
    }
    while let Some(demo) = demos.join_next().await {
        demo.unwrap();
    }
}

/// Machines that are not built in: few GPUs, no NUMA nodes, too many of them, node numbers that no mask holds.
fn odd_machines() -> Vec<Machine> {
    let odd = |name: &str, change: &dyn Fn(&mut NodeObservation)| {
        let mut machine = machines::load("dgx-h100").unwrap();
        machine.name = name.to_owned();
        change(&mut machine.observed);
        machine
    };
    let memory_only = |id| NumaNodeObservation { id: NumaNodeId(id), package: None, cpus: String::new() };
    vec![
        odd("no GPU", &|seen| seen.gpus.clear()),
        odd("one GPU", &|seen| seen.gpus.truncate(1)),
        odd("two GPUs", &|seen| seen.gpus.truncate(2)),
        odd("three GPUs", &|seen| seen.gpus.truncate(3)),
        odd("no host", &|seen| seen.host = HostObservation::default()),
        odd("no NUMA node known", &|seen| {
            seen.host = HostObservation::default();
            seen.gpus.iter_mut().for_each(|gpu| gpu.numa = None);
        }),
        odd("36 NUMA nodes", &|seen| seen.host.numa_nodes.extend((2..36).map(memory_only))),
        odd("node 252", &|seen| seen.host.numa_nodes.push(memory_only(252))),
        odd("a GPU without CPUs near", &|seen| seen.host.numa_nodes[1].cpus.clear()),
    ]
}

#[tokio::test]
async fn demo_succeeds_on_odd_machines() {
    for machine in odd_machines() {
        for policy in POLICIES {
            for hints in ["node", "package", "off"] {
                let printed =
                    played(machine.clone(), &["--topology-manager-policy", policy, "--numa-hints", hints]).await;
                assert!(printed.contains("nothing left behind") || printed.contains("no GPU"), "{printed}");
            }
        }
    }
}

#[tokio::test]
async fn pod_larger_than_numa_node_is_refused_with_reason() {
    let refused = "TopologyAffinityError\n  why: 4 nvidia.com/gpu would fit 1 NUMA node, but what is free needs {0,1}";
    for (policy, refuses) in POLICIES.into_iter().zip([false, false, true, true]) {
        let machine = machines::load("dgx-h100").unwrap();
        let printed = played(machine, &["--topology-manager-policy", policy]).await;
        assert_eq!(printed.contains(refused), refuses, "{policy}\n{printed}");
        assert!(
            printed.contains("leaves the bus") && printed.contains("It comes back and is healthy again"),
            "{printed}"
        );
    }
    // Without hints the Topology Manager does not constrain GPUs.
    let machine = machines::load("dgx-h100").unwrap();
    let printed = played(machine, &["--topology-manager-policy", "single-numa-node", "--numa-hints", "off"]).await;
    assert!(!printed.contains("TopologyAffinityError"), "{printed}");
}

#[test]
fn piped_demo_prints_plain_lines_of_100_columns() {
    for machine in machines::built_in() {
        let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
        command.args(["demo", "--machine", machine.name, "--topology-manager-policy", "restricted"]);
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}: {}\n{text}", machine.name, String::from_utf8_lossy(&output.stderr));
        assert!(!text.contains('\x1b'), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{}: {line}", machine.name);
        }
    }
}
