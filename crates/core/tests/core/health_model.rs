//! Health as a model: random histories with simulated time, checked against the rules of docs/health.md.
//!
//! The oracle keeps no reasons. For safety it counts, from the history alone, how long good polls have to go on before
//! a GPU may be healthy: a lower bound. For liveness each history ends in a world without faults, where all GPUs heal.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{
    Event, FabricHealth, Health, HealthPoll, HealthRecord, NodeIdentity, NodeState, Reach, RecoveryAction,
    ResourceName, RowRemapping, Timestamp, UnhealthyReason,
};
use proptest::prelude::*;

use crate::health::{scan, uuid};

/// Two GPUs with faults and one without, so that no poll fails for all GPUs.
const GPUS: usize = 3;
const START: Duration = Duration::from_secs(1_700_000_000);

fn identity(boot: u8, driver: u8) -> NodeIdentity {
    NodeIdentity { boot: Some(boot.to_string()), driver: Some(driver.to_string()), ..Default::default() }
}

/// A step of a history. A `usize` is the number of a GPU, 0 or 1.
#[derive(Clone, Debug)]
enum Step {
    Xid(usize, u64),
    Ecc(usize),
    Quarantined(usize),
    Released(usize),
    DriverAway,
    DriverBack,
    Cleared(usize),
    Poll(Box<[HealthPoll; 2]>),
    /// A number of good polls, 10 s apart.
    Good(u8),
    /// A scan that finds some of GPUs 0 and 1.
    Scan([bool; 2]),
    Identified(u8, u8),
    Restart,
    Tick,
}

fn good(has_action: bool) -> HealthPoll {
    HealthPoll {
        reach: Reach::Answers,
        recovery_action: has_action.then_some(RecoveryAction::None),
        row_remapping: Some(RowRemapping::default()),
        uncorrectable_ecc: Some(0),
        nvlinks_down: Some(Vec::new()),
        fabric: Some(FabricHealth::Joined),
        on_bus: Some(true),
    }
}

