//! linkwise with DRA: it publishes its GPUs to an API server in a box, prepares a claim for one of them, and the
//! kit runs the faulting programs with the claim's CDI devices.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use linkwise_api_server_box::{ApiServerBox, ResourceType};
use linkwise_core::state::DRA_DRIVER;
use linkwise_kubelet_box::dra::{ClaimRef, DraKubelet, DraOptions, DraState, PodClaims};
use linkwise_kubelet_box::{KubeletBox, Options, runtime};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use super::container::INSIDE;
use super::program::Linkwise;
use super::{KitArgs, Report, TIMEOUT, fault};

const NODE: &str = "node";
const TOKEN: &str = "kit";
const CONFIGURATION: &str = "version: v1\nlinkwise: {dra: {gpus: all}}\n";

pub(super) async fn play(args: &KitArgs, report: &Report) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let server = start_api_server().await?;
    write_files(folder.path(), &server)?;
    let mut options = Options::new(at("kubelet"));
    options.pod_resources = Some(at("pod-resources/kubelet.sock"));
    let device_manager = KubeletBox::start(options)?;
    let kubelet = DraKubelet::start(DraOptions { wait_timeout: TIMEOUT, ..DraOptions::new(at("registry")) })?;
    device_manager.list_claims_of(&kubelet);
    let change = |command: &mut Command| {
        let address = server.address();
        command.env("KUBERNETES_SERVICE_HOST", address.ip().to_string());
        command.env("KUBERNETES_SERVICE_PORT", address.port().to_string());
        command.env("LINKWISE_SERVICE_ACCOUNT_DIR", at("account")).env("NODE_NAME", NODE);
        command.env("LINKWISE_DRA_PLUGINS_DIR", at("plugins")).env("LINKWISE_DRA_REGISTRY_DIR", at("registry"));
        command.arg("--config-file").arg(at("configuration.yaml"));
    };
    let mut linkwise = Linkwise::start(args, folder.path(), "-dra", change).await?;
    linkwise.beside(wait_for_driver(&server, &kubelet)).await?;
    let slices = server.objects(&ResourceType::RESOURCE_SLICES);
    report.write("slices.json", serde_json::to_string_pretty(&slices)?)?;
    report.note(true, &format!("DRA: published GPUs: {}, slices: {}", gpus(&slices).count(), slices.len()))?;
    let (pool, device) = gpus(&slices).next().context("no GPU is published")?;
    let uuid = device["attributes"]["uuid"]["string"].as_str().context("the GPU has no UUID")?;
    let name = device["name"].as_str().context("the GPU has no name")?;
    let claim = allocate(&server, pool, name);
    let begin = Instant::now();
    let names = prepare(&kubelet, claim.clone()).await?;
    let millis = begin.elapsed().as_millis();
    report.note(true, &format!("DRA: a claim for {name} ({uuid}) is prepared after {millis} ms: {names:?}"))?;
    let spec = at("cdi").join(format!("linkwise.dev-claim-{}.json", claim.uid));
    report.write("cdi-claim.json", fs::read(&spec).context("the claim has no CDI spec")?)?;
    let edits = runtime::container(&at("cdi"), &names);
    let edits = edits.map_err(|why| anyhow!("a runtime refuses the CDI devices: {why}"))?;
    let (nodes, mounts, variables) = (edits.hosts.keys(), edits.mounts.len(), edits.env.len());
    report.note(true, &format!("DRA: its CDI devices have {nodes:?}, {mounts} mounts, {variables} variables"))?;
    let untainted = gpus(&slices).filter(is_untainted).count();
    cause_faults(args, report, &linkwise, uuid, (&at("cdi"), &names)).await?;
    sleep(Duration::from_secs(args.idle_seconds)).await;
    let slices = server.objects(&ResourceType::RESOURCE_SLICES);
    let now = gpus(&slices).filter(is_untainted).count();
    report.promise(now == untainted, &format!("DRA: after the faults {now} of {untainted} GPUs have no taint"))?;
    kubelet.stop_pod("pod").await.context("Unprepare")?;
    report.promise(!spec.exists(), "DRA: the claim is unprepared, and its CDI spec is gone")?;
    linkwise.stop(report).await?;
    kubelet.stop().await;
    device_manager.stop().await?;
    Ok(())
}

/// Starts an API server that knows the node and linkwise's token.
async fn start_api_server() -> Result<ApiServerBox> {
    let server =
        ApiServerBox::start_on("127.0.0.1:0", &ResourceType::ALL).await.context("cannot listen on 127.0.0.1")?;
    server.accept_tokens(&[TOKEN]);
    server.put("kubelet", &ResourceType::NODES.key(None, NODE), json!({}));
    Ok(server)
}

/// Writes linkwise's service account and configuration, and makes the folders that a node has.
fn write_files(folder: &Path, server: &ApiServerBox) -> Result<()> {
    for name in ["account", "plugins", "cdi"] {
        fs::create_dir(folder.join(name))?;
    }
    fs::write(folder.join("account/token"), TOKEN)?;
    fs::write(folder.join("account/ca.crt"), server.ca())?;
    fs::write(folder.join("configuration.yaml"), CONFIGURATION)?;
    Ok(())
}

