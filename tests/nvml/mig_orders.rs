//! Tests of orders to make and destroy GPU instances: the driver carries them out, refuses them, or hangs.

use linkwise_core::claims::{MigOrder, MigOrderError, MigTask};
use linkwise_core::topology::{GpuObservation, MigObservation, MigPlacement, MigSlot, MigUuid};
use linkwise_nvml::child::{Agent, AgentEnded};
use linkwise_nvml::gate::Gate;
use linkwise_nvml::protocol::{FromAgent, Place, ToAgent};

use super::{LIMIT, Machine, Path, SHORT, machine, message, ready, timeout, uuid};

/// The place of an instance of the machine's profile 2g.20gb.
const SLOT: MigSlot = MigSlot { profile_id: 14, placement: MigPlacement { start: 2, size: 2 } };

fn file() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/fake-nvml/machines/mig-on-demand.yaml")
}

/// A machine whose GPU 0 is in MIG mode without instances. Its agent polls too rarely to scan without orders.
fn empty() -> Machine {
    let mut machine = machine().with("FAKE_NVML_MACHINE", file());
    machine.command.poll = std::time::Duration::from_secs(3600);
    machine
}

async fn order(agent: &mut Agent, task: MigTask) -> Result<Vec<MigUuid>, MigOrderError> {
    agent.request(ToAgent::Mig(MigOrder { gpu: uuid(0), task })).await.unwrap();
    let message = message(agent).await.unwrap();
    let FromAgent::MigDone(result) = message else { panic!("no answer: {message:?}") };
    result
}

/// Destroys the instance in a slot, if it is `device` (`None`: any); returns the MIG devices of the scan that follows.
async fn destroy(agent: &mut Agent, slot: MigSlot, device: Option<MigUuid>) -> Vec<MigUuid> {
    assert_eq!(order(agent, MigTask::Destroy(slot, device)).await, Ok(vec![]));
    let (gpus, _) = ready(agent).await;
    mig(&gpus).devices.iter().map(|device| device.uuid.clone()).collect()
}

/// Makes the instance of [`SLOT`], and waits for the scan that follows.
async fn make(agent: &mut Agent) -> MigUuid {
    let made = order(agent, MigTask::Make(SLOT)).await.unwrap().remove(0);
    ready(agent).await;
    made
}

/// The machine of [`empty`] with the instance of [`SLOT`], and the agent that made it.
async fn with_instance() -> (Machine, Agent, MigUuid) {
    let machine = empty();
    let mut agent = machine.scanned().await;
    let made = make(&mut agent).await;
    (machine, agent, made)
}

fn mig(gpus: &[GpuObservation]) -> &MigObservation {
    gpus[0].mig.as_ref().unwrap()
}

/// Makes an instance that takes all of the GPU, and destroys it; returns false if the driver refuses it.
async fn full_instance_fits(agent: &mut Agent) -> bool {
    let all = MigSlot { profile_id: 0, placement: MigPlacement { start: 0, size: 8 } };
    let made = order(agent, MigTask::Make(all)).await;
    ready(agent).await;
    if made.is_ok() {
        destroy(agent, all, None).await;
    }
    made.is_ok()
}

#[tokio::test]
async fn profiles_and_placements_are_read() {
    let machine = empty();
    let (gpus, failures) = ready(&mut machine.agent()).await;
    let written = linkwise_host::machines::load(file().to_str().unwrap()).unwrap().observed;
    assert_eq!(gpus[0].mig, written.gpus[0].mig);
    assert_eq!((mig(&gpus).profiles.len(), gpus[1].mig.as_ref().unwrap().profiles.len()), (7, 0));
    assert_eq!(failures, []);
}

#[tokio::test]
async fn failed_placement_call_is_named_and_loses_nothing() {
    const CALL: &str = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
    let machine = empty();
    let mut agent = machine.agent();
    let FromAgent::Ready(before) = message(&mut agent).await.unwrap() else { panic!() };
    let before = before.after(None);
    for code in [1, 4, 7, 15, 77, 999] {
        machine.tell(&format!("fail 0 {CALL} {code}"));
        agent.request(ToAgent::Observe).await.unwrap();
        let FromAgent::Ready(scan) = message(&mut agent).await.unwrap() else { panic!("{code}") };
        let scan = scan.after(Some(&before));
        assert_eq!(scan.observations(), before.observations(), "{code}");
        assert!(scan.failures.iter().any(|failure| failure.error.call == CALL), "{code}");
        machine.tell(&format!("unfail 0 {CALL}"));
    }
    // A driver without the call names no placement, so no profile is kept.
    machine.tell(&format!("fail 0 {CALL} 3"));
    let (gpus, failures) = ready(&mut machine.agent()).await;
    assert_eq!((mig(&gpus).profiles.len(), failures.len()), (0, 0));
}

