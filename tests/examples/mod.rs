//! `manifests/examples/claims`: each scheduler's objects, checked by its published schemas and its further rules.

pub mod schema;

use std::fs;
use std::path::Path;

use linkwise_api_server_box::{Gates, ResourceType, stored};
use schema::{Schema, schemas};
use serde_json::{Value, json};

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/examples")
}

fn example(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(folder().join("claims").join(name)).unwrap();
    text.split("\n---\n").map(|object| serde_saphyr::from_str(object).unwrap()).collect()
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    objects.iter().find(|object| object["kind"] == kind).unwrap_or_else(|| panic!("no {kind}"))
}

/// Checks an object by its published schema, a claim template by the API server box.
fn check_object(schemas: &[Schema], object: &Value) {
    if object["kind"] == "ResourceClaimTemplate" {
        let resource = ResourceType::RESOURCE_CLAIM_TEMPLATES;
        let kept = stored(&resource, Some("default"), Gates::default(), object).unwrap();
        assert_eq!(kept["spec"], object["spec"]);
        return;
    }
    let named = |schema: &&Schema| object["apiVersion"] == schema.api_version && object["kind"] == schema.kind;
    let schema = schemas.iter().find(named).unwrap_or_else(|| panic!("no schema of {object}"));
    assert_eq!(schema.faults(object), [""; 0], "{object}");
}

/// Checks that a pod's claims come from the manifest's template and the one that a ComputeDomain's controller makes, if
/// any, and that the container uses each, without limits. Kueue admits no pod without a request of CPU or memory.
fn check_pod(objects: &[Value], pod: &Value) {
    let claims = pod["resourceClaims"].as_array().unwrap();
    let template = of_kind(objects, "ResourceClaimTemplate");
    let channel = objects.iter().find(|object| object["kind"] == "ComputeDomain");
    let channel = channel.map(|domain| &domain["spec"]["channel"]["resourceClaimTemplate"]["name"]);
    let made = [Some(&template["metadata"]["name"]), channel];
    let named: Vec<Option<&Value>> = claims.iter().map(|claim| claim.get("resourceClaimTemplateName")).collect();
    assert_eq!(named, made.into_iter().filter(Option::is_some).collect::<Vec<_>>());
    let resources = &pod["containers"][0]["resources"];
    let names = |list: &[Value]| list.iter().map(|one| one["name"].clone()).collect::<Vec<_>>();
    assert_eq!(names(resources["claims"].as_array().unwrap()), names(claims));
    assert!(resources["requests"]["cpu"].is_string() && resources.get("limits").is_none(), "{resources}");
}

/// The number of GPUs of a template. Kueue accepts only templates with `exactly` and `ExactCount` (0.19.2,
/// pkg/dra/claims.go), and KAI counts only those (0.17, pkg/common/resources/dra.go).
fn gpu_count(template: &Value) -> u64 {
    let requests = template["spec"]["spec"]["devices"]["requests"].as_array().unwrap().iter();
    let gpus = requests.map(|request| {
        let exactly = &request["exactly"];
        assert!(request["firstAvailable"].is_null() && exactly["allocationMode"] == "ExactCount", "{request}");
        assert_eq!(exactly["deviceClassName"], "gpu.nvidia.com");
        exactly["count"].as_u64().unwrap()
    });
    gpus.sum()
}

/// The Workload that Kueue creates for a job.
fn workload(job: &Value) -> Value {
    let annotations = &job["spec"]["template"]["metadata"]["annotations"];
    let topology = json!({"required": annotations["kueue.x-k8s.io/podset-required-topology"]});
    let template = &job["spec"]["template"];
    let set =
        json!({"name": "main", "count": job["spec"]["parallelism"], "template": template, "topologyRequest": topology});
    let queue = &job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"];
    json!({
        "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": {"name": "job"},
        "spec": {"queueName": queue, "podSets": [set]},
    })
}

/// The PodGroup that KAI creates for a job (0.17, pkg/podgrouper).
fn kai_group(job: &Value) -> Value {
    let annotation = |key: &str| &job["metadata"]["annotations"][format!("kai.scheduler/{key}")];
    let members: u32 = annotation("batch-min-member").as_str().unwrap().parse().unwrap();
    let queue = &job["spec"]["template"]["metadata"]["labels"]["kai.scheduler/queue"];
    let topology = json!({
        "topology": annotation("topology"), "requiredTopologyLevel": annotation("topology-required-placement"),
    });
    let spec = json!({"minMember": members, "queue": queue, "topologyConstraint": topology});
    json!({"apiVersion": "scheduling.run.ai/v2alpha2", "kind": "PodGroup", "metadata": {"name": "job"}, "spec": spec})
}

