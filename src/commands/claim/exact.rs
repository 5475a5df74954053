//! Exact claims: one request with one constraint, whose attribute this module chooses.
//!
//! It chooses the attribute that promises the best set of GPUs on the most nodes of the fleet. A comparison with a
//! claim with alternatives goes to standard error.

use std::cmp::Reverse;

use anyhow::{Context, Result};
use serde_json::Value;

use super::kinds::{BEST, Kind, bandwidth, candidates, kinds, of_fleet};
use super::{Devices, GPUS, OURS, constraint, plain};
use crate::config::FleetArgs;
use linkwise_core::publish::dra::exact::{ExactClaim, GroupAttribute};
use linkwise_core::words::count;
use linkwise_system::output::complain;

/// The most nodes that a line names.
const MAX_NAMES: usize = 5;

/// The attribute for an exact claim of `gpus` GPUs; `None` for one GPU, which needs no group. If the fleet is known, a
/// comparison with alternatives goes to standard error.
pub(super) fn group(gpus: u8, nodes: &[String], fleet: &FleetArgs) -> Result<Option<String>> {
    let names = candidates(gpus);
    let kinds = of_fleet(gpus, nodes, fleet)?;
    let Some(first) = names.first() else { return Ok(None) };
    if kinds.is_empty() {
        return Ok(Some(first.clone()));
    }
    let chosen = choose(&names, &kinds).with_context(|| no_group(gpus, &kinds))?;
    complain("linkwise", notes(chosen, gpus, &kinds));
    Ok(Some(chosen.to_owned()))
}

/// The specification of an exact claim for this number of GPUs on the nodes of these slices.
pub fn exact_claim(gpus: u8, slices: &[Value]) -> Result<Value, serde_json::Error> {
    let names = candidates(gpus);
    let chosen = choose(&names, &kinds(slices, gpus, &[]).0).or(names.first().map(String::as_str));
    serde_json::to_value(devices(gpus, chosen).spec())
}

/// One request, and its constraint.
pub(super) fn devices(gpus: u8, group: Option<&str>) -> Devices {
    let constraints = group.map(|group| constraint(vec!["gpus".to_owned()], format!("{OURS}/{group}")));
    Devices { constraints: constraints.into_iter().collect(), ..Devices::one("gpus", plain(GPUS, gpus)) }
}

/// The attribute that promises the best set on the most nodes. Between equal ones the higher sum of promised worth over
/// all nodes decides, then the lower share of states (sets of free GPUs) in which a claim waits.
fn choose<'a>(names: &'a [String], kinds: &[Kind]) -> Option<&'a str> {
    let rank = |name: &str| {
        let (mut at_best, mut worth, mut waits) = (0, 0, 0);
        for (kind, claim) in kinds.iter().filter_map(|kind| Some((kind, kind.claim(name)?))) {
            let (nodes, share) = (kind.nodes.len() as u64, kind.worth(claim));
            at_best += if share >= BEST { nodes } else { 0 };
            worth += share * nodes;
            waits += claim.waits_per_mille() * nodes;
        }
        (at_best, worth, Reverse(waits))
    };
    // `max_by_key` returns the last of equally good names, so the reversed order makes the first one win.
    let exists = |name: &&str| kinds.iter().any(|kind| kind.claim(name).is_some());
    names.iter().rev().map(String::as_str).filter(exists).max_by_key(|name| rank(name))
}

/// The error if no attribute fits, with the existing groups.
fn no_group(gpus: u8, kinds: &[Kind]) -> String {
    let groups_of = |kind: &Kind| {
        let group = |attribute: &GroupAttribute| {
            let largest = attribute.groups.iter().map(|group| group.len()).max().unwrap_or(0);
            format!("{} of up to {largest} GPUs", attribute.name)
        };
        let groups: Vec<String> = kind.attributes.iter().map(group).collect();
        let groups = if groups.is_empty() { "no groups".to_owned() } else { groups.join(", ") };
        format!("{}: {groups}", kind.title)
    };
    let groups: Vec<String> = kinds.iter().map(groups_of).collect();
    format!("--exact: no group has {gpus} GPUs ({})", groups.join("; "))
}

/// The lines about a chosen attribute: what a claim gets, and what it gives up.
fn notes(chosen: &str, gpus: u8, kinds: &[Kind]) -> Vec<String> {
    let nodes: usize = kinds.iter().map(|kind| kind.nodes.len()).sum();
    let with: usize = kinds.iter().filter(|kind| kind.claim(chosen).is_some()).map(|kind| kind.nodes.len()).sum();
    let mut lines = Vec::new();
    if nodes > 1 {
        lines.push(format!("{OURS}/{chosen}: {gpus} GPUs of one group on {with} of {}", count(nodes, "node")));
    }
    for kind in kinds {
        let Some(claim) = kind.claim(chosen) else {
            let names = kind.nodes.iter().take(MAX_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = if kind.nodes.len() > MAX_NAMES { ", ..." } else { "" };
            lines.push(format!("{} ({names}{more}): no {OURS}/{chosen}, so the claim gets no GPUs there", kind.title));
            continue;
        };
        lines.extend(comparison(kind, claim, gpus));
    }
    lines
}

/// The lines about a claim on one kind of node: what it gets, and how it compares with alternatives.
fn comparison(kind: &Kind, claim: &ExactClaim, gpus: u8) -> Vec<String> {
    let title = &kind.title;
    let mut gets = format!("{title}: {OURS}/{} has room for {} of {gpus} GPUs", claim.name, count(claim.sets, "claim"));
    if let (Some(promised), Some(best)) = (claim.promised, kind.best) {
        gets += &format!(", each with {} or more; the best {gpus} GPUs have {}", bandwidth(promised), bandwidth(best));
    }
    if claim.waits == 0 && claim.share.is_none_or(|share| share == BEST) {
        let and_best = if claim.share.is_some() { ", and gets the best free ones" } else { "" };
        return vec![gets, format!("{title}: the claim never waits while {gpus} GPUs are free{and_best}")];
    }
    let others = kind.claims.iter().filter(|other| other.name != claim.name && kind.alternatives.contains(&other.name));
    let others = others.map(|other| match other.promised {
        Some(promised) => format!("{} ({})", other.name, bandwidth(promised)),
        None => other.name.clone(),
    });
    let others: Vec<String> = others.chain(["GPUs without a common group".to_owned()]).collect();
    let mut gives = format!(
        "{title}: the claim waits in {} of the states with {gpus} or more free GPUs",
        percent(claim.waits_per_mille())
    );
    if let Some(forgone) = claim.forgone {
        gives += &format!(", where alternatives get {} of the best free bandwidth", percent(forgone));
    }
    if let Some(share) = claim.share {
        gives += &format!("; in the other states it gets {} of the best free bandwidth", percent(share));
    }
    vec![gets, gives + "; it never gets " + &others.join(", ")]
}

fn percent(mille: u64) -> String {
    format!("{}.{} %", mille / 10, mille % 10)
}
