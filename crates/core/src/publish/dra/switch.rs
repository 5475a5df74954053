//! [`SetsSwitch`]: whether sets of GPUs are devices now, and how that changes under claims.
//!
//! kube-scheduler counts what the current slices say that allocated devices consume (kubernetes#140802): counters that
//! a claim's device loses would be given out a second time. So they come and go with all sets in place: GPUs get
//! counters where nothing was published before, or while no claim of this node has a device; they lose them when no set
//! is published any more. A set is withdrawn as a GPU is that leaves DRA: tainted for a grace period, in which a
//! scheduler that had chosen it binds its pod, and then as soon as no claim has it.

use core::fmt;

use serde::{Deserialize, Serialize};

use super::set_devices::PublishedSets;
use crate::state::{DRA_GRACE, NodeState, Timestamp};
use crate::topology::set_members;

/// The first release whose API server and scheduler have counters (gate DRAPartitionableDevices, on by default).
const COUNTERS: ServerVersion = ServerVersion { major: 1, minor: 36, patch: 0 };

/// The first release whose scheduler loses no counters of candidates that it rejects (kubernetes#140436).
const SOUND: ServerVersion = ServerVersion { major: 1, minor: 36, patch: 3 };

/// The first release whose scheduler reads pools with counters in linear time (kubernetes#138917).
const FAST: ServerVersion = ServerVersion { major: 1, minor: 37, patch: 0 };

/// Whether sets of GPUs are to be devices: the setting `linkwise.dra.sets`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DraSets {
    /// They are not.
    #[default]
    Off,
    /// They are where the cluster's release is ready for them.
    Auto,
    /// They are wherever the API server keeps counters.
    On,
}

/// The release of an API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerVersion {
    /// 1.
    pub major: u32,
    /// Such as 36.
    pub minor: u32,
    /// Such as 2.
    pub patch: u32,
}

impl ServerVersion {
    /// Reads the `gitVersion` of `/version`: `v1.36.2`, `v1.36.2-eks-1a2b`, `v1.37.0-rc.1`. `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let release = text.strip_prefix('v').unwrap_or(text).split(['-', '+']).next()?;
        let mut numbers = release.split('.').map(|number| number.parse().ok());
        let version = Self { major: numbers.next()??, minor: numbers.next()??, patch: numbers.next()?? };
        numbers.next().is_none().then_some(version)
    }
}

impl ServerVersion {
    /// Whether its API server and scheduler have counters (gate DRAPartitionableDevices, on by default).
    pub fn has_counters(self) -> bool {
        self >= COUNTERS
    }
}

impl fmt::Display for ServerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// What decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchFacts {
    /// The setting.
    pub setting: DraSets,
    /// The API server's release, where it could be read.
    pub version: Option<ServerVersion>,
    /// Whether the API server dropped counters.
    pub drops_counters: bool,
    /// What it has stored of our pool; `None` before that was read.
    pub stored: Option<StoredSets>,
    /// What claims hold.
    pub held: HeldDevices,
}

/// What is stored of our pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredSets {
    /// No slice.
    Nothing,
    /// Slices without counters.
    Plain,
    /// Slices with counters.
    Counters,
}

/// What claims of this node hold of our pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldDevices {
    /// Whether the kubelet could be asked just now.
    pub is_known: bool,
    /// Any device.
    pub any: bool,
    /// A set.
    pub sets: bool,
}

impl HeldDevices {
    /// What a snapshot knows of claims for devices of `driver`.
    pub fn of(state: &NodeState, driver: &str) -> Self {
        let ledger = state.ledger();
        let listed = || ledger.holdings().claims.iter().filter(|claimed| claimed.driver == driver);
        Self {
            is_known: ledger.is_known(),
            any: listed().next().is_some() || ledger.has_prepared(),
            sets: listed().any(|claimed| set_members(&claimed.device).is_some())
                || ledger.prepared_sets().next().is_some(),
        }
    }
}

