//! Hardware that pods hold under other names, or through claims, is not given out again.

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{
    ClaimedDevice, Effect, Event, Health, Holdings, MigStrategy, NodeState, ResourceName, ResourcePlan, UnhealthyReason,
};

use crate::resources::{LATER, after, claimed, mig, mixed, no_holders, planned, renamed, resource, sliced, with};

fn held(devices: &[(&str, &str)]) -> Event {
    let devices = devices.iter().map(|(name, id)| (resource(name), DeviceId::from((*id).to_owned())));
    Event::Holders(Some(devices.collect()))
}

/// The ids of a resource that are unhealthy because pods hold their hardware under other names.
fn withheld(snapshot: &NodeState, name: &str) -> Vec<String> {
    let is_withheld =
        |health: &Health| matches!(health, Health::Unhealthy { reason: UnhealthyReason::HeldElsewhere { .. }, .. });
    let name = resource(name);
    let devices = snapshot.offers().of(&name).filter(|(_, device)| is_withheld(&device.health));
    devices.map(|(id, _)| id.to_string()).collect()
}

#[test]
fn hardware_held_under_other_name_is_not_offered() {
    let gpus: Vec<String> = mixed().gpus.iter().map(|gpu| gpu.uuid.to_string()).collect();
    let gpu = |at: usize| gpus[at].as_str();
    let mig = mixed().gpus[1].mig.as_ref().unwrap().devices[0].uuid.to_string();
    let slot = format!("{}::1", gpu(0));
    let (whole, divided) = (ResourcePlan::default(), self::mig(MigStrategy::Mixed));
    let slots = [format!("{}::0", gpu(0)), slot.clone()];
    let slots = [slots[0].as_str(), slots[1].as_str()];
    let none: &[&str] = &[];
    for (case, plan, (of, id), offered, expected) in [
        ("its own name", &whole, ("nvidia.com/gpu", gpu(0)), "nvidia.com/gpu", none),
        ("a new name", &renamed(), ("nvidia.com/gpu", gpu(0)), "nvidia.com/a100", &[gpu(0)]),
        ("whole, then in slots", &sliced(2), ("nvidia.com/gpu", gpu(0)), "nvidia.com/gpu", &slots),
        ("a slot, then whole", &whole, ("nvidia.com/gpu", slot.as_str()), "nvidia.com/gpu", &[gpu(0)]),
        ("a slot, then slots of another name", &sliced(2), ("a.b/c", slot.as_str()), "nvidia.com/gpu", none),
        ("a MIG device by another name", &divided, ("a.b/c", mig.as_str()), "nvidia.com/mig-1g.10gb", &[mig.as_str()]),
        ("a MIG device, then its GPU", &whole, ("a.b/c", mig.as_str()), "nvidia.com/gpu", &[gpu(1)]),
        ("a device of another vendor", &whole, ("a.b/nic", "nic0"), "nvidia.com/gpu", none),
    ] {
        let (snapshot, effects) = with(plan, mixed()).apply(held(&[(of, id)]), LATER);
        assert_eq!(withheld(&snapshot, offered), expected, "{case}");
        let reports = effects.iter().filter(|effect| matches!(effect, Effect::HeldElsewhere { .. })).count();
        assert_eq!(reports, usize::from(!expected.is_empty()), "{case}: one report for a GPU and a resource");
        assert_eq!(snapshot.offers().awaits_holders(), !expected.is_empty(), "{case}");
        let id = DeviceId::from(expected.first().map_or("none", |id| id).to_owned());
        assert!(snapshot.allocate(&resource(offered), &[id]).is_err(), "{case}");
        let ended = after(snapshot.clone(), [no_holders()]);
        assert_eq!(withheld(&ended, offered), none, "{case}: the pod has ended");
        let unknown = after(snapshot, [Event::Holders(None)]);
        assert_eq!(withheld(&unknown, offered), expected, "{case}: the kubelet restarts, the pod runs on");
    }
}

