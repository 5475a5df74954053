//! `linkwise-lab kit`: linkwise on this machine's driver, beside a kubelet in a box. A part of the kit for the first GPU
//! (`lab/gpu-kit`).
//!
//! It starts the real program as a child, as a DaemonSet would, and writes what it sees into a folder: the admission's
//! answer, memory and wake-ups of both processes, and what a CUDA fault on purpose does to the GPU's health. It changes
//! nothing on the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use linkwise_kubelet_box::{KubeletBox, Options, Pod};
use linkwise_system::block_on;
use linkwise_system::output::print;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

const GPU: &str = "nvidia.com/gpu";

/// The longest time for a start, and for an XID to be logged: a driver without persistence mode starts each GPU first.
const LIMIT: Duration = Duration::from_secs(120);

/// The log's words about an XID that an application caused (13 and 31 in docs/health.md).
const HARMLESS: &str = "an XID that is no fault of the GPU";

/// The arguments.
#[derive(Debug, Args)]
pub struct KitArgs {
    /// The program
    #[arg(long, value_name = "PATH")]
    linkwise: PathBuf,
    /// The folder for the report's files; it exists
    #[arg(long, value_name = "PATH")]
    report: PathBuf,
    /// A command that faults on the first GPU, and its words; it may be given several times
    #[arg(long, value_name = "COMMAND")]
    fault: Vec<String>,
    /// The time over which wake-ups are counted
    #[arg(long, value_name = "N", default_value_t = 30)]
    idle_seconds: u64,
    /// The driver's library
    #[arg(long, value_name = "PATH", env = "LINKWISE_NVML_LIBRARY")]
    nvml_library: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &KitArgs) -> Result<()> {
    block_on(kit(args))
}

async fn kit(args: &KitArgs) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let mut options = Options::new(at("kubelet"));
    options.pod_resources = Some(at("pod-resources/kubelet.sock"));
    options.wait_timeout = LIMIT;
    let kubelet = KubeletBox::start(options)?;
    let log = args.report.join("linkwise.log");
    let mut linkwise = Command::new(&args.linkwise);
    linkwise.arg("run").arg("--kubelet-socket").arg(at("kubelet").join(Options::SOCKET));
    linkwise.arg("--pod-resources-socket").arg(at("pod-resources/kubelet.sock"));
    linkwise.arg("--cdi-dir").arg(at("cdi")).arg("--admin-socket").arg(at("admin/admin.sock"));
    linkwise.args([
        "--device-list-strategy=envvar,cdi-cri",
        "--pass-device-specs=true",
        "--metrics-address=127.0.0.1:0",
    ]);
    linkwise.arg("--nvml-calls").arg(args.report.join("nvml-calls.tsv"));
    if let Some(library) = &args.nvml_library {
        linkwise.arg("--nvml-library").arg(library);
    }
    linkwise.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log)?).kill_on_drop(true);
    let mut linkwise = linkwise.spawn().with_context(|| format!("cannot start {}", args.linkwise.display()))?;
    let listed = kubelet.wait(|state| state.resources.get(GPU).is_some_and(|gpus| !gpus.healthy.is_empty()));
    let state = tokio::select! {
        state = listed => state.context("the kubelet has no healthy GPU")?,
        ended = linkwise.wait() => bail!("linkwise ended: {}; its log: {}", ended?, log.display()),
    };
    let healthy = state.resources.get(GPU).map(|gpus| gpus.healthy.clone()).unwrap_or_default();
    print(&format!("ok: registered, {} healthy\n", healthy.len()))?;
    let admitted = kubelet.admit(&Pod::single("pod", GPU, 1), None).await.context("a pod with one GPU is rejected")?;
    let grant = admitted.grant("main", GPU).context("the pod has no GPU")?;
    fs::write(args.report.join("allocate.txt"), format!("{:#?}\n", grant.allocation))?;
    let absent = |spec: &&linkwise_kubelet_box::DeviceSpec| !Path::new(&spec.host_path).exists();
    let absent: Vec<&str> = grant.allocation.device_specs.iter().filter(absent).map(|spec| &*spec.host_path).collect();
    print(&format!("{}: device nodes of the container, absent: {absent:?}\n", word(absent.is_empty())))?;
    for entry in fs::read_dir(at("cdi")).into_iter().flatten().flatten() {
        fs::copy(entry.path(), args.report.join(entry.file_name()))?;
    }
    footprint(&linkwise, args).await?;
    for (number, fault) in args.fault.iter().enumerate() {
        let before = count(&log);
        let (status, output) = faulted(fault).await?;
        fs::write(args.report.join(format!("fault-{number}.txt")), &output)?;
        let seen = timeout(Duration::from_secs(20), async {
            while count(&log) == before {
                sleep(Duration::from_millis(100)).await;
            }
        });
        let is_seen = seen.await.is_ok();
        let state = kubelet.state();
        let now = state.resources.get(GPU).map(|gpus| gpus.healthy.clone()).unwrap_or_default();
        print(&format!("{}: {fault} ({status}): its XID is logged\n", word(is_seen)))?;
        print(&format!("{}: after it {} of {} GPUs are healthy\n", word(now == healthy), now.len(), healthy.len()))?;
        ensure!(now == healthy, "a fault of an application made a GPU unhealthy");
        ensure!(is_seen, "no XID was logged for {fault}");
    }
    stop(linkwise).await?;
    kubelet.stop().await?;
    Ok(())
}

fn word(is_fine: bool) -> &'static str {
    if is_fine { "ok" } else { "LOOK" }
}

/// The number of XIDs of applications in the log.
fn count(log: &Path) -> usize {
    fs::read_to_string(log).unwrap_or_default().matches(HARMLESS).count()
}

async fn faulted(command: &str) -> Result<(ExitStatus, Vec<u8>)> {
    let mut words = command.split_whitespace();
    let mut process = Command::new(words.next().unwrap_or_default());
    process.args(words).stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(LIMIT, process.output()).await.context("the fault takes too long")?;
    let mut output = output.with_context(|| format!("cannot start {command}"))?;
    output.stdout.append(&mut output.stderr);
    Ok((output.status, output.stdout))
}

/// Writes memory and wake-ups of linkwise and its agent while they are idle.
async fn footprint(linkwise: &Child, args: &KitArgs) -> Result<()> {
    let id = linkwise.id().context("linkwise has ended")?;
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    let ids: Vec<String> = [id.to_string()].into_iter().chain(children.split_whitespace().map(str::to_owned)).collect();
    let mut text = String::new();
    for when in ["at first", "after the idle time"] {
        for id in &ids {
            for file in ["status", "smaps_rollup", "stat"] {
                let of = fs::read_to_string(format!("/proc/{id}/{file}")).unwrap_or_default();
                text.push_str(&format!("== {when}: /proc/{id}/{file}\n{of}"));
            }
        }
        if when == "at first" {
            sleep(Duration::from_secs(args.idle_seconds)).await;
        }
    }
    fs::write(args.report.join("footprint.txt"), text)?;
    print("ok: memory and wake-ups written\n")?;
    Ok(())
}

async fn stop(mut linkwise: Child) -> Result<()> {
    let id = linkwise.id().context("linkwise has ended")?;
    // The kit's libraries are not the system's.
    Command::new("kill").arg(id.to_string()).env_remove("LD_LIBRARY_PATH").status().await.context("kill")?;
    let ended = timeout(LIMIT, linkwise.wait()).await.context("linkwise does not end")??;
    print(&format!("{}: linkwise ended: {ended}\n", word(ended.success())))?;
    Ok(())
}
