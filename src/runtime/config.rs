//! The configuration while linkwise runs: read again when the file changes or at SIGHUP, and what a change changes.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::config::file::{Finding, Weight};
use crate::config::settings::{ConfigError, Loaded, Origin, load, plain};
use crate::config::{Environment, FileWatch, Flags, Settings};
use crate::inventory::Event;
use crate::metrics::Metrics;

/// The keys that do something, all at the start.
const AT_START: [&str; 27] = [
    "configFile",
    "flags.failOnInitError",
    "flags.mpsRoot",
    "flags.nvidiaDriverRoot",
    "flags.nvidiaDevRoot",
    "flags.gdrcopyEnabled",
    "flags.gdsEnabled",
    "flags.mofedEnabled",
    "flags.plugin.passDeviceSpecs",
    "flags.plugin.deviceListStrategy",
    "flags.plugin.deviceIDStrategy",
    "flags.plugin.cdiAnnotationPrefix",
    "flags.plugin.nvidiaCTKPath",
    "flags.plugin.containerDriverRoot",
    "flags.plugin.kubeletSocket",
    "imex.channelIDs",
    "imex.required",
    "linkwise.cdiDir",
    "linkwise.expose.ncclTopology",
    "linkwise.expose.nics",
    "linkwise.ncclTopologyDir",
    "linkwise.adminSocket",
    "linkwise.allowedUids",
    "linkwise.health.xids",
    "linkwise.metricsAddress",
    "linkwise.onNvmlLoss",
    "linkwise.podResourcesSocket",
];
/// The keys that do something while linkwise runs.
const AT_ONCE: [&str; 9] = [
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

/// Tells people what is odd about a configuration, and what of it does nothing yet.
pub(super) fn log(loaded: &Loaded) {
    for finding in &loaded.findings {
        log_finding(finding);
    }
    let told = |key: &str| loaded.findings.iter().any(|finding| finding.key == key);
    let defaults = Settings::defaults().shown();
    for (shown, default) in loaded.settings.shown().into_iter().zip(defaults) {
        let works = AT_START.contains(&shown.key) || AT_ONCE.contains(&shown.key) || told(shown.key);
        // The device nodes' root follows the driver's, and is not said by anybody then.
        if !works && shown.value != default.value && shown.origin != Origin::Default {
            let (key, value, origin) = (shown.key, plain(&shown.value), shown.origin);
            tracing::warn!(key, value, %origin, "this version takes the setting, but does not work by it yet");
        }
    }
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
    pub metrics: Arc<Metrics>,
}

impl Reader {
    /// Lives until `shutdown`. A `hangup` asks for a reading.
    pub async fn run(self, mut hangup: Signal, shutdown: CancellationToken) -> Result<()> {
        let path: Option<PathBuf> = self.settings.borrow().config_file.value.clone();
        let mut file = path.as_deref().map(FileWatch::of);
        // What was written between the first reading and this moment is seen now.
        self.read("start");
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
                () = shutdown.cancelled() => return Ok(()),
            };
            self.read(why);
        }
    }

    /// Reads once: what is valid counts from now on, and what is not leaves things as they are.
    fn read(&self, why: &'static str) {
        let read = load(&self.flags, &self.environment);
        self.metrics.config_valid(read.is_ok());
        match read {
            Ok(loaded) => {
                let changed = loaded.settings.changed(&self.settings.borrow());
                if changed.is_empty() {
                    if why != "start" {
                        tracing::info!(why, "the configuration was read again; nothing in it is another");
                    }
                    return;
                }
                tracing::info!(why, changed = changed.join(","), "a new configuration counts");
                let late: Vec<&str> = changed.into_iter().filter(|key| AT_START.contains(key)).collect();
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
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::error!(why, error, "the configuration is refused; the one before counts on");
            }
        }
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
