//! `matchAttribute` constraints, checked whenever the search adds a device.
//!
//! k8s@1.36: `matchAttributeConstraint`. A device without the attribute never matches. Versions match as texts.

use super::{Ask, Chosen};
use crate::api::{Attribute, Claim};
use crate::devices::NodeDevice;

/// A constraint, and the values of the devices to which it applies so far.
pub(super) struct MatchState<'a> {
    requests: &'a [String],
    attribute: &'a str,
    values: Vec<(Chosen, &'a Attribute)>,
}

/// A device that the search adds.
pub(super) struct Member<'b, 'a> {
    pub chosen: Chosen,
    pub ask: &'b Ask<'a>,
    pub device: &'b NodeDevice<'a>,
}

/// Returns true if a constraint on these requests applies to `ask`.
pub(crate) fn applies_to(requests: &[String], ask: &Ask<'_>) -> bool {
    requests.is_empty() || requests.iter().any(|name| *name == ask.request || *name == ask.name)
}

/// A claim's constraints.
pub(super) fn of_claim(claim: &Claim) -> Vec<MatchState<'_>> {
    let constraints = claim.spec.devices.constraints.iter();
    let states =
        constraints.map(|it| MatchState { requests: &it.requests, attribute: &it.match_attribute, values: Vec::new() });
    states.collect()
}

impl<'a> MatchState<'a> {
    /// Adds a device. Returns false if the device breaks the constraint.
    pub fn add(&mut self, member: &Member<'_, 'a>) -> bool {
        if !applies_to(self.requests, member.ask) {
            return true;
        }
        let Some(value) = attribute(member.device, self.attribute) else { return false };
        let fits = self.values.first().is_none_or(|(_, first)| *first == value);
        if fits {
            self.values.push((member.chosen, value));
        }
        fits
    }

    /// Removes a device, if it was added last.
    pub fn forget(&mut self, chosen: &Chosen) {
        let is_last = |(last, _): &(Chosen, &Attribute)| {
            (last.claim, last.request, last.device) == (chosen.claim, chosen.request, chosen.device)
        };
        if self.values.last().is_some_and(is_last) {
            self.values.pop();
        }
    }
}

/// A device's attribute by its qualified name. A published name without a domain is in the driver's domain.
fn attribute<'a>(device: &NodeDevice<'a>, name: &str) -> Option<&'a Attribute> {
    let attributes = &device.device.attributes;
    attributes.get(name).or_else(|| {
        let (domain, id) = name.split_once('/')?;
        attributes.get(id).filter(|_| domain == device.name.driver)
    })
}
