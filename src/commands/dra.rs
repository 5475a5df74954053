//! `linkwise dra`: prints the resource slices that a machine would publish.

use anyhow::{Result, ensure};
use serde::Serialize;

use super::claim::{List, text};
use super::machine;
use crate::config::settings::load;
use crate::config::{DraArgs, Environment};
use linkwise_core::publish::dra::slice::{Pool, SliceSpec};
use linkwise_core::publish::dra::{DraFacts, GpuLayout, devices, mig_counters, offered};
use linkwise_core::state::{DRA_DRIVER, Door, DriverVersions, ResourcePlan, dra_shares};
use linkwise_core::topology::NodeTopology;
use linkwise_system::output::{complain, print};

/// The longest name of an object.
const MOST_NAME: usize = 253;

/// A slice without an owner, and with a name in the place of the server's.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ResourceSlice {
    api_version: &'static str,
    kind: &'static str,
    metadata: Metadata,
    spec: SliceSpec,
}

#[derive(Debug, Serialize)]
struct Metadata {
    name: String,
}

/// Prints the slices with all GPUs that the settings offer, through whichever door. Problems with the devices go to
/// standard error.
pub async fn dra(args: &DraArgs) -> Result<()> {
    let settings = load(&args.flags, &Environment::read())?.settings;
    let machine = machine(&args.node).await?;
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let plan = ResourcePlan { door: Door::Dra, ..settings.plan() };
    let versions = DriverVersions::of(&machine.observed);
    let gpus = offered(&topology, &plan);
    let (shares, not_shared) = dra_shares(&topology, &plan);
    let is_whole = |place: &usize| topology.gpus().get(*place).is_some_and(|gpu| !shares.contains_key(&gpu.uuid));
    let tables = super::tables(topology.clone());
    let whole = gpus.places().filter(is_whole).collect();
    let layout = GpuLayout::of(&tables, whole);
    let mut facts = DraFacts::of_machine(&topology, &versions, gpus, &layout).shared(&shares);
    facts.settings.dynamic_mig = settings.dra_dynamic_mig.value;
    let (devices, problems) = devices(&facts);
    complain("linkwise", not_shared);
    complain("linkwise", problems);
    let pool = Pool { counters: mig_counters(&facts), ..Pool::new(&args.node_name, devices) };
    let slices = (0..).zip(pool.slices(1)).map(|(number, spec)| ResourceSlice {
        api_version: "resource.k8s.io/v1",
        kind: "ResourceSlice",
        metadata: Metadata { name: name(number, &args.node_name) },
        spec,
    });
    let slices: Vec<ResourceSlice> = slices.collect();
    let longest = slices.iter().map(|slice| slice.metadata.name.len()).max().unwrap_or(0);
    ensure!(longest <= MOST_NAME, "the names of the slices would be {longest} long, with the name of the node");
    Ok(print(&text(&List::new(slices), args.format)?)?)
}

/// A name that begins as Kubernetes' own library for DRA drivers begins it: sorted by name, slices are in their order.
fn name(number: usize, node: &str) -> String {
    format!("{number:05x}-{DRA_DRIVER}-{node}-slice")
}
