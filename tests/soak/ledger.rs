//! Who has which hardware, and what goes on meanwhile, by the soak's own rules: nothing here is linkwise's.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::STUCK;

/// Shares of a GPU that is shared.
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

/// The pieces of each pod.
#[derive(Debug, Default)]
pub struct Books(BTreeMap<String, Vec<Piece>>);

impl Books {
    /// The pod that has what these pieces need.
    fn holder(&self, pieces: &[Piece]) -> Option<&str> {
        let clashes = |held: &Piece| pieces.iter().any(|piece| piece.clashes(*held));
        let by_piece = self.0.iter().find(|(_, held)| held.iter().any(clashes));
        let shares = |pieces: &[Piece], gpu| -> u32 {
            let of_gpu = |piece: &Piece| {
                if let Piece::Shares(of, shares) = piece
                    && *of == gpu
                {
                    *shares
                } else {
                    0
                }
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

    /// Enters what a pod has, in place of what it had; the error says which pod has it already.
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

/// What keeps pods from their hardware at a moment: whether anything does, how often it did, since when nothing does.
#[derive(Debug)]
pub struct Causes {
    now: Mutex<(bool, u64, Instant)>,
    /// So long after the last cause no call of the kubelet fails any more.
    settled: Duration,
}

/// A moment without a cause: how many there were, and the time since the last.
#[derive(Clone, Copy, Debug)]
pub struct Calm {
    causes: u64,
    since: Duration,
}

impl Causes {
    fn new(settled: Duration) -> Self {
        Self { now: Mutex::new((false, 0, Instant::now())), settled }
    }

    pub fn begin(&self) {
        let mut now = self.now.lock().unwrap();
        (now.0, now.1) = (true, now.1 + 1);
    }

    pub fn end(&self) {
        let mut now = self.now.lock().unwrap();
        if now.0 {
            (now.0, now.2) = (false, Instant::now());
        }
    }

    pub fn calm(&self) -> Option<Calm> {
        let now = self.now.lock().unwrap();
        (!now.0).then(|| Calm { causes: now.1, since: now.2.elapsed() })
    }
}

/// The numbers of the soak, and what was wrong.
pub struct Ledger {
    /// What keeps claims from being prepared and unprepared, and pods of the device plugin from being admitted.
    pub claims: Causes,
    pub pods: Causes,
    counts: Mutex<BTreeMap<String, u64>>,
    longest: Mutex<BTreeMap<String, Duration>>,
    began: Instant,
    story: Mutex<Vec<String>>,
    errors: Mutex<Vec<String>>,
    /// Cancelled when the load ends: at the soak's end, or at an error.
    pub over: CancellationToken,
}

/// How long a claim takes to settle after a cause: the kubelet's and our own pauses; and a pod of the device plugin.
pub const SETTLED: Duration = Duration::from_secs(5);
const PODS_SETTLED: Duration = Duration::from_secs(1);

impl Ledger {
    pub fn new() -> Self {
        let (counts, longest, story, errors, over) = Default::default();
        let (claims, pods) = (Causes::new(SETTLED), Causes::new(PODS_SETTLED));
        Self { claims, pods, counts, longest, began: Instant::now(), story, errors, over }
    }

    pub fn count(&self, what: &str) {
        *self.counts.lock().unwrap().entry(what.to_owned()).or_default() += 1;
    }

    /// Notes how long something took; the longest counts.
    pub fn took(&self, what: &str, time: Duration) {
        let mut longest = self.longest.lock().unwrap();
        let longest = longest.entry(what.to_owned()).or_default();
        *longest = time.max(*longest);
    }

    /// Adds an event to the history that an error prints.
    pub fn tell(&self, what: &str) {
        self.story.lock().unwrap().push(format!("{:.1} s: {what}", self.began.elapsed().as_secs_f64()));
    }

    pub fn story(&self) -> String {
        self.story.lock().unwrap().join("\n")
    }

    pub fn counted(&self, what: &str) -> u64 {
        self.counts.lock().unwrap().get(what).copied().unwrap_or(0)
    }

    pub fn error(&self, error: String) {
        self.tell("an error");
        self.errors.lock().unwrap().push(error);
        self.over.cancel();
    }

    pub fn errors(&self) -> Vec<String> {
        self.errors.lock().unwrap().clone()
    }

    /// Judges a call that failed: it may while there is a cause, and for a while after it.
    pub fn failed(&self, causes: &Causes, what: &str, began: Instant, before: Option<Calm>, error: &dyn fmt::Display) {
        let Some(now) = causes.calm() else { return };
        let without_a_cause = before.is_some_and(|before| before.causes == now.causes && before.since > causes.settled);
        if without_a_cause {
            self.error(format!("{what} failed without a cause: {error}"));
        } else if now.since.min(began.elapsed()) > STUCK {
            self.error(format!("{what} is stuck for {:?}: {error}", began.elapsed()));
        }
    }

    /// The numbers, a line each.
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
