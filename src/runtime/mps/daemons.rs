//! The supervisors of all control daemons: which run, which have to end, which are to be started.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::mps::{Limits, Occurrence, Settings, supervise};
use crate::state::ResourceName;

/// The daemons of this node.
pub(super) struct Daemons {
    settings: Settings,
    wanted: BTreeMap<ResourceName, Limits>,
    running: BTreeMap<ResourceName, Running>,
    tasks: JoinSet<ResourceName>,
}

/// A supervisor, and the limits for which it was started.
struct Running {
    limits: Limits,
    /// Whether its daemon does not serve.
    fails: Arc<AtomicBool>,
    end: CancellationToken,
}

impl Running {
    /// Whether it is as good as a new one. While it serves it ends no CUDA work for a GPU that has left; one that has to start
    /// its daemon anyhow is to know the GPUs of now.
    fn is_for(&self, wanted: &Limits) -> bool {
        if self.fails.load(Ordering::Relaxed) { self.limits == *wanted } else { self.limits.hold(wanted) }
    }
}

impl Daemons {
    /// None yet.
    pub fn new(settings: Settings) -> Self {
        Self { settings, wanted: BTreeMap::new(), running: BTreeMap::new(), tasks: JoinSet::new() }
    }

    /// These are to serve from now on. Those whose limits are the same serve on.
    pub fn want(&mut self, wanted: BTreeMap<ResourceName, Limits>) {
        self.wanted = wanted;
        self.turn();
    }

    fn turn(&mut self) {
        for (resource, running) in self.running.iter().filter(|(_, running)| !running.end.is_cancelled()) {
            let wanted = self.wanted.get(resource);
            if !wanted.is_some_and(|wanted| running.is_for(wanted)) {
                let why = if wanted.is_some() { "its limits are others now" } else { "it is no longer shared by MPS" };
                tracing::info!(%resource, why, "ending the MPS daemon");
                running.end.cancel();
            }
        }
        // A GPU may pass from one to the other, which would have its compute mode set back by the first.
        if self.running.values().any(|running| running.end.is_cancelled()) {
            return;
        }
        for (resource, limits) in &self.wanted {
            if self.running.contains_key(resource) {
                continue;
            }
            let fails = Arc::new(AtomicBool::new(false));
            let running = Running { limits: limits.clone(), fails: Arc::clone(&fails), end: CancellationToken::new() };
            let (settings, resource, limits) = (self.settings.clone(), resource.clone(), limits.clone());
            let end = running.end.clone();
            self.running.insert(resource.clone(), running);
            self.tasks.spawn(async move {
                let report = |what| {
                    fails.store(matches!(what, Occurrence::Failed { .. }), Ordering::Relaxed);
                    log(&resource, &limits, &what);
                };
                supervise(&settings, &resource, &limits, &end, report).await;
                resource
            });
        }
    }

    /// Waits until a supervisor has ended, and starts what waited for that; fails where one was not to end. Cancel safe.
    pub async fn next(&mut self) -> Result<()> {
        let Some(ended) = self.tasks.join_next().await else { return std::future::pending().await };
        let resource = ended.context("the supervisor of an MPS daemon broke off")?;
        if !self.running.remove(&resource).is_some_and(|running| running.end.is_cancelled()) {
            bail!("the supervisor of the MPS daemon of {resource} ended by itself");
        }
        self.turn();
        Ok(())
    }

    /// Ends them all in order.
    pub async fn end(mut self) -> Result<()> {
        self.running.values().for_each(|running| running.end.cancel());
        while let Some(ended) = self.tasks.join_next().await {
            ended.context("the supervisor of an MPS daemon broke off")?;
        }
        Ok(())
    }
}

fn log(resource: &ResourceName, limits: &Limits, what: &Occurrence) {
    match what {
        Occurrence::Serving => {
            let memory: Vec<String> = limits.memory.iter().map(|one| memory(&one.gpu, one.mib)).collect();
            let memory = memory.join(",");
            tracing::info!(%resource, threads = limits.thread_percentage, memory, "the MPS daemon serves, its limits hold");
        }
        Occurrence::Failed { why, again_in } => {
            let cause = format!("{:#}", anyhow::Error::from(why.clone()));
            tracing::warn!(%resource, cause, ?again_in, "the MPS daemon does not serve");
        }
        Occurrence::Ended(None) => tracing::info!(%resource, "the MPS daemon ended"),
        Occurrence::Ended(Some(why)) => {
            let cause = format!("{:#}", anyhow::Error::from(why.clone()));
            tracing::warn!(%resource, cause, "the MPS daemon ended, and left something behind");
        }
    }
}

fn memory(gpu: &crate::topology::GpuUuid, mib: Option<u64>) -> String {
    mib.map_or_else(|| format!("{gpu}=unlimited"), |mib| format!("{gpu}={mib}M"))
}
