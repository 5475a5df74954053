//! The rules of docs/health.md: the ways in which reasons begin, and the ways in which they end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{
    Availability, Cordon, Effect, Event, FabricHealth, Health, HealthPoll, HealthRecord, NodeIdentity, NodeState,
    NumaHints, Reach, RecoveryAction, ResourceName, RowRemapping, XidPolicy, XidSet,
};
use linkwise_core::topology::{GpuObservation, GpuUuid, HostObservation, NodeObservation};
use serde_json::{Value, json};

/// A node, its clock, and all its effects so far.
struct World {
    snapshot: NodeState,
    now: Duration,
    effects: Vec<Effect>,
}

pub fn uuid(gpu: usize) -> GpuUuid {
    format!("GPU-{gpu}").parse().unwrap()
}

fn id(gpu: usize) -> DeviceId {
    DeviceId::from(&uuid(gpu))
}

/// A scan that finds these GPUs.
pub fn scan(gpus: impl IntoIterator<Item = usize>) -> Event {
    let gpu = |index: usize| -> GpuObservation {
        // Links 0 to 2 are active, link 3 never was.
        let active = json!({"links": [0, 1, 2], "remote": {"switch": null}});
        let links = json!([active, {"links": [3], "remote": "unknown", "active": false}]);
        let (uuid, pci) = (format!("GPU-{index}"), format!("0000:0{index}:00.0"));
        serde_json::from_value(json!({"index": index, "uuid": uuid, "pci": pci, "nvlinks": links})).unwrap()
    };
    let gpus = gpus.into_iter().map(gpu).collect();
    Event::Observed(Box::new(NodeObservation { gpus, host: HostObservation::default(), ..NodeObservation::default() }))
}

/// The poll of a healthy GPU by a modern driver.
fn well() -> HealthPoll {
    HealthPoll {
        reach: Reach::Answers,
        recovery_action: Some(RecoveryAction::None),
        row_remapping: Some(RowRemapping::default()),
        nvlinks_down: Some(vec![3]),
        ..HealthPoll::default()
    }
}

/// The poll of a healthy old GPU by an old driver.
fn old() -> HealthPoll {
    HealthPoll { reach: Reach::Answers, uncorrectable_ecc: Some(0), ..HealthPoll::default() }
}

fn failed() -> Reach {
    Reach::Failed { call: "nvmlDeviceGetTemperature".into(), error: "NVML_ERROR_UNKNOWN (999)".into() }
}

fn wants(action: RecoveryAction) -> HealthPoll {
    HealthPoll { recovery_action: Some(action), ..well() }
}

fn xid(code: u64) -> Event {
    Event::Xid { gpu: uuid(0), code, instance: None }
}

impl World {
    fn of(snapshot: NodeState) -> Self {
        let now = Duration::from_secs(1_700_000_000);
        let mut world = Self { snapshot, now, effects: Vec::new() };
        world.apply(scan([0, 1]));
        world
    }

    fn new() -> Self {
        Self::of(NodeState::default())
    }

    fn apply(&mut self, event: Event) -> &mut Self {
        let before = std::mem::take(&mut self.snapshot);
        let (snapshot, effects) = before.apply(event, self.now);
        self.snapshot = snapshot;
        self.effects.extend(effects);
        self
    }

    /// Ten seconds later GPU 0 has this poll, and GPU 1 a healthy one.
    fn poll(&mut self, poll: &HealthPoll) -> &mut Self {
        self.poll_both(poll, &well())
    }

    fn poll_both(&mut self, first: &HealthPoll, second: &HealthPoll) -> &mut Self {
        self.now += Duration::from_secs(10);
        self.apply(Event::Polled(BTreeMap::from([(uuid(0), first.clone()), (uuid(1), second.clone())])))
    }

    fn polls(&mut self, times: usize, poll: &HealthPoll) -> &mut Self {
        for _ in 0..times {
            self.poll(poll);
        }
        self
    }

    /// Polls until GPU 0 is healthy; returns the number of polls, `None` above `limit`.
    fn heals_after(&mut self, poll: &HealthPoll, limit: usize) -> Option<usize> {
        (0..=limit).find(|times| {
            if *times > 0 {
                self.poll(poll);
            }
            self.healthy()
        })
    }

