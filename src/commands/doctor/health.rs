//! Checks the GPUs one by one: NVML's failed calls, and the reasons for which a GPU is unhealthy, from the linkwise
//! that runs here or from the health record of an earlier one.
//!
//! This module has no rule of health: `state` decides, by the rules of `run`; a running linkwise has decided already.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::Duration;

use super::driver::Nvml;
use super::{Findings, Node, Status, blocking, name};
use crate::commands::admin;
use crate::commands::top::{lasting, now};
use crate::config::DoctorArgs;
use linkwise_core::publish::view::{CORDONED, GpuView, NodeView, ReasonView, ShortfallView};
use linkwise_core::state::{Event, HealthPoll, HealthRecord, NodeState, Timestamp, UnhealthyReason};
use linkwise_core::topology::{GpuUuid, HostObservation, NodeObservation, ProbeFailure};
use linkwise_node::keeper::{self, Kept};
use linkwise_nvml::{COUNT, CallError, CallFailure, Fault, REGISTER};

/// A reason for which a GPU is unhealthy. The flag is set if NVML reports it now, but the running linkwise has no reason
/// against the GPU.
type Reason = (ReasonView, bool);

/// Adds a finding for each reason against the GPU of this name.
fn add_reasons(found: &mut Findings, reasons: &[Reason], gpu: &str, now: Timestamp) {
    for (ReasonView { reason, kind, since, ends_with }, cleared) in reasons {
        let lasting = lasting(*since, now).map(|time| format!(", for {time}")).unwrap_or_default();
        let what = format!("{gpu}: {reason}{lasting}");
        if *cleared {
            let what = format!("{what}; linkwise has no reason against the GPU");
            let advice =
                "an operator cleared it (linkwise admin clear), or linkwise has not polled since: it polls every 10 s";
            found.each(Status::Warning, reason, what, advice);
            continue;
        }
        let clear =
            if ends_with.contains("`clear`") { " (linkwise admin clear UUID, once it is repaired)" } else { "" };
        let advice = format!("out of service until: {ends_with}{clear}; see docs/health.md");
        // A GPU that still joins its fabric needs no operator, and one with a cordon is as an operator wants it.
        let late = *kind == UnhealthyReason::FabricJoining.label() || *kind == CORDONED;
        let status = if late { Status::Warning } else { Status::Failed };
        found.each(status, reason, what, &advice);
    }
}

/// Adds a finding for each part of the hardware that the node lacks.
fn add_lacks(found: &mut Findings, lacks: &[ShortfallView], now: Timestamp) {
    for lack in lacks {
        let lasting = lasting(lack.since, now).map(|time| format!(", for {time}")).unwrap_or_default();
        let advice = "look at the card and its slot, cable or bridge (dmesg, NVRM); where the hardware was changed on \
                      purpose, linkwise admin accept";
        found.add(Status::Failed, None, format!("lacking: {}{lasting}", lack.what), Some(advice));
    }
}

/// The GPUs' history, from the running linkwise or from the record of an earlier one.
#[derive(Debug, Default)]
pub(super) struct History {
    running: Option<NodeView>,
    kept: Option<Kept>,
}

