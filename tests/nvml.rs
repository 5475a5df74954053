//! The NVML child as a real process, with the real nvml-wrapper, over a libnvidia-ml of our own.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "what a helper cannot do fails the test")]

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use fake_nvml::Control;
use linkwise::nvml::child::{Agent, AgentCommand, AgentEnded};
use linkwise::nvml::protocol::{FromAgent, ToAgent};
use linkwise::topology::{
    GpuObservation, GpuUuid, NodeObservation, NvLinkObservation, NvLinkRemote, ProbeFailure, TopologyLevel,
};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// After this long, what should have happened will not.
const LIMIT: Duration = Duration::from_secs(20);

/// A simulated machine: its folder, its control socket, and the command that starts children on it.
struct Machine {
    _folder: TempDir,
    control: Control,
    command: AgentCommand,
}

fn machine_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-nvml/machines/four-gpus.yaml")
}

fn machine() -> Machine {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control");
    let mut command = AgentCommand::new(env!("CARGO_BIN_EXE_linkwise"));
    command.library = Some(fake_nvml::library_path());
    command.poll = Duration::from_millis(20);
    command.environment =
        vec![("FAKE_NVML_MACHINE".into(), machine_file().into()), ("FAKE_NVML_CONTROL".into(), socket.clone().into())];
    Machine { _folder: folder, control: Control::new(socket), command }
}

impl Machine {
    fn with(mut self, variable: &str, value: impl Into<OsString>) -> Self {
        self.command.environment.push((variable.into(), value.into()));
        self
    }

    fn agent(&self) -> Agent {
        Agent::spawn(&self.command).unwrap()
    }

    fn tell(&self, command: &str) {
        self.control.send(command).unwrap();
    }
}

async fn next(agent: &mut Agent) -> Result<FromAgent, AgentEnded> {
    timeout(LIMIT, agent.next()).await.expect("the agent says something in time")
}

async fn ready(agent: &mut Agent) -> (Vec<GpuObservation>, Vec<ProbeFailure>) {
    match next(agent).await.unwrap() {
        FromAgent::Ready { gpus, failures, .. } => (gpus, failures),
        other => panic!("not ready: {other:?}"),
    }
}

fn uuid(index: u32) -> GpuUuid {
    format!("GPU-00000000-0000-0000-0000-{index:012}").parse().unwrap()
}

/// The observations of the machine file itself.
fn written() -> Vec<GpuObservation> {
    #[derive(serde::Deserialize)]
    struct File {
        observed: NodeObservation,
    }
    let file: File = serde_saphyr::from_str(&std::fs::read_to_string(machine_file()).unwrap()).unwrap();
    file.observed.gpus
}

#[tokio::test]
async fn sees_what_the_machine_file_says() {
    let machine = machine();
    let mut agent = machine.agent();
    let FromAgent::Ready { driver, nvml, mut gpus, failures } = next(&mut agent).await.unwrap() else { panic!() };
    assert_eq!((driver.as_deref(), nvml.as_deref()), (Some("580.95.05"), Some("13.580.95.05")));
    let levels: Vec<_> = gpus.iter_mut().map(|gpu| std::mem::take(&mut gpu.common_ancestors)).collect();
    use TopologyLevel::{Multiple, Single, System};
    assert_eq!(levels[0], [(1, Single), (2, Multiple), (3, System)].into());
    assert_eq!(levels[3], [(0, System), (1, System), (2, System)].into());
    assert_eq!(gpus, written());
    // The fourth GPU cannot say anything of its NVLinks, and that is told once.
    let links: Vec<String> = (0..18).map(|link| link.to_string()).collect();
    let expected = ProbeFailure {
        subject: "10000:9a:00.0".into(),
        call: "nvmlDeviceGetNvLinkState".into(),
        error: format!("NVLink {}: NVML_ERROR_UNKNOWN (999)", links.join(", ")),
    };
    assert_eq!(failures, [expected]);
}

