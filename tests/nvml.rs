//! Tests of the agent as a real process, with the real nvml-wrapper and a libnvidia-ml of our own.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use fake_nvml::Control;
use linkwise_nvml::child::{Agent, AgentCommand, AgentEnded};
use linkwise_nvml::protocol::{FromAgent, Place, ToAgent};

use linkwise_core::state::{FabricHealth, HealthPoll, Reach, RecoveryAction, RowRemapping};
use linkwise_core::topology::{
    CudaVersion, GpuObservation, GpuUuid, HostObservation, MigExtension, MigPlacement, NodeObservation,
    NvLinkObservation, NvLinkRemote, ProbeFailure, TopologyLevel,
};
use linkwise_nvml::{CallError, CallFailure, Fault, Limits};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::timeout;

pub mod codes;
mod life;
mod mig_orders;
mod numbers;
mod real;

/// The longest time of one wait.
const LIMIT: Duration = Duration::from_secs(20);

/// Short limits for tests of calls that hang.
const SHORT: Limits = Limits { start: Duration::from_secs(3), call: Duration::from_secs(1) };

/// A simulated machine: its folder, its control socket, and the command that starts agents on it.
struct Machine {
    folder: TempDir,
    control: Control,
    command: AgentCommand,
}

fn machine_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/fake-nvml/machines/four-gpus.yaml")
}

fn machine() -> Machine {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control");
    let mut command = AgentCommand::new(env!("CARGO_BIN_EXE_linkwise"));
    command.library = Some(fake_nvml::library_path());
    command.poll = Duration::from_millis(20);
    command.environment =
        vec![("FAKE_NVML_MACHINE".into(), machine_file().into()), ("FAKE_NVML_CONTROL".into(), socket.clone().into())];
    Machine { folder, control: Control::new(socket), command }
}

impl Machine {
    fn with(mut self, variable: &str, value: impl Into<OsString>) -> Self {
        self.command.environment.push((variable.into(), value.into()));
        self
    }

    fn agent(&self) -> Agent {
        Agent::spawn(&self.command).unwrap()
    }

    /// Starts an agent, and waits for its first scan.
    async fn scanned(&self) -> Agent {
        let mut agent = self.agent();
        ready(&mut agent).await;
        agent
    }

    fn tell(&self, command: &str) {
        self.control.send(command).unwrap();
    }

    fn tell_all(&self, commands: &[&str]) {
        commands.iter().for_each(|command| self.tell(command));
    }
}

/// A machine, and an agent that has scanned it.
async fn up() -> (Machine, Agent) {
    up_with(|_| {}).await
}

async fn up_with(change: impl FnOnce(&mut AgentCommand)) -> (Machine, Agent) {
    let mut machine = machine();
    change(&mut machine.command);
    let agent = machine.scanned().await;
    (machine, agent)
}

async fn next(agent: &mut Agent) -> Result<FromAgent, AgentEnded> {
    timeout(LIMIT, agent.next()).await.expect("no message of the agent in time")
}

/// The agent's next message that is not a poll.
async fn message(agent: &mut Agent) -> Result<FromAgent, AgentEnded> {
    let wait = async {
        loop {
            match next(agent).await {
                Ok(FromAgent::Polled { .. }) => {}
                other => return other,
            }
        }
    };
    timeout(LIMIT, wait).await.expect("no message other than polls in time")
}

/// The GPUs and the failures of a scan, which must be the agent's next message besides polls.
async fn ready(agent: &mut Agent) -> (Vec<GpuObservation>, Vec<ProbeFailure>) {
    let message = message(agent).await.unwrap();
    let FromAgent::Ready(scan) = message else { panic!("not ready: {message:?}") };
    let node = scan.after(None).node(HostObservation::default(), Vec::new());
    (node.gpus, node.failures)
}

