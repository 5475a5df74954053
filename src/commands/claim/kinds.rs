//! The kinds of node of a fleet, and what each can give to a claim.
//!
//! A fleet is some machines (`--node`), or the nodes of a cluster, read from their ResourceSlices (`--cluster`). Slices
//! do not have the bandwidths of groups. A node gets the bandwidths of a machine, built-in or of `--node`, that has the
//! same number, model and groups of GPUs.
//!
//! [`rails_claim`] makes claims of GPUs on fixed rails. Pods that share a template of such claims get the same rails on
//! each node.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

use super::{Devices, GPUS, OURS, Request, all_groups, of_attribute, plain, request, topology};
use crate::commands::note_unknown_nvlinks;
use crate::config::{ClaimArgs, FleetArgs, Rails};
use linkwise_cluster::all_slices;
use linkwise_core::allocation::GpuSet;
use linkwise_core::publish::dra::exact::{ExactClaim, GroupAttribute, NVLINK_DOMAIN, Valued, of, promised};
use linkwise_core::publish::dra::{GpuLayout, GroupSize};
use linkwise_core::quote::excerpt;
use linkwise_core::topology::NodeTopology;
use linkwise_core::words::{count, gigabytes, ranges};
use linkwise_host::machines;
use linkwise_host::yaml::fault;
use linkwise_system::block_on;
use linkwise_system::output::{complain, open};

/// The worth of a set that is the best of its machine.
pub(super) const BEST: u64 = 1000;

/// The longest file of slices, in bytes: some 20,000 nodes.
const MAX_FILE: u64 = 256 << 20;

/// The most kinds of node that count: those with the most nodes.
const MAX_KINDS: usize = 64;

/// Nodes whose GPUs agree in number, model and groups.
#[derive(Clone, Default)]
pub(super) struct Kind {
    /// The machine's name, or the nodes' number and GPUs.
    pub title: String,
    pub nodes: Vec<String>,
    /// All group attributes of its GPUs.
    pub attributes: Vec<GroupAttribute>,
    /// The exact claims of the requested size, one for each attribute that has a large enough group.
    pub claims: Vec<ExactClaim>,
    /// The attributes that a claim with alternatives lists.
    pub alternatives: Vec<String>,
    /// The best collective of a set of the requested size, MB/s, if it is known.
    pub best: Option<u64>,
    /// The least collective of a set of the requested size, MB/s, if it is known.
    pub least: Option<u64>,
    /// The model of its GPUs, as the attribute `productName` has it.
    pub product: Option<String>,
    /// True if its GPUs are of several models.
    pub is_mixed: bool,
    pub gpus: usize,
}

impl Kind {
    /// All its GPUs as one group.
    pub fn any(&self) -> GroupAttribute {
        GroupAttribute::any(self.gpus)
    }

    pub fn claim(&self, name: &str) -> Option<&ExactClaim> {
        self.claims.iter().find(|claim| claim.name == name)
    }

    /// The worth of the set that a claim is promised: `BEST * promised / best`. With unknown bandwidths the attributes
    /// of alternatives have `BEST / tier`, and others 0, because a set in a larger group may be a bad one.
    pub fn worth(&self, claim: &ExactClaim) -> u64 {
        match (claim.promised, self.best) {
            (Some(promised), Some(best)) => (promised * BEST).checked_div(best).unwrap_or(BEST),
            _ if self.alternatives.contains(&claim.name) => BEST / tier(&claim.name),
            _ => 0,
        }
    }

    fn with_claims(mut self, all: usize, gpus: u8, valued: Option<Valued<'_>>) -> Self {
        self.gpus = all;
        self.alternatives = all_groups(gpus);
        let named = |names: &[String]| -> Vec<GroupAttribute> {
            let find = |name: &String| self.attributes.iter().find(|attribute| attribute.name == *name).cloned();
            names.iter().filter_map(find).collect()
        };
        let (attributes, alternatives) = (named(&candidates(gpus)), named(&self.alternatives));
        self.claims = of(&attributes, &alternatives, (all, gpus.into()), valued);
        self.least = valued.and_then(|valued| promised(&self.any(), gpus.into(), valued));
        self
    }
}