/// What an operator is to know about sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum SetsNote {
    /// The release has no counters.
    #[error("no sets of GPUs are published: they take Kubernetes {COUNTERS}, the API server has {0}")]
    TooOld(ServerVersion),
    /// `auto` waits for a newer release.
    #[error(
        "no sets of GPUs are published: with dra.sets auto they are from Kubernetes {FAST}, the API server has {0}"
    )]
    Waits(ServerVersion),
    /// `auto`, and the release could not be read.
    #[error("no sets of GPUs are published anew: dra.sets is auto, and the API server does not tell its version")]
    Unknown,
    /// The server drops counters.
    #[error("no sets of GPUs are published: the API server drops counters (feature gate DRAPartitionableDevices)")]
    Dropped,
    /// Claims hold devices that had no counters.
    #[error("no sets of GPUs are published before the claims of this node have ended once: its GPUs get counters then")]
    Held,
    /// `on`, and the scheduler may miscount.
    #[error(
        "sets of GPUs are published, and kube-scheduler before {SOUND} miscounts them at times (kubernetes#140436): \
         pods wait though a set is free; the API server has {0}"
    )]
    Miscounted(ServerVersion),
    /// They are on their way out.
    #[error("the sets of GPUs are being withdrawn: those that claims have stay until these end")]
    Withdrawn,
}

/// Where sets are in their life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Off,
    On,
    /// They are being withdrawn.
    Leaving {
        since: Timestamp,
    },
}

/// Whether sets are devices.
#[derive(Clone, Debug, Default)]
pub struct SetsSwitch {
    /// `None` before it is known what is stored.
    phase: Option<Phase>,
}

impl SetsSwitch {
    /// Decides anew. Returns what is to be published from now on, `None` before anything may be, and what an operator
    /// is to know. Time alone changes the answer at [`Self::deadline`].
    pub fn next(&mut self, facts: &SwitchFacts, now: Timestamp) -> (Option<PublishedSets>, Option<SetsNote>) {
        let Some(stored) = facts.stored else { return (None, None) };
        let (wanted, note) = wanted(facts);
        let phase = match self.phase {
            // What an earlier process published goes on.
            None if stored == StoredSets::Counters => Phase::On,
            None if wanted && stored == StoredSets::Nothing => Phase::On,
            None => Phase::Off,
            Some(phase) => phase,
        };
        let is_idle = facts.held.is_known && !facts.held.any;
        let next = match phase {
            _ if facts.drops_counters => Phase::Off,
            Phase::Off if wanted && is_idle => Phase::On,
            Phase::Off => Phase::Off,
            Phase::On | Phase::Leaving { .. } if wanted => Phase::On,
            // A server that does not tell its release has not become older.
            Phase::On if note == Some(SetsNote::Unknown) => Phase::On,
            Phase::On => Phase::Leaving { since: now },
            Phase::Leaving { since } => {
                let is_over = now >= end(since) && facts.held.is_known && !facts.held.sets;
                if is_over { Phase::Off } else { Phase::Leaving { since } }
            }
        };
        self.phase = Some(next);
        match next {
            Phase::Off if wanted => (Some(PublishedSets::None), Some(SetsNote::Held)),
            Phase::Off => (Some(PublishedSets::None), note),
            Phase::On => (Some(PublishedSets::All), note),
            Phase::Leaving { since } if now < end(since) => (Some(PublishedSets::Withdrawn), Some(SetsNote::Withdrawn)),
            Phase::Leaving { .. } => (Some(PublishedSets::Held), Some(SetsNote::Withdrawn)),
        }
    }

    /// When time alone changes what is published.
    pub fn deadline(&self, now: Timestamp) -> Option<Timestamp> {
        match self.phase {
            Some(Phase::Leaving { since }) => Some(end(since)).filter(|end| now < *end),
            _ => None,
        }
    }
}

fn end(since: Timestamp) -> Timestamp {
    since.saturating_add(DRA_GRACE)
}