/// Waits for a poll in which a GPU is as wanted.
async fn polled(agent: &mut Agent, gpu: u32, wanted: impl Fn(&HealthPoll) -> bool) -> HealthPoll {
    let wait = async {
        loop {
            if let FromAgent::Polled { gpus, .. } = next(agent).await.unwrap()
                && let Some(poll) = gpus.get(&uuid(gpu)).filter(|poll| wanted(poll))
            {
                return poll.clone();
            }
        }
    };
    timeout(LIMIT, wait).await.expect("no such poll in time")
}

/// Raises an XID of this GPU, and waits until it arrives.
async fn raise_xid(machine: &Machine, agent: &mut Agent, gpu: u32, code: u64) {
    machine.tell(&format!("xid {gpu} {code}"));
    let xid = FromAgent::Xid { gpu: uuid(gpu), code, gpu_instance: None, compute_instance: None };
    let waiting = async { while message(agent).await.unwrap() != xid {} };
    timeout(LIMIT, waiting).await.expect("the XID did not arrive in time");
}

fn signal(name: &str, agent: &Agent) {
    let kill = format!("kill -{name} {}", agent.id().unwrap());
    assert!(std::process::Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    // A process stops some time after the signal, thread by thread.
    let tasks = format!("/proc/{}/task", agent.id().unwrap());
    let stopped = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        status.contains("State:\tT")
    };
    while name == "STOP" && !std::fs::read_dir(&tasks).unwrap().all(|task| stopped(task.unwrap())) {
        std::thread::yield_now();
    }
}

fn uuid(index: u32) -> GpuUuid {
    format!("GPU-00000000-0000-0000-0000-{index:012}").parse().unwrap()
}

/// The GPUs that the machine's file describes.
fn written() -> Vec<GpuObservation> {
    #[derive(serde::Deserialize)]
    struct File {
        observed: NodeObservation,
    }
    let text = std::fs::read_to_string(machine_file()).unwrap();
    // Only the fake library reads `serial`.
    let file: File = serde_saphyr::from_str(&text.replace("serial: \"1654223000123\"", "")).unwrap();
    let mut gpus = file.observed.gpus;
    gpus[0].serial = Some("1654223000123".to_owned());
    gpus.iter_mut().for_each(|gpu| gpu.pcie_width_now = gpu.pcie.map(|link| link.width));
    gpus
}

#[tokio::test]
async fn scan_reports_what_the_machine_file_has() {
    let machine = machine();
    let mut agent = machine.agent();
    let FromAgent::Ready(scan) = next(&mut agent).await.unwrap() else { panic!() };
    assert_eq!(scan.count, Some(4));
    assert_eq!(scan.library, Ok(Some("13.580.95.05".to_owned())));
    let node = scan.after(None).node(HostObservation::default(), Vec::new());
    let cuda = Some(CudaVersion { major: 13, minor: 0 });
    assert_eq!((node.driver_version.as_deref(), node.cuda_version), (Some("580.95.05"), cuda));
    let (mut gpus, failures) = (node.gpus, node.failures);
    let levels: Vec<_> = gpus.iter_mut().map(|gpu| std::mem::take(&mut gpu.common_ancestors)).collect();
    use TopologyLevel::{Multiple, Single, System};
    assert_eq!(levels[0], [(1, Single), (2, Multiple), (3, System)].into());
    assert_eq!(levels[3], [(0, System), (1, System), (2, System)].into());
    assert_eq!(gpus, written());
    // The fourth GPU fails all calls about NVLinks, which is one failure.
    let links: Vec<String> = (0..36).map(|link| link.to_string()).collect();
    let expected = ProbeFailure {
        subject: "10000:9a:00.0".into(),
        call: "nvmlDeviceGetNvLinkState".into(),
        error: format!("NVLink {}: NVML_ERROR_UNKNOWN (999)", links.join(", ")),
    };
    assert_eq!(failures, [expected]);
}