/// The tier in an attribute's name (2 of `quad2a`): 1 is the best.
pub(super) fn tier(name: &str) -> u64 {
    let digits: String = name.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(1).max(1)
}

/// The error about a claim for more GPUs than the largest of the named machines has.
pub(super) fn too_few(gpus: u8, largest: usize) -> String {
    format!("--gpus {gpus} with --node: a claim gets its GPUs on one machine, and the largest has {largest}")
}

/// The kinds of node of the fleet that the options name, for claims of `gpus` GPUs; empty if they name no fleet.
pub(super) fn of_fleet(gpus: u8, nodes: &[String], fleet: &FleetArgs) -> Result<Vec<Kind>> {
    let slices = match fleet.cluster.as_deref() {
        None => {
            let kinds = nodes.iter().map(|node| Ok(kind_of(node.to_owned(), topology(node)?, gpus)));
            let kinds = kinds.collect::<Result<Vec<_>>>()?;
            let largest = kinds.iter().map(|kind| kind.gpus).max();
            ensure!(largest.is_none_or(|all| usize::from(gpus) <= all), too_few(gpus, largest.unwrap_or_default()));
            return Ok(kinds);
        }
        Some("") => {
            let slices = block_on(async { Ok(all_slices(fleet.api.access()?).await?) });
            slices.context("cannot read the ResourceSlices of the cluster")?
        }
        Some(file) => slices_of(Path::new(file))?,
    };
    // Every named machine is read, so that a wrong name is an error.
    nodes.iter().try_for_each(|node| machines::load(node).map(drop))?;
    let (kinds, left) = kinds(&slices, gpus, nodes);
    ensure!(!kinds.is_empty(), "--cluster: no node publishes whole GPUs in a ResourceSlice of {GPUS}");
    if left > 0 {
        complain(
            "linkwise",
            [format!("{left} of the nodes are ignored: there are more than {MAX_KINDS} kinds of node")],
        );
    }
    Ok(kinds)
}

/// The attributes with groups of at least `gpus` GPUs. A larger group has a free set more often, which is as good if
/// all its GPUs are alike.
pub(super) fn candidates(gpus: u8) -> Vec<String> {
    let sizes = GroupSize::ALL.into_iter().filter(|size| gpus > 1 && size.gpus() >= usize::from(gpus));
    let largest = (gpus > 1).then(|| NVLINK_DOMAIN.to_owned());
    sizes.flat_map(GroupSize::names).chain(largest).collect()
}

/// The kind of node that a machine is.
fn kind_of(title: String, topology: NodeTopology, gpus: u8) -> Kind {
    if gpus > 1 {
        note_unknown_nvlinks(&title, &topology);
    }
    let is_known = topology.knows_nvlinks();
    let all: GpuSet = (0..topology.gpus().len()).collect();
    let product = product_of(&topology).map(str::to_owned);
    let is_mixed = topology.gpus().iter().any(|gpu| gpu.model.as_deref() != product.as_deref());
    let tables = crate::commands::tables(topology);
    let layout = GpuLayout::of(&tables, all);
    let best = tables.best_collective(layout.order.iter().copied().collect(), gpus.into()).filter(|_| is_known);
    let nodes = vec![title.clone()];
    let attributes = GroupAttribute::all_of(&layout);
    let kind = Kind { title, nodes, attributes, best, product, is_mixed, ..Kind::default() };
    kind.with_claims(layout.order.len(), gpus, is_known.then_some((&tables, &layout)))
}

fn product_of(topology: &NodeTopology) -> Option<&str> {
    topology.gpus().first()?.model.as_deref()
}

/// A machine whose bandwidths count for nodes with the same GPUs.
struct KnownMachine {
    name: String,
    topology: NodeTopology,
    /// Its kind, computed when it is first needed.
    kind: Option<Kind>,
}

