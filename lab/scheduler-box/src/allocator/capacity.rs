//! Capacity of devices that several claims may have: the amount that a request consumes, and the check that it is free.
//!
//! k8s@1.36: `structured/internal/incubating/consumable_capacity.go`.

use std::collections::BTreeMap;

use crate::api::{Capacity, CapacityRequirements, Device, RequestPolicy};
use crate::devices::quantity;
use crate::error::Failure;
use crate::quantity::Quantity;

/// The amounts consumed of a device, by capacity.
pub(crate) type Consumed = BTreeMap<String, Amount>;

/// An amount, and its text in the API.
#[derive(Clone, Debug)]
pub(crate) struct Amount {
    pub quantity: Quantity,
    pub text: String,
}

impl Amount {
    pub fn of(device: &str, text: &str) -> Result<Self, Failure> {
        Ok(Self { quantity: quantity(device, text)?, text: text.to_owned() })
    }
}

/// The amounts that a request consumes of a device, rounded by the device's policies. `None` if the request names a
/// capacity that the device lacks, or an amount that a policy refuses.
pub(crate) fn consumed(
    name: &str,
    device: &Device,
    asked: Option<&CapacityRequirements>,
) -> Result<Option<Consumed>, Failure> {
    let requests = || asked.iter().flat_map(|asked| &asked.requests);
    if requests().any(|(capacity, _)| !device.capacity.contains_key(capacity)) {
        return Ok(None);
    }
    let mut all = Consumed::new();
    for (capacity, offered) in &device.capacity {
        let request = requests().find(|(asked, _)| *asked == capacity).map(|(_, amount)| amount.as_str());
        let Some(amount) = amount(name, request, offered)? else { return Ok(None) };
        all.insert(capacity.clone(), amount);
    }
    Ok(Some(all))
}

/// Returns true if the device has the wanted amounts besides those that are consumed already.
pub(crate) fn fits<'a>(
    name: &str,
    device: &Device,
    wanted: &'a Consumed,
    before: impl Iterator<Item = &'a Consumed> + Clone,
) -> Result<bool, Failure> {
    for (capacity, offered) in &device.capacity {
        let whole = quantity(name, &offered.value)?;
        let all = before.clone().chain([wanted]).filter_map(|consumed| consumed.get(capacity));
        if all.map(|amount| amount.quantity.0).sum::<i128>() > whole.0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The amount of one capacity (`calculateConsumedCapacity`); `None` if it `violatesPolicy`.
fn amount(name: &str, request: Option<&str>, capacity: &Capacity) -> Result<Option<Amount>, Failure> {
    let policy = capacity.request_policy.as_ref();
    let Some(request) = request else {
        return Amount::of(name, policy.map_or(&capacity.value, |policy| &policy.default)).map(Some);
    };
    let asked = Amount::of(name, request)?;
    let Some(RequestPolicy { valid_range: range, .. }) = policy else { return Ok(Some(asked)) };
    let (min, step) = (Amount::of(name, &range.min)?, step_of(name, &range.step)?);
    let amount = if asked.quantity < min.quantity {
        min
    } else {
        let min = min.quantity.ceil();
        let steps = (asked.quantity.ceil() - min + step - 1) / step;
        let quantity = Quantity::of_whole(min + step * steps);
        Amount { quantity, text: quantity.binary() }
    };
    let max = range.max.as_deref().map(|max| quantity(name, max)).transpose()?;
    Ok(Some(amount).filter(|amount| max.is_none_or(|max| amount.quantity <= max)))
}

fn step_of(name: &str, step: &str) -> Result<i128, Failure> {
    let whole = quantity(name, step)?.ceil();
    let malformed = || Failure::Malformed { name: name.to_owned(), why: format!("'{step}' is not a step") };
    (whole > 0).then_some(whole).ok_or_else(malformed)
}
