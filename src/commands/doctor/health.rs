//! Checks the GPUs one by one: NVML's failed calls, and the reasons for which a GPU is unhealthy, from a poll, and from
//! the linkwise that runs here or the health record of an earlier one.
//!
//! This module does not decide if a GPU is healthy: the core's `state` does, and if a linkwise runs here, its decisions
//! count.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::Duration;

use super::driver::Nvml;
use super::{Findings, Node, Status, blocking, name};
use crate::commands::admin;
use crate::commands::top::{duration_text, now};
use crate::config::DoctorArgs;
use linkwise_core::publish::view::{CORDONED, GpuView, NodeView, ReasonView, ShortfallView};
use linkwise_core::state::{Event, HealthPoll, HealthRecord, NodeState, Timestamp, UnhealthyReason};
use linkwise_core::topology::{GpuUuid, HostObservation, NodeObservation, ProbeFailure};
use linkwise_node::keeper::{self, Kept};
use linkwise_nvml::{COUNT, CallError, CallFailure, Fault, REGISTER};

/// A reason for which a GPU is unhealthy.
pub(super) struct Reason {
    view: ReasonView,
    /// True if NVML reports it now, but the running linkwise counts the GPU as healthy.
    is_cleared: bool,
}

/// Adds a finding for each reason against the GPU of this name.
fn add_reasons(found: &mut Findings, reasons: &[Reason], gpu: &str, now: Timestamp) {
    for Reason { view: ReasonView { reason, kind, since, ends_with }, is_cleared } in reasons {
        let duration = duration_text(*since, now).map(|time| format!(", for {time}")).unwrap_or_default();
        let what = format!("{gpu}: {reason}{duration}");
        if *is_cleared {
            let what = format!("{what}; linkwise has no reason against the GPU");
            let advice =
                "an operator cleared it (linkwise admin clear), or linkwise has not polled the GPU yet (every 10 s)";
            found.each(Status::Warning, reason, what, advice);
            continue;
        }
        let clear =
            if ends_with.contains("`clear`") { " (linkwise admin clear UUID, once it is repaired)" } else { "" };
        let advice = format!("out of service until: {ends_with}{clear}; see docs/health.md");
        // A GPU that still joins its fabric needs no operator, and a cordon is what an operator wants.
        let is_expected = *kind == UnhealthyReason::FabricJoining.label() || *kind == CORDONED;
        let status = if is_expected { Status::Warning } else { Status::Failed };
        found.each(status, reason, what, &advice);
    }
}

/// Adds a finding for each part of the hardware that the node lacks.
fn add_lacks(found: &mut Findings, lacks: &[ShortfallView], now: Timestamp) {
    for lack in lacks {
        let duration = duration_text(lack.since, now).map(|time| format!(", for {time}")).unwrap_or_default();
        let advice = "check the card and its slot, cable or bridge (dmesg, NVRM); if the hardware was changed on \
                      purpose, run linkwise admin accept";
        found.add(Status::Failed, None, format!("lacking: {}{duration}", lack.what), Some(advice));
    }
}

/// The GPUs' history, from the running linkwise or the record of an earlier one.
#[derive(Debug, Default)]
pub(super) struct History {
    running: Option<NodeView>,
    kept: Option<Kept>,
}