    /// Returns true if GPU 0 is healthy on the list; GPU 1 must be.
    fn healthy(&self) -> bool {
        assert!(self.snapshot.offers().is_healthy(&ResourceName::gpu(), &id(1)), "GPU 1 is unhealthy");
        self.snapshot.offers().is_healthy(&ResourceName::gpu(), &id(0))
    }

    fn reason(&self) -> String {
        match &self.snapshot.offers().resources()[&ResourceName::gpu()].devices()[&id(0)].health {
            Health::Healthy => "healthy".to_owned(),
            Health::Unhealthy { reason, .. } => reason.to_string(),
        }
    }

    fn restart(&self, identity: NodeIdentity) -> Self {
        let record = Box::new(self.snapshot.hardware().record());
        let now = self.now;
        let mut world = Self { snapshot: NodeState::default(), now, effects: Vec::new() };
        world.apply(Event::Restored(record)).apply(Event::Identified(identity)).apply(scan([0, 1]));
        world
    }
}

fn identity(boot: &str, driver: &str) -> NodeIdentity {
    NodeIdentity { boot: Some(boot.into()), driver: Some(driver.into()), ..Default::default() }
}

#[test]
fn configured_hold_doubles_to_its_sixtyfold() {
    let mut world = World::of(NodeState::default().with_hold(Duration::from_secs(20)));
    // One poll that may be older than the XID, one that begins the hold time, and the hold time: 20 s, 40, 80 ... 1200.
    for expected in [4, 6, 10, 18, 34, 66, 122, 122] {
        world.poll(&well()).apply(xid(79));
        assert_eq!(world.heals_after(&well(), 200), Some(expected));
    }
}

#[test]
fn recovery_action_keeps_gpu_unhealthy_until_none() {
    let mut world = World::new();
    // The XID comes before the driver reports a recovery action.
    world.apply(xid(95)).polls(3, &well()).polls(100, &wants(RecoveryAction::GpuReset));
    assert_eq!(world.reason(), "XID 95");
    let standing: Vec<String> =
        world.snapshot.hardware().reasons(&uuid(0)).map(|(reason, _)| reason.to_string()).collect();
    assert_eq!(standing, ["XID 95", "the driver asks for: GPU reset"]);
    assert_eq!(world.heals_after(&well(), 20), Some(7));
    // A recovery action counts without an XID too.
    let mut world = World::new();
    world.poll(&wants(RecoveryAction::NodeReboot));
    assert_eq!(world.reason(), "the driver asks for: node reboot");
    // An unknown action does not prove that the known one was carried out.
    assert_eq!(world.heals_after(&wants(RecoveryAction::Other(12)), 20), None);
    assert_eq!(world.heals_after(&well(), 20), Some(7));
}

#[test]
fn recovery_action_decides_about_unclear_xids() {
    for code in [149, 155, 159] {
        let mut world = World::new();
        world.poll(&well()).apply(xid(code));
        assert!(world.healthy() && world.effects.contains(&Effect::XidIgnored { gpu: uuid(0), code }), "XID {code}");
        assert_eq!(world.poll(&wants(RecoveryAction::GpuReset)).reason(), "the driver asks for: GPU reset");
        let mut world = World::new();
        assert_eq!(world.poll(&old()).apply(xid(code)).reason(), format!("XID {code}"), "no recovery action");
    }
}

#[test]
fn xid_without_recovery_action_stands_until_reset() {
    let mut world = World::new();
    world.poll(&old()).apply(xid(79)).polls(1000, &old());
    assert_eq!(world.reason(), "XID 79");
    // A lower counter, a finished remapping, and a GPU that is usable or on the bus again each show a reset.
    let counted = HealthPoll { uncorrectable_ecc: Some(2), ..old() };
    let pending = HealthPoll { row_remapping: Some(RowRemapping { pending: true, failed: false }), ..old() };
    let done = HealthPoll { row_remapping: Some(RowRemapping::default()), ..old() };
    let refused = HealthPoll { reach: Reach::ResetRequired { call: "nvmlDeviceGetTemperature".into() }, ..old() };
    let off = HealthPoll { on_bus: Some(false), ..old() };
    let on = HealthPoll { on_bus: Some(true), ..old() };
    let lost = HealthPoll { reach: Reach::Lost { call: "nvmlDeviceGetTemperature".into() }, ..old() };
    for (before, after) in [(&counted, &old()), (&pending, &done), (&refused, &old()), (&lost, &old()), (&off, &on)] {
        let mut world = World::new();
        world.poll(&old()).apply(xid(79)).polls(2, before).polls(3, after);
        assert_eq!(world.reason(), "XID 79", "during the hold time");
        assert!(world.heals_after(after, 10).is_some(), "{before:?}");
    }
}