impl KnownMachine {
    /// The machine's kind, if the machine has `all` GPUs of this model in these groups.
    fn as_kind(&mut self, product: Option<&str>, all: usize, attributes: &[GroupAttribute], gpus: u8) -> Option<Kind> {
        if product_of(&self.topology) != product || self.topology.gpus().len() != all {
            return None;
        }
        let kind = self.kind.get_or_insert_with(|| kind_of(self.name.clone(), self.topology.clone(), gpus));
        (kind.attributes == attributes).then(|| kind.clone())
    }
}

/// The known machines: those of `--node`, then the built-in ones.
fn known_machines(nodes: &[String]) -> Vec<KnownMachine> {
    let built_in = machines::built_in().map(|machine| machine.name);
    let known = |name: &str| Some(KnownMachine { name: name.to_owned(), topology: topology(name).ok()?, kind: None });
    nodes.iter().map(String::as_str).chain(built_in).filter_map(known).collect()
}

/// The slices in a file: a list of objects, or one object.
fn slices_of(path: &Path) -> Result<Vec<Value>> {
    let name = if path == Path::new("-") { "standard input".to_owned() } else { path.display().to_string() };
    let mut text = String::new();
    let mut file = open(path)?.take(MAX_FILE + 1);
    file.read_to_string(&mut text).with_context(|| format!("cannot read {name}"))?;
    ensure!(text.len() as u64 <= MAX_FILE, "{name} is longer than {} MiB", MAX_FILE >> 20);
    let object: Value = match text.trim_start().starts_with('{') {
        true => serde_json::from_str(&text).with_context(|| format!("cannot parse {name}"))?,
        false => serde_saphyr::from_str(&text).map_err(|error| anyhow!("cannot parse {name}: {}", fault(&error)))?,
    };
    let objects = object["items"].as_array().cloned().unwrap_or_else(|| vec![object]);
    let is_slice = |object: &Value| object["kind"] == "ResourceSlice" || object["spec"]["pool"].is_object();
    ensure!(
        objects.iter().all(is_slice),
        "{name} is not a list of ResourceSlices; give the output of kubectl get resourceslices -o json"
    );
    Ok(objects)
}

/// The kinds of the nodes of these slices, and the number of nodes of further kinds. `machines` are those of `--node`.
pub(super) fn kinds(slices: &[Value], gpus: u8, machines: &[String]) -> (Vec<Kind>, usize) {
    let mut pools: BTreeMap<(&str, &str), Vec<&Value>> = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice["spec"]["driver"] == GPUS) {
        let text = |value: &'static str| slice["spec"].pointer(value).and_then(Value::as_str).unwrap_or_default();
        pools.entry((text("/nodeName"), text("/pool/name"))).or_default().push(slice);
    }
    type Key = (Option<String>, bool, usize, Vec<GroupAttribute>);
    let mut by_groups: BTreeMap<Key, Vec<String>> = BTreeMap::new();
    for ((node, _), slices) in pools {
        let devices = devices_of(slices);
        let product = |device: &Value| device["attributes"]["productName"]["string"].as_str().map(str::to_owned);
        let Some(first) = devices.first().map(|device| product(device)) else { continue };
        let is_mixed = devices.iter().any(|device| product(device) != first);
        let key = (first, is_mixed, devices.len(), attributes_of(&devices));
        by_groups.entry(key).or_default().push(excerpt(node));
    }
    let mut found: Vec<(Key, Vec<String>)> = by_groups.into_iter().collect();
    found.sort_by_key(|(_, nodes)| Reverse(nodes.len()));
    let left = found.iter().skip(MAX_KINDS).map(|(_, nodes)| nodes.len()).sum();
    found.truncate(MAX_KINDS);
    found.sort_by(|(key, _), (other, _)| key.cmp(other));
    let mut known = known_machines(machines);
    let kind = |((product, is_mixed, all, attributes), nodes): (Key, Vec<String>)| {
        let model = product.as_deref().map_or_else(|| "GPUs".to_owned(), excerpt);
        let title = format!("{} of {all} {model}", count(nodes.len(), "node"));
        let like = |machine: &mut KnownMachine| machine.as_kind(product.as_deref(), all, &attributes, gpus);
        match known.iter_mut().find_map(like).filter(|_| !is_mixed) {
            Some(known) => Kind { title: format!("{title}, as {}", known.title), nodes, ..known },
            None => {
                Kind { title, nodes, attributes, product, is_mixed, ..Kind::default() }.with_claims(all, gpus, None)
            }
        }
    };
    (found.into_iter().map(kind).collect(), left)
}

