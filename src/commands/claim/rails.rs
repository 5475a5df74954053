//! Claims of GPUs on fixed rails: pods of a job that have one such template get the same rails on each node.

use anyhow::{Context, Result, ensure};
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines;
use linkwise_host::picture::ranges;
use serde_json::Value;

use super::{Asked, Devices, GPUS, asked, request, selector};
use crate::config::ClaimArgs;

/// The requests of `linkwise claim --rails`.
pub(super) fn requests_of(args: &ClaimArgs) -> Result<Devices> {
    let rails = args.rails.as_ref().context("no --rails")?;
    let (gpus, count) = (usize::from(args.gpus), rails.rails.len());
    let asked = format!("--gpus {gpus} with --rails {rails}");
    ensure!(count <= gpus, "{asked}: {count} rails for {gpus} GPUs; add --gpus {count}");
    ensure!(gpus.is_multiple_of(count), "{asked}: {gpus} GPUs are not the same number on each of {count} rails");
    if let Some(node) = args.node.first() {
        let (topology, _) = NodeTopology::assemble(&machines::load(node)?.observed);
        let there = topology.rails();
        let known: Vec<u32> = there.keys().copied().collect();
        let known = if known.is_empty() { "none".to_owned() } else { ranges(&known) };
        for rail in &rails.rails {
            let has = there.get(&u32::from(*rail)).map_or(0, Vec::len);
            ensure!(has > 0, "{asked}: {node} has no rail {rail} (it has {known})");
            ensure!(has >= gpus / count, "{asked}: {node} has {has} of {} GPUs on rail {rail}", gpus / count);
        }
    }
    Ok(requests(args.gpus, &rails.rails))
}

/// The specification of a claim for GPUs on these rails: the same number on each, or one more on the first ones.
pub fn rails_claim(gpus: u8, rails: &[u8]) -> Result<Value, serde_json::Error> {
    serde_json::to_value(requests(gpus, rails).spec())
}

/// A request for each rail. A selector, because no constraint can say which value an attribute is to have.
fn requests(gpus: u8, rails: &[u8]) -> Devices {
    let count = u8::try_from(rails.len()).unwrap_or(u8::MAX).max(1);
    let of_rail = |(rail, place): (&u8, u8)| {
        let own = gpus / count + u8::from(place < gpus % count);
        // A selector that reads a missing attribute of a device is an error for the whole pod, on all nodes.
        let expression =
            format!("'rail' in device.attributes['linkwise.dev'] && device.attributes['linkwise.dev'].rail == {rail}");
        let on_rail = Asked { selectors: selector(&expression), ..asked(GPUS, own) };
        (own > 0).then(|| request(&format!("rail-{rail}"), on_rail))
    };
    Devices { requests: rails.iter().zip(0..).filter_map(of_rail).collect(), ..Devices::default() }
}