/// A cordon outlasts a fault, a `clear`, another boot and a restart, until the operator ends it.
#[test]
fn cordoned_gpu_is_healthy_and_gets_no_new_work() {
    let mut world = World::new();
    let cordon = Cordon { by: "ada".to_owned(), why: "a hot cable".to_owned(), evict: false };
    world.apply(Event::Cordoned(uuid(0), Some(cordon.clone()))).poll(&well());
    assert_eq!(world.snapshot.gpus()[0].availability, Availability::Unknown, "a pod may have it");
    world.apply(Event::Holders(Some([].into_iter().collect())));
    let assert_cordoned = |world: &World| {
        let [gpu, other] = world.snapshot.gpus().try_into().unwrap();
        assert_eq!((other.availability, other.reasons.len()), (Availability::Free, 0));
        let reasons: Vec<String> = gpu.reasons.iter().map(|(reason, _)| reason.to_string()).collect();
        assert_eq!(world.snapshot.hardware().health(&uuid(0), None), Some(Health::Healthy), "its claims stay healthy");
        assert_eq!((gpu.is_healthy, gpu.availability), (true, Availability::Cordoned));
        assert_eq!(reasons, ["cordoned by ada: a hot cable"]);
        assert_eq!(world.reason(), reasons[0]);
        assert!(!world.healthy());
    };
    assert_cordoned(&world);
    assert_eq!(world.effects.iter().filter(|effect| matches!(effect, Effect::HealthChanged { .. })).count(), 0);
    assert!(world.effects.contains(&Effect::Keep));

    // A fault has a reason of its own. Neither its end nor a `clear` ends the cordon.
    world.apply(xid(79));
    assert_eq!(world.reason(), "XID 79");
    let gpu = &world.snapshot.gpus()[0];
    assert_eq!((gpu.is_healthy, gpu.availability, gpu.reasons.len()), (false, Availability::Unhealthy, 2));
    world.apply(Event::Cleared(uuid(0)));
    assert_cordoned(&world);

    world.apply(Event::Identified(identity("a", "1"))).apply(Event::Identified(identity("b", "1"))).poll(&well());
    assert_cordoned(&world);
    let mut world = world.restart(identity("c", "2"));
    world.apply(Event::Holders(Some([].into_iter().collect()))).poll(&well());
    assert_cordoned(&world);

    world.apply(Event::Cordoned(uuid(0), None));
    assert!(world.healthy() && world.snapshot.hardware().record().gpus[&uuid(0)].cordon.is_none());
    // An unknown GPU gets no cordon.
    world.apply(Event::Cordoned(uuid(7), Some(cordon)));
    assert!(!world.snapshot.hardware().record().gpus.contains_key(&uuid(7)));
}

#[test]
fn lost_gpu_is_unhealthy_until_it_answers() {
    let mut world = World::new();
    let silent = HealthPoll { reach: Reach::Unknown, ..well() };
    let lost = HealthPoll { reach: Reach::Lost { call: "nvmlDeviceGetTemperature".into() }, ..old() };
    world.poll(&lost).polls(50, &silent);
    assert_eq!(world.reason(), "nvmlDeviceGetTemperature says that the GPU is lost");
    assert_eq!(world.heals_after(&well(), 20), Some(7));
}