/// The GPUs of a pool that new claims can have, in the order in which the scheduler tries them. A pool that is being
/// rewritten has none.
fn devices_of(mut slices: Vec<&Value>) -> Vec<&Value> {
    let pool = |slice: &Value, field: &str| slice["spec"]["pool"][field].as_u64().unwrap_or(0);
    let newest = slices.iter().map(|slice| pool(slice, "generation")).max().unwrap_or(0);
    slices.retain(|slice| pool(slice, "generation") == newest);
    let is_complete = slices.first().is_none_or(|slice| slices.len() as u64 >= pool(slice, "resourceSliceCount"));
    slices.sort_by_key(|slice| slice["metadata"]["name"].as_str());
    let devices = slices.into_iter().filter(|_| is_complete).flat_map(|slice| slice["spec"]["devices"].as_array());
    let is_untainted_gpu = |device: &&Value| {
        let has_taints = device["taints"].as_array().is_some_and(|taints| !taints.is_empty());
        device["attributes"]["type"]["string"] == "gpu" && !has_taints
    };
    devices.flatten().filter(is_untainted_gpu).collect()
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

pub(super) fn bandwidth(mbps: u64) -> String {
    format!("{} GB/s", gigabytes(mbps).trim_end_matches(".0"))
}

/// The requests of `linkwise claim --rails`.
pub(super) fn requests_of(args: &ClaimArgs, rails: &Rails) -> Result<Devices> {
    let (gpus, count) = (usize::from(args.gpus), rails.rails.len());
    let flags = format!("--gpus {gpus} with --rails {rails}");
    ensure!(count <= gpus, "{flags}: {count} rails for {gpus} GPUs; add --gpus {count}");
    ensure!(gpus.is_multiple_of(count), "{flags}: {gpus} GPUs cannot be divided equally among {count} rails");
    if let Some(node) = args.node.first() {
        let topology = topology(node)?;
        let existing = topology.rails();
        let known: Vec<u32> = existing.keys().copied().collect();
        let known = if known.is_empty() { "none".to_owned() } else { ranges(&known) };
        for rail in &rails.rails {
            let has = existing.get(&u32::from(*rail)).map_or(0, Vec::len);
            ensure!(has > 0, "{flags}: {node} has no rail {rail} (it has {known})");
            ensure!(has >= gpus / count, "{flags}: {node} has {has} of {} GPUs on rail {rail}", gpus / count);
        }
    }
    Ok(requests(args.gpus, &rails.rails))
}

/// The specification of a claim for GPUs on these rails: the same number on each, or one more on the first ones.
pub fn rails_claim(gpus: u8, rails: &[u8]) -> Result<Value, serde_json::Error> {
    serde_json::to_value(requests(gpus, rails).spec())
}

/// A request for each rail, with a selector, because a constraint cannot require a certain value of an attribute.
fn requests(gpus: u8, rails: &[u8]) -> Devices {
    let count = u8::try_from(rails.len()).unwrap_or(u8::MAX).max(1);
    let of_rail = |(rail, place): (&u8, u8)| {
        let own = gpus / count + u8::from(place < gpus % count);
        let on_rail = Request { selectors: of_attribute(OURS, "rail", &format!(" == {rail}")), ..plain(GPUS, own) };
        (own > 0).then(|| request(&format!("rail-{rail}"), on_rail))
    };
    Devices { requests: rails.iter().zip(0..).filter_map(of_rail).collect(), ..Devices::default() }
}