#[tokio::test]
async fn mig_devices_have_profile_id_and_placement() {
    let device = |index: u32, more: &str| {
        format!(
            "{{index: {index}, uuid: MIG-{index}, gpu_instance: {}, compute_instance: 0, gpu_slices: 1, \
             compute_slices: 1, memory_mib: 9728, extension: none{more}}}",
            index + 3
        )
    };
    let placed = device(0, ", profile_id: 19, placement: {start: 4, size: 1}");
    let machine = machine();
    machine.tell(&format!("mig 1 {{enabled: true, devices: [{placed}, {}]}}", device(2, ", profile_id: 19")));
    machine.tell("fail 1 nvmlGpuInstanceGetInfo 999");
    let of = |gpus: &[GpuObservation]| -> Vec<_> {
        let mig = gpus[1].mig.clone().unwrap();
        mig.devices.iter().map(|device| (device.profile_id, device.placement, device.extension)).collect()
    };
    let (gpus, failures) = ready(&mut machine.agent()).await;
    assert_eq!(of(&gpus), [(None, None, None); 2]);
    assert!(failures.iter().any(|failure| failure.call == "nvmlGpuInstanceGetInfo"), "{failures:?}");
    machine.tell("unfail 1 nvmlGpuInstanceGetInfo");
    let (gpus, _) = ready(&mut machine.agent()).await;
    // Without a placement, the fake library starts the second after one slice: the size of the first.
    let at = |start| (Some(19), Some(MigPlacement { start, size: 1 }), Some(MigExtension::None));
    assert_eq!(of(&gpus), [at(4), at(1)]);
}

#[tokio::test]
async fn nvlink_peer_of_unknown_kind_is_known_by_address() {
    let machine = machine();
    machine.tell("fail 1 nvmlDeviceGetNvLinkRemoteDeviceType 999");
    let (gpus, _) = ready(&mut machine.agent()).await;
    let to_gpu_0 = NvLinkObservation { links: vec![0, 1], remote: NvLinkRemote::Gpu(written()[0].pci), active: true };
    assert_eq!(gpus[1].nvlinks.as_ref().unwrap()[0], to_gpu_0);
}

#[tokio::test]
async fn gpu_lost_from_the_start_affects_no_other() {
    let machine = machine();
    machine.tell_all(&["lost *", "back 0"]);
    let mut agent = machine.agent();
    let (gpus, failures) = ready(&mut agent).await;
    assert_eq!(gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0]);
    let subjects: Vec<_> = failures.iter().map(|failure| failure.subject.as_str()).collect();
    assert_eq!(subjects, ["GPU 1", "GPU 2", "GPU 3"]);
    assert!(failures.iter().all(|failure| failure.error == "NVML_ERROR_GPU_IS_LOST (15)"), "{failures:?}");
    // Once the GPUs are back, the next poll finds them, and a scan reports that their events are not registered.
    machine.tell("back *");
    let (mut gpus, mut failures) = ready(&mut agent).await;
    while gpus.len() < 4 {
        (gpus, failures) = ready(&mut agent).await;
    }
    assert!(failures.iter().any(|failure| failure.call == "nvmlDeviceRegisterEvents"), "{failures:?}");
    machine.tell("lost 1");
    polled(&mut agent, 1, |poll| matches!(poll.reach, Reach::Lost { .. })).await;
}

#[tokio::test]
async fn events_reach_the_parent_with_their_instances() {
    let (machine, mut agent) = up().await;
    machine.tell("xid 1 79");
    machine.tell(&format!("xid {} 94 2 0", uuid(2)));
    machine.tell("ecc 3");
    let xid = |gpu, code, gpu_instance, compute_instance| FromAgent::Xid { gpu, code, gpu_instance, compute_instance };
    assert_eq!(message(&mut agent).await.unwrap(), xid(uuid(1), 79, None, None));
    assert_eq!(message(&mut agent).await.unwrap(), xid(uuid(2), 94, Some(2), Some(0)));
    assert_eq!(message(&mut agent).await.unwrap(), FromAgent::DoubleBitEcc { gpu: uuid(3) });
}

