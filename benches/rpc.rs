//! The time of GetPreferredAllocation compared with that of an empty RPC, and the time of an admission while NVML hangs
//! compared with that while NVML answers.
//!
//! For the RPCs, a node in this process serves a simulated dgx-h100 as `linkwise run` would; the empty RPC is
//! GetDevicePluginOptions on the same socket. For the admissions, the program runs with the fake NVML library, in which
//! a hanging call holds the lock. The compared calls alternate, so that noise hits both. Run it with `cargo bench
//! --bench rpc`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and ends at its first error")]

mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fake_nvml::Control;
use hyper_util::rt::TokioIo;
use linkwise_core::state::Event;
use linkwise_host::machines;
use linkwise_kubelet::device_plugin::Settings;
use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_api::v1beta1::device_plugin_client::DevicePluginClient;
use linkwise_kubelet_box::{KubeletBox, Options};
use linkwise_node::node::{Node, NodeSettings};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use support::percentile;

/// Pairs of calls after the warm-up.
const ROUNDS: usize = 5_000;
/// Admissions in a block, during which NVML either hangs or answers.
const BLOCK: usize = 500;
const BLOCKS: usize = 20;
const RESOURCE: &str = "nvidia.com/gpu";

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = KubeletBox::start(Options::new(folder.path())).unwrap();
    let settings = Settings::new(folder.path().join(Options::SOCKET));
    let node = Node::start(NodeSettings::new(settings)).await.unwrap();
    let observed = machines::load("dgx-h100").unwrap().observed;
    let ids: Vec<String> = observed.gpus.iter().map(|gpu| gpu.uuid.to_string()).collect();
    let (events, shutdown) = (node.events(), node.shutdown());
    let measure = async {
        events.send(Event::Observed(Box::new(observed))).await.unwrap();
        kubelet.wait(|state| state.resources[RESOURCE].connected).await.unwrap();
        let mut client = client(folder.path()).await;
        println!("{:<28}{:>12}{:>12}{:>12}{:>10}", "GetPreferredAllocation of", "median", "p99", "empty RPC", "ratio");
        for size in [1, 2, 4] {
            let request = question(&ids, size);
            let (mut empty, mut asked) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS + ROUNDS / 10 {
                let start = Instant::now();
                client.get_device_plugin_options(wire::Empty {}).await.unwrap();
                let between = Instant::now();
                client.get_preferred_allocation(request.clone()).await.unwrap();
                if round >= ROUNDS / 10 {
                    empty.push(between - start);
                    asked.push(between.elapsed());
                }
            }
            let (plain, full) = (percentile(&mut empty, 50), percentile(&mut asked, 50));
            let ratio = full.as_secs_f64() / plain.as_secs_f64();
            let tail = percentile(&mut asked, 99);
            println!("{:<28}{full:>12?}{tail:>12?}{plain:>12?}{ratio:>10.2}", format!("{size} of 8, dgx-h100"));
        }
        shutdown.cancel();
    };
    let (served, ()) = tokio::join!(node.serve(), measure);
    served.unwrap();
    kubelet.stop().await.unwrap();
    while_nvml_hangs().await;
}

/// Connects to the plugin whose socket is in this folder.
async fn client(folder: &Path) -> DevicePluginClient<Channel> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let socket = names.into_iter().find(|path| path.to_str().unwrap().contains("linkwise-")).unwrap();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap();
    DevicePluginClient::new(channel)
}

fn question(ids: &[String], size: i32) -> wire::PreferredAllocationRequest {
    let question = wire::ContainerPreferredAllocationRequest {
        available_device_i_ds: ids.to_vec(),
        must_include_device_i_ds: Vec::new(),
        allocation_size: size,
    };
    wire::PreferredAllocationRequest { container_requests: vec![question] }
}

/// Measures GetPreferredAllocation and Allocate of 4 of 8 GPUs, in blocks. In every second block a call of NVML holds
/// the library's lock and does not return.
async fn while_nvml_hangs() {
    let folder = tempfile::tempdir().unwrap();
    // `client` finds the plugin's socket by `linkwise-` in its path, so no other path here may have that.
    let sockets = folder.path().join("kubelet");
    let kubelet = KubeletBox::start(Options::new(&sockets)).unwrap();
    let control = Control::new(folder.path().join("control"));
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx-h100.yaml");
    let mut process = Command::new(env!("CARGO_BIN_EXE_linkwise"))
        .arg("run")
        .arg("--kubelet-socket")
        .arg(sockets.join(Options::SOCKET))
        .arg("--nvml-library")
        .arg(fake_nvml::library_path())
        .args(["--metrics-address", "127.0.0.1:0", "--nvml-poll-ms=20", "--nvml-call-ms=3600000"])
        .env("FAKE_NVML_MACHINE", machine)
        .env("FAKE_NVML_CONTROL", control.socket())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let listed = kubelet.wait(|state| state.resources[RESOURCE].healthy.len() == 8).await.unwrap();
    let ids: Vec<String> = listed.resources[RESOURCE].healthy.iter().cloned().collect();
    let mut client = client(&sockets).await;
    // The times while NVML answers, and those while it hangs.
    let mut times = [Vec::new(), Vec::new()];
    for block in 0..BLOCKS {
        let hangs = block % 2 == 1;
        let word = if hangs { "hold" } else { "unhold" };
        control.send(&format!("{word} 0 nvmlDeviceGetTemperature")).unwrap();
        // After some polls the call has been made and hangs, or polls go on.
        tokio::time::sleep(Duration::from_millis(200)).await;
        for round in 0..BLOCK + BLOCK / 10 {
            let start = Instant::now();
            let preferred = client.get_preferred_allocation(question(&ids, 4)).await.unwrap().into_inner();
            let devices_ids = preferred.container_responses.into_iter().next().unwrap().device_i_ds;
            let order = wire::ContainerAllocateRequest { devices_ids };
            client.allocate(wire::AllocateRequest { container_requests: vec![order] }).await.unwrap();
            if round >= BLOCK / 10 {
                times[usize::from(hangs)].push(start.elapsed());
            }
        }
    }
    let [well, hung] = &mut times;
    println!("\n{:<28}{:>12}{:>12}{:>12}", "an admission, 4 of 8", "median", "p99", "worst");
    for (name, times) in [("NVML answers", &mut *well), ("NVML hangs", &mut *hung)] {
        let [median, tail, worst] = [50, 99, 100].map(|part| percentile(times, part));
        println!("{name:<28}{median:>12?}{tail:>12?}{worst:>12?}");
    }
    let ratio = percentile(hung, 50).as_secs_f64() / percentile(well, 50).as_secs_f64();
    println!("{:<28}{ratio:>12.2}", "ratio");
    let _ = process.kill();
    let _ = process.wait();
    kubelet.stop().await.unwrap();
}