/// Waits until a GPU is published and the kubelet is connected to linkwise's DRA driver.
async fn wait_for_driver(server: &ApiServerBox, kubelet: &DraKubelet) -> Result<()> {
    let has_gpu = |slices: &[Value]| gpus(slices).next().is_some();
    let slices = server.wait_for_objects(&ResourceType::RESOURCE_SLICES, has_gpu);
    timeout(TIMEOUT, slices).await.context("no GPU is published")?;
    let is_connected = |state: &DraState| state.drivers.get(DRA_DRIVER).is_some_and(|driver| driver.connected > 0);
    kubelet.wait(is_connected).await.context("the kubelet has no DRA driver")?;
    Ok(())
}

/// Starts a pod that has the claim. Returns the names of the claim's CDI devices.
async fn prepare(kubelet: &DraKubelet, claim: ClaimRef) -> Result<Vec<String>> {
    let begin = Instant::now();
    let pod = PodClaims::single("pod", claim, DRA_DRIVER);
    let prepared = timeout(TIMEOUT, async {
        // linkwise may have to read the claims or to write the CDI specs first. A real kubelet tries again as well.
        loop {
            match kubelet.start_pod(&pod).await {
                Err(_) if begin.elapsed() < TIMEOUT / 2 => sleep(Duration::from_millis(200)).await,
                done => return done,
            }
        }
    });
    Ok(prepared.await.context("Prepare takes too long")??.remove("main").unwrap_or_default())
}

/// Runs the faulting programs in a container with the claim's CDI devices. Without `--kit`, or if the machine allows no
/// container, they run as plain processes. Each XID must be logged and counted.
async fn cause_faults(
    args: &KitArgs,
    report: &Report,
    linkwise: &Linkwise,
    gpu: &str,
    devices: (&Path, &[String]),
) -> Result<()> {
    let is_contained = match try_container(args, devices).await? {
        Ok(seen) => report.note(true, &format!("DRA: the faulting programs run {seen}")).map(|()| true),
        Err(why) => {
            report.note(false, &format!("DRA: the faulting programs run without a container: {why}")).map(|()| false)
        }
    }?;
    for (number, fault) in args.fault.iter().enumerate() {
        let root = tempfile::tempdir()?;
        let (command, counted_for) = match &args.kit {
            Some(kit) if is_contained => {
                let mut command = container(kit, root.path(), devices)?;
                command.arg("--").args(&fault.words);
                (command, Some(gpu))
            }
            _ => (fault.plain(), None),
        };
        fault::run(report, linkwise, fault, (&format!("fault-{number}-dra.txt"), counted_for), command).await?;
    }
    Ok(())
}

/// This program as `kit-container`, for the CDI devices of a claim.
fn container(kit: &Path, root: &Path, (cdi, names): (&Path, &[String])) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("kit-container").arg("--root").arg(root).arg("--cdi").arg(cdi).arg("--kit").arg(kit);
    command.args(names.iter().flat_map(|name| ["--device", name]));
    Ok(command)
}

/// Makes a container without a command, so that it ends at once. Returns the line about its content, or the reason why
/// there is no container.
async fn try_container(args: &KitArgs, devices: (&Path, &[String])) -> Result<Result<String, String>> {
    let Some(kit) = &args.kit else { return Ok(Err("--kit is missing".to_owned())) };
    let root = tempfile::tempdir()?;
    let mut command = container(kit, root.path(), devices)?;
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(TIMEOUT, command.output()).await.context("a container takes too long")??;
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let line = out.lines().find(|line| line.starts_with(INSIDE));
    Ok(line.filter(|_| output.status.success()).map(str::to_owned).ok_or_else(|| error.trim().to_owned()))
}

/// The published GPUs that are whole, with the names of their pools.
fn gpus(slices: &[Value]) -> impl Iterator<Item = (&str, &Value)> {
    let devices = slices.iter().flat_map(|slice| {
        let pool = slice["spec"]["pool"]["name"].as_str().unwrap_or_default();
        slice["spec"]["devices"].as_array().into_iter().flatten().map(move |device| (pool, device))
    });
    devices.filter(|(_, device)| device["attributes"]["type"]["string"] == "gpu")
}

fn is_untainted((_, device): &(&str, &Value)) -> bool {
    device["taints"].as_array().is_none_or(Vec::is_empty)
}

/// Creates a claim with this device in its allocation, in place of a user and a scheduler.
fn allocate(server: &ApiServerBox, pool: &str, device: &str) -> ClaimRef {
    let result = json!({"request": "gpus", "driver": DRA_DRIVER, "pool": pool, "device": device});
    let uid = server.put_allocated_claim("claim", &[result], &[]);
    ClaimRef { namespace: "default".to_owned(), name: "claim".to_owned(), uid }
}
