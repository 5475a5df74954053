//! The configuration while linkwise runs: read again when the file changes or at SIGHUP, and what a change changes.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::config::file::{Finding, Weight};
use crate::config::settings::{ConfigError, Loaded, load};
use crate::config::{ConfigMetrics, Environment, FileWatch, Flags, Settings};
use crate::errors::chain;
use crate::state::Event;

/// The keys that count at once while linkwise runs; the others count at its next start.
const AT_ONCE: &[&str] = &[
    "flags.migStrategy",
    "flags.plugin.sharedDevicesAllocationPolicy",
    "linkwise.filter.exclude",
    "linkwise.filter.keepDisplay",
    "linkwise.naming",
    "linkwise.numaHints",
    "linkwise.policies",
    "resources",
    "sharing",
];

/// Tells people what is odd about a configuration.
pub(super) fn log(loaded: &Loaded) {
    loaded.findings.iter().for_each(log_finding);
}

fn log_finding(finding: &Finding) {
    let Finding { line, key, problem } = finding;
    match problem.weight() {
        Weight::Note => tracing::warn!(line, key, %problem, "configuration"),
        Weight::Doubt => tracing::warn!(line, key, %problem, "configuration: 'linkwise config check' refuses this"),
        Weight::Error => tracing::error!(line, key, %problem, "configuration: refused"),
    }
}

/// Reads the configuration again and again.
pub(super) struct Reader {
    pub flags: Flags,
    pub environment: Environment,
    /// What counts; whoever works by it follows it.
    pub settings: watch::Sender<Arc<Settings>>,
    pub metrics: ConfigMetrics,
}

impl Reader {
    /// Lives until `shutdown`. A `hangup` asks for a reading.
    pub async fn run(self, hangup: Signal, shutdown: CancellationToken) -> Result<()> {
        shutdown.run_until_cancelled(self.live(hangup)).await.unwrap_or(Ok(()))
    }

    async fn live(self, mut hangup: Signal) -> Result<()> {
        let path: Option<PathBuf> = self.settings.borrow().config_file.value.clone();
        let mut file = match &path {
            Some(path) => Some(FileWatch::of(path).await),
            None => None,
        };
        // What was written between the first reading and this moment is seen now.
        self.read("start").await?;
        loop {
            let changed = async {
                match &mut file {
                    Some(file) => file.changed().await,
                    None => std::future::pending().await,
                }
            };
            let why = tokio::select! {
                () = changed => "the file changed",
                _ = hangup.recv() => "SIGHUP",
            };
            self.read(why).await?;
        }
    }

    /// Reads once: what is valid counts from now on, and what is not leaves things as they are.
    async fn read(&self, why: &'static str) -> Result<()> {
        let (flags, environment) = (self.flags.clone(), self.environment.clone());
        // A disk in trouble would hold a thread that admissions need.
        let read = tokio::task::spawn_blocking(move || load(&flags, &environment)).await;
        let read = read.context("the reading of the configuration broke off")?;
        self.metrics.config_valid(read.is_ok());
        match read {
            Ok(loaded) => {
                let changed = loaded.settings.changed(&self.settings.borrow());
                if changed.is_empty() {
                    if why != "start" {
                        tracing::info!(why, "the configuration was read again; nothing in it is another");
                    }
                    return Ok(());
                }
                tracing::info!(why, changed = changed.join(","), "a new configuration counts");
                let late: Vec<&str> = changed.into_iter().filter(|key| !AT_ONCE.contains(key)).collect();
                if !late.is_empty() {
                    tracing::warn!(keys = late.join(","), "these take effect when linkwise is started the next time");
                }
                log(&loaded);
                self.settings.send_replace(Arc::new(loaded.settings));
            }
            Err(error) => {
                if let ConfigError::Refused { findings, .. } = &error {
                    findings.iter().for_each(log_finding);
                }
                let error = chain(&error);
                tracing::error!(why, error, "the configuration is refused; the one before counts on");
            }
        }
        Ok(())
    }
}

/// Turns changes of the configuration into events of the node.
pub(super) struct Follower {
    pub settings: watch::Receiver<Arc<Settings>>,
    pub events: mpsc::Sender<Event>,
}

impl Follower {
    /// Lives until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) -> Result<()> {
        shutdown.run_until_cancelled(self.follow()).await.unwrap_or(Ok(()))
    }

    async fn follow(&mut self) -> Result<()> {
        let mut last = Arc::clone(&self.settings.borrow_and_update());
        loop {
            self.settings.changed().await.context("nobody reads the configuration any more")?;
            let now = Arc::clone(&self.settings.borrow_and_update());
            let mut events = Vec::new();
            if now.numa_hints.value != last.numa_hints.value {
                events.push(Event::NumaHints(now.numa_hints.value.into()));
            }
            let plan = now.plan();
            if plan != last.plan() {
                events.push(Event::Planned(Box::new(plan)));
            }
            for event in events {
                self.events.send(event).await.context("nobody takes events any more")?;
            }
            last = now;
        }
    }
}
