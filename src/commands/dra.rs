//! `linkwise dra`: prints the resource slices that a machine would publish.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::claim::{list, text};
use super::machine;
use crate::config::DraArgs;
use crate::config::settings::load;
use linkwise_core::publish::dra::slice::{Pool, SliceSpec};
use linkwise_core::publish::dra::{DraFacts, DraSettings, GpuLayout, devices, mig_counters, offered_now};
use linkwise_core::state::{DRA_DRIVER, Door, NodeState, ResourcePlan};
use linkwise_system::output::{complain, print};
use linkwise_system::progress::Progress;

/// The most characters of an object's name.
const MAX_NAME: usize = 253;

/// A slice without an owner, and with a name, which the API server would generate otherwise.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ResourceSlice {
    api_version: &'static str,
    kind: &'static str,
    /// Only the name.
    metadata: BTreeMap<&'static str, String>,
    spec: SliceSpec,
}

/// Prints the slices as if DRA were the door of all GPUs that the settings offer. Problems with the devices go to
/// standard error.
pub async fn dra(args: &DraArgs) -> Result<()> {
    let settings = load(&args.flags)?.settings;
    let machine = machine(&args.node).await?;
    let progress = Progress::start("comparing the sets of this machine's GPUs");
    let state = NodeState::of_machine(machine.observed, ResourcePlan { door: Door::Dra, ..settings.plan() });
    super::note_unknown_nvlinks(&machine.name, state.tables().topology());
    let layout = GpuLayout::of(state.tables(), offered_now(&state));
    let dynamic_mig = settings.dra_dynamic_mig.value;
    let facts = DraFacts::of_state(&state, &layout, DraSettings { dynamic_mig, ..DraSettings::default() });
    let (devices, problems) = devices(&facts);
    drop(progress);
    complain("linkwise", state.offers().problems());
    complain("linkwise", problems);
    let pool = Pool { counters: mig_counters(&facts), ..Pool::new(&args.node_name, devices) };
    // The number comes first, as in Kubernetes' library for DRA drivers, so that sorting by name keeps the slices'
    // order.
    let name = |number: usize| format!("{number:05x}-{DRA_DRIVER}-{}-slice", args.node_name);
    let slices = (0..).zip(pool.slices(1)).map(|(number, spec)| ResourceSlice {
        api_version: "resource.k8s.io/v1",
        kind: "ResourceSlice",
        metadata: [("name", name(number))].into(),
        spec,
    });
    let slices: Vec<ResourceSlice> = slices.collect();
    let longest = slices.iter().flat_map(|slice| slice.metadata.values()).map(String::len).max().unwrap_or(0);
    ensure!(longest <= MAX_NAME, "slice names have {longest} characters, {MAX_NAME} at most; shorten --node-name");
    Ok(print(&text(&list(slices), args.format)?)?)
}
