//! Claims for machines of several kinds: alternatives in classes of bandwidth, which mean the same on each machine.
//!
//! kube-scheduler compares nodes by the position of the alternative that each can give, so the alternatives are sorted
//! by their bandwidth over the whole fleet. An attribute that stands for different bandwidths on different machines
//! becomes an alternative for each class, with a selector for the GPU models. A selector can distinguish models only,
//! so all nodes with one model count as one machine, also a node that lacks a GPU.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use linkwise_core::quote::excerpt;
use linkwise_core::words::count;
use linkwise_system::output::complain;
use serde_json::Value;

use super::kinds::{Kind, bandwidth, candidates, kinds, of_fleet, tier};
use super::{Alternative, Devices, MAX_ALTERNATIVES, in_groups};
use crate::config::FleetArgs;

/// The least bandwidth of a class, in percent of its highest one.
const MIN_OF_CLASS: u64 = 90;

/// The worth of the best tier of a machine whose bandwidths are unknown, MB/s: less than the bandwidth of any link.
const UNKNOWN: u64 = 3;

/// An alternative is left out if the others have at least this share of the worth of all, in per mille: it is not worth
/// the scheduler's time.
const MIN_KEPT: u64 = 985;

/// The most GPU models that get alternatives of their own: those with the most nodes.
const MAX_MODELS: usize = 16;

/// The most kinds of node that represent a model: those with the most nodes.
const MAX_KINDS_OF_MODEL: usize = 4;

/// The nodes with one model of GPU.
struct Model<'a> {
    product: Option<&'a str>,
    title: String,
    nodes: u64,
    /// The kinds that represent the model. If the bandwidths of any kind are known, only such kinds are here.
    kinds: Vec<&'a Kind>,
}

impl Model<'_> {
    fn is_known(&self) -> bool {
        self.kinds.iter().all(|kind| kind.best.is_some())
    }

    /// Returns true if on each kind all sets of the claim's size have the same bandwidth.
    fn is_alike(&self) -> bool {
        self.is_known() && self.kinds.iter().all(|kind| kind.best == kind.least)
    }
}

/// The sets that a claim gets from one model by one attribute, or by none.
struct Entry {
    /// The model's index.
    model: usize,
    /// The attribute's index among the candidates. The number of candidates stands for no attribute: any GPUs.
    attribute: usize,
    /// The least collective of the sets, MB/s; at most [`UNKNOWN`] if it is unknown.
    worth: u64,
    /// True for each state (set of free GPUs) of the model's kinds that has such a set.
    serves: Vec<bool>,
}

/// An alternative in the making: entries of one class with one attribute.
struct Draft<'a> {
    attribute: usize,
    entries: Vec<&'a Entry>,
}

impl<'a> Draft<'a> {
    fn of_model(&self, model: usize) -> Option<&'a Entry> {
        self.entries.iter().copied().find(|entry| entry.model == model)
    }
}

/// The requests of a claim for the fleet that the options name. A line about each alternative goes to standard error.
pub(super) fn devices(gpus: u8, nodes: &[String], fleet: &FleetArgs, strict: bool) -> Result<Devices> {
    let kinds = of_fleet(gpus, nodes, fleet)?;
    let models = models(&kinds, gpus);
    let entries = entries(gpus, &models);
    let drafts = drafts(&entries, &models, gpus, strict);
    ensure!(
        !strict || gpus == 1 || !drafts.is_empty(),
        "--strict: no machine of this fleet has a group of {gpus} GPUs"
    );
    let alternatives = alternatives(&drafts, &entries, &models, gpus);
    if gpus > 1 {
        complain("linkwise", notes(&drafts, &alternatives, &models, &kinds, gpus));
    }
    Ok(in_groups(gpus, &alternatives, strict))
}

/// The specification of a claim for this number of GPUs on the nodes of these slices. `machines` are built-in ones or
/// files, whose bandwidths count for nodes with the same groups.
pub fn fleet_claim(gpus: u8, slices: &[Value], machines: &[String]) -> Result<Value, serde_json::Error> {
    let (kinds, _) = kinds(slices, gpus, machines);
    let models = models(&kinds, gpus);
    let entries = entries(gpus, &models);
    let alternatives = alternatives(&drafts(&entries, &models, gpus, false), &entries, &models, gpus);
    serde_json::to_value(in_groups(gpus, &alternatives, false).spec())
}

