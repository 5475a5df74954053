//! Exact claims: one request with one constraint, and which attribute that is.
//!
//! The attribute is the one that most nodes of a fleet meet at their best. A fleet is one machine (`--node`), or the
//! nodes of a cluster, read from their ResourceSlices (`--cluster`). What such a claim gives up against alternatives goes
//! to standard error.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Asked, Devices, GPUS, OURS, any_groups, asked, constraint, numbered, request};
use crate::config::{FleetArgs, Near};
use linkwise_cluster::all_slices;
use linkwise_core::allocation::GpuSet;
use linkwise_core::publish::dra::exact::{ExactClaim, GroupAttribute, NVLINK_DOMAIN, Valued, of};
use linkwise_core::publish::dra::{GpuLayout, GroupSize};
use linkwise_core::quote::excerpt;
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines;
use linkwise_system::block_on;
use linkwise_system::output::{complain, open};

/// The longest file of slices, in bytes: some 20,000 nodes.
const LONGEST_FILE: u64 = 256 << 20;

/// The most nodes that a line names.
const MOST_NAMES: usize = 5;

/// The worth of a set that is the best of its machine.
const BEST: u64 = 1000;

/// Nodes whose GPUs are in the same groups.
struct Kind {
    /// The machine, or the GPUs of the nodes.
    title: String,
    nodes: Vec<String>,
    /// All attributes of its GPUs.
    attributes: Vec<GroupAttribute>,
    /// The claims of the asked size, by each attribute that can meet them.
    claims: Vec<ExactClaim>,
    /// The attributes that a claim with alternatives lists.
    alternatives: Vec<String>,
    /// The best collective of so many GPUs, MB/s; `None` where slices alone are known.
    best: Option<u64>,
}

impl Kind {
    fn claim(&self, name: &str) -> Option<&ExactClaim> {
        self.claims.iter().find(|claim| claim.name == name)
    }

    /// The worth of what a claim is promised, of [`BEST`]. Where bandwidths are unknown, by the tier in the name; any GPUs
    /// of a larger group may be worth nothing.
    fn worth(&self, claim: &ExactClaim) -> u64 {
        match (claim.promised, self.best) {
            (Some(promised), Some(best)) => (promised * BEST).checked_div(best).unwrap_or(BEST),
            _ if self.alternatives.contains(&claim.name) => BEST / tier(&claim.name),
            _ => 0,
        }
    }
}

/// The tier of an attribute: 1 is the best.
fn tier(name: &str) -> u64 {
    let digits: String = name.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(1).max(1)
}

/// The attribute for an exact claim of so many GPUs; `None` for one GPU, which needs no group. Says on standard error what
/// such a claim gives up, if the fleet is known.
pub(super) fn group(gpus: u8, node: Option<&str>, fleet: &FleetArgs) -> Result<Option<String>> {
    let names = candidates(gpus);
    let Some(first) = names.first() else { return Ok(None) };
    let kinds = match (node, fleet.cluster.as_deref()) {
        (Some(node), _) => vec![machine(node, gpus)?],
        (None, Some("")) => {
            let slices = block_on(async { Ok(all_slices(fleet.api.access()?).await?) });
            kinds(&slices.context("cannot read the ResourceSlices of the cluster")?, gpus)
        }
        (None, Some(file)) => kinds(&slices_of(Path::new(file))?, gpus),
        (None, None) => return Ok(Some(first.clone())),
    };
    ensure!(!kinds.is_empty(), "--cluster: no node publishes whole GPUs in a ResourceSlice of {GPUS}");
    let chosen = choose(&names, &kinds).with_context(|| no_group(gpus, &kinds))?;
    complain("linkwise", notes(chosen, gpus, &kinds));
    Ok(Some(chosen.to_owned()))
}

/// The specification of an exact claim for this number of GPUs on the nodes of these slices.
pub fn exact_claim(gpus: u8, slices: &[Value]) -> Result<Value, serde_json::Error> {
    let names = candidates(gpus);
    let chosen = choose(&names, &kinds(slices, gpus)).or(names.first().map(String::as_str));
    serde_json::to_value(devices(gpus, chosen).spec())
}