#[tokio::test]
async fn poll_reports_the_health_of_each_gpu() {
    let (machine, mut agent) = up().await;
    // The first poll comes with the first scan. Facts that the machine lacks are absent.
    let FromAgent::Polled { gpus, .. } = next(&mut agent).await.unwrap() else { panic!("no poll with the first scan") };
    assert_eq!(gpus.keys().collect::<Vec<_>>(), [0, 1, 2, 3].map(uuid).iter().collect::<Vec<_>>());
    let quiet = HealthPoll {
        reach: Reach::Answers,
        nvlinks_down: Some(vec![]),
        fabric: Some(FabricHealth::Unused),
        ..HealthPoll::default()
    };
    assert_eq!(gpus[&uuid(2)], quiet);
    assert_eq!(gpus[&uuid(3)], HealthPoll { nvlinks_down: None, fabric: None, ..quiet.clone() });
    let down = HealthPoll { nvlinks_down: Some(vec![2]), fabric: Some(FabricHealth::Joined), ..quiet };
    assert_eq!(gpus[&uuid(0)], down);

    machine.tell("lost 2");
    let lost = polled(&mut agent, 2, |poll| poll.reach != Reach::Answers).await;
    assert_eq!(lost.reach, Reach::Lost { call: "nvmlDeviceGetTemperature".into() });
    // An event of a lost GPU still names the GPU, because that needs no call.
    machine.tell("xid 2 79");
    assert!(matches!(message(&mut agent).await.unwrap(), FromAgent::Xid { gpu, code: 79, .. } if gpu == uuid(2)));
    machine.tell_all(&["fail 2 nvmlDeviceGetTemperature 16", "back 2"]);
    polled(&mut agent, 2, |poll| matches!(&poll.reach, Reach::ResetRequired { .. })).await;
    machine.tell("fail 2 nvmlDeviceGetTemperature 999");
    let (call, error) = ("nvmlDeviceGetTemperature".to_owned(), "NVML_ERROR_UNKNOWN (999)".to_owned());
    polled(&mut agent, 2, |poll| poll.reach == Reach::Failed { call: call.clone(), error: error.clone() }).await;
    machine.tell("unfail 2 nvmlDeviceGetTemperature");
    polled(&mut agent, 2, |poll| poll.reach == Reach::Answers).await;
    machine.tell("fabric 0 2 0");
    polled(&mut agent, 0, |poll| poll.fabric == Some(FabricHealth::Joining)).await;
    machine.tell("fabric 0 3 999");
    polled(&mut agent, 0, |poll| poll.fabric == Some(FabricHealth::Failed { status: 999 })).await;
    // Joined, with full bandwidth (2) and no route recovery (2); the route is unhealthy (1), then healthy (2).
    for (mask, health) in [(0b01_1010, FabricHealth::Failed { status: 0 }), (0b10_1010, FabricHealth::Joined)] {
        machine.tell(&format!("fabric 0 3 0 {mask}"));
        polled(&mut agent, 0, |poll| poll.fabric == Some(health)).await;
    }
    // No NVSwitch was detected.
    machine.tell("fabric 0 0 0");
    polled(&mut agent, 0, |poll| poll.fabric == Some(FabricHealth::Unused)).await;
}

#[tokio::test]
async fn reach_is_polled_by_the_first_call_a_gpu_offers() {
    // Either the library lacks the deprecated call, or a vGPU has no temperature at all.
    for missing in [&["nvmlDeviceGetTemperature"][..], &["nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"]] {
        let machine = machine();
        missing.iter().for_each(|call| machine.tell(&format!("fail 1 {call} 3")));
        let mut agent = machine.agent();
        polled(&mut agent, 1, |poll| poll.reach == Reach::Answers).await;
        let stands_in = if missing.len() == 1 { "nvmlDeviceGetTemperatureV" } else { "nvmlDeviceGetUtilizationRates" };
        machine.tell(&format!("fail 1 {stands_in} 15"));
        let lost = Reach::Lost { call: stands_in.into() };
        polled(&mut agent, 1, |poll| poll.reach == lost).await;
        machine.tell_all(&[&format!("fail 1 {stands_in} 3"), "fail 1 nvmlDeviceGetUtilizationRates 3"]);
        polled(&mut agent, 1, |poll| poll.reach == Reach::Unknown).await;
    }
}