#[test]
fn clear_heals_at_once_and_accepts_lasting_faults() {
    for bad in [
        wants(RecoveryAction::NodeReboot),
        HealthPoll { row_remapping: Some(RowRemapping { pending: false, failed: true }), ..well() },
        HealthPoll { nvlinks_down: Some(vec![1, 3]), ..well() },
        HealthPoll { uncorrectable_ecc: Some(3), ..old() },
        HealthPoll { fabric: Some(FabricHealth::Failed { status: 9 }), ..well() },
    ] {
        let mut world = World::new();
        world.apply(xid(79)).polls(2, &bad);
        assert!(!world.healthy());
        world.apply(Event::Cleared(uuid(0)));
        assert!(world.healthy());
        assert!(world.polls(5, &bad).healthy(), "{bad:?} was accepted");
        // A fault stays accepted until it ends, and counts when it begins again.
        let good = if bad.recovery_action.is_some() { well() } else { old() };
        let good = HealthPoll { fabric: bad.fabric.map(|_| FabricHealth::Joined), ..good };
        world.polls(2, &good).apply(scan([0, 1]));
        assert!(!world.polls(2, &bad).healthy(), "{bad:?} is new");
    }
    let mut world = World::new();
    for polls in [1, 2] {
        world.polls(polls, &HealthPoll { reach: failed(), ..well() }).apply(Event::Cleared(uuid(0)));
        assert!(world.healthy());
        assert!(!world.poll(&HealthPoll { reach: failed(), ..well() }).healthy(), "the GPU still does not answer");
    }
}

#[test]
fn flapping_doubles_the_hold_and_decays() {
    let mut world = World::new();
    let bad = HealthPoll { reach: failed(), ..well() };
    let mut fail = || {
        world.polls(2, &bad);
        world.heals_after(&well(), 1000).unwrap() - 1
    };
    let holds: Vec<usize> = (0..9).map(|_| fail() * 10).collect();
    assert_eq!(holds, [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]);
    // Each healthy hour takes back a doubling: two of six.
    world.polls(721, &well()).polls(2, &bad);
    assert_eq!(world.heals_after(&well(), 1000), Some(1 + 96));
}

#[test]
fn single_bad_poll_is_not_a_failure() {
    let fabric = |fabric| HealthPoll { fabric: Some(fabric), ..well() };
    let well = fabric(FabricHealth::Joined);
    for bad in [
        HealthPoll { reach: failed(), ..well.clone() },
        HealthPoll { nvlinks_down: Some(vec![1, 3]), ..well.clone() },
        fabric(FabricHealth::Failed { status: 999 }),
    ] {
        let mut world = World::new();
        world.poll(&well);
        for _ in 0..10 {
            assert!(world.poll(&bad).healthy() && world.polls(2, &well).healthy(), "{bad:?}");
        }
        assert!(!world.polls(2, &bad).healthy());
        assert_eq!(world.heals_after(&well, 20), Some(7), "no single bad poll doubled the hold time");
        // A bad poll during the hold time neither counts towards it nor restarts it.
        world.polls(2, &bad).polls(3, &well).poll(&bad);
        assert_eq!(world.heals_after(&well, 20), Some(10), "120 s, of which 20 s had passed");
    }
    // These fail a GPU at once.
    for bad in [Reach::Lost { call: "f".into() }, Reach::ResetRequired { call: "f".into() }] {
        assert!(!World::new().poll(&well).poll(&HealthPoll { reach: bad, ..well.clone() }).healthy());
    }
}

#[test]
fn bad_first_poll_counts_until_the_second() {
    let bad = HealthPoll { reach: failed(), ..well() };
    let mut world = World::new();
    assert!(!world.poll(&bad).healthy(), "no earlier poll was good");
    assert!(world.poll(&well()).healthy(), "without a hold time");
    assert!(!World::new().polls(2, &bad).poll(&well()).healthy(), "two bad polls in a row begin a hold time");
    // The same is true of the first poll after the driver was loaded again.
    world.apply(Event::Identified(identity("boot", "load 1"))).polls(2, &bad);
    world.apply(Event::Identified(identity("boot", "load 2")));
    assert!(!world.poll(&bad).healthy() && world.poll(&well()).healthy());
}

#[test]
fn failure_of_all_gpus_is_not_a_flap() {
    let mut world = World::new();
    let bad = HealthPoll { reach: failed(), ..well() };
    for _ in 0..4 {
        world.poll_both(&bad, &bad).poll_both(&bad, &bad);
        let is_healthy = |world: &World| world.snapshot.offers().is_healthy(&ResourceName::gpu(), &id(0));
        let times = (1..100).find(|_| is_healthy(world.poll(&well())));
        assert_eq!(times, Some(7));
    }
}

