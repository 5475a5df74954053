//! The supervisors of all control daemons: the running ones, those that have to end, and those to be started.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use linkwise_core::errors::chain;
use linkwise_core::state::ResourceName;
use linkwise_host::mps::{DaemonEvent, Limits, Settings, set_back, supervise, unmount_own_shm, unmount_own_shms};
use linkwise_nvml::gate::{DriverUse, Gate};

/// All control daemons of this process, with their supervisors.
pub(super) struct Daemons {
    settings: Settings,
    /// The wanted daemons; `None` before the first order.
    wanted: Option<BTreeMap<ResourceName, Limits>>,
    running: BTreeMap<ResourceName, Supervisor>,
    tasks: JoinSet<ResourceName>,
    gate: Option<Gate>,
    /// Set from an order to release the driver until daemons are wanted again.
    is_released: bool,
    /// Held while a daemon runs.
    driver: Option<DriverUse>,
}

/// A supervisor, and the limits for which it was started.
struct Supervisor {
    limits: Limits,
    /// Set from a failure of its daemon until it serves or ends.
    is_failing: Arc<AtomicBool>,
    end: CancellationToken,
}

impl Supervisor {
    /// Returns true if the supervisor need not be replaced. A daemon that serves is not ended because a GPU has left; a
    /// daemon that has to be started again is started for the present GPUs.
    fn is_for(&self, wanted: &Limits) -> bool {
        if self.is_failing.load(Ordering::Relaxed) { self.limits == *wanted } else { self.limits.meet(wanted) }
    }
}

impl Daemons {
    /// Starts without daemons. They use the driver through the gate.
    pub fn new(settings: Settings, gate: Option<Gate>) -> Self {
        let (wanted, running, tasks) = Default::default();
        Self { settings, wanted, running, tasks, gate, is_released: false, driver: None }
    }

    /// Sets the daemons that are to serve from now on. Those with unchanged limits go on. At the first call, GPUs that
    /// a killed process left exclusive, and that no wanted daemon needs exclusive, get their compute mode back.
    pub async fn want(&mut self, wanted: BTreeMap<ResourceName, Limits>) {
        if self.wanted.is_none() {
            let left = set_back(&self.settings, |gpu| {
                !wanted.values().filter(|limits| limits.exclusive).flat_map(Limits::gpus).any(|one| one == gpu)
            });
            if let Err(error) = left.await {
                let error = chain(&error);
                tracing::warn!(error, "cannot restore the compute mode that an earlier MPS daemon changed");
            }
        }
        // Unmount the memory that a killed process left, and that of claims that ended while the driver was released.
        let is_needed = |daemon: &ResourceName| wanted.contains_key(daemon) || self.running.contains_key(daemon);
        log_unmounted(unmount_own_shms(&self.settings.layout, is_needed));
        self.wanted = Some(wanted);
        self.is_released = false;
        self.reconcile();
    }

    /// Ends all daemons, until others are wanted.
    pub fn release(&mut self) {
        self.is_released = true;
        if let Some(wanted) = &mut self.wanted {
            wanted.clear();
            self.reconcile();
        }
    }

    fn reconcile(&mut self) {
        let Some(wanted) = &self.wanted else { return };
        for (resource, running) in self.running.iter().filter(|(_, running)| !running.end.is_cancelled()) {
            let limits = wanted.get(resource);
            if !limits.is_some_and(|limits| running.is_for(limits)) {
                let why = match limits {
                    Some(_) => "its limits changed",
                    None if self.is_released => "an operator released the driver",
                    None => "it is no longer shared by MPS",
                };
                tracing::info!(%resource, why, "ending the MPS daemon");
                running.end.cancel();
            }
        }
        // No daemon starts while others are ending: a GPU may pass from one daemon to another, and the first one sets
        // the GPU's compute mode back at its end.
        if self.running.values().any(|running| running.end.is_cancelled()) {
            return;
        }
        if !wanted.is_empty() && self.driver.is_none() {
            match self.gate.as_ref().map(Gate::enter).transpose() {
                Ok(driver) => self.driver = driver,
                // The gate refuses because of an order to release the driver, which arrives here next.
                Err(_) => return,
            }
        }
        for (resource, limits) in wanted {
            if self.running.contains_key(resource) {
                continue;
            }
            let supervisor =
                Supervisor { limits: limits.clone(), is_failing: Arc::default(), end: CancellationToken::new() };
            let (is_failing, end) = (Arc::clone(&supervisor.is_failing), supervisor.end.clone());
            let (settings, resource, limits) = (self.settings.clone(), resource.clone(), limits.clone());
            self.running.insert(resource.clone(), supervisor);
            self.tasks.spawn(async move {
                let report = |event| {
                    if !matches!(event, DaemonEvent::NotLabelled(_)) {
                        is_failing.store(matches!(event, DaemonEvent::Failed(..)), Ordering::Relaxed);
                    }
                    log(&resource, &limits, event);
                };
                supervise(&settings, &resource, &limits, &end, report).await;
                resource
            });
        }
    }

    /// Waits until a supervisor has ended, and starts the daemons that waited for that; fails if one ended by itself.
    /// Cancel safe.
    pub async fn next(&mut self) -> Result<()> {
        let Some(ended) = self.tasks.join_next().await else { return std::future::pending().await };
        let resource = ended.context("the supervisor of an MPS daemon panicked")?;
        if !self.running.remove(&resource).is_some_and(|running| running.end.is_cancelled()) {
            bail!("the supervisor of the MPS daemon of {resource} ended by itself");
        }
        // After a release of the driver, containers of the same claim may start again and need the memory.
        if !self.is_released {
            log_unmounted(unmount_own_shm(&self.settings.layout, &resource));
        }
        self.driver.take_if(|_| self.running.is_empty());
        self.reconcile();
        Ok(())
    }

    /// Ends all daemons, and waits for their supervisors.
    pub async fn end(mut self) -> Result<()> {
        self.running.values().for_each(|running| running.end.cancel());
        while let Some(ended) = self.tasks.join_next().await {
            ended.context("the supervisor of an MPS daemon panicked")?;
        }
        Ok(())
    }
}

fn log_unmounted(unmounted: std::io::Result<()>) {
    if let Err(error) = unmounted {
        tracing::warn!(%error, "cannot unmount the shared memory of an MPS daemon that has ended");
    }
}

fn log(resource: &ResourceName, limits: &Limits, event: DaemonEvent) {
    match event {
        DaemonEvent::Serving => {
            let memory = |mib: Option<u64>| mib.map_or_else(|| "unlimited".to_owned(), |mib| format!("{mib}M"));
            let memory: Vec<String> =
                limits.memory.iter().map(|one| format!("{}={}", one.gpu, memory(one.mib))).collect();
            let (threads, memory) = (limits.thread_percentage, memory.join(","));
            tracing::info!(%resource, threads, memory, "MPS daemon serving, limits confirmed");
        }
        DaemonEvent::NotLabelled(why) => {
            let cause = chain(&why);
            tracing::warn!(%resource, cause, "cannot label MPS pipe directory for SELinux");
        }
        DaemonEvent::Failed(why, again_in) => {
            let cause = chain(&why);
            tracing::warn!(%resource, cause, ?again_in, "MPS daemon failed, starting it again");
        }
        DaemonEvent::Ended(None) => tracing::info!(%resource, "MPS daemon ended"),
        DaemonEvent::Ended(Some(why)) => {
            let cause = chain(&why);
            tracing::warn!(%resource, cause, "MPS daemon ended, compute mode not restored");
        }
    }
}
