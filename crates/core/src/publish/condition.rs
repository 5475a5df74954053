//! [`Condition`]: a node's condition that shows schedulers and autoscalers whether the node's GPUs can be used.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::view::{GpuView, NodeView};
use crate::words::{count, few};

/// The longest message, in bytes: an API server takes 32 KiB, and people read one line.
const MAX_MESSAGE: usize = 1024;

/// A condition of a node, without its type and times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
    /// The reason, a word for programs.
    pub reason: &'static str,
    /// The reason in words.
    pub message: String,
    /// The number of healthy devices of each resource. The kubelet writes them into the node's status a little later.
    pub resources: BTreeMap<String, usize>,
}

impl Condition {
    /// The reason while the node's status lacks some of the healthy devices.
    pub const PENDING: &'static str = "ResourcesPending";

    /// Makes the condition of a node from its view. `expected` healthy GPUs are enough; without `expected`, all GPUs of
    /// the node have to be healthy. A GPU counts as healthy if it is only cordoned, held or withdrawn, or its holders
    /// are unknown.
    pub fn of(view: &NodeView, expected: Option<usize>) -> Self {
        let not_sick = ["held_elsewhere", "claimed", "holders_unknown", "withdrawn", "cordoned"];
        let is_sick = |gpu: &&GpuView| {
            !gpu.healthy
                && (gpu.reasons.is_empty() || gpu.reasons.iter().any(|reason| !not_sick.contains(&&*reason.kind)))
        };
        let sick: Vec<&str> = view.gpus.iter().filter(is_sick).map(|gpu| gpu.pci.as_str()).collect();
        let healthy = view.gpus.len() - sick.len();
        let too_few = expected.map_or(!sick.is_empty(), |expected| healthy < expected);
        let (status, reason, mut message) = if !view.shortfalls.is_empty() {
            let lacks = view.shortfalls.iter().map(|lack| lack.what.as_str()).collect::<Vec<_>>().join("; ");
            ("False", "HardwareLacking", lacks)
        } else if !view.unready.is_empty() {
            let status = if view.gpus.is_empty() { "Unknown" } else { "False" };
            (status, if view.gpus.is_empty() { "GPUsUnknown" } else { "NotServing" }, view.unready.join("; "))
        } else if view.gpus.is_empty() {
            ("False", "NoGPUs", view.idle.clone().unwrap_or_default())
        } else if too_few {
            let mut message = format!("{healthy} of {} healthy", count(view.gpus.len(), "GPU"));
            message += &expected.map(|expected| format!(", {expected} are expected")).unwrap_or_default();
            if !sick.is_empty() {
                message += &format!("; unhealthy: {}", few(&sick, 8));
            }
            ("False", "GPUsUnhealthy", message)
        } else {
            ("True", "GPUsServed", format!("{} healthy", count(healthy, "GPU")))
        };
        let end = (0..=MAX_MESSAGE.min(message.len())).rev().find(|end| message.is_char_boundary(*end));
        message.truncate(end.unwrap_or_default());
        let resources = view.resources.iter().map(|(name, resource)| (name.clone(), resource.healthy));
        Self { status, reason, message, resources: resources.collect() }
    }

    /// Returns true if the condition only reports that the process does not serve.
    pub fn is_starting(&self) -> bool {
        matches!(self.reason, "GPUsUnknown" | "NotServing")
    }

    /// Compares with the node's status, which has `allocatable` devices of a resource. If the status lacks devices, a
    /// true condition becomes false with the reason [`Self::PENDING`].
    #[must_use]
    pub fn compared_with(&self, allocatable: impl Fn(&str) -> usize) -> Self {
        let late = self.resources.iter().find(|(name, count)| allocatable(name) < **count);
        match late {
            Some((name, count)) if self.status == "True" => Self {
                status: "False",
                reason: Self::PENDING,
                message: format!("the node's status has {} of {count} {name}", allocatable(name)),
                resources: self.resources.clone(),
            },
            _ => self.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publish::view::{ReasonView, ResourceView, ShortfallView};

    fn gpu(pci: &str, healthy: bool) -> GpuView {
        let reasons = if healthy { Vec::new() } else { vec![Default::default()] };
        GpuView { pci: pci.to_owned(), healthy, reasons, ..GpuView::default() }
    }

    #[test]
    fn each_cause_has_its_reason() {
        let sick =
            NodeView { gpus: vec![gpu("0000:01:00.0", true), gpu("0000:02:00.0", false)], ..NodeView::default() };
        let well = NodeView { gpus: vec![gpu("0000:01:00.0", true)], ..NodeView::default() };
        let unready =
            |gpus: &NodeView| NodeView { unready: vec!["nvidia.com/gpu: waiting".to_owned()], ..gpus.clone() };
        let lacks = ShortfallView { what: "x".repeat(2000), ..ShortfallView::default() };
        let held = ReasonView { kind: "held_elsewhere".into(), ..ReasonView::default() };
        let held = GpuView { reasons: vec![held], ..gpu("0000:01:00.0", false) };
        let elsewhere = NodeView { gpus: vec![held], ..NodeView::default() };
        let none = NodeView { idle: Some("no NVIDIA GPU on the PCI bus".to_owned()), ..NodeView::default() };
        for (view, expected, status, reason, message) in [
            (&well, None, "True", "GPUsServed", "1 GPU healthy"),
            (&sick, None, "False", "GPUsUnhealthy", "1 of 2 GPUs healthy; unhealthy: 0000:02:00.0"),
            (&elsewhere, None, "True", "GPUsServed", "1 GPU healthy"),
            (&sick, Some(1), "True", "GPUsServed", "1 GPU healthy"),
            (&well, Some(2), "False", "GPUsUnhealthy", "1 of 1 GPU healthy, 2 are expected"),
            (&unready(&well), None, "False", "NotServing", "nvidia.com/gpu: waiting"),
            (&unready(&none), None, "Unknown", "GPUsUnknown", "nvidia.com/gpu: waiting"),
            (&none, None, "False", "NoGPUs", "no NVIDIA GPU on the PCI bus"),
            (
                &NodeView { shortfalls: vec![lacks], ..well.clone() },
                None,
                "False",
                "HardwareLacking",
                &"x".repeat(1024),
            ),
        ] {
            let condition = Condition { status, reason, message: message.to_owned(), resources: BTreeMap::new() };
            assert_eq!(Condition::of(view, expected), condition);
        }
    }

    #[test]
    fn status_of_the_node_is_awaited() {
        let resources = [("nvidia.com/gpu".to_owned(), ResourceView { healthy: 8, ..ResourceView::default() })].into();
        let view = NodeView { gpus: vec![gpu("0000:01:00.0", true)], resources, ..NodeView::default() };
        let condition = Condition::of(&view, None);
        let late = condition.compared_with(|_| 7);
        let words = "the node's status has 7 of 8 nvidia.com/gpu";
        assert_eq!((late.status, late.reason, late.message.as_str()), ("False", "ResourcesPending", words));
        assert_eq!(condition.compared_with(|_| 8), condition);
    }
}