/// The attributes with groups of so many GPUs or more: where all GPUs are alike, claims find a set in a larger group more
/// often.
fn candidates(gpus: u8) -> Vec<String> {
    let sizes = GroupSize::ALL.into_iter().filter(|size| gpus > 1 && size.gpus() >= usize::from(gpus));
    let largest = (gpus > 1).then(|| NVLINK_DOMAIN.to_owned());
    sizes.flat_map(GroupSize::names).chain(largest).collect()
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

/// The attribute that most nodes meet at their best; of equal ones that with the best promise, then that with which claims
/// wait least.
fn choose<'a>(names: &'a [String], kinds: &[Kind]) -> Option<&'a str> {
    let rank = |name: &str| {
        let of_kind = |kind: &Kind| {
            let claim = kind.claim(name)?;
            Some((kind.nodes.len() as u64, kind.worth(claim), claim.waits_per_mille()))
        };
        let (mut at_best, mut worth, mut waits) = (0, 0, 0);
        for (nodes, share, waiting) in kinds.iter().filter_map(of_kind) {
            at_best += if share >= BEST { nodes } else { 0 };
            worth += share * nodes;
            waits += waiting * nodes;
        }
        (at_best, worth, Reverse(waits))
    };
    // Of equals the last counts for `max_by_key`.
    let is_there = |name: &&&str| kinds.iter().any(|kind| kind.claim(name).is_some());
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.iter().rev().filter(is_there).max_by_key(|name| rank(name)).copied()
}

/// A built-in machine, or a file.
fn machine(node: &str, gpus: u8) -> Result<Kind> {
    let (topology, _) = NodeTopology::assemble(&machines::load(node)?.observed);
    Ok(assembled(node.to_owned(), topology, gpus))
}

fn assembled(title: String, topology: NodeTopology, gpus: u8) -> Kind {
    let all: GpuSet = (0..topology.gpus().len()).collect();
    let tables = super::super::tables(topology);
    let layout = GpuLayout::of(&tables, all);
    let valued = Valued::new(&tables, &layout);
    let best = valued.best_of_all(gpus.into());
    let nodes = vec![title.clone()];
    let kind = Kind { title, nodes, best, ..Kind::of(GroupAttribute::all_of(&layout)) };
    kind.with_claims(layout.order.len(), gpus, Some(&valued))
}

impl Kind {
    fn of(attributes: Vec<GroupAttribute>) -> Self {
        let (nodes, claims, alternatives) = Default::default();
        Self { title: String::new(), nodes, attributes, claims, alternatives, best: None }
    }

    fn with_claims(mut self, all: usize, gpus: u8, valued: Option<&Valued<'_>>) -> Self {
        self.alternatives = any_groups(gpus);
        let named = |names: &[String]| -> Vec<GroupAttribute> {
            let find = |name: &String| self.attributes.iter().find(|attribute| attribute.name == *name).cloned();
            names.iter().filter_map(find).collect()
        };
        let (attributes, alternatives) = (named(&candidates(gpus)), named(&self.alternatives));
        self.claims = of(&attributes, &alternatives, (all, gpus.into()), valued);
        self
    }
}

/// A built-in machine with as many GPUs of this model, in the same groups: what they carry is known.
fn known(product: &str, all: usize, attributes: &[GroupAttribute], gpus: u8) -> Option<Kind> {
    machines::built_in().find_map(|machine| {
        let (topology, _) = NodeTopology::assemble(&machines::load(machine.name).ok()?.observed);
        let is_like = topology.gpus().first()?.model.as_deref() == Some(product) && topology.gpus().len() == all;
        let kind = is_like.then(|| assembled(machine.name.to_owned(), topology, gpus))?;
        (kind.attributes == attributes).then_some(kind)
    })
}