#[tokio::test]
async fn instance_is_made_seen_and_destroyed() {
    let machine = empty();
    let mut agent = machine.scanned().await;
    let made = order(&mut agent, MigTask::Make(SLOT)).await.unwrap().remove(0);
    let (gpus, failures) = ready(&mut agent).await;
    let [device] = &mig(&gpus).devices[..] else { panic!("{:?}", mig(&gpus)) };
    assert_eq!((&device.uuid, device.profile_id, device.placement), (&made, Some(14), Some(SLOT.placement)));
    assert_eq!((device.compute_slices, device.gpu_slices, failures), (2, 2, Vec::new()));
    // The instance outlives the agent.
    drop(agent);
    let mut agent = machine.agent();
    let (gpus, _) = ready(&mut agent).await;
    assert_eq!(mig(&gpus).devices[0].uuid, made);
    // Destroying it twice is no error.
    for _ in 0..2 {
        assert_eq!(destroy(&mut agent, SLOT, Some(made.clone())).await, []);
    }
    assert!(full_instance_fits(&mut agent).await);
}

#[tokio::test]
async fn refused_make_names_call_and_code() {
    const CALLS: [&str; 4] = [
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceGetComputeInstanceProfileInfo",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlDeviceGetMigDeviceHandleByIndex",
    ];
    let machine = empty();
    let mut agent = machine.scanned().await;
    for call in CALLS {
        // NOT_SUPPORTED, NO_PERMISSION, INSUFFICIENT_RESOURCES, INVALID_STATE, and an unknown code.
        for code in [3, 4, 23, 29, 77] {
            machine.tell(&format!("fail 0 {call} {code}"));
            let refused = order(&mut agent, MigTask::Make(SLOT)).await.unwrap_err();
            machine.tell(&format!("unfail 0 {call}"));
            ready(&mut agent).await;
            // For the last call, NOT_SUPPORTED means that the index has no device.
            let expected =
                if (call, code) == (CALLS[3], 3) { "lists no MIG device".to_owned() } else { code.to_string() };
            assert!(refused.why.contains(&expected), "{call} {code}: {refused}");
            assert!(refused.why.contains(call) || call == CALLS[3], "{call} {code}: {refused}");
            assert_eq!(refused.why.contains("the overlay dra-mig"), code == 4, "{call} {code}: {refused}");
            // Cleaning up needs the last call too, so the instance may still exist.
            if call == CALLS[3] {
                destroy(&mut agent, SLOT, None).await;
            } else {
                assert!(!refused.may_exist, "{call} {code}: {refused}");
            }
            assert!(full_instance_fits(&mut agent).await, "{call} {code}");
        }
    }
}

#[tokio::test]
async fn taken_placement_is_refused_and_keeps_its_instance() {
    let (_machine, mut agent, made) = with_instance().await;
    for slot in [SLOT, MigSlot { profile_id: 19, placement: MigPlacement { start: 3, size: 1 } }] {
        let refused = order(&mut agent, MigTask::Make(slot)).await.unwrap_err();
        let why = "nvmlDeviceCreateGpuInstanceWithPlacement: NVML_ERROR_INSUFFICIENT_RESOURCES (23)";
        assert_eq!(refused, MigOrderError { why: why.to_owned(), may_exist: false });
        assert_eq!(mig(&ready(&mut agent).await.0).devices[0].uuid, made);
    }
}

#[tokio::test]
async fn instance_in_use_stays_until_it_is_free() {
    let (machine, mut agent, made) = with_instance().await;
    for call in ["nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"] {
        machine.tell(&format!("fail 0 {call} 19"));
        let refused = order(&mut agent, MigTask::Destroy(SLOT, Some(made.clone()))).await.unwrap_err();
        assert_eq!(refused, MigOrderError { why: format!("{call}: NVML_ERROR_IN_USE (19)"), may_exist: true });
        machine.tell(&format!("unfail 0 {call}"));
        ready(&mut agent).await;
    }
    // Without its compute instance the GPU instance has no UUID, and is found by its slot.
    destroy(&mut agent, SLOT, Some(made)).await;
    assert!(full_instance_fits(&mut agent).await);
}

#[tokio::test]
async fn other_instance_in_the_slot_is_left_alone() {
    let (_machine, mut agent, made) = with_instance().await;
    assert_eq!(destroy(&mut agent, SLOT, Some("MIG-another".parse().unwrap())).await, std::slice::from_ref(&made));
    // An instance of another profile is left alone too.
    assert_eq!(destroy(&mut agent, MigSlot { profile_id: 15, ..SLOT }, None).await, [made]);
}

