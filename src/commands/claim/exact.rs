//! Exact claims: one request with one constraint, and which attribute that is.
//!
//! The attribute is the one that the machine meets best. What such a claim gives up against alternatives goes to standard
//! error.

use std::cmp::Reverse;

use anyhow::{Context, Result};
use serde_json::Value;

use super::{Asked, Devices, GPUS, OURS, any_groups, asked, constraint, numbered, request};
use crate::config::Near;
use linkwise_core::allocation::AllocationTables;
use linkwise_core::publish::dra::exact::{ExactClaim, GroupAttribute, NVLINK_DOMAIN, Valued, of};
use linkwise_core::publish::dra::{GpuLayout, GroupSize};
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines;
use linkwise_system::output::complain;

/// The worth of a set that is the best of its machine.
const BEST: u64 = 1000;

/// What a machine can give to claims of one size.
struct Machine {
    name: String,
    /// All attributes of its GPUs.
    attributes: Vec<GroupAttribute>,
    /// The claims of the asked size, by each attribute that can meet them.
    claims: Vec<ExactClaim>,
    /// The attributes that a claim with alternatives lists.
    alternatives: Vec<String>,
    /// The best collective of so many GPUs, MB/s.
    best: Option<u64>,
}

impl Machine {
    fn new(name: &str, tables: &AllocationTables, gpus: u8) -> Self {
        let layout = GpuLayout::of(tables, (0..tables.topology().gpus().len()).collect());
        let valued = Valued::new(tables, &layout);
        let attributes = GroupAttribute::all_of(&layout);
        let named = |names: &[String]| -> Vec<GroupAttribute> {
            let find = |name: &String| attributes.iter().find(|attribute| attribute.name == *name).cloned();
            names.iter().filter_map(find).collect()
        };
        let alternatives = any_groups(gpus);
        let claims = of(&named(&candidates(gpus)), &named(&alternatives), gpus.into(), &valued);
        Self { name: name.to_owned(), best: valued.best_of_all(gpus.into()), attributes, claims, alternatives }
    }

    /// The claim that is promised most; of equal ones that which waits least, then the first of the candidates.
    fn choose(&self) -> Option<&ExactClaim> {
        let worth = |claim: &ExactClaim| match (claim.promised, self.best) {
            (Some(promised), Some(best)) => (promised * BEST).checked_div(best).unwrap_or(BEST),
            _ => 0,
        };
        // Of equals the last counts for `max_by_key`.
        self.claims.iter().rev().max_by_key(|claim| (worth(claim), Reverse(claim.waits_per_mille())))
    }

    /// The reason why no attribute fits, with the groups that there are.
    fn no_group(&self, gpus: u8) -> String {
        let group = |attribute: &GroupAttribute| {
            let largest = attribute.groups.iter().map(|group| group.len()).max().unwrap_or(0);
            format!("{} of up to {largest}", attribute.name)
        };
        let groups: Vec<String> = self.attributes.iter().map(group).collect();
        let groups = if groups.is_empty() { "no groups".to_owned() } else { groups.join(", ") };
        format!("--exact: there is no group of {gpus} GPUs; {}: {groups}", self.name)
    }