/// Whether there are to be sets, and why not, or what is odd about it.
fn wanted(facts: &SwitchFacts) -> (bool, Option<SetsNote>) {
    let SwitchFacts { setting, version, drops_counters, .. } = *facts;
    match (setting, version) {
        (DraSets::Off, _) => (false, None),
        (_, Some(version)) if !version.has_counters() => (false, Some(SetsNote::TooOld(version))),
        _ if drops_counters => (false, Some(SetsNote::Dropped)),
        (DraSets::Auto, None) => (false, Some(SetsNote::Unknown)),
        (DraSets::Auto, Some(version)) if version < FAST => (false, Some(SetsNote::Waits(version))),
        (DraSets::On, Some(version)) if version < SOUND => (true, Some(SetsNote::Miscounted(version))),
        (DraSets::Auto | DraSets::On, _) => (true, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;

    const IDLE: HeldDevices = HeldDevices { is_known: true, any: false, sets: false };
    const GPU_HELD: HeldDevices = HeldDevices { is_known: true, any: true, sets: false };
    const SET_HELD: HeldDevices = HeldDevices { is_known: true, any: true, sets: true };
    const START: Timestamp = Timestamp::from_secs(100);

    fn version(text: &str) -> Option<ServerVersion> {
        ServerVersion::parse(text)
    }

    fn facts(setting: DraSets, text: &str, stored: StoredSets, held: HeldDevices) -> SwitchFacts {
        SwitchFacts { setting, version: version(text), drops_counters: false, stored: Some(stored), held }
    }

    fn published(switch: &mut SetsSwitch, facts: &SwitchFacts, now: Timestamp) -> PublishedSets {
        switch.next(facts, now).0.unwrap()
    }

    #[test]
    fn versions_are_read_with_what_vendors_add() {
        let of = |text| version(text).map(|version| version.to_string());
        for (text, expected) in [
            ("v1.36.2", Some("1.36.2")),
            ("1.37.0", Some("1.37.0")),
            ("v1.36.2-eks-1a2b3c", Some("1.36.2")),
            ("v1.36.2+k3s1", Some("1.36.2")),
            ("v1.37.0-rc.1", Some("1.37.0")),
            ("v1.36", None),
            ("v1.36.2.1", None),
            ("v1.x.2", None),
            ("", None),
        ] {
            assert_eq!(of(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn setting_and_release_decide_about_new_sets() {
        use DraSets::{Auto, Off, On};
        for (setting, text, is_on, says) in [
            (Off, "v1.37.0", false, None),
            (Auto, "v1.35.6", false, Some("take Kubernetes 1.36.0, the API server has 1.35.6")),
            (Auto, "v1.36.9", false, Some("from Kubernetes 1.37.0, the API server has 1.36.9")),
            (Auto, "odd", false, Some("does not tell its version")),
            (Auto, "v1.37.0", true, None),
            (On, "v1.35.6", false, Some("take Kubernetes 1.36.0")),
            (On, "v1.36.2", true, Some("before 1.36.3 miscounts")),
            (On, "v1.36.3", true, None),
            (On, "v1.37.1", true, None),
            (On, "odd", true, None),
        ] {
            let (sets, note) = SetsSwitch::default().next(&facts(setting, text, StoredSets::Nothing, IDLE), START);
            assert_eq!(sets, Some(if is_on { PublishedSets::All } else { PublishedSets::None }), "{setting:?} {text}");
            let note = note.map(|note| note.to_string());
            assert_eq!(note.is_some(), says.is_some(), "{setting:?} {text}: {note:?}");
            assert!(note.unwrap_or_default().contains(says.unwrap_or_default()), "{setting:?} {text}");
        }
    }

    #[test]
    fn nothing_is_published_before_the_slices_are_read() {
        let unread = SwitchFacts { stored: None, ..facts(DraSets::Off, "v1.37.0", StoredSets::Plain, IDLE) };
        assert_eq!(SetsSwitch::default().next(&unread, START), (None, None));
    }

    #[test]
    fn gpus_get_counters_when_no_claim_has_one() {
        let mut switch = SetsSwitch::default();
        let unknown = HeldDevices { is_known: false, ..IDLE };
        for held in [unknown, GPU_HELD, unknown] {
            let (sets, note) = switch.next(&facts(DraSets::On, "v1.37.0", StoredSets::Plain, held), START);
            assert_eq!((sets, note), (Some(PublishedSets::None), Some(SetsNote::Held)));
        }
        let idle = facts(DraSets::On, "v1.37.0", StoredSets::Plain, IDLE);
        assert_eq!(switch.next(&idle, START), (Some(PublishedSets::All), None));
        let held = facts(DraSets::On, "v1.37.0", StoredSets::Counters, SET_HELD);
        assert_eq!(published(&mut switch, &held, START), PublishedSets::All, "and keep them");
    }

    #[test]
    fn restart_and_wipe_go_on_with_sets() {
        for stored in [StoredSets::Counters, StoredSets::Nothing] {
            let facts = facts(DraSets::Auto, "v1.37.0", stored, SET_HELD);
            assert_eq!(published(&mut SetsSwitch::default(), &facts, START), PublishedSets::All, "{stored:?}");
        }
    }

    #[test]
    fn unknown_release_begins_and_ends_nothing() {
        let auto = |text, stored| facts(DraSets::Auto, text, stored, SET_HELD);
        let mut switch = SetsSwitch::default();
        assert_eq!(published(&mut switch, &auto("v1.37.0", StoredSets::Nothing), START), PublishedSets::All);
        assert_eq!(published(&mut switch, &auto("odd", StoredSets::Counters), START), PublishedSets::All);
        for (stored, expected) in
            [(StoredSets::Counters, PublishedSets::All), (StoredSets::Nothing, PublishedSets::None)]
        {
            assert_eq!(published(&mut SetsSwitch::default(), &auto("odd", stored), START), expected, "{stored:?}");
        }
    }

    #[test]
    fn sets_that_are_switched_off_go_after_grace_and_claims() {
        let mut switch = SetsSwitch::default();
        let off = |held| facts(DraSets::Off, "v1.37.0", StoredSets::Counters, held);
        let end = START + DRA_GRACE;
        assert_eq!(published(&mut switch, &off(SET_HELD), START), PublishedSets::Withdrawn);
        assert_eq!(switch.deadline(START), Some(end));
        assert_eq!(
            published(&mut switch, &off(IDLE), end.checked_sub(Timestamp::from_nanos(1)).unwrap()),
            PublishedSets::Withdrawn
        );
        assert_eq!(published(&mut switch, &off(SET_HELD), end), PublishedSets::Held);
        assert_eq!(switch.deadline(end), None);
        assert_eq!(published(&mut switch, &off(HeldDevices { is_known: false, ..IDLE }), end), PublishedSets::Held);
        let mut back = switch.clone();
        let on = facts(DraSets::On, "v1.37.0", StoredSets::Counters, SET_HELD);
        assert_eq!(published(&mut back, &on, end), PublishedSets::All);
        assert_eq!(published(&mut switch, &off(GPU_HELD), end), PublishedSets::None);
    }

    #[test]
    fn dropped_counters_end_sets_at_once() {
        let mut switch = SetsSwitch::default();
        let on = facts(DraSets::On, "v1.37.0", StoredSets::Nothing, IDLE);
        assert_eq!(published(&mut switch, &on, START), PublishedSets::All);
        let dropped = SwitchFacts { drops_counters: true, held: SET_HELD, ..on };
        assert_eq!(switch.next(&dropped, START), (Some(PublishedSets::None), Some(SetsNote::Dropped)));
        let off = SwitchFacts { setting: DraSets::Off, ..dropped };
        assert_eq!(switch.next(&off, START), (Some(PublishedSets::None), None));
    }
}