#[test]
fn hold_time_counts_only_time_between_polls() {
    let mut world = World::new();
    world.apply(xid(79)).polls(2, &well());
    // The clock jumps forwards and back. Each poll still covers from 0 to 20 s.
    world.now += Duration::from_secs(1_000_000);
    world.poll(&well());
    world.now -= Duration::from_secs(2_000_000);
    world.poll(&well());
    assert_eq!(world.heals_after(&well(), 20), Some(4), "20 s and four times 10 s");
    // Time without polls does not count.
    world.apply(xid(79));
    world.now += Duration::from_secs(1_000_000);
    assert!(!world.apply(Event::Tick).healthy());
}

#[test]
fn missing_values_neither_fail_nor_heal_a_gpu() {
    let mut world = World::new();
    assert!(world.polls(5, &HealthPoll::default()).healthy());
    world.polls(2, &HealthPoll { reach: failed(), ..well() }).polls(4, &well()).polls(500, &HealthPoll::default());
    assert!(!world.healthy());
    assert_eq!(world.heals_after(&well(), 10), Some(3), "30 s passed before");
}

#[test]
fn ecc_errors_count_without_containment() {
    let counted = |base: HealthPoll| HealthPoll { uncorrectable_ecc: Some(1), ..base };
    let mut world = World::new();
    assert_eq!(world.poll(&counted(old())).reason(), "1 uncorrectable ECC errors since the driver was loaded");
    assert_eq!(world.heals_after(&old(), 20), Some(7));
    let remaps = HealthPoll { row_remapping: Some(RowRemapping { pending: true, failed: false }), ..old() };
    assert!(World::new().poll(&counted(remaps.clone())).healthy(), "contained, and replaced at the next reset");
    assert!(World::new().poll(&counted(well())).healthy(), "the driver reports a recovery action");
    // A poll that does not repeat that the GPU can remap rows changes nothing.
    assert!(World::new().poll(&remaps).poll(&counted(old())).healthy());
    let failed = HealthPoll { row_remapping: Some(RowRemapping { pending: false, failed: true }), ..well() };
    assert_eq!(World::new().poll(&failed).reason(), "a row remapping failed");
}

#[test]
fn only_links_that_were_active_count_as_down() {
    let mut world = World::new();
    assert!(world.poll(&well()).healthy(), "link 3 was never active");
    let down = HealthPoll { nvlinks_down: Some(vec![0, 2, 3]), ..well() };
    assert_eq!(world.polls(2, &down).reason(), "NVLinks down: 0,2");
    assert!(world.polls(500, &HealthPoll { nvlinks_down: Some(vec![2, 3]), ..well() }).reason() == "NVLinks down: 2");
    assert_eq!(world.heals_after(&well(), 20), Some(7));
}

#[test]
fn late_fabric_join_is_no_failure() {
    let fabric = |fabric| HealthPoll { fabric: Some(fabric), ..well() };
    let mut world = World::new();
    assert_eq!(world.poll(&fabric(FabricHealth::Joining)).reason(), "still joining the NVLink fabric");
    assert!(world.poll(&fabric(FabricHealth::Joined)).healthy());
    world.polls(2, &fabric(FabricHealth::Failed { status: 999 }));
    assert_eq!(world.heals_after(&fabric(FabricHealth::Joined), 20), Some(7));
    // A failure ends the reason that the GPU is joining.
    world.poll(&fabric(FabricHealth::Joining)).polls(2, &fabric(FabricHealth::Failed { status: 999 }));
    assert_eq!(world.heals_after(&fabric(FabricHealth::Joined), 20), Some(13), "120 s");
}

