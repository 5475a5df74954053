//! Namespaces with a LimitRange: a pod gets the same number of GPUs as without the policy, by claims or by the
//! resource, and is refused if it is refused without the policy.

use linkwise_api_server_box::{ApiServerBox, ResourceType};
use serde_json::{Value, json};

use crate::unchanged_pods::{GPUS, OFF, ON, created, server};

/// Makes `item` the only LimitRange of both namespaces.
fn put_range(server: &ApiServerBox, item: &Value) {
    for namespace in [ON, OFF] {
        let key = ResourceType::LIMIT_RANGES.key(Some(namespace), "range");
        server.put("kubectl", &key, json!({"spec": {"limits": [item]}}));
    }
}

/// A pod with the number of GPUs of each container; `None` for a container without GPUs.
fn pod(gpus: &[Option<u32>]) -> Value {
    let container = |(at, gpus): (usize, &Option<u32>)| {
        let resources = gpus.map_or(json!({}), |gpus| json!({"limits": {GPUS: gpus.to_string()}}));
        json!({"name": format!("c{at}"), "image": "i", "resources": resources})
    };
    let containers: Vec<Value> = gpus.iter().enumerate().map(container).collect();
    json!({"metadata": {"name": "pod"}, "spec": {"containers": containers}})
}

/// The numbers of a stored pod's GPUs: by the templates of its claims, and by its limits.
fn gpus(pod: &Value) -> (u32, u32) {
    let claims = pod["spec"]["resourceClaims"].as_array().into_iter().flatten();
    let of_claim = |claim: &Value| -> u32 {
        let name = claim["resourceClaimTemplateName"].as_str().unwrap();
        name.strip_prefix("linkwise-gpus-").unwrap().trim_end_matches("-any").parse().unwrap()
    };
    let limit = |container: &Value| -> u32 {
        container["resources"]["limits"][GPUS].as_str().map_or(0, |limit| limit.parse().unwrap())
    };
    (claims.map(of_claim).sum(), pod["spec"]["containers"].as_array().unwrap().iter().map(limit).sum())
}

#[tokio::test]
async fn limit_range_changes_no_number_of_gpus() {
    let server = server().await;
    let amount = |gpus: &str| json!({GPUS: gpus});
    let ranges = [
        json!({"type": "Container", "default": {"cpu": "1"}}),
        json!({"type": "Container", "max": amount("8")}),
        json!({"type": "Container", "max": amount("2")}),
        json!({"type": "Container", "max": amount("2"), "default": amount("0")}),
        json!({"type": "Container", "max": amount("8"), "default": amount("0")}),
        json!({"type": "Container", "default": amount("0")}),
        json!({"type": "Container", "default": amount("1")}),
        json!({"type": "Pod", "max": amount("4")}),
        json!({"type": "Container", "max": amount("1k"), "default": amount("0")}),
        json!({"type": "Container", "max": amount("100"), "default": amount("0")}),
    ];
    // The GPUs of each container; `-` is a container without GPUs.
    let pods = ["1", "2", "4", "8", "2 2", "4 4", "4 -", "- 2", "-"];
    let pods = pods.map(|gpus| gpus.split(' ').map(|count| count.parse().ok()).collect::<Vec<Option<u32>>>());
    let mut claimed = 0;
    for range in &ranges {
        put_range(&server, range);
        for asked in &pods {
            let (without, with) = (created(&server, OFF, &pod(asked)), created(&server, ON, &pod(asked)));
            let (without, with) = match (without, with) {
                (Ok(without), Ok(with)) => (gpus(&without), gpus(&with)),
                (Err(_), Err(_)) => continue,
                other => panic!("{range} {asked:?}: refused in one namespace: {other:?}"),
            };
            assert_eq!(with.0 + with.1, without.1, "{range} {asked:?}: claims {}, limits {}", with.0, with.1);
            assert!(with.0 == 0 || with.1 == 0, "{range} {asked:?}: GPUs by claims and by limits: {with:?}");
            claimed += u32::from(with.0 > 0);
        }
    }
    assert!(claimed > 20, "{claimed}");
}

#[tokio::test]
async fn refusal_names_the_limit_range() {
    let server = server().await;
    put_range(&server, &json!({"type": "Container", "max": {GPUS: "2"}, "default": {GPUS: "0"}}));
    let refused = created(&server, ON, &pod(&[Some(8)])).unwrap_err();
    assert!(refused.contains("the LimitRange 'range' allows fewer nvidia.com/gpu than the pod asks for"), "{refused}");
    // A claim of the user's whose name begins like ours is no reason to refuse the pod.
    let mut own = pod(&[None]);
    own["spec"]["resourceClaims"] = json!([{"name": "linkwise-gpus-own", "resourceClaimTemplateName": "mine"}]);
    assert!(created(&server, ON, &own).is_ok());
    // A minimum refuses each pod that the policy changes, because its request is 0 then.
    put_range(&server, &json!({"type": "Container", "min": {GPUS: "1"}}));
    let refused = created(&server, ON, &pod(&[Some(2)])).unwrap_err();
    assert!(refused.contains("minimum nvidia.com/gpu usage per Container is 1, but request is 0"), "{refused}");
}
