//! GetPreferredAllocation over the socket beside an empty RPC on the same socket.
//!
//! The whole node serves a simulated dgx-h100 as in `linkwise run`; the empty RPC is
//! GetDevicePluginOptions. The two are asked in turn, so that noise meets both. Run with
//! `cargo bench --bench rpc`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and ends where it cannot go on")]

use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use linkwise::inventory::Event;
use linkwise::kubelet::Settings;
use linkwise::kubelet_box::{KubeletBox, Options};
use linkwise::machines;
use linkwise::proto::v1beta1 as wire;
use linkwise::proto::v1beta1::device_plugin_client::DevicePluginClient;
use linkwise::runtime::{HealthSettings, Node, NodeSettings};
use tokio::net::UnixStream;
use tonic::transport::Endpoint;

/// Pairs of calls after the warm-up.
const ROUNDS: usize = 5_000;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = KubeletBox::start(Options::new(folder.path())).unwrap();
    let settings = NodeSettings {
        kubelet: Settings::new(folder.path().join(Options::SOCKET)),
        metrics_address: "127.0.0.1:0".parse().unwrap(),
        numa_hints: linkwise::inventory::NumaHints::default(),
        health: HealthSettings::default(),
    };
    let node = Node::start(settings).await.unwrap();
    let observed = machines::load("dgx-h100").unwrap().observed;
    let ids: Vec<String> = observed.gpus.iter().map(|gpu| gpu.uuid.to_string()).collect();
    let (events, shutdown) = (node.events(), node.shutdown());
    let measure = async {
        events.send(Event::Observed(Box::new(observed))).await.unwrap();
        kubelet.wait(|state| state.resources["nvidia.com/gpu"].connected).await.unwrap();
        let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let socket = names.into_iter().find(|path| path.to_str().unwrap().contains("linkwise-")).unwrap();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
        });
        let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap();
        let mut client = DevicePluginClient::new(channel);
        println!("{:<28}{:>12}{:>12}{:>12}{:>10}", "GetPreferredAllocation of", "median", "p99", "empty RPC", "ratio");
        for size in [1, 2, 4] {
            let question = wire::ContainerPreferredAllocationRequest {
                available_device_i_ds: ids.clone(),
                must_include_device_i_ds: Vec::new(),
                allocation_size: size,
            };
            let request = wire::PreferredAllocationRequest { container_requests: vec![question] };
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
}

fn percentile(times: &mut [Duration], part: usize) -> Duration {
    times.sort_unstable();
    times.get(times.len() * part / 100).copied().unwrap_or_default()
}
