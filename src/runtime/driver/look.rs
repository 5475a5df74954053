//! A look at the node: NVML's GPUs as a child has seen them, and the host around them, told as one.
//!
//! Called by `driver`. The look at the host runs beside, and what the child says meanwhile is heard: a file of a device in
//! trouble can hang whoever reads it.

use std::sync::Arc;

use anyhow::Result;
use tokio::time::Instant;

use super::Driver;
use super::known::{Host, Known};
use crate::hwloc;
use crate::nvml::protocol::FromAgent;
use crate::state::Event;
use crate::topology::{GpuUuid, NodeObservation, ProbeFailure};

impl Driver {
    /// The host around a new look at the GPUs. Both are told together: hwloc takes tens of milliseconds.
    pub(super) async fn look_at_host(&self, known: &mut Known) -> Result<()> {
        if known.untold.is_none() {
            if known.hosts.runs() {
                // It has taken too long already.
                return self.observed(None, known).await;
            }
            known.untold = Some(Instant::now() + self.command.limits.call / 3);
        }
        let sysfs = self.sysfs.clone();
        known.hosts.start(move || hwloc::observe(&sysfs));
        Ok(())
    }

    /// NVML's GPUs and the host around them, where they are not as they were told last. Without a new look at the host, which
    /// takes too long then, it is as it was.
    pub(super) async fn observed(&self, host: Option<Host>, known: &mut Known) -> Result<()> {
        known.untold = None;
        let late = host.is_none();
        if let Some(host) = host {
            known.take_host(host);
        }
        let Some((_, gpus, looked)) = &known.looked else { return Ok(()) };
        let (gpus, looked) = (gpus.clone(), looked.clone());
        let mut failures = looked.clone();
        if late {
            let (subject, call) = ("hwloc".to_owned(), "hwloc_topology_load".to_owned());
            let error = "it takes too long; the host is as it was seen before, if it was".to_owned();
            failures.push(ProbeFailure { subject, call, error });
        }
        let (host, more) = known.host.clone().unwrap_or_default();
        // A look at the host that is late is waited for; every other failure is asked about again.
        known.again.looked(looked.into_iter().chain(more.iter().cloned()).collect());
        failures.extend(more);
        if let Some(observed) = known.news(NodeObservation { gpus, host, failures }) {
            // A look at the node may be a look through another driver: who it is goes first.
            self.identify(known).await?;
            self.seen.send_replace(Arc::new(observed.clone()));
            self.tell(Event::Observed(Box::new(observed))).await?;
        }
        Ok(())
    }

    /// What is said of a GPU that nobody was told of would be lost: the look at it goes first.
    pub(super) async fn introduce(&self, message: &FromAgent, known: &mut Known) -> Result<()> {
        let told = |gpu: &GpuUuid| self.seen.borrow().gpus.iter().any(|seen| seen.uuid == *gpu);
        let news = match message {
            FromAgent::Xid { gpu, .. } | FromAgent::DoubleBitEcc { gpu } => !told(gpu),
            // One round more or less; but without the first one nothing is offered.
            FromAgent::Polled { gpus, .. } => !gpus.keys().any(told),
            _ => false,
        };
        if news && known.untold.is_some() {
            let host = known.host().await;
            self.observed(host, known).await?;
        }
        Ok(())
    }
}