/// The models with enough GPUs for the claim, those with the most nodes first; empty for one GPU, which needs no group.
fn models(kinds: &[Kind], gpus: u8) -> Vec<Model<'_>> {
    let mut by_product: BTreeMap<Option<&str>, Vec<&Kind>> = BTreeMap::new();
    for kind in kinds.iter().filter(|kind| gpus > 1 && !kind.is_mixed && kind.gpus >= usize::from(gpus)) {
        by_product.entry(kind.product.as_deref()).or_default().push(kind);
    }
    let mut models: Vec<Model<'_>> = by_product.into_iter().map(|(product, kinds)| model(product, kinds)).collect();
    models.sort_by_key(|model| Reverse(model.nodes));
    models.truncate(MAX_MODELS);
    models
}

fn model<'a>(product: Option<&'a str>, mut kinds: Vec<&'a Kind>) -> Model<'a> {
    let nodes: usize = kinds.iter().map(|kind| kind.nodes.len()).sum();
    let title = match kinds.as_slice() {
        [kind] => kind.title.clone(),
        _ => format!("{} with {}", count(nodes, "node"), product.map_or_else(|| "GPUs".to_owned(), excerpt)),
    };
    kinds.sort_by_key(|kind| (kind.best.is_none(), Reverse(kind.nodes.len())));
    let is_known = kinds.first().is_some_and(|kind| kind.best.is_some());
    kinds.retain(|kind| kind.best.is_some() == is_known);
    kinds.truncate(MAX_KINDS_OF_MODEL);
    Model { product, title, nodes: nodes as u64, kinds }
}

