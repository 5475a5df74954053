//! Pods with several claims that fit nowhere: what an attempt costs the scheduler, in devices that it looks at.

use std::path::Path;

use linkwise_scheduler_box::Failure;
use serde_json::{Value, json};

use crate::dra_model::published::{accepted, node};

/// The claim of a template of manifests/dra/templates, and that of its further claims.
fn templates(gpus: u32) -> [Value; 2] {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("manifests/dra/templates/linkwise-gpus-{gpus}.yaml"));
    let list: Value = serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let [first, further] = list["items"].as_array().unwrap().as_slice() else { panic!("{list}") };
    assert_eq!(first["metadata"]["annotations"]["linkwise.dev/further-claims"], further["metadata"]["name"]);
    [first, further].map(|template| {
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
            "spec": template["spec"]["spec"],
        });
        accepted(&object, Some("default"))
    })
}

#[test]
fn further_claims_for_any_gpus_bound_what_an_attempt_costs() {
    let mut worst = 0;
    for name in ["dgx1-v100", "aws-p5", "nvlink-bridge-pairs", "pcie-8x-pix-pairs"] {
        let node = node(name);
        let cluster = node.cluster(&[]).with_most_steps(u64::MAX);
        for sizes in [&[2, 2, 2, 2][..], &[2, 2, 2], &[4, 2, 2], &[2, 2, 4], &[8, 2]] {
            // One GPU too few is free: no other number has as many sets to try.
            let free = (1 << (sizes.iter().sum::<u32>() - 1).min(7)) - 1;
            let cluster = node.occupied(&cluster, free);
            let looked_at = |which: &dyn Fn(usize) -> usize| {
                let claims = sizes.iter().enumerate().map(|(nth, gpus)| templates(*gpus)[which(nth)].clone());
                match cluster.allocate(name, &claims.collect::<Vec<_>>()) {
                    Err(Failure::Refused(why)) => why[0].steps,
                    other => panic!("{name} {sizes:?}: {other:?}"),
                }
            };
            let plain = looked_at(&|_| 1);
            let bounded = looked_at(&|nth| nth.min(1));
            // A thousand devices on each of 100 nodes were less than 0.1 s of kube-scheduler 1.36.2.
            assert!(bounded <= 2 * plain + 1_000, "{name} {sizes:?}: {bounded} devices, {plain} by plain claims");
            worst = worst.max(looked_at(&|_| 0) / plain);
        }
    }
    // What the bound is for.
    assert!(worst > 5, "claims with alternatives cost {worst} times as much as plain ones");
}
