//! Claims for parts of GPUs, by shares and by memory. The expected amounts are constants here, not the core's results.

use linkwise_scheduler_box::{Cluster, Failure};
use serde_json::{Value, json};

use crate::dra::model::published::{Node, SHARED, accepted, exactly, gpus, node_with};
use crate::dra::published::golden::config;

/// A DGX H100 with GPUs in four shares each; `row` says which GPUs.
fn node(row: &str) -> Node {
    let sharing = format!("sharing: {{timeSlicing: {{resources: [{{name: nvidia.com/gpu, replicas: 4, {row}}}]}}}}");
    configured(&format!("version: v1\nlinkwise: {{naming: true}}\n{sharing}\n"))
}

/// A DGX H100 with this configuration.
fn configured(text: &str) -> Node {
    node_with("dgx-h100", &["--config-file", config(text).to_str().unwrap()])
}

/// A claim for a part of each of this many GPUs.
fn part(count: u32, requests: &Value) -> Value {
    exactly(json!({"deviceClassName": SHARED, "count": count, "capacity": {"requests": requests}}), &[])
}

/// Allocates up to this many equal claims until one is refused, and returns the first result of each.
fn results(node: &Node, cluster: &mut Cluster, claim: &Value, most: usize) -> Vec<Value> {
    let mut results = Vec::new();
    for _ in 0..most {
        match cluster.allocate(node.name, std::slice::from_ref(claim)) {
            Ok(placement) => {
                cluster.occupy(&placement.allocations[0]).unwrap();
                results.push(placement.allocations[0]["devices"]["results"][0].clone());
            }
            Err(Failure::Refused(_)) => break,
            Err(other) => panic!("{other}"),
        }
    }
    results
}

fn devices(results: &[Value]) -> Vec<&str> {
    results.iter().map(|result| result["device"].as_str().unwrap()).collect()
}

/// The memory that a claim gets by default of a GPU of 81,559 MiB in four shares.
const QUARTER: &str = "20389Mi";

#[test]
fn exclusive_claim_never_gets_a_shared_gpu() {
    let node = node("devices: 2");
    let mut cluster = node.cluster(&[]);
    let given = results(&node, &mut cluster, &gpus(1, None), 9);
    assert_eq!(devices(&given).len(), 6, "{given:?}");
    assert!(given.iter().all(|result| result.get("shareID").is_none()));
    let shares = results(&node, &mut cluster, &part(1, &json!({})), 9);
    assert_eq!(devices(&shares), ["gpu-0", "gpu-0", "gpu-0", "gpu-0", "gpu-1", "gpu-1", "gpu-1", "gpu-1"]);
    for share in &shares {
        assert_eq!(share["consumedCapacity"], json!({"shares": "1", "memory": QUARTER}));
    }
}

#[test]
fn half_a_gpu_is_allocated_by_shares_or_by_memory() {
    let node = node("devices: 1");
    let by_shares = results(&node, &mut node.cluster(&[]), &part(1, &json!({"shares": "2"})), 9);
    assert_eq!(by_shares.len(), 2, "{by_shares:?}");
    assert_eq!(by_shares[0]["consumedCapacity"], json!({"shares": "2", "memory": QUARTER}));
    let by_memory = results(&node, &mut node.cluster(&[]), &part(1, &json!({"memory": "40Gi"})), 9);
    assert_eq!(by_memory.len(), 1, "the GPU has a little less than 80 GiB");
    let by_memory = results(&node, &mut node.cluster(&[]), &part(1, &json!({"memory": "39Gi"})), 9);
    assert_eq!(by_memory.len(), 2);
    // A claim that does not ask for memory takes a share's worth, so it does not fit into less.
    let mut cluster = node.cluster(&[]);
    assert_eq!(results(&node, &mut cluster, &part(1, &json!({"memory": "60Gi"})), 9).len(), 1);
    assert_eq!(results(&node, &mut cluster, &part(1, &json!({})), 9).len(), 0);
    assert_eq!(results(&node, &mut cluster, &part(1, &json!({"memory": "6Gi"})), 9).len(), 3);
}