#[tokio::test]
async fn mig_devices_that_nvml_hides_are_reported() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/fake-nvml/machines/four-gpus-mig.yaml");
    let mut machine = machine().with("FAKE_NVML_MACHINE", file);
    let procfs = tempfile::tempdir().unwrap();
    machine.command.procfs = procfs.path().to_owned();
    let hidden = |failures: &[ProbeFailure]| {
        failures.iter().filter(|failure| failure.error.contains("NVML shows none")).cloned().collect::<Vec<_>>()
    };
    // A process without the capability mig/monitor gets NOT_FOUND. Without instances that is no failure.
    machine.tell("fail 2 nvmlDeviceGetMigDeviceHandleByIndex 6");
    let (gpus, failures) = ready(&mut machine.agent()).await;
    assert_eq!(hidden(&failures), []);
    let minor = gpus[2].minor.unwrap();
    let instances = procfs.path().join(format!("driver/nvidia/capabilities/gpu{minor}/mig"));
    std::fs::create_dir_all(instances.join("gi1/ci0")).unwrap();
    std::fs::create_dir_all(instances.join("gi2/ci0")).unwrap();
    let mut agent = machine.agent();
    let (_, failures) = ready(&mut agent).await;
    let [failure] = &hidden(&failures)[..] else { panic!("{failures:?}") };
    assert!(failure.error.contains("2 MIG device(s)") && failure.error.contains("mig/monitor"), "{failure:?}");
    machine.tell("unfail 2 nvmlDeviceGetMigDeviceHandleByIndex");
    let (gpus, failures) = ready(&mut agent).await;
    assert!(!gpus[2].mig.as_ref().unwrap().devices.is_empty() && hidden(&failures).is_empty());
}

#[tokio::test]
async fn one_call_reads_all_links_if_the_driver_can() {
    let machine = machine();
    let down = |links: &'static [u32]| move |poll: &HealthPoll| poll.nvlinks_down.as_deref() == Some(links);
    let mut agent = machine.agent();
    assert_eq!(ready(&mut agent).await.0[0].nvlinks, written()[0].nvlinks);
    // The agent does not call nvmlDeviceGetNvLinkState.
    machine.tell_all(&["fail * nvmlDeviceGetNvLinkState 999", "link 0 4 down"]);
    polled(&mut agent, 0, down(&[2, 4])).await;
    // A link that sleeps is not down.
    machine.tell("link 0 4 sleep");
    polled(&mut agent, 0, down(&[2])).await;
    machine.tell("unfail * nvmlDeviceGetNvLinkState");
    // With an older driver, polls and scans make a call for each link.
    machine.tell_all(&["link-fields no", "link 0 0 down", "link 0 4 up"]);
    polled(&mut agent, 0, down(&[0, 2])).await;
    machine.tell("link 0 0 up");
    polled(&mut agent, 0, down(&[2])).await;
    assert_eq!(ready(&mut machine.agent()).await.0[0].nvlinks, written()[0].nvlinks);
}

#[tokio::test]
async fn nvlinks_that_were_not_ready_are_scanned_later() {
    for fields in ["yes", "no"] {
        let machine = machine();
        machine.tell_all(&[&format!("link-fields {fields}"), "links 0 absent"]);
        let mut agent = machine.agent();
        assert_eq!(ready(&mut agent).await.0[0].nvlinks, Some(Vec::new()), "fields: {fields}");
        machine.tell_all(&["calls nvmlDeviceGetTemperature 8", "links 0 up"]);
        assert_ne!(ready(&mut agent).await.0[0].nvlinks, Some(Vec::new()), "fields: {fields}");
    }
}

