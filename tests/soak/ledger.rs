//! What was done and what came of it, in numbers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::world::Measured;

/// The books; clones share them.
#[derive(Clone, Default)]
pub struct Ledger(Arc<Mutex<Books>>);

#[derive(Default)]
struct Books {
    faults: BTreeMap<&'static str, Row>,
    admissions: BTreeMap<Outcome, u64>,
    slowest: Duration,
    lines: usize,
    starts: u64,
    errors: Vec<String>,
    /// The faults of this round.
    round: String,
}

#[derive(Default)]
struct Row {
    injected: u64,
    recovered: u64,
    times: Vec<Duration>,
}

/// What became of an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The pod got what it asked for.
    Answered,
    /// The connection between kubelet and plugin, or one of the two, was being broken meanwhile.
    Interrupted,
    /// A GPU that was chosen failed at that moment.
    Overtaken,
    /// The kubelet saw that too few devices are free, and asked nobody.
    Full,
    /// It should have been answered.
    Failed,
}

impl Ledger {
    fn books<T>(&self, what: impl FnOnce(&mut Books) -> T) -> T {
        what(&mut self.0.lock().unwrap())
    }

    pub fn injected(&self, fault: &'static str) {
        self.books(|books| books.faults.entry(fault).or_default().injected += 1);
    }

    /// `after` is how long the node took to be whole again; none where another fault came with it.
    pub fn recovered(&self, fault: &'static str, after: Option<Duration>) {
        self.books(|books| {
            let row = books.faults.entry(fault).or_default();
            row.recovered += 1;
            row.times.extend(after);
        });
    }

    /// `took` is how long an admission took that nobody disturbed.
    pub fn admission(&self, outcome: Outcome, took: Option<Duration>) {
        self.books(|books| {
            *books.admissions.entry(outcome).or_default() += 1;
            if outcome == Outcome::Answered {
                books.slowest = books.slowest.max(took.unwrap_or_default());
            }
        });
    }

    /// A process of ours was started.
    pub fn started(&self) {
        self.books(|books| books.starts += 1);
    }

    /// A process of ours has logged so many lines in all.
    pub fn logged(&self, lines: usize) {
        self.books(|books| books.lines += lines);
    }

    /// A round begins, with these faults.
    pub fn round(&self, faults: String) {
        self.books(|books| books.round = faults);
    }

    pub fn error(&self, error: String) {
        self.books(|books| {
            let error = format!("during {}: {error}", books.round);
            println!("error: {error}");
            books.errors.push(error);
        });
    }

    pub fn errors(&self) -> Vec<String> {
        self.books(|books| books.errors.clone())
    }

    pub fn print(&self, elapsed: Duration, measured: Option<(&Measured, &Measured)>) {
        self.books(|books| books.print(elapsed, measured));
    }
}

impl Books {
    fn print(&mut self, elapsed: Duration, measured: Option<(&Measured, &Measured)>) {
        println!("\n{:<44}{:>9}{:>10}{:>12}{:>12}", "fault", "injected", "recovered", "median", "worst");
        let (mut injected, mut recovered) = (0, 0);
        for (fault, row) in &mut self.faults {
            row.times.sort_unstable();
            let at =
                |index: usize| row.times.get(index).map_or("-".to_owned(), |time| format!("{} ms", time.as_millis()));
            let (median, worst) = (at(row.times.len() / 2), at(row.times.len().wrapping_sub(1)));
            println!("{fault:<44}{:>9}{:>10}{median:>12}{worst:>12}", row.injected, row.recovered);
            injected += row.injected;
            recovered += row.recovered;
        }
        println!("{:<44}{injected:>9}{recovered:>10}", "in all");
        let count = |outcome| self.admissions.get(&outcome).copied().unwrap_or(0);
        println!(
            "\nadmissions: {} answered (slowest undisturbed {:?}), {} interrupted, {} overtaken by a GPU's failure, {} with too few free, {} failed",
            count(Outcome::Answered),
            self.slowest,
            count(Outcome::Interrupted),
            count(Outcome::Overtaken),
            count(Outcome::Full),
            count(Outcome::Failed),
        );
        println!("log: {} lines of {} starts in {} s", self.lines, self.starts, elapsed.as_secs());
        let Some((start, end)) = measured else { return };
        for (name, start, end) in [("plugin", start.plugin, end.plugin), ("NVML child", start.child, end.child)] {
            println!(
                "{name:<11} resident {} KiB, then {} KiB; open files {}, then {}; threads {}, then {}",
                start.resident, end.resident, start.files, end.files, start.threads, end.threads
            );
        }
        println!("(at the end, the plugin runs for {} s)", end.age.as_secs());
    }
}
