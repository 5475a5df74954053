//! `nvidia.com/gpu.*`: the labels of a node's whole GPUs.
//!
//! A label has room for one model. If GPUs differ, GPU Feature Discovery writes the model that it read last, and its
//! labels may change with each run. Here the choice is always the same; see [`Model::chosen`].

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::{LabelProblem, Labels, MAX_VALUE, Shared, sanitised};
use crate::state::ResourcePlan;
use crate::topology::{ComputeCapability, DisplayClass, Gpu, NodeTopology};

/// The GPUs of one model.
pub(super) struct Model<'a> {
    /// The product's name in NVML.
    pub name: Option<&'a str>,
    /// At least one GPU. GPUs in MIG mode are last, so that facts come from the other GPUs first.
    gpus: Vec<&'a Gpu>,
    /// The number of models on the node.
    models: usize,
}

impl<'a> Model<'a> {
    /// Chooses the model that the labels are about: a model with a GPU outside MIG mode before one without; then the
    /// one with the most GPUs; then the first by name. `None` without GPUs.
    pub fn chosen(topology: &'a NodeTopology) -> Option<Self> {
        let models: BTreeSet<_> = topology.gpus().iter().map(|gpu| &gpu.model).collect();
        let gpus = topology.gpus().iter().map(|gpu| (gpu.model.as_deref(), gpu));
        let (name, mut gpus) = group_of_chosen_model(gpus, |gpus| gpus.iter().any(|gpu| !gpu.mig_enabled))?;
        gpus.sort_by_key(|gpu| gpu.mig_enabled);
        Some(Self { name, gpus, models: models.len() })
    }

    /// A fact from the first GPU that has it.
    fn fact<T>(&self, fact: impl Fn(&Gpu) -> Option<T>) -> Option<T> {
        self.gpus.iter().find_map(|gpu| fact(gpu))
    }
}

/// Groups things by model, and returns the group of one model: the largest by `first`, then the one with the most
/// things, then a known model before the unknown one, then the first by name.
pub(super) fn group_of_chosen_model<'a, T, R: Ord>(
    things: impl Iterator<Item = (Option<&'a str>, T)>,
    first: impl Fn(&[T]) -> R,
) -> Option<(Option<&'a str>, Vec<T>)> {
    let mut models: BTreeMap<Option<&str>, Vec<T>> = BTreeMap::new();
    for (model, thing) in things {
        models.entry(model).or_default().push(thing);
    }
    // `max_by_key` takes the last of equals.
    models.into_iter().rev().max_by_key(|(model, things)| (first(things), things.len(), model.is_some()))
}

/// The product's name as a value, with the suffix `end`; `None` for an unknown model. A long name is cut, so that the
/// suffix stays: schedulers distinguish MIG devices from GPUs by it.
pub(super) fn product(model: Option<&str>, end: &str) -> Option<String> {
    let name = sanitised(model?);
    let kept = name.get(..MAX_VALUE.saturating_sub(end.len())).unwrap_or(&name);
    let is_cut = kept.len() < name.len();
    let kept = if is_cut { kept.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()) } else { kept };
    Some(format!("{kept}{end}"))
}

pub(super) fn labels(topology: &NodeTopology, plan: &ResourcePlan, labels: &mut Labels) {
    let Some(model) = Model::chosen(topology) else { return };
    if model.models > 1 {
        let chosen = model.name.unwrap_or("an unknown model").to_owned();
        labels.problems.push(LabelProblem::SeveralModels(chosen, model.models));
    }
    let whole = model.gpus.first().filter(|gpu| !gpu.mig_enabled);
    let no_whole_gpu = Shared { replicas: 0, ..Shared::NOT };
    let shared = whole.map_or(no_whole_gpu, |gpu| Shared::of(plan, &plan.name_of_gpu(gpu)));
    labels.put_known("nvidia.com/gpu.product", product(model.name, shared.suffix));
    labels.put("nvidia.com/gpu.count", model.gpus.len());
    labels.put("nvidia.com/gpu.replicas", shared.replicas);
    labels.put("nvidia.com/gpu.sharing-strategy", shared.strategy);
    labels.put_known("nvidia.com/gpu.memory", model.fact(|gpu| gpu.facts.memory_mib.filter(|memory| *memory > 0)));
    if let Some(capability) = model.fact(|gpu| gpu.facts.compute_capability.filter(|capability| capability.major > 0)) {
        labels.put("nvidia.com/gpu.family", family(capability));
        labels.put("nvidia.com/gpu.compute.major", capability.major);
        labels.put("nvidia.com/gpu.compute.minor", capability.minor);
    }
    labels.put("nvidia.com/gpu.mode", mode(topology.gpus()));
}

/// The name of an architecture, by GPU Feature Discovery's table.
fn family(ComputeCapability { major, minor }: ComputeCapability) -> &'static str {
    match (major, minor) {
        (1, _) => "tesla",
        (2, _) => "fermi",
        (3, _) => "kepler",
        (5, _) => "maxwell",
        (6, _) => "pascal",
        (7, 0..=4) => "volta",
        (7, _) => "turing",
        (8, 0..=8) => "ampere",
        (8, _) => "ada-lovelace",
        (9, _) => "hopper",
        (10 | 12, _) => "blackwell",
        (13, _) => "rubin",
        _ => "undefined",
    }
}

/// The purpose of the GPUs, by their PCI class.
fn mode(gpus: &[Gpu]) -> &'static str {
    let all = |class| gpus.iter().all(|gpu| gpu.class == Some(class));
    if all(DisplayClass::Vga) {
        "graphics"
    } else if all(DisplayClass::ThreeD) {
        "compute"
    } else {
        "unknown"
    }
}
