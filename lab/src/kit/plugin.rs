//! linkwise as a device plugin: a pod gets a GPU, idle processes are measured, applications fault on a GPU, linkwise
//! releases and resumes the driver, and a second linkwise takes over.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use linkwise_kubelet_box::{DeviceSpec, KubeletBox, Options, Pod, ResourceState, State};
use tokio::time::sleep;

use super::program::Linkwise;
use super::{KitArgs, Report, TIMEOUT, fault, footprint, release, takeover};

const GPU: &str = "nvidia.com/gpu";

pub(super) async fn play(args: &KitArgs, report: &Report) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let mut options = Options::new(at("kubelet"));
    options.pod_resources = Some(at("pod-resources/kubelet.sock"));
    options.wait_timeout = TIMEOUT;
    let kubelet = KubeletBox::start(options)?;
    let start = |suffix| {
        Linkwise::start(args, folder.path(), suffix, |command| {
            command.args(["--device-list-strategy=envvar,cdi-cri", "--pass-device-specs=true"]);
        })
    };
    let mut linkwise = start("").await?;
    let listed = kubelet.wait(|state| state.resources.get(GPU).is_some_and(|gpus| !gpus.healthy.is_empty()));
    let listed = async { listed.await.context("the kubelet has no healthy GPU") };
    let state = linkwise.beside(listed).await?;
    let healthy = state.resources.get(GPU).map(|gpus| gpus.healthy.clone()).unwrap_or_default();
    report.note(true, &format!("registered, {} healthy", healthy.len()))?;
    let admitted = kubelet.admit(&Pod::single("pod", GPU, 1), None).await.context("a pod with one GPU is rejected")?;
    let grant = admitted.grant("main", GPU).context("the pod has no GPU")?;
    report.write("allocate.txt", format!("{:#?}\n", grant.allocation))?;
    let absent = |spec: &&DeviceSpec| !Path::new(&spec.host_path).exists();
    let absent: Vec<&str> = grant.allocation.device_specs.iter().filter(absent).map(|spec| &*spec.host_path).collect();
    report.note(absent.is_empty(), &format!("device nodes of the container, absent: {absent:?}"))?;
    for entry in fs::read_dir(at("cdi")).into_iter().flatten().flatten() {
        fs::copy(entry.path(), args.report.join(entry.file_name()))?;
    }
    footprint::measure(args, &linkwise, report).await?;
    for (number, fault) in args.fault.iter().enumerate() {
        fault::run(report, &linkwise, fault, (&format!("fault-{number}.txt"), None), fault.plain()).await?;
    }
    // Some faults make a GPU unhealthy only if two polls in a row find them.
    sleep(Duration::from_secs(args.idle_seconds)).await;
    let state = kubelet.state();
    let now = state.resources.get(GPU).map(|gpus| gpus.healthy.clone()).unwrap_or_default();
    let text = format!("after the faults {} of {} GPUs are healthy", now.len(), healthy.len());
    report.promise(now == healthy, &text)?;
    let kubelet_before = (&kubelet, &*state);
    release::play(args, report, &linkwise, &at("admin/admin.sock"), kubelet_before).await?;
    report.write("metrics.txt", linkwise.metrics().text().await?)?;
    let second = start("-successor");
    takeover::play(args, report, kubelet_before, linkwise, second).await?.stop(report).await?;
    kubelet.stop().await?;
    Ok(())
}

/// Returns true if the kubelet saw no violation and its resources are connected, with the same healthy devices and the
/// same devices in pods as before.
pub(super) fn is_as_before(before: &State, now: &State) -> bool {
    let is_same = |(name, before): (&String, &ResourceState)| {
        let now = now.resources.get(name);
        now.is_some_and(|now| now.connected && now.healthy == before.healthy && now.allocated == before.allocated)
    };
    now.violations.is_empty() && before.resources.iter().all(is_same)
}
