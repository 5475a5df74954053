//! Whose events are heard, and what an event brings.

use linkwise_core::state::RecoveryAction;
use linkwise_nvml::CallError;
use linkwise_nvml::CallFailure;
use linkwise_nvml::child::Agent;
use linkwise_nvml::protocol::FromAgent;

use super::{Duration, LIMIT, Machine, machine, next, polled, ready, said, timeout, uuid};

/// Waits until this many GPUs are not heard.
async fn unheard(agent: &mut Agent, wanted: u32) {
    let waiting = async {
        while !matches!(next(agent).await.unwrap(), FromAgent::Polled { unheard, .. } if unheard == wanted) {}
    };
    timeout(LIMIT, waiting).await.expect("they are heard, or are not, in time");
}

/// An XID of this GPU arrives.
pub async fn heard(machine: &Machine, agent: &mut Agent, gpu: u32, code: u64) {
    machine.tell(&format!("xid {gpu} {code}"));
    let xid = FromAgent::Xid { gpu: uuid(gpu), code, gpu_instance: None, compute_instance: None };
    let waiting = async { while said(agent).await.unwrap() != xid {} };
    timeout(LIMIT, waiting).await.expect("it is heard in time");
}

#[tokio::test]
async fn a_lost_gpu_that_ends_the_wait_for_all_costs_its_own_events_only() {
    let machine = machine();
    machine.tell("loss-ends-waits");
    let mut agent = machine.scanned().await;
    machine.tell("lost 2");
    let failed = FromAgent::Failed(CallFailure::new("driver", CallError::returned("nvmlEventSetWait_v2", 15)));
    assert_eq!(said(&mut agent).await.unwrap(), failed);
    unheard(&mut agent, 4).await;
    // The next agent does not find it, and hears the others.
    let mut agent = machine.agent();
    unheard(&mut agent, 0).await;
    heard(&machine, &mut agent, 3, 79).await;
    machine.tell("back 2");
    unheard(&mut agent, 1).await;
    let mut agent = machine.agent();
    unheard(&mut agent, 0).await;
    heard(&machine, &mut agent, 2, 79).await;
    heard(&machine, &mut agent, 3, 63).await;
}

#[tokio::test]
async fn gpus_that_cannot_be_registered_are_counted_and_named() {
    for (call, which, deaf) in
        [("nvmlDeviceRegisterEvents", "1", 1), ("nvmlDeviceRegisterEvents", "*", 4), ("nvmlEventSetCreate", "*", 4)]
    {
        let machine = machine().with("FAKE_NVML_FAIL", format!("{which}:{call}:999"));
        let mut agent = machine.agent();
        let (_, failures) = ready(&mut agent).await;
        assert!(failures.iter().any(|failure| failure.call == call), "{failures:?}");
        unheard(&mut agent, deaf).await;
    }
}

#[tokio::test]
async fn an_event_is_followed_by_a_round_that_finds_what_it_left() {
    let mut machine = machine();
    machine.command.poll = Duration::from_secs(3600);
    machine.tell("recovery 1 0");
    let mut agent = machine.agent();
    polled(&mut agent, 1, |poll| poll.recovery_action == Some(RecoveryAction::None)).await;
    for action in [1, 2] {
        machine.tell(&format!("recovery 1 {action}"));
        machine.tell("storm 1 31 100");
        polled(&mut agent, 1, |poll| poll.recovery_action == Some(RecoveryAction::from(action))).await;
    }
}