#[tokio::test]
async fn a_gpu_that_fails_half_its_calls_costs_those_facts_only() {
    let faults = [
        "1:nvmlDeviceGetName:999",
        "1:nvmlDeviceGetMemoryInfo_v2:999",
        "1:nvmlDeviceGetMaxPcieLinkWidth:4",
        "1:nvmlDeviceGetNvLinkRemoteDeviceType:999",
        "1:nvmlDeviceGetGpuFabricInfoV:999",
        "1:nvmlDeviceGetTopologyCommonAncestor:999",
        "1:nvmlDeviceRegisterEvents:999",
        "2:nvmlDeviceGetUUID:999",
        "3:nvmlDeviceGetPciInfo_v3:999",
    ];
    let machine = machine().with("FAKE_NVML_FAIL", faults.join(","));
    let mut agent = machine.agent();
    let (gpus, failures) = ready(&mut agent).await;
    let written = written();
    assert_eq!(gpus.len(), 2);
    assert_eq!(GpuObservation { common_ancestors: [].into(), ..written[0].clone() }, gpus[0]);
    let second = &gpus[1];
    assert_eq!((&second.model, second.memory_mib, second.pcie, &second.fabric), (&None, None, None, &None));
    assert_eq!((&second.uuid, second.minor, second.numa), (&uuid(1), Some(1), written[1].numa));
    // By the remote's PCI address, a GPU of this node is still known as one.
    let own = NvLinkRemote::Gpu(written[0].pci);
    assert_eq!(second.nvlinks.as_ref().unwrap()[0], NvLinkObservation { links: vec![0, 1], remote: own, active: true });

    let told = |subject: &str, call: &str| failures.iter().any(|told| told.subject == subject && told.call == call);
    for call in [
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceRegisterEvents",
    ] {
        assert!(told("0000:2a:00.0", call), "{call} in {failures:?}");
    }
    assert!(told("0000:18:00.0", "nvmlDeviceGetTopologyCommonAncestor"), "{failures:?}");
    assert!(told("0000:3a:00.0", "nvmlDeviceGetUUID") && told("GPU 3", "nvmlDeviceGetPciInfo_v3"), "{failures:?}");
    // The set was undefined after the second GPU's error; the first one's events come all the same.
    machine.tell("xid 0 31");
    let xid = FromAgent::Xid { gpu: uuid(0), code: 31, gpu_instance: None, compute_instance: None };
    assert_eq!(next(&mut agent).await.unwrap(), xid);
}

#[tokio::test]
async fn a_gpu_that_is_lost_from_the_start_costs_itself_only() {
    let machine = machine();
    machine.tell("lost *");
    machine.tell("back 0");
    let mut agent = machine.agent();
    let (gpus, failures) = ready(&mut agent).await;
    assert_eq!(gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0]);
    let subjects: Vec<_> = failures.iter().map(|failure| failure.subject.as_str()).collect();
    assert_eq!(subjects, ["GPU 1", "GPU 2", "GPU 3"]);
    assert!(failures.iter().all(|failure| failure.error == "NVML_ERROR_GPU_IS_LOST (15)"), "{failures:?}");
    // Once they are back, a second look finds them, and says that they have no events yet.
    machine.tell("back *");
    agent.request(ToAgent::Observe).await.unwrap();
    let (gpus, failures) = ready(&mut agent).await;
    assert_eq!(gpus.len(), 4);
    assert!(failures.iter().any(|failure| failure.call == "nvmlDeviceRegisterEvents"), "{failures:?}");
    machine.tell("lost 1");
    assert!(matches!(next(&mut agent).await.unwrap(), FromAgent::Lost { gpu, .. } if gpu == uuid(1)));
}

#[tokio::test]
async fn events_reach_the_parent_with_their_instances() {
    let machine = machine();
    let mut agent = machine.agent();
    ready(&mut agent).await;
    machine.tell("xid 1 79");
    machine.tell(&format!("xid {} 94 2 0", uuid(2)));
    machine.tell("ecc 3");
    let xid = |gpu, code, gpu_instance, compute_instance| FromAgent::Xid { gpu, code, gpu_instance, compute_instance };
    assert_eq!(next(&mut agent).await.unwrap(), xid(uuid(1), 79, None, None));
    assert_eq!(next(&mut agent).await.unwrap(), xid(uuid(2), 94, Some(2), Some(0)));
    assert_eq!(next(&mut agent).await.unwrap(), FromAgent::DoubleBitEcc { gpu: uuid(3) });
}

