//! Claims for machines of several kinds: alternatives in classes of bandwidth, which mean the same on each.
//!
//! kube-scheduler compares nodes by the place of the alternative that each can give. So the alternatives come in the
//! order of what they carry anywhere in the fleet. An attribute with which kinds of machine carry unlike bandwidths is an
//! alternative for each class, with a selector for the models of GPU.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use linkwise_core::quote::excerpt;
use linkwise_system::output::complain;
use serde_json::Value;

use super::kinds::{Kind, bandwidth, candidates, kinds, of_fleet, tier};
use super::{Alternative, Devices, MOST_ALTERNATIVES, in_groups};
use crate::config::FleetArgs;

/// The least share of a class's highest bandwidth that is in the class, in percent.
const ALIKE: u64 = 90;

/// The worth of the best tier of a machine whose bandwidths are unknown, as MB/s: less than any link carries.
const UNKNOWN: u64 = 3;

/// An alternative without which the others are worth so many per mille of all together is left out: each costs the
/// scheduler time.
const WORTH_IT: u64 = 985;

/// What one kind of machine gives by one attribute, or by none.
struct Entry {
    kind: usize,
    /// The attribute's place among the candidates; one behind them for any GPUs.
    attribute: usize,
    /// MB/s, or less than [`UNKNOWN`] allows.
    worth: u64,
    /// The place of its part of the claim: 0 is the first. A machine to be spared comes after the groups of the others,
    /// and before their GPUs that are in no better group.
    part: u8,
    /// For each state of the machine, whether it can give such a set.
    serves: Vec<bool>,
}

/// An alternative in the making: entries of one class with one attribute.
struct Draft<'a> {
    attribute: usize,
    entries: Vec<&'a Entry>,
}

impl<'a> Draft<'a> {
    fn of_kind(&self, kind: usize) -> Option<&'a Entry> {
        self.entries.iter().copied().find(|entry| entry.kind == kind)
    }

    fn worth(&self) -> u64 {
        self.entries.iter().map(|entry| entry.worth).min().unwrap_or(0)
    }
}

/// The requests of a claim for the fleet that the options name. Says on standard error what each alternative is.
pub(super) fn devices(gpus: u8, nodes: &[String], fleet: &FleetArgs, strict: bool) -> Result<Devices> {
    let kinds = of_fleet(gpus, nodes, fleet)?;
    let entries = entries(gpus, &kinds, fleet.spare_nvswitch);
    let drafts = drafts(&entries, &kinds, gpus, strict);
    ensure!(
        !strict || gpus == 1 || !drafts.is_empty(),
        "--strict: no machine of this fleet has a group of {gpus} GPUs"
    );
    let alternatives = alternatives(&drafts, &entries, &kinds, gpus);
    complain("linkwise", notes(&drafts, &alternatives, &kinds));
    Ok(in_groups(gpus, &alternatives, strict))
}

/// The specification of a claim for this number of GPUs on the nodes of these slices.
pub fn fleet_claim(gpus: u8, slices: &[Value]) -> Result<Value, serde_json::Error> {
    let kinds = kinds(slices, gpus, &[]);
    let entries = entries(gpus, &kinds, false);
    let alternatives = alternatives(&drafts(&entries, &kinds, gpus, false), &entries, &kinds, gpus);
    serde_json::to_value(in_groups(gpus, &alternatives, false).spec())
}

