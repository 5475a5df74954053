//! The ResourceSlices of all nodes, for a command that a person runs once.

use kube::Api;
use kube::api::{DynamicObject, ListParams};
use linkwise_core::state::DRA_DRIVER;
use serde_json::Value;

use crate::access::Access;
use crate::error::ApiError;
use crate::metrics::ApiMetrics;
use crate::server::{ApiServer, Pace};
use crate::slices::follow::{OBJECT, resource, value};

/// Slices in one answer: a slice has some 10 kB.
const PAGE: u32 = 500;

/// The driver's ResourceSlices in the cluster.
///
/// # Errors
///
/// See [`ApiError`].
pub async fn all_slices(access: Access) -> Result<Vec<Value>, ApiError> {
    let mut server = ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default());
    let (mut slices, mut token) = (Vec::new(), None);
    loop {
        let params = ListParams::default().fields(&format!("spec.driver={DRA_DRIVER}")).limit(PAGE);
        let params = ListParams { continue_token: token, ..params };
        let list = |client| async move { Api::<DynamicObject>::all_with(client, &resource()).list(&params).await };
        let page = server.call(OBJECT, "list", list).await?;
        for slice in &page.items {
            slices.push(value(slice)?);
        }
        token = page.metadata.continue_.filter(|token| !token.is_empty());
        if token.is_none() {
            return Ok(slices);
        }
    }
}