    /// The lines about a claim: what it gets, and what it gives up.
    fn notes(&self, claim: &ExactClaim, gpus: u8) -> Vec<String> {
        let name = &self.name;
        let room = if claim.sets == 1 { "1 claim".to_owned() } else { format!("{} claims", claim.sets) };
        let mut gets = format!("{name}: {OURS}/{} has room for {room} of {gpus} GPUs", claim.name);
        if let (Some(promised), Some(best)) = (claim.promised, self.best) {
            gets += &format!(", {} each or more, where the best {gpus} have {}", bandwidth(promised), bandwidth(best));
        }
        if claim.waits == 0 && claim.share.is_none_or(|share| share == BEST) {
            let alike = if claim.share.is_some() { ", and gets the best that is free" } else { "" };
            return vec![gets, format!("{name}: against alternatives it waits in no state{alike}")];
        }
        let others = self.claims.iter().filter(|other| other.name != claim.name);
        let others = others.filter(|other| self.alternatives.contains(&other.name)).map(|other| match other.promised {
            Some(promised) => format!("{} ({})", other.name, bandwidth(promised)),
            None => other.name.clone(),
        });
        let others: Vec<String> = others.chain(["GPUs without a common group".to_owned()]).collect();
        let mut gives = format!(
            "{name}: against alternatives it waits in {} of the states with {gpus} free GPUs or more",
            percent(claim.waits_per_mille())
        );
        if let Some(forgone) = claim.forgone {
            gives += &format!(", where they get {} of the best that is free", percent(forgone));
        }
        if let Some(share) = claim.share {
            gives += &format!("; in the others it gets {} of that best", percent(share));
        }
        vec![gets, gives + "; it never gets " + &others.join(", ")]
    }
}

/// The attributes with groups of so many GPUs or more: where all GPUs are alike, claims find a set in a larger group more
/// often.
fn candidates(gpus: u8) -> Vec<String> {
    let sizes = GroupSize::ALL.into_iter().filter(|size| gpus > 1 && size.gpus() >= usize::from(gpus));
    let largest = (gpus > 1).then(|| NVLINK_DOMAIN.to_owned());
    sizes.flat_map(GroupSize::names).chain(largest).collect()
}

/// The attribute for an exact claim of so many GPUs; `None` for one GPU, which needs no group. Says on standard error what
/// such a claim gives up, if the machine is known.
pub(super) fn group(gpus: u8, node: Option<&str>) -> Result<Option<String>> {
    let Some(first) = candidates(gpus).into_iter().next() else { return Ok(None) };
    let Some(node) = node else { return Ok(Some(first)) };
    let (topology, _) = NodeTopology::assemble(&machines::load(node)?.observed);
    let machine = Machine::new(node, &super::super::tables(topology), gpus);
    let chosen = machine.choose().with_context(|| machine.no_group(gpus))?;
    complain("linkwise", machine.notes(chosen, gpus));
    Ok(Some(chosen.name.clone()))
}

/// The specification of an exact claim for this number of GPUs, on nodes of this machine, or of any.
pub fn exact_claim(gpus: u8, machine: Option<&AllocationTables>) -> Result<Value, serde_json::Error> {
    let of_machine = machine.map(|tables| Machine::new("", tables, gpus));
    let chosen = of_machine.as_ref().and_then(Machine::choose).map(|claim| claim.name.clone());
    serde_json::to_value(devices(gpus, chosen.or_else(|| candidates(gpus).into_iter().next()).as_deref()).spec())
}

/// One request, and its constraint.
pub(super) fn devices(gpus: u8, group: Option<&str>) -> Devices {
    let constraints = group.map(|group| constraint(vec!["gpus".to_owned()], format!("{OURS}/{group}")));
    Devices { requests: vec![request("gpus", asked(GPUS, gpus))], constraints: constraints.into_iter().collect() }
}

/// GPUs with a request each, beside other devices, and in one group if one is named.
pub(super) fn beside(gpus: u8, near: Near, of_gpu: &Asked, group: Option<String>) -> Result<Devices> {
    let mut devices = super::beside(gpus, near, of_gpu)?;
    let requests = || (0..gpus).map(|number| numbered("gpu", number, gpus)).collect();
    devices.constraints.extend(group.map(|group| constraint(requests(), format!("{OURS}/{group}"))));
    Ok(devices)
}

fn bandwidth(mbps: u64) -> String {
    let tenths = mbps % 1000 / 100;
    if tenths == 0 { format!("{} GB/s", mbps / 1000) } else { format!("{}.{tenths} GB/s", mbps / 1000) }
}

fn percent(mille: u64) -> String {
    format!("{}.{} %", mille / 10, mille % 10)
}