#[test]
fn examples_match_schedulers_schemas() {
    let schemas = schemas();
    let mut files: Vec<String> = fs::read_dir(folder().join("claims"))
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let all = [
        "compute-domain.yaml",
        "kai.yaml",
        "kube-scheduler.yaml",
        "kueue-configuration.yaml",
        "kueue.yaml",
        "volcano.yaml",
    ];
    assert_eq!(files, all);
    let readme = fs::read_to_string(folder().join("README.md")).unwrap();
    for file in files {
        assert!(readme.contains(&format!("`claims/{file}`")), "README.md does not name {file}");
        let objects = example(&file);
        objects.iter().for_each(|object| check_object(&schemas, object));
        if let [only] = objects.as_slice() {
            let mapping = json!([{"name": "nvidia.com/gpu", "deviceClassNames": ["gpu.nvidia.com"]}]);
            assert_eq!(only["resources"]["deviceClassMappings"], mapping);
            continue;
        }
        let job = of_kind(&objects, "Job");
        assert_eq!(gpu_count(of_kind(&objects, "ResourceClaimTemplate")), 4);
        let pod = match file.as_str() {
            "volcano.yaml" => &job["spec"]["tasks"][0]["template"]["spec"],
            _ => &job["spec"]["template"]["spec"],
        };
        check_pod(&objects, pod);
        match file.as_str() {
            "kube-scheduler.yaml" => {
                let group = of_kind(&objects, "PodGroup");
                assert_eq!(group["metadata"]["name"], pod["schedulingGroup"]["podGroupName"]);
                assert_eq!(group["spec"]["schedulingPolicy"]["gang"]["minCount"], job["spec"]["parallelism"]);
            }
            "kueue.yaml" => {
                check_object(&schemas, &workload(job));
                assert_eq!((&job["spec"]["suspend"], pod.get("schedulerName")), (&json!(true), None));
                // The example for the device plugin defines the queue.
                let queues = fs::read_to_string(folder().join("kueue.yaml")).unwrap();
                assert!(queues.contains("kind: LocalQueue\nmetadata:\n  name: gpus\n"));
                assert_eq!(job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], "gpus");
            }
            "kai.yaml" => {
                let group = kai_group(job);
                check_object(&schemas, &group);
                assert_eq!((&group["spec"]["minMember"], &pod["schedulerName"]), (&json!(4), &json!("kai-scheduler")));
                let (topology, placement) = (of_kind(&objects, "Topology"), &group["spec"]["topologyConstraint"]);
                assert_eq!(topology["metadata"]["name"], placement["topology"]);
                assert_eq!(topology["spec"]["levels"][0]["nodeLabel"], placement["requiredTopologyLevel"]);
            }
            "volcano.yaml" => assert_eq!(job["spec"]["minAvailable"], job["spec"]["tasks"][0]["replicas"]),
            _ => {}
        }
    }
}

#[test]
fn schemas_refuse_broken_objects() {
    let schemas = schemas();
    for (file, kind, place, value) in [
        ("kube-scheduler.yaml", "PodGroup", "/spec/schedulingPolicy/gang/minCount", json!("2")),
        ("kube-scheduler.yaml", "PodGroup", "/spec/schedulingConstraints/topology/0", json!({})),
        ("kube-scheduler.yaml", "Job", "/spec/completionMode", json!("indexed")),
        ("kube-scheduler.yaml", "Job", "/spec/template/spec/containers", json!([])),
        ("compute-domain.yaml", "ComputeDomain", "/spec/channel", json!({"template": 1})),
        ("volcano.yaml", "Job", "/spec/networkTopology/mode", json!("strict")),
        ("volcano.yaml", "Job", "/spec/tasks/0/name", json!("Worker")),
        ("volcano.yaml", "Job", "/spec/tasks/0/template/spec/resourceClaims/0", json!({"claim": "a"})),
    ] {
        let objects = example(file);
        let mut broken = of_kind(&objects, kind).clone();
        let schema = schemas.iter().find(|schema| schema.kind == kind && broken["apiVersion"] == schema.api_version);
        *broken.pointer_mut(place).unwrap() = value;
        assert!(!schema.unwrap().faults(&broken).is_empty(), "{place}");
    }
}
