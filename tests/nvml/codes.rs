//! Tests of the agent with each code of its NVML calls: a failed call costs its own facts, and nothing else.

use std::collections::BTreeSet;

use linkwise_core::state::{HealthPoll, Reach};
use linkwise_core::topology::{GpuObservation, ProbeFailure};
use linkwise_nvml::CallError;
use linkwise_nvml::child::{Agent, AgentEnded};
use linkwise_nvml::protocol::{FromAgent, Missing, Place, ToAgent};

use super::{Duration, LIMIT, Machine, Path, machine, message, next, polled, raise_xid, ready, timeout, up, uuid};

/// An NVML call about a GPU.
pub struct Call {
    pub name: &'static str,
    /// The facts of a scan that come from the call.
    scan: &'static [&'static str],
    /// The facts of a poll that come from the call.
    poll: &'static [&'static str],
    /// The codes, besides NOT_SUPPORTED and FUNCTION_NOT_FOUND, that mean that the GPU lacks the feature.
    silent: &'static [u32],
    /// True for calls about MIG, which are tested on GPU 2 of a machine with MIG; the others are tested on GPU 0.
    mig: bool,
}

const fn call(name: &'static str, scan: &'static [&'static str], poll: &'static [&'static str]) -> Call {
    Call { name, scan, poll, silent: &[], mig: false }
}

const fn mig(name: &'static str, silent: &'static [u32]) -> Call {
    Call { name, scan: &["mig"], poll: &[], silent, mig: true }
}

/// The tested calls about a GPU, without those that identify it and those whose facts node files leave out.
pub const CALLS: [Call; 31] = [
    call("nvmlDeviceGetName", &["model"], &[]),
    call("nvmlDeviceGetBrand", &["brand"], &[]),
    call("nvmlDeviceGetArchitecture", &["architecture"], &[]),
    call("nvmlDeviceGetMinorNumber", &["minor"], &[]),
    call("nvmlDeviceGetAddressingMode", &["addressing_mode"], &[]),
    call("nvmlDeviceGetCudaComputeCapability", &["compute_capability"], &[]),
    call("nvmlDeviceGetMemoryInfo_v2", &["memory_mib"], &[]),
    call("nvmlDeviceGetMemoryInfo", &["memory_mib"], &[]),
    call("nvmlDeviceGetMemoryAffinity", &["numa"], &[]),
    call("nvmlDeviceGetMaxPcieLinkGeneration", &["pcie"], &[]),
    call("nvmlDeviceGetMaxPcieLinkWidth", &["pcie"], &[]),
    call("nvmlDeviceGetC2cModeInfoV", &["c2c"], &[]),
    call("nvmlDeviceGetDisplayActive", &["display"], &[]),
    call("nvmlDeviceGetGpuFabricInfoV", &["fabric"], &["fabric"]),
    call("nvmlDeviceGetTopologyCommonAncestor", &["common_ancestors"], &[]),
    call("nvmlDeviceGetP2PStatus", &["p2p_refused"], &[]),
    // INVALID_ARGUMENT means that there is no link of this number, or no such field.
    Call { silent: &[2], ..call("nvmlDeviceGetNvLinkState", &["nvlinks"], &["nvlinks_down"]) },
    Call { silent: &[2], ..call("nvmlDeviceGetNvLinkRemoteDeviceType", &["nvlinks"], &[]) },
    Call { silent: &[2], ..call("nvmlDeviceGetNvLinkRemotePciInfo_v2", &["nvlinks"], &[]) },
    Call { silent: &[2], ..call("nvmlDeviceGetFieldValues", &[], &["recovery_action"]) },
    call("nvmlDeviceGetTemperature", &[], &["reach"]),
    call("nvmlDeviceGetRemappedRows", &[], &["row_remapping"]),
    call("nvmlDeviceGetTotalEccErrors", &[], &["uncorrectable_ecc"]),
    mig("nvmlDeviceGetMigMode", &[]),
    mig("nvmlDeviceGetMaxMigDeviceCount", &[]),
    // NOT_FOUND means that no device was created for the index.
    mig("nvmlDeviceGetMigDeviceHandleByIndex", &[6]),
    mig("nvmlDeviceGetGpuInstanceId", &[]),
    mig("nvmlDeviceGetComputeInstanceId", &[]),
    mig("nvmlDeviceGetAttributes_v2", &[]),
    mig("nvmlGpuInstanceGetInfo", &[]),
    // INVALID_ARGUMENT means that the GPU lacks the profile.
    mig("nvmlDeviceGetGpuInstanceProfileInfo", &[2]),
];

/// The calls that identify a GPU.
pub const IDENTITY: [&str; 3] = ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetUUID"];

/// The calls that give a fact about the driver.
const SYSTEM: [&str; 3] = ["nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion"];

const COUNT: &str = "nvmlDeviceGetCount_v2";

impl Call {
    fn is_silent(&self, code: u32) -> bool {
        matches!(code, 3 | 13) || self.silent.contains(&code)
    }

    /// The index of the GPU on which the call is tested.
    fn gpu(&self) -> usize {
        if self.mig { 2 } else { 0 }
    }
}

/// Every nvmlReturn_t of NVML 13 but success, and the undefined 77.
fn codes() -> impl Iterator<Item = u32> {
    (1..=30).chain([77, 999])
}

/// The keys in which two values differ.
fn differences(one: &impl serde::Serialize, two: &impl serde::Serialize) -> Vec<String> {
    let (one, two) = (serde_json::to_value(one).unwrap(), serde_json::to_value(two).unwrap());
    let (one, two) = (one.as_object().unwrap(), two.as_object().unwrap());
    let keys: BTreeSet<&String> = one.keys().chain(two.keys()).collect();
    keys.into_iter().filter(|key| one.get(*key) != two.get(*key)).cloned().collect()
}

/// A machine on which the agent makes this call, if need be with MIG or an older driver.
fn machine_for(call: &Call) -> Machine {
    let machine = machine();
    if call.name == "nvmlDeviceGetMemoryInfo" {
        machine.tell("fail * nvmlDeviceGetMemoryInfo_v2 13");
    }
    if call.name == "nvmlDeviceGetNvLinkState" {
        machine.tell("link-fields no");
    }
    if !call.mig {
        return machine;
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/fake-nvml/machines/four-gpus-mig.yaml");
    machine.with("FAKE_NVML_MACHINE", file)
}

async fn scan(agent: &mut Agent) -> (Vec<GpuObservation>, Vec<ProbeFailure>) {
    agent.request(ToAgent::Observe).await.unwrap();
    ready(agent).await
}

#[tokio::test]
async fn scan_survives_each_code_of_each_call() {
    for call in CALLS.iter().filter(|call| !call.scan.is_empty()) {
        let mut machine = machine_for(call);
        // No poll may come between the scans.
        machine.command.poll = Duration::from_secs(3600);
        let mut agent = machine.agent();
        let (before, quiet) = ready(&mut agent).await;
        for code in codes() {
            let (name, at) = (call.name, call.gpu());
            machine.tell(&format!("fail {at} {name} {code}"));
            let (gpus, failures) = scan(&mut agent).await;
            machine.tell(&format!("unfail {at} {name}"));
            for (position, (is, was)) in gpus.iter().zip(&before).enumerate() {
                let differing = differences(is, was);
                // The topology level of two GPUs is a fact of both.
                let may = position == at || call.scan == ["common_ancestors"];
                let allowed = |key: &String| may && call.scan.contains(&key.as_str());
                assert!(differing.iter().all(allowed), "{name} {code}: GPU {position}: {differing:?}");
                assert!(position != at || call.is_silent(code) || !differing.is_empty(), "{name} {code}");
            }
            assert_eq!(gpus.len(), before.len());
            let new: Vec<_> = failures.iter().filter(|failure| !quiet.contains(failure)).collect();
            assert_eq!(new.is_empty(), call.is_silent(code), "{name} {code}: {new:?}");
            let named = |failure: &&ProbeFailure| failure.call == name && failure.error.contains(&code.to_string());
            assert!(new.iter().all(named), "{name} {code}: {new:?}");
        }
        assert_eq!(scan(&mut agent).await, (before, quiet));
    }
}

#[tokio::test]
async fn scan_survives_each_code_of_calls_that_find_gpus() {
    let mut machine = machine();
    machine.command.poll = Duration::from_secs(3600);
    let mut agent = machine.agent();
    let (before, _) = ready(&mut agent).await;
    // If one of these calls fails, the GPU is missing and the others stay.
    for call in IDENTITY {
        for code in codes() {
            machine.tell(&format!("fail 0 {call} {code}"));
            let (gpus, failures) = scan(&mut agent).await;
            machine.tell(&format!("unfail 0 {call}"));
            let uuids: Vec<_> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
            assert_eq!(uuids, [1, 2, 3].map(uuid), "{call} {code}");
            assert!(failures.iter().any(|failure| failure.call == call), "{call} {code}: {failures:?}");
        }
    }
    for code in codes() {
        machine.tell(&format!("fail * {COUNT} {code}"));
        agent.request(ToAgent::Observe).await.unwrap();
        let FromAgent::Ready(scan) = message(&mut agent).await.unwrap() else { panic!("{code}") };
        let (count, gpus, failures) = (scan.count, &scan.gpus, &scan.failures);
        machine.tell(&format!("unfail * {COUNT}"));
        assert!(count.is_none() && gpus.is_empty(), "{code}");
        assert!(failures.iter().any(|failure| failure.error.call == COUNT), "{code}: {failures:?}");
    }
    // These calls are about no GPU.
    for call in SYSTEM {
        for code in codes() {
            machine.tell(&format!("fail * {call} {code}"));
            let (gpus, failures) = scan(&mut agent).await;
            machine.tell(&format!("unfail * {call}"));
            assert_eq!(gpus, before, "{call} {code}");
            let noted = failures.iter().any(|failure| failure.subject == "driver" && failure.call == call);
            assert_eq!(noted, !matches!(code, 3 | 13), "{call} {code}: {failures:?}");
        }
    }
}

#[tokio::test]
async fn poll_survives_each_code_of_each_call() {
    let mut machine = machine();
    machine.command.poll = Duration::from_millis(2);
    machine.tell_all(&["recovery 0 0", "rows 0 false false", "uncorrectable 0 0"]);
    // No other call may replace nvmlDeviceGetTemperature.
    machine.tell_all(&["fail 0 nvmlDeviceGetTemperatureV 3", "fail 0 nvmlDeviceGetUtilizationRates 3"]);
    let mut agent = machine.agent();
    let before = polled(&mut agent, 0, |_| true).await;
    let full = |poll: &HealthPoll| differences(poll, &before).is_empty();
    for call in CALLS.iter().filter(|call| !call.poll.is_empty()) {
        if call.name == "nvmlDeviceGetNvLinkState" {
            machine.tell("link-fields no");
        }
        for code in codes() {
            machine.tell(&format!("fail 0 {} {code}", call.name));
            let poll = polled(&mut agent, 0, |poll| !full(poll)).await;
            assert_eq!(differences(&poll, &before), call.poll, "{} {code}", call.name);
            machine.tell(&format!("unfail 0 {}", call.name));
            // After these codes an agent may skip the call in later polls.
            if matches!(code, 2 | 3 | 13) {
                agent = machine.agent();
            }
            polled(&mut agent, 0, full).await;
        }
    }
}

/// Waits for a poll with the wanted missing GPUs, and returns them. Asserts that no scan comes before.
async fn missing(agent: &mut Agent, wanted: impl Fn(&[Missing]) -> bool) -> Vec<Missing> {
    let waiting = async {
        loop {
            match next(agent).await.unwrap() {
                FromAgent::Polled { gpus, missing, .. } => {
                    assert_eq!(gpus.len(), 4, "each GPU is polled by its known handle");
                    if wanted(&missing) {
                        return missing;
                    }
                }
                other => panic!("not a poll: {other:?}"),
            }
        }
    };
    timeout(LIMIT, waiting).await.expect("such a poll comes in time")
}

#[tokio::test]
async fn poll_survives_each_code_of_calls_that_find_gpus() {
    let (machine, mut agent) = up().await;
    for call in ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", COUNT] {
        // These codes of the count end the agent: see `unloaded_driver_is_named_and_ends_the_agent`.
        for code in codes().filter(|code| call != COUNT || !matches!(code, 1 | 9 | 18)) {
            let which = if call == COUNT { "*" } else { "0" };
            machine.tell(&format!("fail {which} {call} {code}"));
            let found = missing(&mut agent, |missing| !missing.is_empty()).await;
            machine.tell(&format!("unfail {which} {call}"));
            let place = (call != COUNT).then_some(Place { index: 0, of: 4 });
            assert!(found.len() == 1 && found[0].place == place, "{call} {code}: {found:?}");
            match &found[0].reach {
                Reach::Lost { call: named } => assert_eq!((named.as_str(), code), (call, 15)),
                Reach::ResetRequired { call: named } => assert_eq!((named.as_str(), code), (call, 16)),
                Reach::Failed { call: named, error } => {
                    let has_code = error.contains(&code.to_string()) || matches!(code, 3 | 13);
                    assert!(named == call && has_code && !matches!(code, 15 | 16), "{call} {code}: {error}");
                }
                other => panic!("{call} {code}: {other:?}"),
            }
            missing(&mut agent, <[Missing]>::is_empty).await;
        }
    }
}

#[tokio::test]
async fn failed_mig_call_of_a_poll_is_no_change() {
    for call in CALLS.iter().filter(|call| call.mig) {
        let machine = machine_for(call);
        let mut agent = machine.scanned().await;
        for code in codes().filter(|code| !call.is_silent(*code)) {
            machine.tell(&format!("fail 2 {} {code}", call.name));
            for _ in 0..2 {
                missing(&mut agent, |_| true).await;
            }
            machine.tell(&format!("unfail 2 {}", call.name));
        }
    }
}

#[tokio::test]
async fn agent_survives_each_code_of_event_waits() {
    let (machine, mut agent) = up().await;
    for code in codes() {
        machine.tell(&format!("fail * nvmlEventSetWait_v2 {code}"));
        // TIMEOUT means that there was no event.
        if code == 10 {
            machine.tell("calls nvmlEventSetWait_v2 3");
        } else {
            let failed = loop {
                match message(&mut agent).await.unwrap() {
                    FromAgent::Failed(failure) => break failure.error,
                    // Two event sets may deliver one event, which is then reported twice.
                    FromAgent::Xid { .. } => {}
                    other => panic!("{code}: {other:?}"),
                }
            };
            assert_eq!(failed, CallError::returned("nvmlEventSetWait_v2", code));
        }
        machine.tell("unfail * nvmlEventSetWait_v2");
        raise_xid(&machine, &mut agent, 0, 1000 + u64::from(code)).await;
    }
}

#[tokio::test]
async fn each_code_of_init_and_registration_is_named() {
    let mut machine = machine();
    machine.command.poll = Duration::from_secs(3600);
    for code in codes() {
        machine.tell(&format!("init {code}"));
        let mut agent = machine.agent();
        let FromAgent::Leaving(error) = next(&mut agent).await.unwrap() else { panic!("{code}: the agent goes on") };
        // NOT_SUPPORTED and FUNCTION_NOT_FOUND give another error: NVML lacks the call.
        assert!(error == CallError::returned("nvmlInit_v2", code) || matches!(code, 3 | 13), "{code}: {error}");
        assert!(matches!(next(&mut agent).await, Err(AgentEnded::Exited(status)) if status.code() == Some(1)));
    }
    machine.tell("init 0");
    for call in ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"] {
        for code in codes() {
            machine.tell(&format!("fail * {call} {code}"));
            let (gpus, failures) = ready(&mut machine.agent()).await;
            machine.tell(&format!("unfail * {call}"));
            assert_eq!(gpus.len(), 4, "{call} {code}");
            let noted = failures.iter().any(|failure| failure.call == call);
            assert_eq!(noted, !matches!(code, 3 | 13), "{call} {code}: {failures:?}");
        }
    }
    // A GPU whose event types cannot be read is registered for all events that linkwise uses.
    for code in codes() {
        machine.tell(&format!("fail * nvmlDeviceGetSupportedEventTypes {code}"));
        let mut agent = machine.scanned().await;
        raise_xid(&machine, &mut agent, 3, 79).await;
        machine.tell("unfail * nvmlDeviceGetSupportedEventTypes");
    }
}
