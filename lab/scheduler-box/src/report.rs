//! The result of a search: the `status.allocation` of each claim, or the reason why a node cannot serve the claims.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Value, json};

use crate::allocator::{Attempt, Chosen, applies_to};
use crate::api::{AllocationResult, Claim};
use crate::devices::NodeDevice;
use crate::error::{Failure, Refusal};

/// A claim's `status.allocation`: results in the order of requests, and a node selector.
pub(crate) fn allocation(attempt: &Attempt<'_>, claim: usize) -> Result<Value, Failure> {
    let mut results = Vec::new();
    for chosen in attempt.chosen().iter().filter(|chosen| chosen.claim == claim) {
        let (Some(ask), Some(device)) =
            (attempt.asks(claim, chosen.request).get(chosen.alternative), attempt.devices.devices.get(chosen.device))
        else {
            continue;
        };
        let (mut share_id, mut consumed_capacity) = (None, BTreeMap::new());
        if device.device.allow_multiple_allocations {
            let name = attempt.claims.get(claim).map(Claim::name).unwrap_or_default();
            share_id = Some(new_share(attempt, device, &format!("{name}/{}/{}", ask.name, results.len())));
            let consumed = attempt.consumes(*chosen)?.unwrap_or_default();
            consumed_capacity = consumed.into_iter().map(|(capacity, amount)| (capacity, amount.text)).collect();
        }
        results.push(AllocationResult {
            request: ask.name.clone(),
            driver: device.name.driver.clone(),
            pool: device.name.pool.clone(),
            device: device.name.device.clone(),
            share_id,
            consumed_capacity,
        });
    }
    let field = json!({"key": "metadata.name", "operator": "In", "values": [attempt.node]});
    Ok(json!({
        "devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }))
}

/// A new ID for a share of a device, derived from `choice`. The real scheduler's IDs are random.
fn new_share(attempt: &Attempt<'_>, device: &NodeDevice<'_>, choice: &str) -> String {
    let known = attempt.shares.get(&device.name);
    let mut id = String::new();
    for number in 0_u64.. {
        let mut hasher = DefaultHasher::new();
        (&device.name.device, choice, number).hash(&mut hasher);
        id = format!("00000000-0000-4000-8000-{:012x}", hasher.finish() >> 16);
        if known.is_none_or(|known| !known.contains_key(&id)) {
            break;
        }
    }
    id
}

/// The reason why a node cannot serve a request, or its last alternative, which usually asks for the least.
pub(crate) fn refusal(attempt: &mut Attempt<'_>, claim: usize, request: usize) -> Refusal {
    let alternative = attempt.asks(claim, request).len().saturating_sub(1);
    let mut refusal = Refusal {
        node: attempt.node.to_owned(),
        claim: attempt.claims.get(claim).map(Claim::name).unwrap_or_default(),
        unread_pools: attempt.devices.unread.clone(),
        steps: attempt.steps(),
        ..Refusal::default()
    };
    for device in 0..attempt.devices.devices.len() {
        // The search did not reach a selector that fails only here. Its failure is therefore not the reason.
        if attempt.selects(claim, request, alternative, device).unwrap_or(false) {
            refusal.selected += 1;
            refusal.used += usize::from(attempt.is_used(device));
            let chosen = Chosen { claim, request, alternative, device };
            refusal.tainted += usize::from(attempt.is_tainted(device));
            // The search did not reach an invalid amount either.
            refusal.short += usize::from(!attempt.has_capacity(chosen).unwrap_or(true));
        }
    }
    if let Some(ask) = attempt.asks(claim, request).get(alternative) {
        refusal.request.clone_from(&ask.name);
        refusal.wanted = ask.asked.count;
        let constraints = attempt.claims.get(claim).into_iter().flat_map(|claim| &claim.spec.devices.constraints);
        let applying = constraints.filter(|constraint| applies_to(&constraint.requests, ask));
        refusal.constraints = applying.map(|one| format!("matchAttribute {}", one.match_attribute)).collect();
    }
    refusal
}