#[tokio::test]
async fn ecc_that_is_switched_on_later_is_counted() {
    let machine = machine();
    let mut agent = machine.agent();
    polled(&mut agent, 1, |poll| poll.uncorrectable_ecc.is_none() && poll.row_remapping.is_none()).await;
    machine.tell_all(&["calls nvmlDeviceGetTemperature 8", "uncorrectable 1 3", "rows 1 true false"]);
    let poll = polled(&mut agent, 1, |poll| poll.uncorrectable_ecc.is_some()).await;
    assert_eq!((poll.uncorrectable_ecc, poll.row_remapping.map(|rows| rows.pending)), (Some(3), Some(true)));
}

#[tokio::test]
async fn poll_has_recovery_action_and_counters_if_offered() {
    let machine = machine();
    machine.tell_all(&["recovery 1 0", "rows 1 false false", "uncorrectable 1 0"]);
    let mut agent = machine.agent();
    let poll = polled(&mut agent, 1, |_| true).await;
    assert_eq!(poll.recovery_action, Some(RecoveryAction::None));
    assert_eq!(poll.row_remapping, Some(RowRemapping { pending: false, failed: false }));
    assert_eq!(poll.uncorrectable_ecc, Some(0));
    for number in 0..9 {
        machine.tell(&format!("recovery 1 {number}"));
        polled(&mut agent, 1, |poll| poll.recovery_action == Some(RecoveryAction::from(number))).await;
    }
    machine.tell("rows 1 true false");
    polled(&mut agent, 1, |poll| poll.row_remapping == Some(RowRemapping { pending: true, failed: false })).await;
    machine.tell("rows 1 false true");
    polled(&mut agent, 1, |poll| poll.row_remapping == Some(RowRemapping { pending: false, failed: true })).await;
    machine.tell("uncorrectable 1 3");
    polled(&mut agent, 1, |poll| poll.uncorrectable_ecc == Some(3)).await;
    // After "not supported" this agent does not repeat the call; the next agent does.
    machine.tell("recovery 2 1");
    let poll = polled(&mut agent, 2, |_| true).await;
    assert_eq!(poll.recovery_action, None);
    polled(&mut machine.agent(), 2, |poll| poll.recovery_action == Some(RecoveryAction::GpuReset)).await;
}

#[tokio::test]
async fn change_causes_a_scan_without_a_request() {
    let machine = machine();
    let mut agent = machine.agent();
    let (before, _) = ready(&mut agent).await;
    machine.tell("link 0 3 down");
    let (gpus, _) = ready(&mut agent).await;
    let down = |gpu: &GpuObservation| {
        let links = gpu.nvlinks.iter().flatten().filter(|links| !links.active);
        links.flat_map(|links| links.links.clone()).collect::<Vec<u32>>()
    };
    assert_eq!((down(&before[0]), down(&gpus[0])), (vec![2], vec![2, 3]));
    machine.tell("remove 1");
    let (gpus, _) = ready(&mut agent).await;
    assert_eq!(gpus.iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>(), [0, 2, 3].map(uuid));
    machine.tell("add 1");
    assert_eq!(ready(&mut agent).await.0.len(), 4);
    // An added GPU is polled at once.
    let FromAgent::Polled { gpus, .. } = next(&mut agent).await.unwrap() else { panic!("no poll with the scan") };
    assert_eq!(gpus.len(), 4);
    // While nothing changes there are polls and no scans.
    for _ in 0..5 {
        assert!(matches!(next(&mut agent).await.unwrap(), FromAgent::Polled { .. }));
    }
}

#[tokio::test]
async fn change_reverted_during_a_scan_is_scanned_again() {
    let machine = machine();
    let mut agent = machine.agent();
    let (before, _) = ready(&mut agent).await;
    machine.tell_all(&["hang 1 nvmlDeviceGetBrand", "link 0 3 down"]);
    // The scan has read GPU 0, and hangs at GPU 1.
    machine.tell_all(&["blocked nvmlDeviceGetBrand", "link 0 3 up", "unhang 1 nvmlDeviceGetBrand"]);
    let (during, _) = ready(&mut agent).await;
    assert_ne!(during[0].nvlinks, before[0].nvlinks);
    assert_eq!(ready(&mut agent).await.0, before);
}