/// All entries, those with the highest worth first.
fn entries(gpus: u8, models: &[Model<'_>]) -> Vec<Entry> {
    let names = candidates(gpus);
    let mut entries: Vec<Entry> = Vec::new();
    for (number, model) in models.iter().enumerate() {
        let least = model.kinds.iter().map(|kind| kind.least.unwrap_or(0)).min().unwrap_or(0);
        for attribute in 0..=names.len() {
            let (mut worth, mut serves) = (None, Vec::new());
            for kind in &model.kinds {
                let given = match names.get(attribute) {
                    Some(name) => by_attribute(kind, name, gpus),
                    None => Some((least, kind.any().serves(kind.gpus, gpus.into()))),
                };
                match given {
                    Some((own, states)) => {
                        // A selector admits all kinds of the model, also the worst.
                        worth = Some(worth.map_or(own, |worth: u64| worth.min(own)));
                        serves.extend(states);
                    }
                    None => serves.extend(kind.any().serves(kind.gpus, gpus.into()).iter().map(|_| false)),
                }
            }
            entries.extend(worth.map(|worth| Entry { model: number, attribute, worth, serves }));
        }
    }
    // Of entries with the same worth the one that serves most states comes first: it may make the others superfluous.
    let served = |entry: &Entry| entry.serves.iter().filter(|serves| **serves).count();
    entries.sort_by_key(|entry| (Reverse(entry.worth), Reverse(served(entry))));
    entries
}

/// The worth of a set by an attribute on this kind, and true for each state that has such a set.
fn by_attribute(kind: &Kind, name: &str, gpus: u8) -> Option<(u64, Vec<bool>)> {
    let claim = kind.claim(name)?;
    let by_tier = || {
        let is_tier = kind.alternatives.iter().any(|tier| tier == name);
        is_tier.then(|| UNKNOWN.saturating_sub(tier(name).saturating_sub(1)).max(1))
    };
    let groups = kind.attributes.iter().find(|groups| groups.name == name)?;
    Some((claim.promised.or_else(by_tier)?, groups.serves(kind.gpus, gpus.into())))
}

/// The alternatives of a claim: by class and attribute, the best first.
fn drafts<'a>(entries: &'a [Entry], models: &[Model<'_>], gpus: u8, strict: bool) -> Vec<Draft<'a>> {
    let any = candidates(gpus).len();
    let mut by_class: BTreeMap<(usize, usize), Draft<'a>> = BTreeMap::new();
    let (mut class, mut first): (usize, Option<&Entry>) = (0, None);
    let mut served: BTreeMap<usize, Vec<bool>> = BTreeMap::new();
    for entry in entries {
        let before = served.entry(entry.model).or_insert_with(|| vec![false; entry.serves.len()]);
        let adds = before.iter().zip(&entry.serves).any(|(before, serves)| *serves && !before);
        let is_without_group = entry.attribute == any && !models.get(entry.model).is_some_and(Model::is_alike);
        if !adds || (strict && is_without_group) {
            continue;
        }
        before.iter_mut().zip(&entry.serves).for_each(|(before, serves)| *before |= serves);
        if first.is_none_or(|first| entry.worth * 100 < first.worth * MIN_OF_CLASS) {
            class += 1;
            first = Some(entry);
        }
        let draft = || Draft { attribute: entry.attribute, entries: Vec::new() };
        by_class.entry((class, entry.attribute)).or_insert_with(draft).entries.push(entry);
    }
    let mut drafts: Vec<Draft<'a>> = by_class.into_values().collect();
    // The claim's last alternative, any GPUs, gives the worst GPUs of the fleet anyway.
    if !strict && drafts.last().is_some_and(|last| last.attribute == any) {
        drafts.pop();
    }
    trim(&mut drafts, entries, models, strict);
    drafts
}

/// Leaves out alternatives: those for which there is no room and, unless `strict`, those that add little. While there
/// is room, the first alternative of a model stays unless it adds nothing.
fn trim(drafts: &mut Vec<Draft<'_>>, entries: &[Entry], models: &[Model<'_>], strict: bool) {
    // The worth of a state in which no listed alternative has a set: 0 if strict, else that of the worst GPUs.
    let floor = entries.iter().map(|entry| entry.worth).min().filter(|_| !strict).unwrap_or(0);
    let all = total_worth(&drafts.iter().collect::<Vec<_>>(), models, entries, floor);
    loop {
        let has_room = drafts.len() <= MAX_ALTERNATIVES - usize::from(!strict);
        if strict && has_room {
            break;
        }
        let is_first = |at: usize| {
            let first = |model: usize| drafts.iter().position(|draft| draft.of_model(model).is_some());
            (0..models.len()).any(|model| first(model) == Some(at))
        };
        let without = |at: usize| {
            let rest = drafts.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, draft)| draft);
            total_worth(&rest.collect::<Vec<_>>(), models, entries, floor)
        };
        let left = (0..drafts.len()).map(|at| (without(at), at));
        // Of equal alternatives the last one is removed.
        let Some((left, at)) = left.filter(|(left, at)| !has_room || *left == all || !is_first(*at)).max() else {
            break;
        };
        if has_room && left * 1000 < all * MIN_KEPT {
            break;
        }
        drafts.remove(at);
    }
}

/// The worth of these alternatives to the scheduler: the sum over all models of `nodes * 1000 * w / (best * states)`.
/// `w` is the sum over the model's states of the worth of the first alternative that has a set, or of `floor` without
/// one.
fn total_worth(drafts: &[&Draft<'_>], models: &[Model<'_>], entries: &[Entry], floor: u64) -> u64 {
    let of_model = |(number, model): (usize, &Model<'_>)| {
        let own = || entries.iter().filter(|entry| entry.model == number);
        let best = own().map(|entry| entry.worth).max().unwrap_or(0);
        let states = own().next().map_or(0, |entry| entry.serves.len());
        let listed: Vec<&Entry> = drafts.iter().filter_map(|draft| draft.of_model(number)).collect();
        let worth = |state: usize| {
            let serves = |entry: &&&Entry| entry.serves.get(state).is_some_and(|serves| *serves);
            listed.iter().find(serves).map_or(floor, |entry| entry.worth)
        };
        let sum: u64 = (0..states).map(worth).sum();
        (sum * 1000).checked_div(best * states as u64).unwrap_or(0) * model.nodes
    };
    models.iter().enumerate().map(of_model).sum()
}