#[test]
fn fabric_reason_ends_when_unused_or_cleared() {
    let fabric = |fabric| HealthPoll { fabric: Some(fabric), ..well() };
    let mut world = World::new();
    assert!(!world.poll(&fabric(FabricHealth::Joining)).healthy());
    assert!(world.poll(&fabric(FabricHealth::Unused)).healthy(), "MIG was turned on");
    world.polls(2, &fabric(FabricHealth::Failed { status: 3 }));
    assert_eq!(world.heals_after(&fabric(FabricHealth::Unused), 20), Some(7));
    // A degraded GPU reports a failure for ever, and one without a partition joins for ever.
    for lasting in [FabricHealth::Failed { status: 3 }, FabricHealth::Joining] {
        let mut world = World::new();
        assert!(!world.polls(100, &fabric(lasting)).healthy());
        world.apply(Event::Cleared(uuid(0)));
        assert!(world.polls(100, &fabric(lasting)).healthy(), "accepted by the operator: {lasting:?}");
        assert!(world.restart(NodeIdentity::default()).poll(&fabric(lasting)).healthy());
        world.poll(&fabric(FabricHealth::Joined));
        assert!(!world.polls(2, &fabric(lasting)).healthy(), "it began again");
    }
}

#[test]
fn quarantined_gpu_is_unhealthy_until_released() {
    let mut world = World::new();
    world.apply(Event::Quarantined(uuid(0), "SIGSEGV in nvmlDeviceGetTemperature".into()));
    world.apply(Event::Cleared(uuid(0))).polls(100, &well());
    assert_eq!(world.reason(), "quarantined: SIGSEGV in nvmlDeviceGetTemperature");
    world.apply(Event::ReleasedFromQuarantine(uuid(0)));
    assert_eq!(world.heals_after(&well(), 20), Some(7));
}

#[test]
fn driver_back_waits_for_the_next_poll() {
    let mut world = World::new();
    let all = |world: &World| [0, 1].map(|gpu| world.snapshot.offers().is_healthy(&ResourceName::gpu(), &id(gpu)));
    world.apply(Event::DriverAway("no answer".into()));
    assert_eq!(all(&world), [false; 2]);
    world.apply(Event::Cleared(uuid(0))).apply(Event::DriverBack);
    assert_eq!(all(&world), [false; 2]);
    world.polls(2, &HealthPoll { reach: failed(), ..well() });
    assert_eq!(all(&world), [false, true]);
    // A GPU that failed meanwhile keeps its own reason.
    assert_eq!(world.heals_after(&well(), 20), Some(7));
}

#[test]
fn reset_reasons_survive_restart_not_boot_or_driver() {
    let mut world = World::new();
    world.apply(Event::Identified(identity("boot", "580, load 7"))).apply(xid(79)).poll(&old());
    assert_eq!(world.restart(identity("boot", "580, load 7")).reason(), "XID 79");
    assert_eq!(world.restart(NodeIdentity::default()).reason(), "XID 79", "unknown is no change");
    assert!(world.restart(identity("another", "580, load 7")).healthy());
    assert!(world.restart(identity("boot", "580, load 8")).healthy());
    // The driver is loaded again while linkwise runs: the XID ends at the next poll.
    world.apply(Event::Identified(identity("boot", "580, load 8")));
    assert!(!world.healthy());
    assert!(world.poll(&old()).healthy());
    // A restart forgets a reason that polls find, because the next poll finds it again.
    world.poll(&HealthPoll { reach: failed(), ..old() });
    assert!(world.restart(identity("boot", "580, load 8")).healthy());
}

#[test]
fn reset_while_linkwise_was_down_is_noticed() {
    let mut world = World::new();
    let counted = HealthPoll { uncorrectable_ecc: Some(4), ..old() };
    world.apply(Event::Identified(identity("boot", "load"))).apply(xid(48)).polls(2, &counted);
    let mut next = world.restart(identity("boot", "load"));
    assert!(next.heals_after(&old(), 20).is_some());
    let mut next = world.restart(identity("boot", "load"));
    assert_eq!(next.heals_after(&counted, 200), None);
}

#[test]
fn record_of_other_version_is_reported_and_ignored() {
    let mut world = World::new();
    world.apply(xid(79));
    let record = HealthRecord { version: 2, ..world.snapshot.hardware().record() };
    let (snapshot, effects) = NodeState::default().apply(Event::Restored(Box::new(record)), world.now);
    assert_eq!(effects, [Effect::RecordIgnored(2)]);
    assert_eq!(snapshot.hardware().record(), NodeState::default().hardware().record());
}