#[tokio::test]
async fn gpu_without_pci_address_causes_no_scans() {
    let machine = machine().with("FAKE_NVML_FAIL", "2:nvmlDeviceGetPciInfo_v3:999");
    let mut agent = machine.agent();
    let (gpus, failures) = ready(&mut agent).await;
    assert_eq!(gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0, 1, 3]);
    let failed: Vec<_> = failures.iter().filter(|failure| failure.subject == "GPU 2").collect();
    assert_eq!(failed.iter().map(|failure| failure.call.as_str()).collect::<Vec<_>>(), ["nvmlDeviceGetPciInfo_v3"]);
    for _ in 0..5 {
        let message = next(&mut agent).await.unwrap();
        assert!(matches!(message, FromAgent::Polled { .. }), "{message:?}");
    }
    machine.tell("unfail 2 nvmlDeviceGetPciInfo_v3");
    assert_eq!(ready(&mut agent).await.0.len(), 4);
}

#[tokio::test]
async fn skipped_gpu_is_not_called() {
    let mut machine = machine();
    for call in ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetTemperature"] {
        machine.tell(&format!("crash 1 {call}"));
    }
    machine.command.skip = vec![Place { index: 1, of: 4 }];
    let mut agent = machine.agent();
    let FromAgent::Ready(scan) = next(&mut agent).await.unwrap() else { panic!() };
    assert_eq!((scan.count, scan.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>()), (Some(4), vec![0, 2, 3]));
    for _ in 0..3 {
        polled(&mut agent, 0, |_| true).await;
    }
    agent.request(ToAgent::Observe).await.unwrap();
    assert_eq!(ready(&mut agent).await.0.len(), 3);
    // On a machine with another number of GPUs the index means another GPU, so the place does not apply.
    machine.command.skip = vec![Place { index: 1, of: 5 }];
    let mut agent = machine.agent();
    assert!(message(&mut agent).await.is_err());
    let called = agent.open_call().unwrap();
    assert_eq!((called.call.as_str(), called.gpu.as_ref().unwrap().place.index), ("nvmlDeviceGetHandleByIndex_v2", 1));
}

#[tokio::test]
async fn hung_call_is_named_with_its_gpu() {
    for (command, start) in [
        ("hang nvmlInit_v2", "nvmlInit_v2 did not return"),
        ("hang 3 nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex_v2 of GPU 3 did not return"),
        ("hang 1 nvmlDeviceGetName", &format!("nvmlDeviceGetName of {} did not return", uuid(1))),
        ("hang 2 nvmlDeviceRegisterEvents", &format!("nvmlDeviceRegisterEvents of {} did not return", uuid(2))),
        ("hold 1 nvmlDeviceGetTemperature", &format!("nvmlDeviceGetTemperature of {} did not return", uuid(1))),
    ] {
        let mut machine = machine();
        machine.command.limits = SHORT;
        machine.tell(command);
        let mut agent = machine.agent();
        let ended = message(&mut agent).await.unwrap_err();
        assert!(ended.to_string().starts_with(start), "{command}: {ended}");
        assert!(next(&mut agent).await.unwrap_err().to_string().contains("SIGKILL"));
    }
}

#[tokio::test]
async fn hung_nvlink_call_of_a_poll_is_named_with_its_gpu() {
    for (fields, call) in [("yes", "nvmlDeviceGetFieldValues"), ("no", "nvmlDeviceGetNvLinkState")] {
        let mut machine = machine();
        machine.command.limits = SHORT;
        machine.tell(&format!("link-fields {fields}"));
        let mut agent = machine.scanned().await;
        machine.tell(&format!("hang 1 {call}"));
        let ended = message(&mut agent).await.unwrap_err().to_string();
        assert!(ended.starts_with(&format!("{call} of {} did not return", uuid(1))), "{ended}");
    }
}