/// All entries, by what they are worth. One GPU has none.
fn entries(gpus: u8, kinds: &[Kind], spare_nvswitch: bool) -> Vec<Entry> {
    let names = candidates(gpus);
    let mut entries = Vec::new();
    for (number, kind) in kinds.iter().enumerate().filter(|_| gpus > 1) {
        let named = kind.claims.iter().filter_map(|claim| {
            let is_tier = kind.alternatives.contains(&claim.name);
            let by_tier = is_tier.then(|| UNKNOWN.saturating_sub(tier(&claim.name).saturating_sub(1)).max(1));
            let attribute = names.iter().position(|name| *name == claim.name)?;
            let groups = kind.attributes.iter().find(|groups| groups.name == claim.name)?;
            Some((attribute, claim.promised.or(by_tier)?, groups.serves(kind.gpus, gpus.into())))
        });
        let any = (names.len(), kind.least.unwrap_or(0), kind.any().serves(kind.gpus, gpus.into()));
        let entry = |(attribute, worth, serves)| Entry { kind: number, attribute, worth, part: 0, serves };
        entries.extend(named.chain([any]).map(entry));
    }
    // A selector cannot tell machines with one model of GPU apart: an attribute is worth what it is on the worst of them.
    let mut least: BTreeMap<(Option<&str>, usize), u64> = BTreeMap::new();
    let product = |entry: &Entry| kinds.get(entry.kind).and_then(|kind| kind.product.as_deref());
    for entry in &entries {
        let worth = least.entry((product(entry), entry.attribute)).or_insert(entry.worth);
        *worth = (*worth).min(entry.worth);
    }
    for entry in &mut entries {
        entry.worth = least.get(&(product(entry), entry.attribute)).copied().unwrap_or(entry.worth);
        let Some(kind) = kinds.get(entry.kind).filter(|_| spare_nvswitch) else { continue };
        let is_group = kind.best == kind.least || kind.least.is_none_or(|least| entry.worth > least);
        entry.part = if kind.is_switched {
            1
        } else if is_group {
            0
        } else {
            2
        };
    }
    // Of equal ones that with which a set is found most often comes first, and makes the others superfluous.
    let served = |entry: &Entry| entry.serves.iter().filter(|serves| **serves).count();
    entries.sort_by_key(|entry| (entry.part, Reverse(entry.worth), Reverse(served(entry))));
    entries
}

/// The alternatives of a claim: by class and attribute, the best first, no more than it has room for, and none that gains
/// little.
fn drafts<'a>(entries: &'a [Entry], kinds: &[Kind], gpus: u8, strict: bool) -> Vec<Draft<'a>> {
    let any = candidates(gpus).len();
    let mut by_class: BTreeMap<(usize, usize), Draft<'a>> = BTreeMap::new();
    let (mut class, mut first): (usize, Option<&Entry>) = (0, None);
    let mut served: BTreeMap<usize, Vec<bool>> = BTreeMap::new();
    for entry in entries {
        let before = served.entry(entry.kind).or_insert_with(|| vec![false; entry.serves.len()]);
        let adds = before.iter().zip(&entry.serves).any(|(before, serves)| *serves && !before);
        let is_best = kinds.get(entry.kind).is_some_and(|kind| kind.least.is_some() && kind.least == kind.best);
        if !adds || (strict && entry.attribute == any && !is_best) {
            continue;
        }
        before.iter_mut().zip(&entry.serves).for_each(|(before, serves)| *before |= serves);
        let is_alike = |first: &Entry| first.part == entry.part && entry.worth * 100 >= first.worth * ALIKE;
        if !first.is_some_and(is_alike) {
            class += 1;
            first = Some(entry);
        }
        let draft = || Draft { attribute: entry.attribute, entries: Vec::new() };
        by_class.entry((class, entry.attribute)).or_insert_with(draft).entries.push(entry);
    }
    let mut drafts: Vec<Draft<'a>> = by_class.into_values().collect();
    // The worst GPUs of the fleet are what a claim's last alternative takes: any.
    if !strict && drafts.last().is_some_and(|last| last.attribute == any) {
        drafts.pop();
    }
    let floor = entries.iter().map(|entry| entry.worth).min().unwrap_or(0);
    let all = seen(&drafts.iter().collect::<Vec<_>>(), kinds, entries, floor);
    loop {
        let without = |at: usize| {
            let rest = drafts.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, draft)| draft);
            seen(&rest.collect::<Vec<_>>(), kinds, entries, floor)
        };
        // Of equals the last goes.
        let Some((left, at)) = (0..drafts.len()).map(|at| (without(at), at)).max() else { break };
        let has_room = drafts.len() <= MOST_ALTERNATIVES - usize::from(!strict);
        if has_room && left * 1000 < all * WORTH_IT {
            break;
        }
        drafts.remove(at);
    }
    drafts
}