fn poll() -> impl Strategy<Value = HealthPoll> {
    let call = || "nvmlDeviceGetTemperature".to_owned();
    let reach = prop_oneof![
        8 => Just(Reach::Answers),
        2 => Just(Reach::Unknown),
        1 => Just(Reach::Lost { call: call() }),
        1 => Just(Reach::ResetRequired { call: call() }),
        1 => Just(Reach::Failed { call: call(), error: "NVML_ERROR_UNKNOWN (999)".to_owned() }),
    ];
    let action = prop_oneof![
        5 => Just(None),
        5 => Just(Some(RecoveryAction::None)),
        1 => Just(Some(RecoveryAction::GpuReset)),
        1 => Just(Some(RecoveryAction::NodeReboot)),
    ];
    let rows = prop_oneof![
        5 => Just(None),
        5 => (any::<bool>()).prop_map(|pending| Some(RowRemapping { pending, failed: false })),
        1 => Just(Some(RowRemapping { pending: false, failed: true })),
    ];
    let fabric = prop_oneof![
        4 => Just(None),
        8 => Just(Some(FabricHealth::Joined)),
        1 => Just(Some(FabricHealth::Joining)),
        1 => Just(Some(FabricHealth::Failed { status: 9 })),
    ];
    let links =
        prop_oneof![2 => Just(None), 8 => Just(Some(vec![])), 1 => Just(Some(vec![1])), 1 => Just(Some(vec![7]))];
    let on_bus = prop_oneof![3 => Just(None), 8 => Just(Some(true)), 1 => Just(Some(false))];
    let ecc = prop_oneof![2 => Just(None), 6 => Just(Some(0)), 2 => (1_u64..3).prop_map(Some)];
    (reach, action, rows, ecc, links, fabric, on_bus).prop_map(
        |(reach, recovery_action, row_remapping, uncorrectable_ecc, nvlinks_down, fabric, on_bus)| HealthPoll {
            reach,
            recovery_action,
            row_remapping,
            uncorrectable_ecc,
            nvlinks_down,
            fabric,
            on_bus,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let gpu = || 0_usize..2;
    prop_oneof![
        3 => (gpu(), prop::sample::select(vec![13_u64, 48, 63, 79, 94, 119, 555]))
            .prop_map(|(gpu, code)| Step::Xid(gpu, code)),
        1 => gpu().prop_map(Step::Ecc),
        1 => gpu().prop_map(Step::Quarantined),
        1 => gpu().prop_map(Step::Released),
        1 => Just(Step::DriverAway),
        1 => Just(Step::DriverBack),
        1 => gpu().prop_map(Step::Cleared),
        6 => [poll(), poll()].prop_map(|polls| Step::Poll(Box::new(polls))),
        5 => (1_u8..40).prop_map(Step::Good),
        2 => any::<[bool; 2]>().prop_map(Step::Scan),
        1 => (0_u8..2, 0_u8..2).prop_map(|(boot, driver)| Step::Identified(boot, driver)),
        1 => Just(Step::Restart),
        1 => Just(Step::Tick),
    ]
}

/// The seconds until the next step, and the jump of the clock meanwhile.
fn pace() -> impl Strategy<Value = (u64, i64)> {
    let jump = prop_oneof![8 => Just(0_i64), 1 => -100_000_i64..100_000];
    (0_u64..40, jump)
}

/// The steps, each with its [`pace`], and true if the driver reports recovery actions.
type History = (Vec<(Step, (u64, i64))>, bool);

fn history() -> impl Strategy<Value = History> {
    (prop::collection::vec((step(), pace()), 1..40), any::<bool>())
}

/// The time that good polls still have to cover.
#[derive(Clone, Debug, Default)]
struct Debt {
    hold: Option<Duration>,
    /// The number of polls that prove nothing yet.
    unproved: u32,
}

impl Debt {
    fn owe(&mut self, unproved: u32) {
        *self = Self { hold: Some(Duration::from_secs(60)), unproved };
    }

    fn pay(&mut self, gap: Duration) {
        if self.unproved > 0 {
            self.unproved -= 1;
        } else if let Some(hold) = self.hold {
            self.hold = Some(hold.saturating_sub(gap)).filter(|hold| !hold.is_zero());
        }
    }
}

/// The good polls that a GPU still needs, counted from the history alone.
#[derive(Clone, Debug, Default)]
struct Owed {
    trouble: Debt,
    /// The polls owed because of a quarantine or a GPU off the bus, which neither a `clear` nor a new driver ends.
    unseen: Debt,
    last_poll: Option<Timestamp>,
    absent: bool,
    away: bool,
    away_until_poll: bool,
    /// True if an operator has accepted the faults that polls may still show.
    cleared: bool,
    /// True if the driver once reported a recovery action, or the GPU can remap rows.
    explains_ecc: bool,
    /// The faults of the last poll that only two polls in a row prove: a failed call, the fabric, the links.
    shown: [bool; 3],
    /// The last known state of the fabric, and the one that an operator accepted, until it changes.
    fabric: Option<FabricHealth>,
    accepted_fabric: Option<FabricHealth>,
}

impl Owed {
    /// Counts a poll. Returns true if the GPU is joining its fabric, unless an operator accepted that.
    fn poll(&mut self, poll: &HealthPoll, now: Timestamp) -> bool {
        let gap = self.last_poll.map_or(Duration::ZERO, |last| now.saturating_sub(last)).min(Duration::from_secs(20));
        self.last_poll = Some(now);
        self.explains_ecc |= poll.recovery_action.is_some() || poll.row_remapping.is_some();
        self.away &= !self.away_until_poll;
        let unreachable = matches!(poll.reach, Reach::Lost { .. } | Reach::ResetRequired { .. });
        let shown = [
            matches!(poll.reach, Reach::Failed { .. }),
            matches!(poll.fabric, Some(FabricHealth::Failed { .. })),
            poll.nvlinks_down.as_ref().is_some_and(|down| down.contains(&1)),
        ];
        let before = std::mem::replace(&mut self.shown, shown);
        let [failed, fabric, links] = [0, 1, 2].map(|trouble| shown[trouble] && before[trouble]);
        let unreachable = unreachable || failed;
        self.fabric = poll.fabric.or(self.fabric);
        self.accepted_fabric = self.accepted_fabric.filter(|accepted| Some(*accepted) == self.fabric);
        let fabric = fabric && self.accepted_fabric.is_none();
        let acceptable = poll.recovery_action.is_some_and(|action| action != RecoveryAction::None)
            || poll.row_remapping.is_some_and(|rows| rows.failed)
            || links
            || (!self.explains_ecc && poll.uncorrectable_ecc.is_some_and(|count| count > 0));
        if unreachable || fabric || (acceptable && !self.cleared) {
            self.trouble.owe(1);
        } else {
            self.trouble.pay(gap);
        }
        if poll.on_bus == Some(false) {
            self.unseen.owe(1);
        } else {
            self.unseen.pay(gap);
        }
        poll.fabric == Some(FabricHealth::Joining) && self.accepted_fabric.is_none()
    }

    fn is_paid(&self) -> bool {
        self.trouble.hold.is_none() && self.unseen.hold.is_none() && !self.absent && !self.away
    }
}

/// A part of a poll.
#[derive(Clone, Copy, Debug)]
enum Source {
    Reach,
    Action,
    Rows,
    Ecc,
    Links,
    Fabric,
    Bus,
}

impl Source {
    fn silence(self, poll: &mut HealthPoll) {
        match self {
            Self::Reach => poll.reach = Reach::Unknown,
            Self::Action => poll.recovery_action = None,
            Self::Rows => poll.row_remapping = None,
            Self::Ecc => poll.uncorrectable_ecc = None,
            Self::Links => poll.nvlinks_down = None,
            Self::Fabric => poll.fabric = None,
            Self::Bus => poll.on_bus = None,
        }
    }

    /// Returns true if the reason may wait for this source, by the table of docs/health.md. `has_action` is true if the
    /// driver reports recovery actions.
    fn ends(self, reason: &UnhealthyReason, has_action: bool) -> bool {
        let resets = !has_action || matches!(self, Self::Action);
        match reason {
            UnhealthyReason::Xid { .. } | UnhealthyReason::DoubleBitEcc => resets,
            UnhealthyReason::Lost { .. } => resets || matches!(self, Self::Reach),
            UnhealthyReason::ResetRequired { .. } | UnhealthyReason::CallFailed { .. } => matches!(self, Self::Reach),
            UnhealthyReason::RecoveryAction { .. } => resets,
            UnhealthyReason::RowRemapFailed => matches!(self, Self::Rows),
            UnhealthyReason::UncorrectableEcc { .. } => matches!(self, Self::Ecc),
            UnhealthyReason::LinksDown { .. } => matches!(self, Self::Links),
            UnhealthyReason::FabricJoining | UnhealthyReason::FabricFailed { .. } => matches!(self, Self::Fabric),
            _ => false,
        }
    }
}

struct World {
    snapshot: NodeState,
    now: Timestamp,
    identity: NodeIdentity,
    owed: [Owed; GPUS],
    has_action: bool,
    /// The only GPU whose steps and polls happen; `None` for all.
    only: Option<usize>,
    verdicts: Vec<[bool; GPUS]>,
}

fn healthy(snapshot: &NodeState, gpu: usize) -> bool {
    snapshot.offers().is_healthy(&ResourceName::gpu(), &DeviceId::from(&uuid(gpu)))
}

impl World {
    fn new(has_action: bool, only: Option<usize>) -> Self {
        let mut world = Self {
            snapshot: NodeState::default(),
            now: START,
            identity: identity(0, 0),
            owed: Default::default(),
            has_action,
            only,
            verdicts: Vec::new(),
        };
        world.apply(Event::Identified(world.identity.clone()));
        world.apply(scan(0..GPUS));
        world
    }

    fn apply(&mut self, event: Event) {
        let before = std::mem::take(&mut self.snapshot);
        (self.snapshot, _) = before.apply(event, self.now);
    }

    fn includes(&self, gpu: usize) -> bool {
        self.only.is_none_or(|only| only == gpu)
    }

    fn poll(&mut self, polls: &[HealthPoll; 2]) {
        let mut sent = BTreeMap::from([(uuid(2), good(self.has_action))]);
        self.owed[2].poll(&good(self.has_action), self.now);
        let mut joining = [false; GPUS];
        for (gpu, poll) in polls.iter().enumerate() {
            // An absent GPU is not polled.
            if self.includes(gpu) && !self.owed[gpu].absent {
                sent.insert(uuid(gpu), poll.clone());
                joining[gpu] = self.owed[gpu].poll(poll, self.now);
            }
        }
        self.apply(Event::Polled(sent));
        for (gpu, joining) in joining.into_iter().enumerate() {
            assert!(!(joining && healthy(&self.snapshot, gpu)), "GPU {gpu} is healthy while it joins its fabric");
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Xid(gpu, code) if self.includes(*gpu) => {
                self.apply(Event::Xid { gpu: uuid(*gpu), code: *code, instance: None });
                if ![13, 63, 94].contains(code) {
                    self.owed[*gpu].trouble.owe(2);
                }
            }
            Step::Ecc(gpu) if self.includes(*gpu) => {
                self.apply(Event::DoubleBitEcc(uuid(*gpu)));
                self.owed[*gpu].trouble.owe(2);
            }
            Step::Quarantined(gpu) if self.includes(*gpu) => {
                self.apply(Event::Quarantined(uuid(*gpu), "SIGSEGV".to_owned()));
                self.owed[*gpu].unseen.owe(2);
            }
            Step::Released(gpu) if self.includes(*gpu) => self.apply(Event::ReleasedFromQuarantine(uuid(*gpu))),
            Step::Cleared(gpu) if self.includes(*gpu) => {
                self.apply(Event::Cleared(uuid(*gpu)));
                let owed = &mut self.owed[*gpu];
                (owed.cleared, owed.trouble, owed.accepted_fabric) = (true, Debt::default(), owed.fabric);
            }
            Step::DriverAway => {
                self.apply(Event::DriverAway("gone".to_owned()));
                self.owed.iter_mut().for_each(|owed| (owed.away, owed.away_until_poll) = (true, false));
            }
            Step::DriverBack => {
                self.apply(Event::DriverBack);
                self.owed.iter_mut().for_each(|owed| owed.away_until_poll = true);
            }
            Step::Poll(polls) => self.poll(polls),
            Step::Good(times) => {
                for _ in 0..*times {
                    self.now += Duration::from_secs(10);
                    self.poll(&[good(self.has_action), good(self.has_action)]);
                    self.check();
                }
            }
            Step::Scan(present) => {
                let there = |gpu: &usize| *gpu == 2 || present[*gpu] || !self.includes(*gpu);
                let gpus: Vec<usize> = (0..GPUS).filter(there).collect();
                self.apply(scan(gpus.clone()));
                for (gpu, owed) in self.owed.iter_mut().enumerate() {
                    owed.absent = !gpus.contains(&gpu);
                }
            }
            Step::Identified(boot, driver) => {
                let new = identity(*boot, *driver);
                let renewed = new != self.identity;
                self.identity = new;
                self.apply(Event::Identified(self.identity.clone()));
                for owed in self.owed.iter_mut().filter(|_| renewed) {
                    (owed.trouble, owed.explains_ecc, owed.cleared) = (Debt::default(), false, false);
                    (owed.fabric, owed.accepted_fabric) = (None, None);
                }
                // As on a node, a scan comes with the identity.
                self.step(&Step::Scan([true; 2]));
            }
            Step::Restart => self.restart(),
            Step::Tick => self.apply(Event::Tick),
            _ => {}
        }
    }

    /// Starts another process, which reads the health record.
    fn restart(&mut self) {
        let text = serde_json::to_string(&self.snapshot.hardware().record()).unwrap();
        let record: HealthRecord = serde_json::from_str(&text).unwrap();
        assert_eq!(record, self.snapshot.hardware().record(), "the record changed on the disk");
        let needs_reset = |snapshot: &NodeState, gpu: usize| {
            let kept = snapshot.hardware().record();
            kept.gpus.get(&uuid(gpu)).is_some_and(|gpu| !gpu.reasons.is_empty())
        };
        let before: Vec<bool> = (0..GPUS).map(|gpu| needs_reset(&self.snapshot, gpu)).collect();
        // After another boot no GPU has a reason.
        let mut other = NodeState::default();
        for event in [Event::Restored(Box::new(record.clone())), Event::Identified(identity(9, 0)), scan(0..GPUS)] {
            (other, _) = other.apply(event, self.now);
        }
        assert!((0..GPUS).all(|gpu| healthy(&other, gpu)), "unhealthy after another boot");

        self.snapshot = NodeState::default();
        self.apply(Event::Restored(Box::new(record.clone())));
        self.apply(Event::Identified(self.identity.clone()));
        self.step(&Step::Scan([true; 2]));
        for (gpu, needs_reset) in before.into_iter().enumerate() {
            assert_eq!(healthy(&self.snapshot, gpu), !needs_reset, "GPU {gpu} after a restart");
            // The next poll finds again the reasons that only polls find. The time counted so far stays.
            let owed = &mut self.owed[gpu];
            (owed.away, owed.unseen, owed.last_poll, owed.shown) = (false, Debt::default(), None, [false; 3]);
            // The first poll of a new agent cannot be older than the restart.
            owed.trouble.unproved = owed.trouble.unproved.min(1);
            if !needs_reset {
                owed.trouble = Debt::default();
            }
        }
    }

    fn check(&mut self) {
        for (gpu, owed) in self.owed.iter().enumerate() {
            if healthy(&self.snapshot, gpu) {
                assert!(owed.is_paid(), "GPU {gpu} is healthy too early: {owed:?}");
                assert_eq!(self.snapshot.hardware().reasons(&uuid(gpu)).count(), 0, "GPU {gpu} has a reason");
            }
        }
        self.verdicts.push([0, 1, 2].map(|gpu| healthy(&self.snapshot, gpu)));
    }

    fn play(mut self, history: &[(Step, (u64, i64))]) -> Self {
        self.check();
        for (step, (seconds, jump)) in history {
            let moved = self.now.as_secs().saturating_add(*seconds).saturating_add_signed(*jump);
            self.now = Duration::from_secs(moved);
            self.step(step);
            self.check();
        }
        self
    }

    /// Checks a world in which one source is silent for ever and all else is well. Only that source, an
    /// operator's order, another boot or another driver could end the reasons that are left.
    fn assert_heals_without(&mut self, source: Source) {
        self.calm_down();
        let mut poll = good(self.has_action);
        source.silence(&mut poll);
        self.poll_long(&poll);
        for gpu in 0..2 {
            for (reason, _) in self.snapshot.hardware().reasons(&uuid(gpu)) {
                // If the driver reports no recovery action, a reason may wait until a source shows a reset.
                assert!(source.ends(reason, self.has_action), "GPU {gpu}: {reason} does not wait for {source:?}");
            }
            self.step(&Step::Cleared(gpu));
        }
        self.poll_long(&poll);
        self.assert_all_healthy(&format!("without {source:?}"));
    }

    /// Brings back the driver and all GPUs, and ends quarantines.
    fn calm_down(&mut self) {
        self.step(&Step::DriverBack);
        self.step(&Step::Scan([true; 2]));
        (0..2).for_each(|gpu| self.step(&Step::Released(gpu)));
    }

    /// Polls for the longest hold time, and three times before it begins.
    fn poll_long(&mut self, poll: &HealthPoll) {
        for _ in 0..3600 / 20 + 3 {
            self.now += Duration::from_secs(20);
            self.poll(&[poll.clone(), poll.clone()]);
        }
    }

    fn assert_all_healthy(&self, when: &str) {
        for gpu in 0..GPUS {
            let standing: Vec<_> = self.snapshot.hardware().reasons(&uuid(gpu)).map(|(reason, _)| reason).collect();
            assert!(healthy(&self.snapshot, gpu), "GPU {gpu} {when}: {standing:?}");
        }
    }

    /// Checks that all GPUs heal in a world without faults: after a `clear` if the driver reports no recovery actions.
    fn assert_heals(&mut self) {
        self.calm_down();
        if !self.has_action {
            (0..2).for_each(|gpu| self.step(&Step::Cleared(gpu)));
        }
        self.poll_long(&good(self.has_action));
        self.assert_all_healthy("in the end");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() })]

    /// No GPU is healthy before it has had the good polls that it needs, and in the end all GPUs heal.
    #[test]
    fn nothing_heals_early_and_everything_heals((history, has_action) in history()) {
        World::new(has_action, None).play(&history).assert_heals();
    }

    /// All GPUs heal even if a source stays silent for ever, some only by an operator's order.
    #[test]
    fn operator_ends_what_a_silent_source_cannot(
        (history, has_action) in history(),
        source in prop::sample::select(vec![
            Source::Reach, Source::Action, Source::Rows, Source::Ecc, Source::Links, Source::Fabric, Source::Bus,
        ]),
    ) {
        World::new(has_action, None).play(&history).assert_heals_without(source);
    }

    /// A GPU's health is the same without the other GPU's history.
    #[test]
    fn history_of_another_gpu_changes_no_health((history, has_action) in history()) {
        let all = World::new(has_action, None).play(&history).verdicts;
        for gpu in 0..2 {
            let alone = World::new(has_action, Some(gpu)).play(&history).verdicts;
            let of = |verdicts: &[[bool; GPUS]]| verdicts.iter().map(|verdict| verdict[gpu]).collect::<Vec<_>>();
            prop_assert_eq!(of(&all), of(&alone));
        }
    }

    /// The record is read from a disk and may have any content.
    #[test]
    fn any_record_is_read_without_panic(
        version in 0_u32..3, flaps in any::<Option<u32>>(), since in any::<u64>(), links in any::<BTreeSet<u32>>(),
    ) {
        let reasons = serde_json::json!([{"reason": {"xid": {"code": 79, "instance": null}}, "since": since}]);
        let gpu = serde_json::json!({"reasons": reasons, "flaps": flaps, "links": links});
        let text = serde_json::json!({"version": version, "gpus": {"GPU-0": gpu}});
        let record: HealthRecord = serde_json::from_value(text).unwrap();
        let (snapshot, _) = NodeState::default().apply(Event::Restored(Box::new(record)), START);
        let (snapshot, _) = snapshot.apply(scan([0]), START);
        prop_assert_eq!(healthy(&snapshot, 0), version != HealthRecord::VERSION);
        let (snapshot, _) = snapshot.apply(Event::Polled(BTreeMap::from([(uuid(0), good(true))])), Duration::MAX);
        let (snapshot, _) = snapshot.apply(Event::Cleared(uuid(0)), Duration::ZERO);
        prop_assert!(matches!(snapshot.offers().of(&ResourceName::gpu()).next().unwrap().1.health, Health::Healthy));
    }
}