#[test]
fn first_list_waits_for_first_poll() {
    let waiting = || NodeState::default().awaiting(|first| (first.scan, first.poll) = (true, true));
    let mut world = World::of(waiting());
    assert!(!world.effects.contains(&Effect::Publish));
    let deadline = world.snapshot.next_deadline().unwrap();
    world.poll(&wants(RecoveryAction::GpuReset));
    assert!(world.effects.contains(&Effect::Publish));
    assert!(!world.healthy());
    assert_eq!(world.snapshot.next_deadline(), None);
    // Without polls the list is published at the deadline, and not when a setting changes meanwhile.
    let mut world = World::of(waiting());
    world.apply(Event::NumaHints(NumaHints::Package));
    assert!(!world.effects.contains(&Effect::Publish), "no GPU was polled yet");
    world.now = deadline;
    world.apply(Event::Tick);
    assert!(world.effects.contains(&Effect::Publish) && world.healthy());
    // Without a GPU there is no poll to wait for.
    let (_, effects) = waiting().apply(scan([]), deadline);
    assert_eq!(effects, [Effect::Publish]);
}

#[test]
fn xid_storm_is_one_transition_and_few_log_lines() {
    let mut world = World::new();
    world.effects.clear();
    for storm in 0..100_000_u64 {
        let (code, instance) = (if storm % 2 == 0 { 79 } else { 13 }, None);
        world.apply(Event::Xid { gpu: uuid(0), code, instance });
    }
    let changes = world.effects.iter().filter(|effect| matches!(effect, Effect::HealthChanged { .. })).count();
    assert_eq!((changes, world.effects.len()), (1, 4), "{:?}", world.effects);
    // A minute later an XID with the same code is logged again.
    world.now += Duration::from_secs(60);
    world.effects.clear();
    for _ in 0..2 {
        world.apply(Event::Xid { gpu: uuid(0), code: 13, instance: None });
    }
    assert_eq!(world.effects, [Effect::XidIgnored { gpu: uuid(0), code: 13 }]);
    assert_eq!(world.snapshot.next_deadline(), None, "nothing waits for a deadline");
    // 100,000 different XIDs take bounded memory, and the GPU is unhealthy until the last one has ended.
    let mut world = World::new();
    for code in 1_000..101_000 {
        world.apply(xid(code));
    }
    assert!(world.snapshot.hardware().reasons(&uuid(0)).count() <= 32);
    assert!(world.snapshot.hardware().record().gpus[&uuid(0)].reasons.len() <= 32);
    world.polls(5, &well()).apply(xid(200_000));
    assert!(!world.polls(4, &well()).healthy());
}

/// A node with health checks disabled, except for these XIDs.
fn silenced(enabled: XidSet) -> World {
    let policy = XidPolicy { disabled: XidSet::All, enabled, ..XidPolicy::default() };
    World::of(NodeState::default().with_xids(policy))
}

#[test]
fn silenced_xids_do_not_count() {
    let mut world = silenced(XidSet::default());
    assert!(world.apply(xid(79)).apply(Event::DoubleBitEcc(uuid(0))).healthy());
    assert!(
        !world.apply(xid(200_000)).poll(&HealthPoll { on_bus: Some(false), ..well() }).healthy(),
        "it is off the bus"
    );
    // An XID that is enabled by number counts nevertheless.
    let mut world = silenced(XidSet::parse("79").0);
    assert!(!world.apply(xid(79)).healthy());
}