#[tokio::test]
async fn a_gpu_is_told_lost_and_back_once_each() {
    let machine = machine();
    let mut agent = machine.agent();
    ready(&mut agent).await;
    machine.tell("lost 2");
    let lost = FromAgent::Lost { gpu: uuid(2), call: "nvmlDeviceGetTemperature".into() };
    assert_eq!(next(&mut agent).await.unwrap(), lost);
    // An event of a lost GPU is still its own; no call is needed to name it.
    machine.tell("xid 2 79");
    assert!(matches!(next(&mut agent).await.unwrap(), FromAgent::Xid { gpu, code: 79, .. } if gpu == uuid(2)));
    // Another error is no proof that it is back.
    machine.tell("fail 2 nvmlDeviceGetTemperature 999");
    machine.tell("back 2");
    // Two changes of another GPU are a whole round of calls.
    machine.tell("lost 3");
    assert!(matches!(next(&mut agent).await.unwrap(), FromAgent::Lost { gpu, .. } if gpu == uuid(3)));
    machine.tell("back 3");
    assert_eq!(next(&mut agent).await.unwrap(), FromAgent::Back { gpu: uuid(3) });
    machine.tell("unfail 2 nvmlDeviceGetTemperature");
    assert_eq!(next(&mut agent).await.unwrap(), FromAgent::Back { gpu: uuid(2) });
    machine.tell("lost 2");
    assert_eq!(next(&mut agent).await.unwrap(), lost);
}

#[tokio::test]
async fn looks_again_when_asked() {
    let machine = machine();
    let mut agent = machine.agent();
    let before = ready(&mut agent).await;
    machine.tell("fail 0 nvmlDeviceGetName 999");
    agent.request(ToAgent::Observe).await.unwrap();
    let (gpus, failures) = ready(&mut agent).await;
    assert_eq!((gpus[0].model.as_ref(), failures.len()), (None, before.1.len() + 1));
}

#[tokio::test]
async fn a_wait_that_fails_is_told_once_and_tried_again() {
    let machine = machine();
    let mut agent = machine.agent();
    ready(&mut agent).await;
    machine.tell("fail * nvmlEventSetWait_v2 999");
    let failed = FromAgent::Failed { call: "nvmlEventSetWait_v2".into(), error: "NVML_ERROR_UNKNOWN (999)".into() };
    assert_eq!(next(&mut agent).await.unwrap(), failed);
    machine.tell("calls nvmlEventSetWait_v2 3");
    machine.tell("xid 0 63");
    machine.tell("unfail * nvmlEventSetWait_v2");
    assert!(matches!(next(&mut agent).await.unwrap(), FromAgent::Xid { code: 63, .. }));
}

#[tokio::test]
async fn a_driver_that_does_not_initialise_is_named() {
    let machine = machine().with("FAKE_NVML_INIT", "9");
    let mut agent = machine.agent();
    let failed = FromAgent::Failed { call: "nvmlInit_v2".into(), error: "NVML_ERROR_DRIVER_NOT_LOADED (9)".into() };
    assert_eq!(next(&mut agent).await.unwrap(), failed);
    let Err(AgentEnded::Exited(status)) = next(&mut agent).await else { panic!("it goes on") };
    assert_eq!(status.code(), Some(1));
}

#[tokio::test]
async fn a_library_that_is_not_there_is_named() {
    let mut machine = machine();
    machine.command.library = Some("/no/such/libnvidia-ml.so.1".into());
    let mut agent = machine.agent();
    let FromAgent::Failed { call, error } = next(&mut agent).await.unwrap() else { panic!("it found one") };
    assert_eq!(call, "dlopen");
    assert!(error.contains("cannot load /no/such/libnvidia-ml.so.1"), "{error}");
    assert!(matches!(next(&mut agent).await, Err(AgentEnded::Exited(status)) if !status.success()));
}

