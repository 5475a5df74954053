//! A claim as the API server answers for it.

use thiserror::Error;

use linkwise_core::claims::Claim;
use linkwise_core::quote::one_line;

/// An answer of the API server is no claim.
#[derive(Debug, Error)]
#[error("the API server's answer is no ResourceClaim: {}", one_line(.0))]
pub struct NoClaim(String);

/// Reads a `ResourceClaim` (`resource.k8s.io/v1`) from its JSON. The caller bounds the length.
///
/// # Errors
///
/// It is no JSON, a field has another type, or it has no UID.
pub fn parse_claim(text: &[u8]) -> Result<Claim, NoClaim> {
    let claim = Claim::from_json(text).map_err(|error| NoClaim(error.to_string()))?;
    if claim.metadata.uid.is_empty() {
        return Err(NoClaim("it has no UID".to_owned()));
    }
    Ok(claim)
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
        let claim = parse_claim(text.as_bytes()).unwrap();
        let devices = claim.status.allocation.unwrap().devices;
        assert_eq!((claim.metadata.name.as_str(), claim.metadata.uid.as_str()), ("train", "u1"));
        let device = &devices.results[0];
        assert_eq!((device.request.as_str(), device.share_id.as_deref()), ("gpus/quad", Some("s1")));
        assert_eq!(device.admin_access, Some(true));
        let opaque = devices.config[0].opaque.as_ref().unwrap();
        assert!(opaque.parameters.contains(r#""kind":"GpuConfig""#), "{}", opaque.parameters);
        let bare = parse_claim(br#"{"metadata":{"uid":"u"},"status":{}}"#).unwrap();
        assert_eq!(bare.status.allocation, None);
    }

    #[test]
    fn answer_that_is_no_claim_is_refused() {
        let deep = format!("{{\"metadata\":{}", "[".repeat(100_000));
        for text in
            ["", "null", "[]", "{}", r#"{"metadata":{"uid":7}}"#, r#"{"metadata":{"uid":"u"},"status":3}"#, &deep]
        {
            let error = parse_claim(text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("the API server's answer is no ResourceClaim"), "{error}");
        }
    }
}