/// What the scheduler sees by these alternatives: over all nodes and their states the share of the node's best, summed,
/// in per mille. Sets of no alternative count as the worst of the fleet.
fn seen(drafts: &[&Draft<'_>], kinds: &[Kind], entries: &[Entry], floor: u64) -> u64 {
    let of_kind = |(number, kind): (usize, &Kind)| {
        let own = || entries.iter().filter(|entry| entry.kind == number);
        let best = own().map(|entry| entry.worth).max().unwrap_or(0);
        let states = own().next().map_or(0, |entry| entry.serves.len());
        let listed: Vec<&Entry> = drafts.iter().filter_map(|draft| draft.of_kind(number)).collect();
        let worth = |state: usize| {
            let serves = |entry: &&&Entry| entry.serves.get(state).is_some_and(|serves| *serves);
            listed.iter().find(serves).map_or(floor, |entry| entry.worth)
        };
        let sum: u64 = (0..states).map(worth).sum();
        let mean = (sum * 1000).checked_div(best * states as u64).unwrap_or(0);
        mean * kind.nodes.len() as u64
    };
    kinds.iter().enumerate().map(of_kind).sum()
}

/// The alternatives of a claim: one for each of these, under a name of its own.
fn alternatives(drafts: &[Draft<'_>], entries: &[Entry], kinds: &[Kind], gpus: u8) -> Vec<Alternative> {
    let names = candidates(gpus);
    let mut taken: BTreeMap<usize, usize> = BTreeMap::new();
    let alternative = |(at, draft): (usize, &Draft<'_>)| {
        let times = taken.entry(draft.attribute).or_insert(0);
        *times += 1;
        let attribute = names.get(draft.attribute);
        let name = attribute.map_or("kind", String::as_str).to_ascii_lowercase();
        let name = if *times > 1 { format!("{name}-{times}") } else { name };
        let before = drafts.get(..at).unwrap_or_default();
        let needs_selector = (0..kinds.len()).any(|kind| intrudes(kind, draft, before, entries));
        let products = if needs_selector { models(draft, kinds) } else { BTreeSet::new() };
        Alternative { name, attribute: attribute.cloned(), products }
    };
    drafts.iter().enumerate().map(alternative).collect()
}

/// Returns true if a node of this kind could take the alternative although it is not for this kind.
fn intrudes(kind: usize, draft: &Draft<'_>, before: &[Draft<'_>], entries: &[Entry]) -> bool {
    if draft.of_kind(kind).is_some() {
        return false;
    }
    let own: Vec<&Entry> = before.iter().filter_map(|draft| draft.of_kind(kind)).collect();
    let by_attribute = entries.iter().find(|entry| entry.kind == kind && entry.attribute == draft.attribute);
    by_attribute.is_some_and(|entry| {
        let is_served = |state: usize| own.iter().any(|own| own.serves.get(state).is_some_and(|serves| *serves));
        entry.serves.iter().enumerate().any(|(state, serves)| *serves && !is_served(state))
    })
}

/// The models of GPU that an alternative is for.
fn models(draft: &Draft<'_>, kinds: &[Kind]) -> BTreeSet<Option<String>> {
    draft.entries.iter().filter_map(|entry| kinds.get(entry.kind)).map(|kind| kind.product.clone()).collect()
}

/// The lines about the alternatives: what each is worth, and where.
fn notes(drafts: &[Draft<'_>], alternatives: &[Alternative], kinds: &[Kind]) -> Vec<String> {
    let title = |entry: &&Entry| kinds.get(entry.kind).map(|kind| excerpt(&kind.title));
    let line = |(draft, alternative): (&Draft<'_>, &Alternative)| {
        let on: Vec<String> = draft.entries.iter().filter_map(title).collect();
        let worth = draft.worth();
        let carries =
            if worth > UNKNOWN { format!("{} or more", bandwidth(worth)) } else { "unknown bandwidth".to_owned() };
        format!("gpus/{}: {carries}, on {}", alternative.name, on.join("; "))
    };
    let unknown = kinds.iter().filter(|kind| kind.best.is_none() && kind.gpus > 1).map(|kind| {
        let title = excerpt(&kind.title);
        format!("{title}: what its groups carry is unknown, so they come last; give the file that linkwise snapshot writes there to --node")
    });
    drafts.iter().zip(alternatives).map(line).chain(unknown).collect()
}