impl History {
    /// Asks the running linkwise, or else reads the health record; the findings name the source. A node without GPUs
    /// may have neither, which is not a finding.
    pub async fn ask(found: &mut Findings, args: &DoctorArgs, has_gpus: bool, limit: Duration) -> Self {
        let socket = &args.admin_socket;
        match admin::state(socket, limit).await {
            Ok(state) => {
                found.ok(format!(
                    "linkwise answers on {}: its reasons for unhealthy GPUs are listed here",
                    socket.display()
                ));
                if state.driver_released {
                    found.warning(
                        "an operator released the driver: the GPUs are not monitored",
                        "run linkwise admin resume to open it again",
                    );
                }
                let status = if state.idle.is_some() { Status::Failed } else { Status::Warning };
                for problem in &state.problems {
                    let advice = "change the configuration of this node, or the MIG layout of its GPUs";
                    found.add(status, None, format!("cannot be offered: {problem}"), Some(advice));
                }
                return Self { running: Some(state), kept: None };
            }
            Err(error) if means_no_linkwise_runs(&error) => {}
            Err(error) => found.warning(
                format!("{error:#}"),
                "the reasons of a running linkwise are unknown here: run this as root, with its --admin-socket",
            ),
        }
        let (folder, kubelet, sysfs) = (args.state_dir.clone(), args.kubelet_socket.clone(), args.host.sysfs.clone());
        let reading = blocking(limit, move || keeper::kept(folder.as_deref(), &kubelet, &sysfs)).await;
        let Some(read) = reading else {
            super::add_hang(found, limit);
            return Self::default();
        };
        match read {
            Ok(Kept { record: None, .. }) if !has_gpus => {}
            Ok(Kept { record: None, file, .. }) => found.skipped(
                format!("no linkwise answers on {}, and there is no {}", socket.display(), file.display()),
                Some("XIDs, and NVLinks that were active once, are unknown here: only what NVML reports now counts"),
            ),
            Ok(Kept { record: Some(HealthRecord { version, .. }), file, .. }) if version != HealthRecord::VERSION => {
                let file = file.display();
                found.skipped(format!("{file}: health record of version {version}, which linkwise does not use"), None);
            }
            Ok(kept) => {
                found.ok(format!("{}: used as the health record of this boot and driver", kept.file.display()));
                return Self { running: None, kept: Some(kept) };
            }
            Err((file, error)) => found.warning(
                format!("cannot read {}: {error:#}", file.display()),
                "the next linkwise renames it, and starts without the earlier XIDs",
            ),
        }
        Self::default()
    }

    /// The reasons of each GPU, those of a running linkwise first, after an observation of the node and a poll of each
    /// GPU. Adds a finding for the hardware that the node lacks.
    pub fn reasons(
        self,
        found: &mut Findings,
        observed: &NodeObservation,
        polls: &BTreeMap<GpuUuid, HealthPoll>,
        now: Timestamp,
    ) -> BTreeMap<GpuUuid, Vec<Reason>> {
        let mut events = Vec::new();
        let mut known: Vec<GpuUuid> = observed.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        if let Some(Kept { record: Some(record), identity, .. }) = self.kept {
            known.extend(record.gpus.keys().cloned());
            events.extend([Event::Restored(Box::new(record)), Event::Identified(identity)]);
        }
        if !observed.gpus.is_empty() {
            events.extend([Event::Observed(Box::new(observed.clone())), Event::Polled(polls.clone())]);
        }
        let judged = events.into_iter().fold(NodeState::default(), |state, event| state.apply(event, now).0);
        let own = || judged.hardware().shortfalls().map(ShortfallView::of).collect();
        let lacks: Vec<ShortfallView> = self.running.as_ref().map_or_else(own, |state| state.shortfalls.clone());
        add_lacks(found, &lacks, now);
        let mut all: BTreeMap<GpuUuid, Vec<Reason>> = BTreeMap::new();
        for gpu in known {
            let reasons = judged.hardware().reasons(&gpu).chain(judged.hardware().cordon(&gpu));
            let own = reasons.map(|(reason, since)| Reason { view: ReasonView::of(reason, since), is_cleared: false });
            all.insert(gpu.clone(), own.collect());
        }
        for GpuView { uuid, reasons, .. } in self.running.into_iter().flat_map(|state| state.gpus) {
            let Ok(uuid) = uuid.parse() else { continue };
            let own = all.entry(uuid).or_default();
            own.retain(|own| !reasons.iter().any(|running| running.kind == own.view.kind));
            let is_healthy = reasons.iter().all(|reason| reason.kind == CORDONED);
            own.iter_mut().for_each(|own| own.is_cleared = is_healthy);
            own.splice(0..0, reasons.into_iter().map(|view| Reason { view, is_cleared: false }));
        }
        all.retain(|_, reasons| !reasons.is_empty());
        all
    }
}