#[tokio::test]
async fn order_that_hangs_ends_the_agent() {
    for call in ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"] {
        let mut machine = empty();
        machine.command.limits = SHORT;
        let mut agent = machine.scanned().await;
        machine.tell(&format!("hang 0 {call}"));
        agent.request(ToAgent::Mig(MigOrder { gpu: uuid(0), task: MigTask::Make(SLOT) })).await.unwrap();
        let ended = message(&mut agent).await.unwrap_err();
        assert!(matches!(&ended, AgentEnded::Hung(called, _) if called.call == call), "{ended:?}");
        agent.kill().await;
        machine.tell(&format!("unhang 0 {call}"));
        // The instance that the agent left is destroyed by its slot.
        let mut agent = machine.scanned().await;
        destroy(&mut agent, SLOT, None).await;
        assert!(full_instance_fits(&mut agent).await, "{call}");
    }
}

/// The agent of a killed process may still be in a call, so another process's agent must wait for it.
#[tokio::test]
async fn order_waits_for_that_of_another_process() {
    const CALL: &str = "nvmlGpuInstanceCreateComputeInstance";
    let mut machine = empty();
    let folder = tempfile::tempdir().unwrap();
    let gate = Gate::of_kubelet(&folder.path().join("kubelet.sock"), "run").unwrap();
    gate.prepare().unwrap();
    machine.command.gate = Some(gate);
    let (mut one, mut other) = (machine.agent(), machine.agent());
    ready(&mut one).await;
    ready(&mut other).await;
    machine.tell(&format!("hang 0 {CALL}"));
    let make = MigOrder { gpu: uuid(0), task: MigTask::Make(SLOT) };
    one.request(ToAgent::Mig(make)).await.unwrap();
    let turn = std::fs::File::create(folder.path().join("linkwise/driver/mig")).unwrap();
    while turn.try_lock().is_ok() {
        turn.unlock().unwrap();
        tokio::task::yield_now().await;
    }
    other.request(ToAgent::Mig(MigOrder { gpu: uuid(0), task: MigTask::List })).await.unwrap();
    let opened = |agent: &Agent| {
        let files = std::fs::read_dir(format!("/proc/{}/fd", agent.id().unwrap())).into_iter().flatten().flatten();
        files.filter_map(|file| std::fs::read_link(file.path()).ok()).any(|file| file.ends_with("driver/mig"))
    };
    let waits = async {
        while !opened(&other) {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, waits).await.expect("the other agent waits for the turn");
    machine.tell(&format!("unhang 0 {CALL}"));
    let mut done = Vec::new();
    for agent in [&mut one, &mut other] {
        let FromAgent::MigDone(Ok(devices)) = message(agent).await.unwrap() else { panic!("no answer") };
        done.push(devices);
    }
    assert!(done[0].len() == 1 && done[0] == done[1], "{done:?}");
}

#[tokio::test]
async fn lost_gpu_has_no_instances_left() {
    let (machine, mut agent, made) = with_instance().await;
    machine.tell("lost 0");
    let refused = order(&mut agent, MigTask::Make(SLOT)).await.unwrap_err();
    assert!(refused.why.contains("GPU_IS_LOST") && !refused.may_exist, "{refused}");
    ready(&mut agent).await;
    assert_eq!(order(&mut agent, MigTask::Destroy(SLOT, Some(made))).await, Ok(vec![]));
}

#[tokio::test]
async fn without_mig_mode_nothing_is_left_to_destroy() {
    const LIST: &str = "nvmlDeviceGetGpuInstances";
    let (machine, mut agent, made) = with_instance().await;
    // NVML answers NOT_SUPPORTED once MIG mode is off.
    machine.tell(&format!("fail 0 {LIST} 3"));
    assert_eq!(order(&mut agent, MigTask::Destroy(SLOT, Some(made))).await, Ok(vec![]));
}

#[tokio::test]
async fn skipped_gpu_may_still_have_its_instances() {
    let mut machine = empty();
    let made = {
        let mut agent = machine.scanned().await;
        make(&mut agent).await
    };
    let skipped = {
        machine.command.skip = vec![Place { index: 0, of: 2 }];
        let mut agent = machine.scanned().await;
        order(&mut agent, MigTask::Destroy(SLOT, Some(made.clone()))).await.unwrap_err()
    };
    assert!(skipped.may_exist && skipped.why.contains("NVML does not list GPU-"), "{skipped:?}");
    machine.command.skip.clear();
    let mut agent = machine.agent();
    assert_eq!(mig(&ready(&mut agent).await.0).devices.len(), 1);
    assert_eq!(destroy(&mut agent, SLOT, Some(made)).await, []);
}
