//! The configuration while linkwise runs: reloaded when the file changes or at SIGHUP, and what a change causes.
//!
//! A task of `run` and of `mps-control-daemon`. It turns a valid change into events of the node; an invalid one changes
//! nothing.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::signal::unix::Signal;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::dra::start::{Lack, RightsReader};
use super::readiness::{Part, Readiness};
use crate::config::file::{Finding, Severity};
use crate::config::settings::{ConfigError, load_text};
use crate::config::{ConfigMetrics, Environment, FileWatch, Flags, Settings};
use crate::errors::chain;
use crate::state::{DraGpus, Event};

/// The pause until rights that DRA lacks are looked for again.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Logs findings, a line each.
pub(super) fn log(findings: &[Finding]) {
    for Finding { line, key, severity, problem } in findings {
        match severity {
            Severity::Note => tracing::warn!(line, key, problem, "configuration"),
            Severity::Warning => {
                tracing::warn!(line, key, problem, "configuration, rejected by 'linkwise config check'")
            }
            Severity::Error => tracing::error!(line, key, problem, "configuration, rejected"),
        }
    }
}

/// Follows the configuration.
pub(super) struct Reloader {
    pub flags: Flags,
    pub environment: Environment,
    /// The effective settings.
    pub settings: Settings,
    pub metrics: ConfigMetrics,
    pub events: mpsc::Sender<Event>,
    /// A wish for DRA; `None` where DRA is served already.
    pub dra: Option<DraWish>,
}

/// A wish for DRA in a process that serves none: it starts again where it has the rights for DRA, and says otherwise
/// what is missing.
pub(super) struct DraWish {
    rights: RightsReader,
    readiness: Readiness,
    restart: CancellationToken,
    shutdown: CancellationToken,
    /// The rights that were missing last.
    lacks: Vec<Lack>,
}

impl DraWish {
    /// No wish yet. `restart` is cancelled where the process is to start again, and then `shutdown`.
    pub fn new(
        rights: RightsReader,
        readiness: Readiness,
        restart: CancellationToken,
        shutdown: CancellationToken,
    ) -> Self {
        Self { rights, readiness, restart, shutdown, lacks: Vec::new() }
    }

    /// GPUs are to go through DRA, and these rights are missing: they stay with the device plugin. Logged once.
    pub fn cannot(&mut self, lacks: Vec<Lack>) {
        let why: Vec<String> = lacks.iter().map(Lack::to_string).collect();
        let why = why.join("; ");
        self.readiness.add(Part::Dra, "GPUs stay with the device plugin");
        self.readiness.trouble(&Part::Dra, why.clone());
        if lacks != self.lacks {
            tracing::error!(why, "GPUs cannot go through DRA, they stay with the device plugin");
        }
        self.lacks = lacks;
    }

    /// There is no wish any more.
    fn none(&mut self) {
        self.lacks.clear();
        self.readiness.remove(&Part::Dra);
    }
}

impl Reloader {
    /// Runs for ever. A `hangup` asks for a reload.
    pub async fn run(mut self, mut hangup: Signal) -> Result<()> {
        let mut file = self.settings.config_file.value.as_deref().map(FileWatch::of);
        // The file may have changed since it was loaded for the start.
        let mut reason = "start";
        let mut text = read(&mut file).await;
        loop {
            self.reload(text, reason).await?;
            let changed = async {
                match &mut file {
                    Some(file) => file.changed().await,
                    None => std::future::pending().await,
                }
            };
            let lacks = self.dra.as_ref().is_some_and(|wish| !wish.lacks.is_empty());
            let look_again = async { if lacks { sleep(LOOK_AGAIN).await } else { std::future::pending().await } };
            (reason, text) = tokio::select! {
                text = changed => ("the file changed", text),
                _ = hangup.recv() => ("SIGHUP", read(&mut file).await),
                () = look_again => ("DRA lacked rights", read(&mut file).await),
            };
        }
    }

