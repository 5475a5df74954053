//! A ResourceClaim's JSON as what linkwise reads of it. Unknown fields are of newer API servers and left out; a field of
//! another type is an error that names it.

use linkwise::claims::{
    AllocatedConfig, AllocatedDevice, Allocation, Claim, ClaimName, ClaimStatus, DeviceAllocation, OpaqueConfig,
};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct WireClaim {
    metadata: WireMetadata,
    #[serde(default)]
    status: Option<WireStatus>,
}

#[derive(Deserialize)]
struct WireMetadata {
    namespace: String,
    name: String,
    uid: String,
}

#[derive(Deserialize)]
struct WireStatus {
    allocation: Option<WireAllocation>,
}

#[derive(Deserialize)]
struct WireAllocation {
    #[serde(default)]
    devices: WireDevices,
}

#[derive(Default, Deserialize)]
struct WireDevices {
    results: Option<Vec<WireResult>>,
    config: Option<Vec<WireConfig>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireResult {
    request: String,
    driver: String,
    pool: String,
    device: String,
    admin_access: Option<bool>,
    #[serde(rename = "shareID")]
    share_id: Option<String>,
}

#[derive(Deserialize)]
struct WireConfig {
    #[serde(default)]
    source: String,
    requests: Option<Vec<String>>,
    opaque: Option<WireOpaque>,
}

#[derive(Deserialize)]
struct WireOpaque {
    driver: String,
    #[serde(default)]
    parameters: Value,
}

/// Reads a claim.
pub(super) fn parse(object: Value) -> Result<Claim, serde_json::Error> {
    let WireClaim { metadata, status } = serde_json::from_value(object)?;
    let WireMetadata { namespace, name, uid } = metadata;
    let allocation = status.and_then(|status| status.allocation).map(|allocation| {
        let WireDevices { results, config } = allocation.devices;
        let results = results.into_iter().flatten().map(|result| AllocatedDevice {
            request: result.request,
            driver: result.driver,
            pool: result.pool,
            device: result.device,
            admin_access: result.admin_access,
            share_id: result.share_id,
        });
        let config = config.into_iter().flatten().map(|config| AllocatedConfig {
            source: config.source,
            requests: config.requests.unwrap_or_default(),
            opaque: config
                .opaque
                .map(|opaque| OpaqueConfig { driver: opaque.driver, parameters: opaque.parameters.to_string() }),
        });
        Allocation { devices: DeviceAllocation { results: results.collect(), config: config.collect() } }
    });
    Ok(Claim { metadata: ClaimName { namespace, name, uid }, status: ClaimStatus { allocation } })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn claim_is_read_with_results_and_configuration() {
        let claim = parse(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": "a", "name": "b", "uid": "c", "labels": {"x": "y"}},
            "spec": {"devices": {}},
            "status": {"allocation": {"devices": {
                "results": [{"request": "gpus/quad", "driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0",
                    "adminAccess": true, "shareID": "s", "consumedCapacity": {}}],
                "config": [{"source": "FromClaim", "opaque": {"driver": "d", "parameters": {"kind": "GpuConfig"}}}],
            }}},
        }));
        let claim = claim.unwrap();
        assert_eq!(claim.metadata.to_string(), "a/b");
        let devices = claim.status.allocation.unwrap().devices;
        let [result] = devices.results.as_slice() else { panic!("{devices:?}") };
        assert_eq!(
            (result.device.as_str(), result.admin_access, result.share_id.as_deref()),
            ("gpu-0", Some(true), Some("s"))
        );
        assert_eq!(devices.config[0].opaque.as_ref().unwrap().parameters, r#"{"kind":"GpuConfig"}"#);
    }

    #[test]
    fn claim_without_allocation_and_nonsense() {
        let metadata = json!({"namespace": "a", "name": "b", "uid": "c"});
        for status in [Value::Null, json!({}), json!({"allocation": null})] {
            let claim = parse(json!({"metadata": metadata, "status": status})).unwrap();
            assert_eq!(claim.status.allocation, None);
        }
        for wrong in [json!({}), json!({"metadata": {"name": 3}}), json!({"metadata": metadata, "status": 3})] {
            assert!(parse(wrong).is_err());
        }
    }
}