impl History {
    /// Asks the running linkwise, or else reads the health record; the findings name the source. It is no finding to
    /// have neither on a node without GPUs (`any` is false).
    pub async fn ask(found: &mut Findings, args: &DoctorArgs, any: bool, limit: Duration) -> Self {
        let socket = &args.admin_socket;
        match admin::state(socket, limit).await {
            Ok(state) => {
                found.ok(format!(
                    "linkwise answers on {}: its reasons for unhealthy GPUs are listed here",
                    socket.display()
                ));
                if state.driver_released {
                    found.warning(
                        "linkwise has released the driver, as an operator ordered: the GPUs are not monitored",
                        "linkwise admin resume opens it again",
                    );
                }
                let status = if state.idle.is_some() { Status::Failed } else { Status::Warning };
                for problem in &state.problems {
                    let advice = "change the configuration of this node, or the MIG layout of its GPUs";
                    found.add(status, None, format!("cannot be offered: {problem}"), Some(advice));
                }
                return Self { running: Some(state), kept: None };
            }
            Err(error) if is_absent(&error) => {}
            Err(error) => found.warning(
                format!("{error:#}"),
                "its reasons for unhealthy GPUs are unknown here: run this as root, with its --admin-socket",
            ),
        }
        let (folder, kubelet, sysfs) = (args.state_dir.clone(), args.kubelet_socket.clone(), args.host.sysfs.clone());
        let reading = blocking(limit, move || keeper::kept(folder.as_deref(), &kubelet, &sysfs)).await;
        let Some(read) = reading else {
            super::hangs(found, limit);
            return Self::default();
        };
        match read {
            Ok(Kept { record: None, .. }) if !any => {}
            Ok(Kept { record: None, file, .. }) => found.skipped(
                format!("no linkwise answers on {}, and there is no {}", socket.display(), file.display()),
                Some("XIDs, and NVLinks that were active once, are unknown here: only what NVML reports now counts"),
            ),
            Ok(Kept { record: Some(HealthRecord { version, .. }), file, .. }) if version != HealthRecord::VERSION => {
                let file = file.display();
                found.skipped(format!("{file}: a health record of version {version}, which is not used"), None);
            }
            Ok(kept) => {
                found.ok(format!("{}: its record of this boot and driver counts", kept.file.display()));
                return Self { running: None, kept: Some(kept) };
            }
            Err((file, error)) => found.warning(
                format!("{}: {error:#}", file.display()),
                "the next linkwise sets it aside and has no earlier XIDs",
            ),
        }
        Self::default()
    }

    /// The reasons of each GPU, in the order in which they began, after an observation of the node and a poll of each
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
            let own = reasons.map(|(reason, since)| (ReasonView::of(reason, since), false));
            all.insert(gpu.clone(), own.collect());
        }
        for GpuView { uuid, reasons, .. } in self.running.into_iter().flat_map(|state| state.gpus) {
            let Ok(uuid) = uuid.parse() else { continue };
            let now = all.entry(uuid).or_default();
            now.retain(|(own, _)| !reasons.iter().any(|held| held.kind == own.kind));
            let is_well = reasons.iter().all(|reason| reason.kind == CORDONED);
            now.iter_mut().for_each(|(_, cleared)| *cleared = is_well);
            now.splice(0..0, reasons.into_iter().map(|reason| (reason, false)));
        }
        all.retain(|_, reasons| !reasons.is_empty());
        all
    }
}

/// Returns true if no linkwise runs.
fn is_absent(error: &anyhow::Error) -> bool {
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
            "it has fallen off the bus: drain the node and reboot it; if it comes again, the card or its slot"
        }
        Fault::ResetRequired => {
            "drain the node, then linkwise admin release, nvidia-smi --gpu-reset -i INDEX, linkwise admin resume"
        }
        _ if error.call == REGISTER => {
            "its XIDs and ECC errors are not seen: another process may hold the events, or the driver is in trouble (dmesg)"
        }
        _ => "linkwise goes on without that fact; dmesg (NVRM, Xid) may say why the driver does not answer",
    }
}

/// Adds a line for each GPU that is well, and one for each fault.
pub(super) async fn check_gpus(found: &mut Findings, node: &Node, host: HostObservation) {
    found.check = "gpus";
    let history = History::ask(found, &node.args, !node.nvml.gpus().is_empty(), node.limit).await;
    let now = now();
    let Nvml::Answers { gpus, failures, polls, .. } = &node.nvml else {
        found.skipped("NVML does not answer: no GPU can be asked", None);
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
        let asked = polls.contains_key(&gpu.uuid);
        if failed.is_empty() && reasons.is_empty() && asked {
            found.ok(format!("{}: {}", name(gpu), gpu.model.as_deref().unwrap_or("model unknown")));
        }
        for failure in failed {
            let what = format!("{}: {}", name(gpu), described(failure));
            found.each(Status::Warning, described(failure), what, advice(&failure.error));
        }
        add_reasons(found, &reasons, &name(gpu), now);
        if !asked {
            let what = "the process that asked NVML ended before it said how the GPU is";
            let advice = "run this again; where it stays so, dmesg (NVRM, Xid) may say why";
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
        // A failed call about the driver only loses its fact, except the count of GPUs: without it no GPU can be
        // offered.
        let costs_gpus = failure.subject != "driver" || failure.error.call == COUNT;
        let status = if costs_gpus { Status::Failed } else { Status::Warning };
        found.each(status, described(failure), what, advice(&failure.error));
    }
}