/// A pod may have started after the last list, so a changed plan waits for two newer lists.
#[test]
fn withdrawn_device_is_held_until_two_lists_lack_it() {
    let snapshot = after(with(&ResourcePlan::default(), mixed()), [no_holders(), planned(&renamed())]);
    assert_eq!(withheld(&snapshot, "nvidia.com/a100").len(), 4);
    let snapshot = after(snapshot, [no_holders()]);
    assert_eq!(withheld(&snapshot, "nvidia.com/a100").len(), 4, "this list may be older than the plan");
    let snapshot = after(snapshot, [no_holders()]);
    assert_eq!(withheld(&snapshot, "nvidia.com/a100"), [] as [&str; 0]);
    assert!(!snapshot.offers().awaits_holders());
}

/// Without any list from the kubelet there is nothing to wait for.
#[test]
fn unknown_holders_let_a_plan_apply_at_once() {
    let snapshot = after(with(&ResourcePlan::default(), mixed()), [planned(&renamed())]);
    assert_eq!(withheld(&snapshot, "nvidia.com/a100"), [] as [&str; 0]);
}

#[test]
fn holders_count_while_the_kubelet_restarts() {
    let gpu = mixed().gpus[0].uuid.to_string();
    let has = || held(&[("nvidia.com/gpu", &gpu)]);
    let events = [has(), Event::Holders(None), planned(&renamed())];
    let snapshot = after(with(&ResourcePlan::default(), mixed()), events);
    assert_eq!(withheld(&snapshot, "nvidia.com/a100").len(), 4, "one is held, and pods may hold the others by now");
    assert_eq!(withheld(&after(snapshot, [has(), has()]), "nvidia.com/a100"), [gpu.as_str()]);
}

/// The kubelet keeps the devices of an init container that has ended until its pod ends.
#[test]
fn devices_of_init_containers_are_held_too() {
    let gpu = mixed().gpus[0].uuid.to_string();
    let init_containers = [(ResourceName::gpu(), DeviceId::from(gpu.clone()))].into();
    let holdings = Holdings { init_containers, ..Holdings::default() };
    let snapshot = after(with(&renamed(), mixed()), [Event::Holders(Some(holdings))]);
    assert_eq!(withheld(&snapshot, "nvidia.com/a100"), [gpu]);
}

#[test]
fn claimed_hardware_is_not_offered() {
    let observed = mixed();
    let (gpu, mig) = (&observed.gpus[0], &observed.gpus[1].mig.as_ref().unwrap().devices[0]);
    let of_training = |device: &str, cdi: &str| claimed("team/training", device, cdi);
    let by_minor = format!("gpu-{}", gpu.minor.unwrap());
    let of_gpu_1 = format!("gpu-{}-mig-1g10gb-19-0", observed.gpus[1].minor.unwrap());
    let all_of_gpu_1 = observed.gpus[1].mig.as_ref().unwrap().devices.len();
    for (claim, expected) in [
        (of_training(&by_minor, "claim-1"), 1),
        (of_training("any", gpu.uuid.as_str()), 1),
        (of_training("any", mig.uuid.as_str()), 1),
        (of_training(&of_gpu_1, "claim-1"), all_of_gpu_1),
        (of_training("gpu-77", "claim-1"), 0),
        (ClaimedDevice { driver: "nic.example.com".to_owned(), ..of_training(&by_minor, "nic") }, 0),
    ] {
        let holdings = Holdings { claims: [claim.clone()].into(), ..Holdings::default() };
        let snapshot = after(with(&self::mig(MigStrategy::Mixed), mixed()), [Event::Holders(Some(holdings))]);
        let held = snapshot.offers().devices().filter(|device| {
            matches!(&device.health, Health::Unhealthy { reason: UnhealthyReason::Claimed { .. }, .. })
        });
        assert_eq!(held.count(), expected, "{claim:?}");
        assert_eq!(snapshot.offers().awaits_holders(), expected > 0);
        assert!(!after(snapshot, [no_holders()]).offers().awaits_holders());
    }
}
