//! The requests of a claim, with their classes.

use crate::api::{Claim, DeviceClass, Exactly};
use crate::error::Failure;

/// A request as the search reads it.
pub(crate) struct RequestPlan<'a> {
    /// The alternatives in the order of preference. A request without alternatives is its own single alternative.
    pub asks: Vec<Ask<'a>>,
    /// Set if the request is a list of alternatives.
    pub is_prioritised: bool,
}

/// An alternative of a request, or a request without alternatives.
pub(crate) struct Ask<'a> {
    /// The request's name.
    pub request: &'a str,
    /// The name in results: `request`, or `request/alternative`.
    pub name: String,
    pub asked: &'a Exactly,
    pub class: &'a DeviceClass,
}

/// A claim's requests.
pub(super) fn plan<'a>(claim: &'a Claim, classes: &'a [DeviceClass]) -> Result<Vec<RequestPlan<'a>>, Failure> {
    let ask = |request: &'a str, asked: &'a Exactly| {
        let name = if asked.name.is_empty() { request.to_owned() } else { format!("{request}/{}", asked.name) };
        let class = classes.iter().find(|class| class.metadata.name == asked.device_class_name);
        let class = class.ok_or_else(|| Failure::NoClass {
            claim: claim.name(),
            request: name.clone(),
            class: asked.device_class_name.clone(),
        })?;
        Ok(Ask { request, name, asked, class })
    };
    let requests = claim.spec.devices.requests.iter().map(|request| {
        let asked = request.exactly.iter().chain(&request.first_available);
        let asks = asked.map(|asked| ask(&request.name, asked)).collect::<Result<_, _>>()?;
        Ok(RequestPlan { asks, is_prioritised: request.exactly.is_none() })
    });
    requests.collect()
}
