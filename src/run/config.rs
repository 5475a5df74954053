//! The configuration while linkwise runs: reloads it when the file changes or at SIGHUP, and applies the changes.
//!
//! A task of `run`, which turns a valid change into events of the node; an invalid one changes nothing.

use std::time::Duration;

use anyhow::{Context, Result};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::signal::unix::Signal;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::dra::start::{MissingRequirement, RequirementsReader};
use crate::config::settings::{ConfigError, Finding, Loaded, Severity, load_text};
use crate::config::{Environment, FileWatch, Flags, Settings};
use linkwise_core::errors::chain;
use linkwise_core::state::{Door, Event};
use linkwise_node::readiness::{Part, Readiness};
use linkwise_system::metrics::new;

/// The time between two checks of the requirements that DRA lacks.
const LACKS_INTERVAL: Duration = Duration::from_secs(10);

/// Makes and registers the metric that reports whether the configuration that was read last is in use. A process starts
/// with a valid one.
pub(super) fn valid_metric(registry: &mut Registry) -> Gauge {
    let help = "1 while the configuration that was read last is in use, 0 while it is rejected and the previous one is \
                in use";
    let valid: Gauge = new(registry, "config_valid", help);
    valid.set(1);
    valid
}

/// Logs findings: at least as warnings, because a setting may have no effect.
pub(super) fn log(findings: &[Finding]) {
    for Finding { line, key, severity, problem } in findings {
        match severity {
            Severity::Note => tracing::warn!(line, key, problem, "configuration note"),
            Severity::Warning => {
                tracing::warn!(line, key, problem, "configuration warning, 'linkwise config check' rejects it")
            }
            Severity::Error => tracing::error!(line, key, problem, "configuration error"),
        }
    }
}

/// The task that reloads the configuration; [`super::start`] makes it.
pub(super) struct Reloader {
    pub flags: Flags,
    pub settings: Settings,
    pub valid: Gauge,
    pub events: mpsc::Sender<Event>,
    pub requirements: RequirementsReader,
    /// The requirements of DRA that were missing at the last check. Without them the GPUs stay with the device plugin,
    /// and the node is not ready.
    pub lacks: Vec<MissingRequirement>,
    pub readiness: Readiness,
    /// Cancelled before `shutdown` if the node is to be served again, through the other door.
    pub serve_again: CancellationToken,
    pub shutdown: CancellationToken,
}

impl Reloader {
    /// Records the missing requirements because of which GPUs that are to go through DRA stay with the device plugin.
    /// Logs the same requirements once.
    pub fn record_lacks(&mut self, lacks: Vec<MissingRequirement>) {
        let why: Vec<String> = lacks.iter().map(MissingRequirement::to_string).collect();
        let why = why.join("; ");
        self.readiness.add(Part::Dra, "GPUs stay with the device plugin");
        self.readiness.trouble(&Part::Dra, why.clone());
        if lacks != self.lacks {
            tracing::error!(why, "GPUs cannot go through DRA, they stay with the device plugin");
        }
        self.lacks = lacks;
    }

    /// If the wanted door is not the present one, ends this start, so that the node is served again, and returns true.
    /// If the device plugin serves and DRA lacks a requirement, sets `wanted` to the device plugin.
    async fn change_door(&mut self, wanted: &mut Door, reason: &str) -> bool {
        let now = self.settings.dra_gpus.value;
        let lacks = if *wanted == Door::Dra { self.requirements.lacks().await } else { Vec::new() };
        if !lacks.is_empty() {
            // If DRA serves and has lost a requirement, the part that needs it reports the loss.
            if now == Door::Plugin {
                self.record_lacks(lacks);
                *wanted = now;
            }
            return false;
        }
        self.lacks.clear();
        self.readiness.remove(&Part::Dra);
        if *wanted == now {
            return false;
        }
        tracing::info!(why = reason, door = wanted.label(), "GPUs are to go through the other door");
        self.serve_again.cancel();
        self.shutdown.cancel();
        true
    }

    /// Runs for ever. Each `hangup` requests a reload.
    pub async fn run(mut self, mut hangup: Signal) -> Result<()> {
        let mut file = FileWatch::of(self.settings.config_file.value.as_deref());
        // The file may have changed since it was loaded for the start.
        let mut reason = "start";
        let mut text = file.read().await;
        loop {
            self.reload(text, reason).await?;
            (reason, text) = tokio::select! {
                text = file.changed() => ("the file changed", text),
                _ = hangup.recv() => ("SIGHUP", file.read().await),
                () = sleep(LACKS_INTERVAL), if !self.lacks.is_empty() => ("DRA lacked requirements", file.read().await),
            };
        }
    }

    /// Applies a valid text.
    async fn reload(&mut self, text: Result<String, ConfigError>, reason: &str) -> Result<()> {
        let loaded = reloaded(&self.flags, text, reason);
        self.valid.set(loaded.is_some().into());
        let Some(mut loaded) = loaded else { return Ok(()) };
        if self.change_door(&mut loaded.settings.dra_gpus.value, reason).await {
            return Ok(());
        }
        if !self.lacks.is_empty() {
            self.valid.set(0);
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

/// The settings of a text. If it is rejected, logs the reasons and returns `None`.
pub(super) fn reloaded(flags: &Flags, text: Result<String, ConfigError>, why: &str) -> Option<Loaded> {
    let rejected = |error: &ConfigError| {
        if let ConfigError::Rejected(_, findings) = error {
            log(findings);
        }
        tracing::error!(why, error = chain(error), "configuration rejected, keeping the previous one");
    };
    text.and_then(|text| load_text(flags, &Environment::read(), &text)).inspect_err(rejected).ok()
}

/// The events for those changed settings that apply at once.
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

    /// A copy of a tree without the value at a path of keys.
    fn without(tree: &Value, path: &str) -> Value {
        let mut tree = tree.clone();
        let (parent, last) = path.rsplit_once('.').unwrap_or(("", path));
        let parent = if parent.is_empty() { String::new() } else { format!("/{}", parent.replace('.', "/")) };
        tree.pointer_mut(&parent).unwrap().as_object_mut().unwrap().remove(last).unwrap();
        tree
    }

    #[test]
    fn settings_that_cause_events_apply_at_once() {
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