fn means_no_linkwise_runs(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref().map(std::io::Error::kind);
    matches!(kind, Some(ErrorKind::NotFound | ErrorKind::ConnectionRefused))
}

fn described(failure: &CallFailure) -> String {
    let ProbeFailure { call, error, .. } = failure.clone().into();
    format!("{call}: {error}")
}

fn advice(error: &CallError) -> &'static str {
    match error.fault() {
        Fault::GpuLost => {
            "the GPU has fallen off the bus: drain the node and reboot it; if it recurs, check the card and its slot"
        }
        Fault::ResetRequired => {
            "drain the node, then linkwise admin release, nvidia-smi --gpu-reset -i INDEX, linkwise admin resume"
        }
        _ if error.call == REGISTER => {
            "the GPU's XIDs and ECC errors are not seen: another process may hold the events, or see dmesg"
        }
        _ => "linkwise works without that fact; look for the cause in dmesg (NVRM, Xid)",
    }
}

/// Adds a finding for each healthy GPU, and one for each fault.
pub(super) async fn check_gpus(found: &mut Findings, node: &Node, host: HostObservation) {
    found.check = "gpus";
    let history = History::ask(found, &node.args, !node.nvml.gpus().is_empty(), node.limit).await;
    let now = now();
    let Nvml::Answers { gpus, failures, polls, .. } = &node.nvml else {
        found.skipped("NVML unavailable: no GPU can be checked", None);
        for (gpu, reasons) in history.reasons(found, &NodeObservation::default(), &Default::default(), now) {
            add_reasons(found, &reasons, &format!("GPU {gpu}"), now);
        }
        return;
    };
    if gpus.is_empty() && failures.is_empty() {
        found.skipped("NVML lists no GPU", None);
    }
    let observed = NodeObservation { gpus: gpus.clone(), host, ..NodeObservation::default() };
    let mut unhealthy = history.reasons(found, &observed, polls, now);
    for gpu in gpus {
        let address = gpu.pci.to_string();
        let failed: Vec<_> = failures.iter().filter(|failure| failure.subject == address).collect();
        let reasons = unhealthy.remove(&gpu.uuid).unwrap_or_default();
        let is_polled = polls.contains_key(&gpu.uuid);
        if failed.is_empty() && reasons.is_empty() && is_polled {
            found.ok(format!("{}: {}", name(gpu), gpu.model.as_deref().unwrap_or("model unknown")));
        }
        for failure in failed {
            let what = format!("{}: {}", name(gpu), described(failure));
            found.each(Status::Warning, described(failure), what, advice(&failure.error));
        }
        add_reasons(found, &reasons, &name(gpu), now);
        if !is_polled {
            let what = "the NVML agent ended before it polled the GPU";
            let advice = "run this again; if it recurs, look for the cause in dmesg (NVRM, Xid)";
            found.each(Status::Warning, what, format!("{}: {what}", name(gpu)), advice);
        }
    }
    for (gpu, reasons) in unhealthy {
        add_reasons(found, &reasons, &format!("GPU {gpu}, which NVML does not list"), now);
    }
    // A GPU that could not even be identified cannot be offered.
    let listed = |failure: &CallFailure| gpus.iter().any(|gpu| failure.subject == gpu.pci.to_string());
    for failure in failures.iter().filter(|failure| !listed(failure)) {
        let what = format!("{}: {}", failure.subject, described(failure));
        // A failed call about the driver costs one fact only. The count of GPUs is an exception, because without it no
        // GPU can be offered.
        let costs_gpus = failure.subject != "driver" || failure.error.call == COUNT;
        let status = if costs_gpus { Status::Failed } else { Status::Warning };
        found.each(status, described(failure), what, advice(&failure.error));
    }
}