/// The slices in a file: a list of objects, or one.
fn slices_of(path: &Path) -> Result<Vec<Value>> {
    let name = if path == Path::new("-") { "standard input".to_owned() } else { path.display().to_string() };
    let mut text = String::new();
    let mut file = open(path)?.take(LONGEST_FILE + 1);
    file.read_to_string(&mut text).with_context(|| format!("cannot read {name}"))?;
    ensure!(text.len() as u64 <= LONGEST_FILE, "{name} is longer than {} MiB", LONGEST_FILE >> 20);
    let object: Value = match text.trim_start().starts_with('{') {
        true => serde_json::from_str(&text).with_context(|| format!("{name} is no JSON"))?,
        false => serde_saphyr::from_str(&text).with_context(|| format!("{name} is no YAML"))?,
    };
    let objects = object["items"].as_array().cloned().unwrap_or_else(|| vec![object]);
    let is_slice = |object: &Value| object["kind"] == "ResourceSlice" || object["spec"]["pool"].is_object();
    ensure!(
        objects.iter().all(is_slice),
        "{name}: expected ResourceSlices, as kubectl get resourceslices -o json prints"
    );
    Ok(objects)
}

/// The nodes of these slices, by what they publish.
fn kinds(slices: &[Value], gpus: u8) -> Vec<Kind> {
    let mut pools: BTreeMap<(&str, &str), Vec<&Value>> = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice["spec"]["driver"] == GPUS) {
        let text = |value: &'static str| slice["spec"].pointer(value).and_then(Value::as_str).unwrap_or_default();
        pools.entry((text("/nodeName"), text("/pool/name"))).or_default().push(slice);
    }
    let mut by_groups: BTreeMap<(String, usize, Vec<GroupAttribute>), Vec<String>> = BTreeMap::new();
    for ((node, _), slices) in pools {
        let devices = devices_of(slices);
        let Some(first) = devices.first() else { continue };
        let product = first["attributes"]["productName"]["string"].as_str().map(excerpt);
        let attributes = attributes_of(&devices);
        let key = (product.unwrap_or_else(|| "GPUs".to_owned()), devices.len(), attributes);
        by_groups.entry(key).or_default().push(excerpt(node));
    }
    let kind = |((product, all, attributes), nodes): ((String, usize, Vec<GroupAttribute>), Vec<String>)| {
        let title = format!("{} of {all} {product}", counted(nodes.len(), "node"));
        match known(&product, all, &attributes, gpus) {
            Some(known) => Kind { title: format!("{title}, as {}", known.title), nodes, ..known },
            None => Kind { title, nodes, ..Kind::of(attributes) }.with_claims(all, gpus, None),
        }
    };
    by_groups.into_iter().map(kind).collect()
}

/// The GPUs of a pool that new claims can have, in the order in which the scheduler tries them. A pool that is being
/// rewritten has none.
fn devices_of(mut slices: Vec<&Value>) -> Vec<&Value> {
    let pool = |slice: &Value, field: &str| slice["spec"]["pool"][field].as_u64().unwrap_or(0);
    let newest = slices.iter().map(|slice| pool(slice, "generation")).max().unwrap_or(0);
    slices.retain(|slice| pool(slice, "generation") == newest);
    let is_whole = slices.first().is_none_or(|slice| slices.len() as u64 >= pool(slice, "resourceSliceCount"));
    slices.sort_by_key(|slice| slice["metadata"]["name"].as_str());
    let devices = slices.into_iter().filter(|_| is_whole).flat_map(|slice| slice["spec"]["devices"].as_array());
    let is_free = |device: &&Value| {
        let has_taints = device["taints"].as_array().is_some_and(|taints| !taints.is_empty());
        device["attributes"]["type"]["string"] == "gpu" && !has_taints
    };
    devices.flatten().filter(is_free).collect()
}

