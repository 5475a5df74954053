//! The configuration while linkwise runs: reloaded when the file changes or at SIGHUP, and what a change causes.
//!
//! A task of `run` and of `mps-control-daemon`. It turns a valid change into events of the node; an invalid one changes
//! nothing.

use anyhow::{Context, Result};
use tokio::signal::unix::Signal;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::config::file::{Finding, Severity};
use crate::config::settings::{ConfigError, load_text};
use crate::config::{ConfigMetrics, Environment, FileWatch, Flags, Settings};
use crate::errors::chain;
use crate::state::{DraGpus, Event};

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
    /// What becomes of a wish for DRA.
    pub dra: DraSwitch,
}

/// What becomes of a wish for DRA while linkwise runs.
pub(super) enum DraSwitch {
    /// DRA is served already.
    Running,
    /// There is no API server to publish to.
    NoApiServer,
    /// This program has no client of the API server: it ends, and goes on as one that has.
    ByRestart {
        /// Cancelled when that is so.
        wanted: CancellationToken,
        /// Ends the node.
        shutdown: CancellationToken,
    },
}

impl DraSwitch {
    /// Follows the wish to restart.
    pub fn wanted(&self) -> Option<CancellationToken> {
        match self {
            Self::ByRestart { wanted, .. } => Some(wanted.clone()),
            Self::Running | Self::NoApiServer => None,
        }
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
            (reason, text) = tokio::select! {
                text = changed => ("the file changed", text),
                _ = hangup.recv() => ("SIGHUP", read(&mut file).await),
            };
        }
    }

    /// Applies a text: a valid one takes effect, any other leaves things as they are.
    async fn reload(&mut self, text: Result<String, ConfigError>, reason: &str) -> Result<()> {
        let loaded = text.and_then(|text| load_text(&self.flags, &self.environment, &text));
        self.metrics.config_valid(loaded.is_ok());
        let loaded = match loaded {
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
        if loaded.settings.dra_gpus.value != DraGpus::None {
            match &self.dra {
                DraSwitch::Running => {}
                DraSwitch::NoApiServer => {
                    let error =
                        "DRA needs the API server: KUBERNETES_SERVICE_HOST is not set, no --kubeconfig is given";
                    tracing::error!(why = reason, error, "configuration rejected, keeping the previous one");
                    self.metrics.config_valid(false);
                    return Ok(());
                }
                DraSwitch::ByRestart { wanted, shutdown } => {
                    tracing::info!(why = reason, "GPUs are to go through DRA: starting again as linkwise-cluster");
                    wanted.cancel();
                    shutdown.cancel();
                    return Ok(());
                }
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