/// The alternatives of a claim: one for each draft, with a unique name.
fn alternatives(drafts: &[Draft<'_>], entries: &[Entry], models: &[Model<'_>], gpus: u8) -> Vec<Alternative> {
    let names = candidates(gpus);
    let mut taken: BTreeMap<usize, usize> = BTreeMap::new();
    let alternative = |(at, draft): (usize, &Draft<'_>)| {
        let times = taken.entry(draft.attribute).or_insert(0);
        *times += 1;
        let attribute = names.get(draft.attribute);
        let name = attribute.map_or("kind", String::as_str).to_ascii_lowercase();
        let name = if *times > 1 { format!("{name}-{times}") } else { name };
        let before = drafts.get(..at).unwrap_or_default();
        let needs_selector = (0..models.len()).any(|model| may_take(model, draft, before, entries));
        let of_draft = draft.entries.iter().filter(|_| needs_selector).filter_map(|entry| models.get(entry.model));
        let products: BTreeSet<_> = of_draft.map(|model| model.product.map(str::to_owned)).collect();
        Alternative { name, attribute: attribute.cloned(), products }
    };
    drafts.iter().enumerate().map(alternative).collect()
}

/// Returns true if a node with this model may take the alternative, although the alternative is for other models.
fn may_take(model: usize, draft: &Draft<'_>, before: &[Draft<'_>], entries: &[Entry]) -> bool {
    if draft.of_model(model).is_some() {
        return false;
    }
    let own: Vec<&Entry> = before.iter().filter_map(|draft| draft.of_model(model)).collect();
    let by_attribute = entries.iter().find(|entry| entry.model == model && entry.attribute == draft.attribute);
    by_attribute.is_some_and(|entry| {
        let is_served = |state: usize| own.iter().any(|own| own.serves.get(state).is_some_and(|serves| *serves));
        entry.serves.iter().enumerate().any(|(state, serves)| *serves && !is_served(state))
    })
}

/// The lines about a claim: the bandwidth and the machines of each alternative; then the nodes without an alternative
/// of their own.
fn notes(
    drafts: &[Draft<'_>],
    alternatives: &[Alternative],
    models: &[Model<'_>],
    kinds: &[Kind],
    gpus: u8,
) -> Vec<String> {
    let mut lines = Vec::new();
    for (draft, alternative) in drafts.iter().zip(alternatives) {
        let on = draft.entries.iter().filter_map(|entry| models.get(entry.model)).map(|model| model.title.as_str());
        let worth = match draft.entries.iter().map(|entry| entry.worth).min() {
            Some(worth) if worth > UNKNOWN => format!("{} or more", bandwidth(worth)),
            _ => "unknown bandwidth".to_owned(),
        };
        lines.push(format!("gpus/{}: {worth}, on {}", alternative.name, on.collect::<Vec<_>>().join("; ")));
    }
    if drafts.is_empty() && models.iter().all(Model::is_alike) {
        lines.push(format!("any {gpus} GPUs have the same bandwidth on these machines: no alternatives"));
    }
    for (number, model) in models.iter().enumerate() {
        if !model.is_known() {
            lines.push(format!(
                "{}: bandwidths unknown, ranked below all known ones; run linkwise snapshot there, and name its \
                 file with --node",
                model.title
            ));
        } else if !drafts.is_empty() && !drafts.iter().any(|draft| draft.of_model(number).is_some()) {
            lines.push(format!("{}: no alternative of its own", model.title));
        }
    }
    let (mut mixed, mut small, mut further) = (0, 0, 0);
    for kind in kinds {
        let nodes = match () {
            () if kind.gpus < usize::from(gpus) => &mut small,
            () if kind.is_mixed => &mut mixed,
            () if !models.iter().any(|model| model.product == kind.product.as_deref()) => &mut further,
            () => continue,
        };
        *nodes += kind.nodes.len();
    }
    for (nodes, why) in [
        (small, "too few GPUs for the claim"),
        (mixed, "GPUs of several models, and no alternative of their own"),
        (further, "further models of GPU, and no alternative of their own"),
    ] {
        if nodes > 0 {
            lines.push(format!("{} with {why}", count(nodes, "node")));
        }
    }
    lines
}
