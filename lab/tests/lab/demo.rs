//! The demo succeeds on every machine under every policy, with alternating scopes, and `--hold` keeps its page served.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use clap::Parser;
use linkwise_core::topology::{HostObservation, NodeObservation, NumaNodeId, NumaNodeObservation};
use linkwise_host::machines::{self, Machine};
use linkwise_kubelet_box::TopologyManager;
use linkwise_lab::demo::{DemoArgs, demo, play_with_dra};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const POLICIES: [&str; 4] = ["none", "best-effort", "restricted", "single-numa-node"];
const SCOPES: [&str; 2] = ["container", "pod"];
/// The most demos at a time. More would compete for the two workers, and `KubeletBox::wait` gives up after 20 s.
const MAX_CONCURRENT: usize = 2;

#[derive(Parser)]
struct Options {
    #[command(flatten)]
    demo: DemoArgs,
}

fn args(options: &[&str]) -> DemoArgs {
    Options::try_parse_from(["demo"].iter().chain(options)).unwrap().demo
}

/// Plays a demo, which must succeed. Returns the printed text.
pub async fn play(machine: Machine, options: &[&str]) -> String {
    let printed = Mutex::new(String::new());
    let print = |text: &str| {
        printed.lock().unwrap().push_str(text);
        Ok(())
    };
    let name = machine.name.clone();
    let args = args(options);
    let result = match args.dra {
        true => play_with_dra(&args, machine, &print).await,
        false => demo(&args, machine, &print).await,
    };
    let printed = printed.into_inner().unwrap();
    result.unwrap_or_else(|error| panic!("{name} {options:?}: {error:#}\n{printed}"));
    printed
}

/// The scope alternates from policy to policy, and every second machine begins with the other scope.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_succeeds_on_each_machine_and_policy() {
    let mut demos = tokio::task::JoinSet::new();
    for (at, machine) in machines::built_in().enumerate() {
        for (policy, scope) in POLICIES.into_iter().zip(SCOPES.into_iter().cycle().skip(at % 2)) {
            let machine = machines::load(machine.name).unwrap();
            if demos.len() == MAX_CONCURRENT {
                demos.join_next().await.unwrap().unwrap();
            }
            demos.spawn(async move {
                let nodes = linkwise_lab::demo::numa_nodes(&machine.observed.host).len();
                let (name, gpus) = (machine.name.clone(), machine.observed.gpus.len());
                let printed = play(machine, &["--topology-manager-policy", policy, "--scope", scope]).await;
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

/// Machines that are not built in: with few GPUs, or NUMA nodes that are unknown, many, without CPUs or beyond a mask.
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
                    play(machine.clone(), &["--topology-manager-policy", policy, "--numa-hints", hints]).await;
                assert!(printed.contains("nothing left behind") || printed.contains("no GPU"), "{printed}");
            }
        }
    }
}

#[test]
fn piped_demo_is_plain_and_within_100_columns() {
    for machine in machines::built_in() {
        let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise-lab"));
        command.args(["demo", "--machine", machine.name, "--topology-manager-policy", "restricted"]);
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}: {}\n{text}", machine.name, String::from_utf8_lossy(&output.stderr));
        assert!(!text.contains('\x1b'), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{}: {line}", machine.name);
        }
        // On a DGX H100 a pod of 4 GPUs is refused, with the reason, because no NUMA node has 4 free GPUs left.
        let why = "TopologyAffinityError\n  why: 4 nvidia.com/gpu would fit 1 NUMA node, but what is free needs {0,1}";
        assert!(machine.name != "dgx-h100" || text.contains(why), "{text}");
    }
}

/// A child process that is killed when this value is dropped.
pub struct KillOnDrop(pub Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn get(address: &str, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

/// Requests the path until the answer has all wanted texts.
async fn get_until(address: &str, path: &str, wanted: &[&str]) -> String {
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    let mut last = String::new();
    let polling = async {
        loop {
            ticks.tick().await;
            last = get(address, path).await;
            if wanted.iter().all(|text| last.contains(text)) {
                return last.clone();
            }
        }
    };
    let answer = tokio::time::timeout(Duration::from_secs(60), polling).await.ok();
    answer.unwrap_or_else(|| panic!("{path} has not all of {wanted:?}:\n{last}"))
}

#[tokio::test]
async fn held_demo_shows_free_gpus_after_its_last_pod() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise-lab"));
    command.args(["demo", "--hold", "--machine", "dgx-h100", "--metrics-address", "127.0.0.1:0"]);
    let mut demo = KillOnDrop(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut printed = BufReader::new(demo.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let page = printed.find_map(|line| line.strip_prefix("The node's page: http://").map(str::to_owned)).unwrap();
    let address = page.trim_end_matches('/');
    assert!(printed.any(|line| line.starts_with("Serving until interrupted")), "the demo ended before it served");
    // linkwise counts no GPU as held, even if no kubelet list had the short-lived pods.
    let counts = ["held\"} 0", "free\"} 8", "mig\"} 0", "unhealthy\"} 0", "unknown\"} 0"];
    let counts = counts.map(|count| format!("linkwise_gpus_by_availability{{availability=\"{count}"));
    let metrics = get_until(address, "/metrics", &counts.each_ref().map(String::as_str)).await;
    let by_node = metrics.lines().filter(|line| line.starts_with("linkwise_free_gpus{"));
    assert_eq!(by_node.map(|line| line.split(' ').nth(1).unwrap().parse::<u32>().unwrap()).sum::<u32>(), 8);
    for size in [2, 4, 8] {
        assert!(metrics.contains(&format!("linkwise_free_collective_megabytes_per_second{{size=\"{size}\"}}")));
    }
    let tiles = ["<dt>Held</dt><dd>0</dd>", "<dt>Free</dt><dd>8</dd>", "<dt>Unhealthy</dt><dd>0</dd>"];
    let page = get_until(address, "/", &tiles).await;
    let can_be_met = |size: &str| {
        let item = page.split(&format!("data-size=\"{size}\"")).nth(1).unwrap();
        !item.split("</li>").next().unwrap().contains("cannot be met")
    };
    assert_eq!(["1", "2", "4", "8"].map(can_be_met), [true; 4], "{page}");
    assert!(page.contains("8 GPUs: 0 held, 8 free, 0 unhealthy."), "{page}");
}