#[tokio::test]
async fn hung_wait_for_events_is_noticed() {
    let (machine, mut agent) = up_with(|command| command.limits = SHORT).await;
    machine.tell("hang nvmlEventSetWait_v2");
    let ended = timeout(LIMIT, message(&mut agent)).await.unwrap().unwrap_err();
    assert!(matches!(ended, AgentEnded::EventWaitHung(_)), "{ended}");
}

#[tokio::test]
async fn unloaded_driver_is_named_and_ends_the_agent() {
    for code in [1, 9, 18] {
        let (machine, mut agent) = up().await;
        machine.tell(&format!("fail * nvmlDeviceGetCount_v2 {code}"));
        let FromAgent::Leaving(error) = message(&mut agent).await.unwrap() else { panic!("the agent goes on") };
        assert_eq!(error, CallError::returned("nvmlDeviceGetCount_v2", code));
        assert!(matches!(next(&mut agent).await, Err(AgentEnded::Exited(status)) if status.code() == Some(1)));
    }
}

#[tokio::test]
async fn failed_wait_for_events_is_reported_once() {
    let (machine, mut agent) = up().await;
    machine.tell("fail * nvmlEventSetWait_v2 999");
    let failed = FromAgent::Failed(CallFailure::new("driver", CallError::returned("nvmlEventSetWait_v2", 999)));
    assert_eq!(message(&mut agent).await.unwrap(), failed);
    machine.tell_all(&["calls nvmlEventSetWait_v2 3", "xid 0 63", "unfail * nvmlEventSetWait_v2"]);
    assert!(matches!(message(&mut agent).await.unwrap(), FromAgent::Xid { code: 63, .. }));
}

#[tokio::test]
async fn links_and_counters_return_when_mig_mode_ends() {
    let machine = machine();
    machine.tell_all(&["mig 0 {enabled: false}", "fabric 0 2 0"]);
    let mut agent = machine.agent();
    let down = polled(&mut agent, 0, |poll| poll.fabric == Some(FabricHealth::Joining)).await;
    assert_eq!((down.nvlinks_down, down.row_remapping), (Some(vec![2]), None));
    machine.tell("mig 0 {enabled: true}");
    // A GPU in MIG mode uses no fabric either.
    let poll = polled(&mut agent, 0, |poll| poll.nvlinks_down == Some(vec![])).await;
    assert_eq!(poll.fabric, Some(FabricHealth::Unused));
    // If the mode cannot be read, the last known mode counts.
    machine.tell("fail 0 nvmlDeviceGetMigMode 999");
    for _ in 0..2 {
        assert_eq!(polled(&mut agent, 0, |_| true).await.nvlinks_down, Some(vec![]));
    }
    machine.tell_all(&["unfail 0 nvmlDeviceGetMigMode", "rows 0 false true", "mig 0 {enabled: false}"]);
    let rows = Some(RowRemapping { pending: false, failed: true });
    let after = polled(&mut agent, 0, |poll| poll.row_remapping == rows).await;
    assert_eq!((after.nvlinks_down, after.fabric), (Some(vec![2]), Some(FabricHealth::Joining)));
}

#[tokio::test]
async fn event_is_followed_by_a_poll() {
    let mut machine = machine();
    machine.command.poll = Duration::from_secs(3600);
    machine.tell("recovery 1 0");
    let mut agent = machine.agent();
    polled(&mut agent, 1, |poll| poll.recovery_action == Some(RecoveryAction::None)).await;
    for action in [1, 2] {
        machine.tell_all(&[&format!("recovery 1 {action}"), "storm 1 31 100"]);
        polled(&mut agent, 1, |poll| poll.recovery_action == Some(RecoveryAction::from(action))).await;
    }
}
