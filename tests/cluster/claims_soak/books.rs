//! Who has which hardware, and what goes on meanwhile, by the soak's own rules: nothing here is linkwise's.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// Shares of a GPU that is shared.
pub const SHARES: u32 = 4;
/// So long after the last cause every claim has been prepared or unprepared.
const STUCK: Duration = Duration::from_secs(30);
/// So long after the last cause no call of the kubelet fails any more.
pub const SETTLED: Duration = Duration::from_secs(5);

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
        let count = |piece: &Piece, gpu| matches!(piece, Piece::Shares(of, _) if *of == gpu);
        let shares = |pieces: &[Piece], gpu| -> u32 {
            let of = pieces.iter().filter(|piece| count(piece, gpu));
            of.map(|piece| if let Piece::Shares(_, shares) = piece { *shares } else { 0 }).sum()
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

    /// Enters what a pod has; the error says who has it already.
    pub fn enter(&mut self, pod: &str, pieces: Vec<Piece>) -> Result<(), String> {
        if let Some(other) = self.holder(&pieces) {
            return Err(format!("{pieces:?} of {other}, {:?}, went to {pod} too", self.0[other]));
        }
        self.0.insert(pod.to_owned(), pieces);
        Ok(())
    }

    pub fn leave(&mut self, pod: &str) {
        self.0.remove(pod);
    }

    pub fn pods(&self) -> Vec<&String> {
        self.0.keys().collect()
    }
}

/// What keeps claims and pods from their hardware at a moment.
#[derive(Debug)]
pub struct Causes(Mutex<(Option<&'static str>, u64, Instant)>);

/// A moment without a cause: how many there were, and the time since the last.
#[derive(Clone, Copy, Debug)]
pub struct Calm {
    causes: u64,
    since: Duration,
}

impl Causes {
    pub fn begin(&self, what: &'static str) {
        let mut now = self.0.lock().unwrap();
        (now.0, now.1) = (Some(what), now.1 + 1);
    }

    pub fn end(&self) {
        let mut now = self.0.lock().unwrap();
        (now.0, now.2) = (None, Instant::now());
    }

    pub fn calm(&self) -> Option<Calm> {
        let now = self.0.lock().unwrap();
        now.0.is_none().then(|| Calm { causes: now.1, since: now.2.elapsed() })
    }
}

/// The numbers of the soak, and the first thing that was wrong.
pub struct Ledger {
    pub causes: Causes,
    counts: Mutex<BTreeMap<&'static str, u64>>,
    began: Instant,
    story: Mutex<Vec<String>>,
    slowest: Mutex<Duration>,
    errors: Mutex<Vec<String>>,
    /// Cancelled when the load ends: at the soak's end, or at an error.
    pub over: CancellationToken,
}

impl Ledger {
    pub fn new() -> Self {
        let causes = Causes(Mutex::new((None, 0, Instant::now())));
        let (counts, story, slowest, errors, over) = Default::default();
        Self { causes, counts, began: Instant::now(), story, slowest, errors, over }
    }

    pub fn count(&self, what: &'static str) {
        *self.counts.lock().unwrap().entry(what).or_default() += 1;
    }

    /// Adds an event to the history that an error prints.
    pub fn tell(&self, what: String) {
        self.story.lock().unwrap().push(format!("{:.1} s: {what}", self.began.elapsed().as_secs_f64()));
    }

    pub fn story(&self) -> String {
        self.story.lock().unwrap().join("\n")
    }

    pub fn counted(&self, what: &str) -> u64 {
        self.counts.lock().unwrap().get(what).copied().unwrap_or(0)
    }

    /// A claim was prepared so long after it was made, without any cause in between.
    pub fn took(&self, before: Option<Calm>, time: Duration) {
        let calm = before.zip(self.causes.calm()).is_some_and(|(before, now)| before.causes == now.causes);
        if calm {
            let mut slowest = self.slowest.lock().unwrap();
            *slowest = slowest.max(time);
        }
    }

    pub fn error(&self, error: String) {
        self.errors.lock().unwrap().push(error);
        self.over.cancel();
    }

    pub fn errors(&self) -> Vec<String> {
        self.errors.lock().unwrap().clone()
    }

    /// Judges a call that failed: it may while there is a cause, and for a while after it.
    pub fn failed(&self, what: &str, began: Instant, before: Option<Calm>, error: &dyn fmt::Display) {
        let Some(now) = self.causes.calm() else { return };
        let without_a_cause = before.is_some_and(|before| before.causes == now.causes && before.since > SETTLED);
        if without_a_cause {
            self.error(format!("{what} failed without a cause: {error}"));
        } else if now.since.min(began.elapsed()) > STUCK {
            self.error(format!("{what} is stuck for {:?}: {error}", began.elapsed()));
        }
    }

    /// The numbers, a line each.
    pub fn summary(&self) -> String {
        let counts = self.counts.lock().unwrap();
        let lines: Vec<String> = counts.iter().map(|(what, times)| format!("{times:>8} {what}\n")).collect();
        format!("{}slowest claim without a cause: {:?}", lines.concat(), self.slowest.lock().unwrap())
    }
}