/// The groups of devices, by the values of their attributes.
fn attributes_of(devices: &[&Value]) -> Vec<GroupAttribute> {
    let names = GroupSize::ALL.into_iter().flat_map(GroupSize::names).chain([NVLINK_DOMAIN.to_owned()]);
    let attribute = |name: String| {
        let mut groups: BTreeMap<&str, GpuSet> = BTreeMap::new();
        for (place, device) in devices.iter().enumerate() {
            if let Some(value) = device["attributes"][format!("{OURS}/{name}")]["string"].as_str() {
                let group = groups.entry(value).or_default();
                *group = group.union(GpuSet::of(place));
            }
        }
        (!groups.is_empty()).then(|| GroupAttribute { name, groups: groups.into_values().collect() })
    };
    names.filter_map(attribute).collect()
}

/// The reason why no attribute fits, with the groups that there are.
fn no_group(gpus: u8, kinds: &[Kind]) -> String {
    let has = |kind: &Kind| {
        let group = |attribute: &GroupAttribute| {
            let largest = attribute.groups.iter().map(|group| group.len()).max().unwrap_or(0);
            format!("{} of up to {largest}", attribute.name)
        };
        let groups: Vec<String> = kind.attributes.iter().map(group).collect();
        let groups = if groups.is_empty() { "no groups".to_owned() } else { groups.join(", ") };
        format!("{}: {groups}", kind.title)
    };
    let has: Vec<String> = kinds.iter().map(has).collect();
    format!("--exact: there is no group of {gpus} GPUs; {}", has.join("; "))
}

/// The lines about a chosen attribute: what a claim gets, and what it gives up.
fn notes(chosen: &str, gpus: u8, kinds: &[Kind]) -> Vec<String> {
    let nodes: usize = kinds.iter().map(|kind| kind.nodes.len()).sum();
    let with = kinds.iter().filter(|kind| kind.claim(chosen).is_some()).map(|kind| kind.nodes.len()).sum::<usize>();
    let mut lines = Vec::new();
    if nodes > 1 {
        lines.push(format!("{OURS}/{chosen}: {gpus} GPUs of one group on {with} of {}", counted(nodes, "node")));
    }
    for kind in kinds {
        let Some(claim) = kind.claim(chosen) else {
            let names = kind.nodes.iter().take(MOST_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = if kind.nodes.len() > MOST_NAMES { ", ..." } else { "" };
            lines.push(format!("{} ({names}{more}): no {OURS}/{chosen}, so no such claim", kind.title));
            continue;
        };
        lines.extend(of_kind(kind, claim, gpus));
    }
    lines
}

fn of_kind(kind: &Kind, claim: &ExactClaim, gpus: u8) -> Vec<String> {
    let title = &kind.title;
    let mut gets =
        format!("{title}: {OURS}/{} has room for {} of {gpus} GPUs", claim.name, counted(claim.sets, "claim"));
    if let (Some(promised), Some(best)) = (claim.promised, kind.best) {
        gets += &format!(", {} each or more, where the best {gpus} have {}", bandwidth(promised), bandwidth(best));
    }
    if claim.waits == 0 && claim.share.is_none_or(|share| share == BEST) {
        let alike = if claim.share.is_some() { ", and gets the best that is free" } else { "" };
        return vec![gets, format!("{title}: against alternatives it waits in no state{alike}")];
    }
    let others = kind.claims.iter().filter(|other| other.name != claim.name && kind.alternatives.contains(&other.name));
    let others = others.map(|other| match other.promised {
        Some(promised) => format!("{} ({})", other.name, bandwidth(promised)),
        None => other.name.clone(),
    });
    let others: Vec<String> = others.chain(["GPUs without a common group".to_owned()]).collect();
    let mut gives = format!(
        "{title}: against alternatives it waits in {} of the states with {gpus} free GPUs or more",
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

fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

fn bandwidth(mbps: u64) -> String {
    let tenths = mbps % 1000 / 100;
    if tenths == 0 { format!("{} GB/s", mbps / 1000) } else { format!("{}.{tenths} GB/s", mbps / 1000) }
}

fn percent(mille: u64) -> String {
    format!("{}.{} %", mille / 10, mille % 10)
}