    /// Applies a text: a valid one takes effect, any other leaves things as they are.
    async fn reload(&mut self, text: Result<String, ConfigError>, reason: &str) -> Result<()> {
        let loaded = text.and_then(|text| load_text(&self.flags, &self.environment, &text));
        self.metrics.config_valid(loaded.is_ok());
        let mut loaded = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                if let ConfigError::Rejected { findings, .. } = &error {
                    log(findings);
                }
                tracing::error!(
                    why = reason,
                    error = chain(&error),
                    "configuration rejected, keeping the previous one"
                );
                return Ok(());
            }
        };
        if let Some(wish) = &mut self.dra {
            let lacks = match loaded.settings.dra_gpus.value {
                DraGpus::None => {
                    wish.none();
                    Vec::new()
                }
                _ => {
                    let lacks = wish.rights.lacks().await;
                    if lacks.is_empty() {
                        tracing::info!(why = reason, "GPUs are to go through DRA: starting again as linkwise-cluster");
                        wish.restart.cancel();
                        wish.shutdown.cancel();
                        return Ok(());
                    }
                    lacks
                }
            };
            if !lacks.is_empty() {
                wish.cannot(lacks);
                self.metrics.config_valid(false);
                loaded.settings.dra_gpus.value = DraGpus::None;
            }
        }
        let changed = loaded.settings.changed(&self.settings);
        if changed.is_empty() {
            if reason != "start" {
                tracing::info!(why = reason, "configuration reloaded, unchanged");
            }
            return Ok(());
        }
        let keys = |at_once: &[bool]| {
            let keys = changed.iter().filter(|changed| at_once.contains(&changed.at_once)).map(|changed| changed.key);
            keys.collect::<Vec<_>>().join(",")
        };
        tracing::info!(why = reason, changed = keys(&[true, false]), "configuration applied");
        let later = keys(&[false]);
        if !later.is_empty() {
            tracing::warn!(keys = later, "these settings apply at the next start");
        }
        log(&loaded.findings);
        for event in events(&self.settings, &loaded.settings) {
            self.events.send(event).await.context("the node takes no events")?;
        }
        self.settings = loaded.settings;
        Ok(())
    }
}

async fn read(file: &mut Option<FileWatch>) -> Result<String, ConfigError> {
    match file {
        Some(file) => file.read().await,
        None => Ok(String::new()),
    }
}

/// What a change of the settings causes at once.
fn events(before: &Settings, now: &Settings) -> Vec<Event> {
    let mut events = Vec::new();
    if now.numa_hints.value != before.numa_hints.value {
        events.push(Event::NumaHints(now.numa_hints.value));
    }
    let plan = now.plan();
    if plan != before.plan() {
        events.push(Event::Planned(Box::new(plan)));
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const FILE: &str = include_str!("../../tests/configs/linkwise/everything.yaml");

    fn settings(file: &Value) -> Settings {
        // JSON is YAML.
        load_text(&Flags::default(), &Environment::default(), &file.to_string()).unwrap().settings
    }

    /// Takes the value at a path of keys out of a tree.
    fn without(tree: &Value, path: &str) -> Value {
        let mut tree = tree.clone();
        let (parent, last) = path.rsplit_once('.').unwrap_or(("", path));
        let parent = if parent.is_empty() { String::new() } else { format!("/{}", parent.replace('.', "/")) };
        tree.pointer_mut(&parent).unwrap().as_object_mut().unwrap().remove(last).unwrap();
        tree
    }

    #[test]
    fn settings_that_apply_at_once_are_those_that_cause_events() {
        let tree: Value = serde_saphyr::from_str(FILE).unwrap();
        let all = settings(&tree);
        for shown in all.shown().into_iter().filter(|shown| shown.key != "configFile") {
            let before = settings(&without(&tree, shown.key));
            assert!(
                before.changed(&all).iter().any(|changed| changed.key == shown.key),
                "{} has its default",
                shown.key
            );
            assert_eq!(!events(&before, &all).is_empty(), shown.at_once, "{}", shown.key);
        }
    }
}
