//! The findings of a check, and the report of all findings: for people, and as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde::Serialize;

/// The most findings of one kind that are listed one by one; of more, the first is listed with their number.
const EACH: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    Ok,
    /// linkwise works, but could work better.
    Warning,
    /// GPUs are not offered, or not all of them, until an operator acts.
    Failed,
    /// The check could not be made, or does not apply here.
    Skipped,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// The check that found it.
    check: &'static str,
    status: Status,
    what: String,
    /// The remedy.
    advice: Option<String>,
    /// The common text of findings of several GPUs or files.
    #[serde(skip)]
    kind: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct Findings {
    /// The check of the next finding.
    pub check: &'static str,
    pub found: Vec<Finding>,
}

impl Findings {
    fn add(&mut self, status: Status, what: impl Into<String>, advice: Option<&str>) {
        let (what, advice) = (what.into(), advice.map(str::to_owned));
        self.found.push(Finding { check: self.check, status, what, advice, kind: None });
    }

    pub fn ok(&mut self, what: impl Into<String>) {
        self.add(Status::Ok, what, None);
    }

    pub fn warning(&mut self, what: impl Into<String>, advice: &str) {
        self.add(Status::Warning, what, Some(advice));
    }

    /// Adds a failure: GPUs are not offered until an operator acts.
    pub fn failed(&mut self, what: impl Into<String>, advice: &str) {
        self.add(Status::Failed, what, Some(advice));
    }

    /// Adds a check that was not made, or that does not matter here.
    pub fn skipped(&mut self, what: impl Into<String>, advice: Option<&str>) {
        self.add(Status::Skipped, what, advice);
    }

    /// Adds one of possibly many findings that differ in their subject only: `what` names it, `kind` does not.
    pub fn each(&mut self, status: Status, kind: impl Into<String>, what: impl Into<String>, advice: &str) {
        self.add(status, what, Some(advice));
        if let Some(last) = self.found.last_mut() {
            // Checks do not share a kind.
            last.kind = Some(format!("{}: {}", self.check, kind.into()));
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    findings: Vec<Finding>,
    ok: usize,
    warnings: usize,
    failed: usize,
    skipped: usize,
}

impl Report {
    /// Lists findings in the order of the checks; of more than [`EACH`] findings of one kind the first stands for all.
    pub fn new(found: Vec<Finding>) -> Self {
        let key = |finding: &Finding| Some((finding.kind.clone()?, finding.status.word(), finding.advice.clone()));
        let mut counts = BTreeMap::new();
        for key in found.iter().filter_map(key) {
            *counts.entry(key).or_insert(0usize) += 1;
        }
        let mut merged = BTreeSet::new();
        let one_of_many = |mut finding: Finding| {
            let Some((key, count)) = key(&finding).and_then(|key| counts.get_key_value(&key)) else {
                return Some(finding);
            };
            if *count > EACH {
                finding.what += &format!(" (and {} like it)", count - 1);
            }
            (*count <= EACH || merged.insert(key)).then_some(finding)
        };
        let findings: Vec<Finding> = found.into_iter().filter_map(one_of_many).collect();
        let count = |status| findings.iter().filter(|finding| finding.status == status).count();
        let (ok, warnings) = (count(Status::Ok), count(Status::Warning));
        let (failed, skipped) = (count(Status::Failed), count(Status::Skipped));
        Self { findings, ok, warnings, failed, skipped }
    }

    pub fn has_failed(&self) -> bool {
        self.failed > 0
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut check = "";
        for finding in &self.findings {
            // Writing to a String cannot fail.
            if finding.check != check {
                check = finding.check;
                let _ = writeln!(text, "{check}");
            }
            let _ = writeln!(text, "  {:<8} {}", finding.status.word(), finding.what);
            if let Some(advice) = &finding.advice {
                let _ = writeln!(text, "           -> {advice}");
            }
        }
        let Self { ok, warnings, failed, skipped, .. } = self;
        let warnings = linkwise_core::words::count(*warnings, "warning");
        let _ = writeln!(text, "\n{ok} ok, {warnings}, {failed} failed, {skipped} skipped");
        text
    }
}