#[test]
fn disabled_checks_report_but_do_not_count_faults() {
    let lost = Reach::Lost { call: "f".into() };
    for poll in [
        wants(RecoveryAction::GpuReset),
        HealthPoll { reach: failed(), ..well() },
        HealthPoll { reach: lost, ..well() },
        HealthPoll { row_remapping: Some(RowRemapping { pending: false, failed: true }), ..well() },
        HealthPoll { nvlinks_down: Some(vec![1, 3]), ..well() },
        HealthPoll { fabric: Some(FabricHealth::Failed { status: 999 }), ..well() },
    ] {
        assert!(!World::new().poll(&poll).healthy(), "unhealthy with health checks: {poll:?}");
        let mut world = silenced(XidSet::default());
        world.effects.clear();
        assert!(world.polls(3, &poll).healthy(), "{poll:?}");
        let standing: Vec<_> = world.snapshot.hardware().reasons(&uuid(0)).map(|(reason, _)| reason.clone()).collect();
        let [reason] = &standing[..] else { panic!("{standing:?}") };
        let reported = Effect::NotCounted(uuid(0), reason.clone());
        assert_eq!(world.effects.iter().filter(|effect| **effect == reported).count(), 1, "{:?}", world.effects);
    }
    // A reason from before the checks were disabled does not count either.
    let mut before = World::new();
    before.apply(xid(79));
    let mut world = silenced(XidSet::default());
    world.apply(Event::Restored(Box::new(before.snapshot.hardware().record()))).poll(&well());
    assert!(world.healthy());
    // Unavailable NVML is not a health check, so it still counts.
    assert!(!world.apply(Event::DriverAway("why".into())).snapshot.offers().is_healthy(&ResourceName::gpu(), &id(0)));
}

#[test]
fn gone_gpu_leaves_the_list_once_unheld() {
    let mut world = World::new();
    let resource = ResourceName::gpu();
    let listed = |world: &World| world.snapshot.offers().of(&resource).count();
    let held = |gpus: &[usize]| {
        let held: BTreeSet<_> = gpus.iter().map(|gpu| (resource.clone(), id(*gpu))).collect();
        Event::Holders(Some(held.into_iter().collect()))
    };
    world.apply(scan([1])).apply(Event::Holders(None)).apply(Event::Holders(None));
    assert_eq!((listed(&world), world.reason().as_str()), (2, "the device is gone from the node"));
    // The first list of holders may be older than the last pod, and the list after a failure may be a new kubelet's.
    world.apply(held(&[])).apply(held(&[0])).apply(held(&[1])).apply(Event::Holders(None)).apply(held(&[1]));
    assert_eq!(listed(&world), 2);
    world.effects.clear();
    world.apply(held(&[1]));
    assert_eq!((listed(&world), &world.effects[..]), (1, &[Effect::Publish][..]));
    // A GPU that exists stays listed without a holder. A GPU that comes back is listed and healthy.
    world.apply(held(&[])).apply(held(&[])).apply(scan([0, 1]));
    assert_eq!((listed(&world), world.healthy()), (2, true));
    world.apply(scan([])).apply(held(&[])).apply(held(&[]));
    assert!(world.snapshot.offers().resources().is_empty(), "a resource without devices is not offered");
}

#[test]
fn gpu_back_on_the_bus_counts_as_reset() {
    let on_bus = |bus: &[usize], by_nvml: &[usize]| {
        let Event::Observed(mut observed) = scan(by_nvml.iter().copied()) else { unreachable!() };
        let device = |gpu: &usize| json!({"pci": format!("0000:0{gpu}:00.0"), "kind": "gpu"});
        let devices: Vec<Value> = bus.iter().map(device).collect();
        observed.host.host_bridges = serde_json::from_value(json!([{"numa": 0, "devices": devices}])).unwrap();
        Event::Observed(observed)
    };
    // A GPU that NVML still lists, but the bus does not, is not back.
    let mut world = World::new();
    let gone = HealthPoll { on_bus: Some(false), ..old() };
    world
        .apply(on_bus(&[0, 1], &[0, 1]))
        .poll(&old())
        .apply(xid(79))
        .poll(&old())
        .poll(&gone)
        .apply(on_bus(&[1], &[0, 1]));
    assert_eq!((world.reason().as_str(), world.heals_after(&old(), 50)), ("XID 79", None));
    let back = HealthPoll { on_bus: Some(true), ..old() };
    assert_eq!(world.heals_after(&back, 50), Some(7));
    for (bus, healed) in [(&[1][..], true), (&[0, 1], false)] {
        let mut world = World::new();
        world.apply(on_bus(&[0, 1], &[0, 1])).poll(&old()).apply(xid(79)).poll(&old());
        world.apply(on_bus(bus, &[1])).apply(on_bus(&[0, 1], &[0, 1]));
        assert_eq!(world.reason(), "XID 79");
        assert_eq!(world.heals_after(&old(), 50).is_some(), healed, "on the bus meanwhile: {bus:?}");
    }
}
