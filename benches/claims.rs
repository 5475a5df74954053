//! The time of NodePrepareResources and NodeUnprepareResources over the socket, with checkpoints in memory and on a
//! disk. No GET of the claim is made: a function answers at once.
//!
//! The calls come from the kubelet in the box. A repeated Prepare is answered from the checkpoint. Run it with `cargo
//! bench --bench claims`; LINKWISE_BENCH_DISK names a folder on the disk (default: the build folder).

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a benchmark prints, reads its environment, and ends at its first error"
)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use linkwise_core::claims::{AllocatedDevice, Allocation, Claim, ClaimName, ClaimStatus, DeviceAllocation};
use linkwise_core::publish::injection::{CdiOptions, InjectionOptions};
use linkwise_core::state::{Door, Event, Holdings, NodeState, NumaHints, ResourcePlan};
use linkwise_kubelet::dra::{CdiDevices, Handover, LedgerEntry, LedgerLink, Plugin, PluginMetrics, Settings};
use linkwise_kubelet::readiness::Readiness;
use linkwise_kubelet_box::dra::{ClaimRef, DraKubelet, DraOptions, PodClaims};
use linkwise_nvml::supervisor::Idle;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use support::percentile;

/// Claims after the warm-up.
const ROUNDS: usize = 300;
const DRIVER: &str = "gpu.nvidia.com";
const KIND: &str = "k8s.device-plugin.nvidia.com/gpu";

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let disk = std::env::var_os("LINKWISE_BENCH_DISK").map(PathBuf::from);
    let disk = disk.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target"));
    println!("{:<24}{:>12}{:>12}{:>12}{:>12}", "a claim of 4 GPUs", "Prepare", "p99", "repeated", "Unprepare");
    for (name, folder) in [("checkpoints in memory", Path::new("/dev/shm")), ("checkpoints on disk", &disk)] {
        let [mut prepared, mut repeated, mut unprepared] = measure(folder).await;
        let tail = percentile(&mut prepared, 99);
        let [prepared, repeated, unprepared] =
            [&mut prepared, &mut repeated, &mut unprepared].map(|times| percentile(times, 50));
        println!("{name:<24}{prepared:>12.2?}{tail:>12.2?}{repeated:>12.2?}{unprepared:>12.2?}");
    }
}

async fn measure(folder: &Path) -> [Vec<Duration>; 3] {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("cdi")).unwrap();
    let state = state();
    let cdi = CdiOptions { kind: KIND.to_owned(), annotation_prefix: None, cri: true };
    let settings = Settings {
        registry: at("r"),
        plugins: at("p"),
        cdi_folder: at("cdi"),
        cdi: watch::channel(Some(Arc::new(cdi_devices(&state)))).1,
        boot: Some("this".to_owned()),
        injection: InjectionOptions { cdi: Some(cdi), ..InjectionOptions::default() },
        read_claim: Some(Arc::new(|asked: ClaimName| {
            let asked = ClaimName { uid: asked.name.clone(), ..asked };
            Box::pin(std::future::ready(Ok(claim(asked))))
        })),
        ..Settings::new(DRIVER, "pool", at("claims"))
    };
    let kubelet = DraKubelet::start(DraOptions::new(at("r"))).unwrap();
    let (shown, snapshot) = watch::channel(Arc::new(state));
    let (ledger, mut entries) = LedgerLink::new();
    tokio::spawn(async move {
        while let Some(LedgerEntry { plan, answer, .. }) = entries.recv().await {
            let planned = plan(&shown.borrow());
            let prepared = planned.map(|(event, prepared)| {
                shown.send_modify(|now| *now = Arc::new(NodeState::clone(now).apply(event, Duration::ZERO).0));
                prepared
            });
            let _ = answer.send(prepared);
        }
    });
    let end = CancellationToken::new();
    let (metrics, readiness) =
        (PluginMetrics::register(&mut Registry::default()), Readiness::new(Idle::Waiting(String::new())));
    let plugin = Plugin::new(Arc::new(settings), metrics, readiness);
    let plugin = tokio::spawn(plugin.run(snapshot, ledger, Handover::alone(), end.clone()));
    let is_connected = |state: &linkwise_kubelet_box::dra::DraState| {
        state.drivers.get(DRIVER).is_some_and(|driver| driver.connected > 0)
    };
    kubelet.wait(is_connected).await.unwrap();
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..ROUNDS + ROUNDS / 10 {
        let uid = format!("u{round}");
        let claim = ClaimRef { namespace: "default".to_owned(), name: uid.clone(), uid };
        let pod = PodClaims::single("pod", claim, DRIVER);
        let start = Instant::now();
        kubelet.start_pod(&pod).await.unwrap();
        let prepared = start.elapsed();
        // A restarted kubelet asks to prepare the claim again.
        kubelet.forget_prepared();
        let start = Instant::now();
        kubelet.start_pod(&pod).await.unwrap();
        let repeated = start.elapsed();
        let start = Instant::now();
        kubelet.stop_pod("pod").await.unwrap();
        if round >= ROUNDS / 10 {
            times.iter_mut().zip([prepared, repeated, start.elapsed()]).for_each(|(times, time)| times.push(time));
        }
    }
    kubelet.stop().await;
    end.cancel();
    plugin.await.unwrap();
    times
}

/// The CDI devices of the node, with a mount for each of a driver's many files.
fn cdi_devices(state: &NodeState) -> CdiDevices {
    let mount = |number: usize| {
        let path = format!("/usr/lib/x86_64-linux-gnu/libnvidia-{number}.so.580.95.05");
        json!({"hostPath": path, "containerPath": path, "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"]})
    };
    let common = json!({"env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": (0..60).map(mount).collect::<Vec<_>>()});
    let devices = state.topology().gpus().iter().map(|gpu| {
        let node = format!("/dev/nvidia{}", gpu.facts.minor.unwrap());
        let edits = json!({"deviceNodes": [{"path": node}]}).as_object().unwrap().clone();
        (format!("{KIND}={}", gpu.uuid), edits)
    });
    CdiDevices { common: common.to_string(), devices: devices.collect() }
}

fn state() -> NodeState {
    let observed = linkwise_host::machines::load("dgx-h100").unwrap().observed;
    let plan = ResourcePlan { door: Door::Dra, ..ResourcePlan::default() };
    let unheld = || Event::Holders(Some(Holdings::default()));
    let events = [Event::Planned(Box::new(plan)), Event::Observed(Box::new(observed)), unheld(), unheld()];
    events.into_iter().fold(NodeState::new(NumaHints::default()), |state, event| state.apply(event, Duration::ZERO).0)
}

/// A claim to which the first four GPUs are allocated.
fn claim(metadata: ClaimName) -> Claim {
    let result = |minor: u32| AllocatedDevice {
        request: "gpus".to_owned(),
        driver: DRIVER.to_owned(),
        pool: "pool".to_owned(),
        device: format!("gpu-{minor}"),
        ..AllocatedDevice::default()
    };
    let devices = DeviceAllocation { results: (0..4).map(result).collect(), config: Vec::new() };
    Claim { metadata, pod_claim_name: None, status: ClaimStatus { allocation: Some(Allocation { devices }) } }
}