#[tokio::test]
async fn a_program_that_is_not_there_is_named() {
    let error = Agent::spawn(&AgentCommand::new("/no/such/linkwise")).unwrap_err();
    assert_eq!(error.to_string(), "cannot start the NVML agent /no/such/linkwise");
}

#[tokio::test]
async fn a_crash_costs_the_child_and_names_the_signal() {
    let machine = machine();
    let mut agent = machine.agent();
    ready(&mut agent).await;
    machine.tell("crash");
    let ended = next(&mut agent).await.unwrap_err();
    assert!(ended.to_string().contains("SIGABRT"), "{ended}");
    // It stays ended, and the next child works.
    assert!(next(&mut agent).await.is_err());
    ready(&mut machine.agent()).await;
}

/// A program that is no linkwise.
fn stand_in(name: &str) -> AgentCommand {
    AgentCommand::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvml").join(name))
}

#[tokio::test]
async fn nonsense_from_a_child_ends_it() {
    let mut agent = Agent::spawn(&stand_in("babbler.sh")).unwrap();
    assert!(matches!(next(&mut agent).await, Err(AgentEnded::Protocol(_))));
    let ended = next(&mut agent).await.unwrap_err();
    assert!(ended.to_string().contains("SIGKILL"), "{ended}");
}

#[tokio::test]
async fn ending_a_child_is_its_own_doing_even_while_a_call_hangs() {
    let machine = machine();
    let mut agent = machine.agent();
    ready(&mut agent).await;
    machine.tell("hang nvmlDeviceGetTemperature");
    machine.tell("hang nvmlEventSetWait_v2");
    let status = timeout(LIMIT, agent.end()).await.unwrap().unwrap();
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn dropping_the_agent_ends_the_child() {
    let machine = machine();
    let mut agent = machine.agent();
    ready(&mut agent).await;
    drop(agent);
    // Its control socket closes with it.
    timeout(LIMIT, async {
        while UnixStream::connect(machine.control.socket()).is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_child_that_closes_its_socket_and_stays_is_killed() {
    let mut agent = Agent::spawn(&stand_in("silent.sh")).unwrap();
    assert!(matches!(next(&mut agent).await, Err(AgentEnded::Silent)));
}

/// A child started by hand, with our end of its socket.
fn by_hand(control: &Control) -> (UnixStream, Child) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_linkwise"))
        .args(["nvml-agent", "--library"])
        .arg(fake_nvml::library_path())
        .env("FAKE_NVML_MACHINE", machine_file())
        .env("FAKE_NVML_CONTROL", control.socket())
        .stdin(OwnedFd::from(theirs))
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    (ours, child)
}

#[tokio::test]
async fn a_child_that_hangs_before_its_first_words_is_given_up() {
    let machine = machine();
    machine.tell("hang nvmlInit_v2");
    let mut agent = machine.agent();
    let process = agent.id().unwrap();
    let ended = timeout(LIMIT, agent.next_within(Duration::from_millis(50))).await.unwrap().unwrap_err();
    assert!(matches!(ended, AgentEnded::Late(_)), "{ended}");
    assert_eq!(ended.to_string(), "the NVML agent said nothing within 50ms and was killed");
    let after = timeout(LIMIT, agent.next()).await.unwrap().unwrap_err();
    assert!(after.to_string().contains("SIGKILL"), "{after}: {process} goes on");
}

#[tokio::test]
async fn a_child_whose_parent_is_gone_ends_even_while_nvml_hangs_at_init() {
    let machine = machine();
    machine.tell("hang nvmlInit_v2");
    let (ours, child) = by_hand(&machine.control);
    drop(ours);
    let ended = timeout(LIMIT, child.wait_with_output()).await.unwrap().unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

#[tokio::test]
async fn nonsense_from_the_parent_ends_the_child() {
    let (mut ours, child) = by_hand(&machine().control);
    ours.write_all(b"dance\n").unwrap();
    let ended = timeout(LIMIT, child.wait_with_output()).await.unwrap().unwrap();
    assert_eq!(ended.status.code(), Some(1));
    let words = String::from_utf8_lossy(&ended.stderr);
    assert!(words.contains("'dance' is no message"), "{words}");
}
