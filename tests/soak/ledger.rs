//! The pods' hardware, the faults under way, and the errors, kept by the soak's own rules, without code of linkwise.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::STUCK_TIMEOUT;

/// The number of shares of the shared GPU.
pub const SHARES: u32 = 4;

/// A part of the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Piece {
    Whole(u32),
    /// Memory slices of a GPU in MIG mode, a bit each.
    Slices(u32, u8),
    /// A MIG device, by the minor number of its GPU instance's capability.
    Instance(u32, u32),
    Shares(u32, u32),
}

impl Piece {
    pub fn gpu(self) -> u32 {
        let (Self::Whole(gpu) | Self::Slices(gpu, _) | Self::Instance(gpu, _) | Self::Shares(gpu, _)) = self;
        gpu
    }

    fn clashes(self, other: Self) -> bool {
        self.gpu() == other.gpu()
            && match (self, other) {
                (Self::Slices(_, one), Self::Slices(_, two)) => one & two != 0,
                (Self::Instance(_, one), Self::Instance(_, two)) => one == two,
                (Self::Shares(..), Self::Shares(..)) => false,
                _ => true,
            }
    }
}

/// The pieces that each pod holds.
#[derive(Debug, Default)]
pub struct Holdings(BTreeMap<String, Vec<Piece>>);

impl Holdings {
    /// A pod that already has one of these pieces, or shares that they need.
    fn holder(&self, pieces: &[Piece]) -> Option<&str> {
        let clashes = |held: &Piece| pieces.iter().any(|piece| piece.clashes(*held));
        let by_piece = self.0.iter().find(|(_, held)| held.iter().any(clashes));
        let shares = |pieces: &[Piece], gpu| -> u32 {
            let of_gpu = |piece: &Piece| match piece {
                Piece::Shares(of, shares) if *of == gpu => *shares,
                _ => 0,
            };
            pieces.iter().map(of_gpu).sum()
        };
        let by_share = pieces.iter().map(|piece| piece.gpu()).find_map(|gpu| {
            let taken: u32 = self.0.values().map(|held| shares(held, gpu)).sum();
            let is_full = taken + shares(pieces, gpu) > SHARES && shares(pieces, gpu) > 0;
            self.0.iter().find(|(_, held)| is_full && shares(held, gpu) > 0)
        });
        by_piece.or(by_share).map(|(pod, _)| pod.as_str())
    }

    pub fn are_free(&self, pieces: &[Piece]) -> bool {
        self.holder(pieces).is_none()
    }

    /// Replaces a pod's pieces by these. The error names the pod that already has one of them.
    pub fn enter(&mut self, pod: &str, pieces: Vec<Piece>) -> Result<(), String> {
        self.leave(pod);
        if let Some(other) = self.holder(&pieces) {
            return Err(format!("{pieces:?} of {other}, {:?}, went to {pod} too", self.0[other]));
        }
        self.0.insert(pod.to_owned(), pieces);
        Ok(())
    }

    pub fn leave(&mut self, pod: &str) {
        self.0.remove(pod);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[derive(Debug)]
struct CauseState {
    is_active: bool,
    causes: u64,
    ended: Instant,
}

/// The causes for which a kind of call may fail.
#[derive(Debug)]
pub struct Causes {
    now: Mutex<CauseState>,
    /// The time after the last cause during which calls may still fail.
    timeout: Duration,
}

/// A moment without an active cause: the number of causes before it, and the time since the last one.
#[derive(Clone, Copy, Debug)]
pub struct Calm {
    causes: u64,
    since: Duration,
}

impl Causes {
    fn new(timeout: Duration) -> Self {
        Self { now: Mutex::new(CauseState { is_active: false, causes: 0, ended: Instant::now() }), timeout }
    }

    pub fn begin(&self) {
        let mut now = self.now.lock().unwrap();
        (now.is_active, now.causes) = (true, now.causes + 1);
    }

    pub fn end(&self) {
        let mut now = self.now.lock().unwrap();
        if now.is_active {
            (now.is_active, now.ended) = (false, Instant::now());
        }
    }

    pub fn calm(&self) -> Option<Calm> {
        let now = self.now.lock().unwrap();
        (!now.is_active).then(|| Calm { causes: now.causes, since: now.ended.elapsed() })
    }
}

/// The counts and longest times of the soak, its history and its errors.
pub struct Journal {
    /// The causes for which calls for claims may fail, and those for which pods of the plugin may be refused.
    pub claims: Causes,
    pub pods: Causes,
    counts: Mutex<BTreeMap<String, u64>>,
    longest: Mutex<BTreeMap<String, Duration>>,
    began: Instant,
    history: Mutex<Vec<String>>,
    errors: Mutex<Vec<String>>,
    /// Cancelled when the load ends: at the soak's end, or at an error.
    pub over: CancellationToken,
}

/// The times from a cause's end until claims and pods of the plugin must succeed: the kubelet and linkwise may pause.
pub const CLAIM_SETTLE_TIMEOUT: Duration = Duration::from_secs(5);
const POD_SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

impl Journal {
    pub fn new() -> Self {
        let (counts, longest, history, errors, over) = Default::default();
        let (claims, pods) = (Causes::new(CLAIM_SETTLE_TIMEOUT), Causes::new(POD_SETTLE_TIMEOUT));
        Self { claims, pods, counts, longest, began: Instant::now(), history, errors, over }
    }

    pub fn count(&self, what: &str) {
        *self.counts.lock().unwrap().entry(what.to_owned()).or_default() += 1;
    }

    /// Notes the duration of something; the longest is kept.
    pub fn took(&self, what: &str, time: Duration) {
        let mut longest = self.longest.lock().unwrap();
        let longest = longest.entry(what.to_owned()).or_default();
        *longest = time.max(*longest);
    }

    /// Adds an event to the history that an error prints.
    pub fn note(&self, what: &str) {
        self.history.lock().unwrap().push(format!("{:.1} s: {what}", self.began.elapsed().as_secs_f64()));
    }

    pub fn history(&self) -> String {
        self.history.lock().unwrap().join("\n")
    }

    pub fn counted(&self, what: &str) -> u64 {
        self.counts.lock().unwrap().get(what).copied().unwrap_or(0)
    }

    pub fn error(&self, error: String) {
        self.note("an error");
        self.errors.lock().unwrap().push(error);
        self.over.cancel();
    }

    pub fn errors(&self) -> Vec<String> {
        self.errors.lock().unwrap().clone()
    }

    /// Judges a failed attempt by `before`, the calm at its start. An attempt that starts within the causes' timeout
    /// after a cause may fail, until [`STUCK_TIMEOUT`] after the cause.
    pub fn failed(&self, causes: &Causes, what: &str, began: Instant, before: Option<Calm>, error: &dyn fmt::Display) {
        let Some(now) = causes.calm() else { return };
        let is_unexplained = before.is_some_and(|before| before.causes == now.causes && before.since > causes.timeout);
        if is_unexplained {
            self.error(format!("{what} failed without a cause: {error}"));
        } else if now.since.min(began.elapsed()) > STUCK_TIMEOUT {
            self.error(format!("{what} is stuck for {:?}: {error}", began.elapsed()));
        }
    }

    pub fn summary(&self) -> String {
        let longest = self.longest.lock().unwrap();
        let lines = self.counts.lock().unwrap();
        let lines = lines.iter().map(|(what, times)| match longest.get(what) {
            Some(time) => format!("{times:>8} {what}, at most {} ms\n", time.as_millis()),
            None => format!("{times:>8} {what}\n"),
        });
        lines.collect()
    }
}