#[test]
fn odd_capacity_requests_are_rounded_or_refused() {
    let node = node("devices: all");
    let cluster = node.cluster(&[]);
    for (requests, shares, memory) in [
        (json!({"shares": "0"}), "1", QUARTER),
        (json!({"shares": "1500m"}), "2", QUARTER),
        (json!({"memory": "0"}), "1", "1Mi"),
        (json!({"memory": "1000M"}), "1", "954Mi"),
        (json!({"memory": "81559Mi", "shares": "4"}), "4", "81559Mi"),
    ] {
        let got = results(&node, &mut cluster.clone(), &part(1, &requests), 1);
        assert_eq!(got[0]["consumedCapacity"], json!({"shares": shares, "memory": memory}), "{requests}");
    }
    for requests in [json!({"shares": "5"}), json!({"memory": "80Gi"}), json!({"cores": "1"})] {
        let allocated = cluster.allocate(node.name, &[part(1, &requests)]);
        let Err(Failure::Refused(why)) = allocated else { panic!("{requests}") };
        assert_eq!((why[0].selected, why[0].short), (8, 8), "{requests}: {}", why[0]);
    }
}

#[test]
fn one_slot_per_container_is_one_share_per_claim() {
    let row = "{name: nvidia.com/gpu, replicas: 4}";
    let sharing = format!("sharing: {{timeSlicing: {{failRequestsGreaterThanOne: true, resources: [{row}]}}}}");
    let node = configured(&format!("version: v1\n{sharing}\n"));
    let cluster = node.cluster(&[]);
    assert!(cluster.allocate(node.name, &[part(1, &json!({"shares": "2"}))]).is_err());
    assert!(cluster.allocate(node.name, &[part(1, &json!({"shares": "1"}))]).is_ok());
}

fn file(path: &str) -> String {
    std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The classes of the manifests.
fn classes() -> Vec<Value> {
    let class = |name: &str| serde_saphyr::from_str(&file(&format!("manifests/overlays/dra/deviceclass-{name}.yaml")));
    ["gpu", "shared-gpu", "mig"].map(|name| class(name).unwrap()).into()
}

#[test]
fn manifest_classes_keep_shares_and_gpus_apart() {
    let node = node("devices: 1");
    let mut cluster = Cluster::new(&node.slices, &classes(), &[]).unwrap();
    assert_eq!(results(&node, &mut cluster, &gpus(1, None), 9).len(), 7);
    assert_eq!(devices(&results(&node, &mut cluster, &part(1, &json!({})), 9)), ["gpu-0"; 4]);
    // Pods without a claim ask for the class's extended resource.
    let mut cluster = Cluster::new(&node.slices, &classes(), &[]).unwrap();
    let claim = cluster.extended_claim("default", "pod", &[vec![("nvidia.com/gpu.shared", 1)]]).unwrap();
    assert_eq!(devices(&results(&node, &mut cluster, &claim, 9)), ["gpu-0"; 4]);
    let claim = cluster.extended_claim("default", "pod", &[vec![("nvidia.com/gpu", 1)]]).unwrap();
    assert_eq!(results(&node, &mut cluster, &claim, 9).len(), 7);
    let chart = file("charts/linkwise/templates/dra.yaml");
    for class in classes() {
        let expression = class["spec"]["selectors"][0]["cel"]["expression"].as_str().unwrap();
        let name = class["metadata"]["name"].as_str().unwrap();
        let of_chart = chart.split("kind: DeviceClass").find(|part| part.contains(&format!("name: {name}\n"))).unwrap();
        assert!(of_chart.contains(expression), "the chart's {name}");
    }
}

#[test]
fn documented_claims_get_their_part() {
    let page = file("docs/sharing.md");
    let blocks = page.split("    apiVersion: resource.k8s.io/v1\n").skip(1);
    let taken = blocks.map(|block| {
        let lines = block.lines().take_while(|line| line.starts_with("    "));
        let mut object: Value = serde_saphyr::from_str(&lines.collect::<Vec<_>>().join("\n")).unwrap();
        if object["kind"] == "ResourceClaimTemplate" {
            object["spec"] = object["spec"]["spec"].take();
            object["kind"] = json!("ResourceClaim");
        }
        let node = node("devices: 1");
        let mut cluster = Cluster::new(&node.slices, &classes(), &[]).unwrap();
        results(&node, &mut cluster, &accepted(&object, Some("default")), 1)[0]["consumedCapacity"].clone()
    });
    let expected = [json!({"shares": "2", "memory": QUARTER}), json!({"shares": "1", "memory": "20Gi"})];
    assert_eq!(taken.collect::<Vec<_>>(), expected);
}
