//! [`Claim`]: a `ResourceClaim` as the API server has it, limited to the fields that linkwise reads.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use thiserror::Error;

use crate::quote::one_line;
use crate::state::{ClaimName, DRA_DRIVER};
use crate::topology::is_mig;

/// The request without its alternative: `gpus` of `gpus/quad`.
pub(super) fn base(request: &str) -> &str {
    request.split('/').next().unwrap_or(request)
}

/// The alternative of the request that the scheduler took: `quad` of `gpus/quad`.
pub(super) fn alternative(request: &str) -> Option<&str> {
    Some(request.split_once('/')?.1)
}

/// The fields of a `ResourceClaim` that linkwise reads (`resource.k8s.io/v1`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Object")]
pub struct Claim {
    /// Its name, namespace and UID.
    pub metadata: ClaimName,
    /// The claim's name in its pod, from an annotation, if Kubernetes made the claim from a template.
    pub pod_claim_name: Option<String>,
    /// Its status.
    pub status: ClaimStatus,
}

/// A [`Claim`] in the API's form.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Object {
    metadata: Metadata,
    status: ClaimStatus,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Metadata {
    namespace: String,
    name: String,
    uid: String,
    #[serde(deserialize_with = "or_default")]
    annotations: Annotations,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Annotations {
    #[serde(rename = "resource.kubernetes.io/pod-claim-name")]
    pod_claim_name: Option<String>,
}

impl From<Object> for Claim {
    fn from(Object { metadata, status }: Object) -> Self {
        let Metadata { namespace, name, uid, annotations } = metadata;
        let metadata = ClaimName { namespace, name, uid };
        Self { metadata, pod_claim_name: annotations.pod_claim_name, status }
    }
}

impl Claim {
    /// Returns true if a device of our driver in the allocation has the name of a MIG device.
    pub fn has_mig_device(&self) -> bool {
        self.allocated().filter(|result| result.driver == DRA_DRIVER).any(|result| is_mig(&result.device))
    }

    /// The devices that the scheduler allocated to the claim.
    pub fn allocated(&self) -> impl Iterator<Item = &AllocatedDevice> {
        self.status.allocation.iter().flat_map(|allocation| &allocation.devices.results)
    }
}

/// The status of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimStatus {
    /// Its devices; `None` before the scheduler allocates any.
    pub allocation: Option<Allocation>,
}

/// The devices of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Allocation {
    /// The devices, of all drivers, and their configuration.
    pub devices: DeviceAllocation,
}

/// The `devices` of an [`Allocation`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceAllocation {
    /// The devices.
    #[serde(deserialize_with = "or_default")]
    pub results: Vec<AllocatedDevice>,
    /// The configurations of device classes and of the claim; a later one overrides an earlier one.
    #[serde(deserialize_with = "or_default")]
    pub config: Vec<AllocatedConfig>,
}

/// One device of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AllocatedDevice {
    /// The request that it is for; `request/subrequest` if the request has alternatives.
    pub request: String,
    /// Its DRA driver.
    pub driver: String,
    /// Its pool.
    pub pool: String,
    /// Its name in the pool.
    pub device: String,
    /// True if an administrator has it in addition to its users (`adminAccess`).
    pub admin_access: Option<bool>,
    /// The ID of its share, if several claims have the device.
    #[serde(rename = "shareID")]
    pub share_id: Option<String>,
    /// The part that the share takes of the device's capacities, as quantities by name.
    #[serde(deserialize_with = "or_default")]
    pub consumed_capacity: BTreeMap<String, String>,
}

/// Configuration that a claim or its class carries for a driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AllocatedConfig {
    /// `FromClass` or `FromClaim`.
    pub source: String,
    /// The requests that it is for; empty for all.
    #[serde(deserialize_with = "or_default")]
    pub requests: Vec<String>,
    /// Parameters for the driver alone.
    pub opaque: Option<OpaqueConfig>,
}

/// Configuration for the driver alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OpaqueConfig {
    /// The driver.
    pub driver: String,
    /// The object, as JSON text.
    #[serde(deserialize_with = "as_text")]
    pub parameters: String,
}

/// Reads a value; null is the default.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Reads a JSON value as its text.
fn as_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    serde_json::Value::deserialize(deserializer).map(|value| value.to_string())
}

/// The error for an answer of the API server that is not a claim.
#[derive(Debug, Error)]
#[error("the API server's answer is not a ResourceClaim: {}", one_line(.0))]
pub struct NoClaim(String);

impl Claim {
    /// Reads a `ResourceClaim` (`resource.k8s.io/v1`) from its JSON. Fields that linkwise does not use are skipped. The
    /// caller bounds the length.
    ///
    /// # Errors
    ///
    /// The text is not JSON, a field has another type, or the claim has no UID.
    pub fn from_json(text: &[u8]) -> Result<Self, NoClaim> {
        let claim: Self = serde_json::from_slice(text).map_err(|error| NoClaim(error.to_string()))?;
        if claim.metadata.uid.is_empty() {
            return Err(NoClaim("no UID".to_owned()));
        }
        Ok(claim)
    }
}

/// The reason why a claim could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReadClaimError {
    /// There is no such claim.
    #[error("there is no such claim")]
    NotFound,
    /// The API server gave no readable claim.
    #[error("{0}")]
    Failed(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_is_read_from_its_json() {
        let text = r#"{"apiVersion":"resource.k8s.io/v1","kind":"ResourceClaim",
            "metadata":{"namespace":"ml","name":"train","uid":"u1","labels":{"a":"b"}},
            "spec":{"devices":{"requests":[]}},
            "status":{"reservedFor":[{"resource":"pods","name":"p","uid":"x"}],"allocation":{
              "nodeSelector":{"nodeSelectorTerms":[]},
              "devices":{
                "results":[{"request":"gpus/quad","driver":"gpu.nvidia.com","pool":"n/gpu","device":"gpu-0",
                            "adminAccess":true,"shareID":"s1","tolerations":[]}],
                "config":[{"source":"FromClass","requests":null,"opaque":{"driver":"gpu.nvidia.com",
                           "parameters":{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}}}]}}}}"#;
        let claim = Claim::from_json(text.as_bytes()).unwrap();
        let devices = claim.status.allocation.unwrap().devices;
        assert_eq!((claim.metadata.name.as_str(), claim.metadata.uid.as_str()), ("train", "u1"));
        let device = &devices.results[0];
        assert_eq!((device.request.as_str(), device.share_id.as_deref()), ("gpus/quad", Some("s1")));
        assert_eq!(device.admin_access, Some(true));
        let opaque = devices.config[0].opaque.as_ref().unwrap();
        assert!(opaque.parameters.contains(r#""kind":"GpuConfig""#), "{}", opaque.parameters);
        let bare = Claim::from_json(br#"{"metadata":{"uid":"u"},"status":{}}"#).unwrap();
        assert_eq!(bare.status.allocation, None);
    }

    #[test]
    fn answer_that_is_not_a_claim_is_refused() {
        let deep = format!("{{\"metadata\":{}", "[".repeat(100_000));
        for text in
            ["", "null", "[]", "{}", r#"{"metadata":{"uid":7}}"#, r#"{"metadata":{"uid":"u"},"status":3}"#, &deep]
        {
            let error = Claim::from_json(text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("the API server's answer is not a ResourceClaim"), "{error}");
        }
    }
}
