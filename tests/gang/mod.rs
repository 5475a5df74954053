//! `linkwise gang`: each scheduler's objects, against the schemas that it publishes and the rules that it has beside them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what a helper cannot do fails the test"
)]

mod schema;

use std::process::{Command, Output};

use linkwise_api_server_box::{Gates, ResourceType, stored};
use schema::{Schema, schemas};
use serde_json::{Value, json};

const SCHEDULERS: [&str; 4] = ["kube", "kueue", "kai", "volcano"];

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_linkwise")).env_clear().arg("gang").args(args).output().unwrap()
}

/// The objects, and the needs on standard error.
fn gang(scheduler: &str, args: &[&str]) -> (Vec<Value>, String) {
    let output = run(&[&["--scheduler", scheduler, "--format", "json"], args].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{scheduler} {args:?}: {said}");
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    (list["items"].as_array().unwrap().clone(), said)
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    objects.iter().find(|object| object["kind"] == kind).unwrap_or_else(|| panic!("no {kind}"))
}

/// The object by its published schema; a template of claims as the API server takes it.
fn holds(schemas: &[Schema], object: &Value) {
    if object["kind"] == "ResourceClaimTemplate" {
        let resource = ResourceType::RESOURCE_CLAIM_TEMPLATES;
        let kept = stored(&resource, Some("default"), Gates::default(), object).unwrap();
        assert_eq!(kept["spec"], object["spec"]);
        return;
    }
    let named = |schema: &&Schema| object["apiVersion"] == schema.api_version && object["kind"] == schema.kind;
    let schema = schemas.iter().find(named).unwrap_or_else(|| panic!("no schema of {object}"));
    assert_eq!(schema.faults(object), [""; 0], "{object}");
    let name = object["metadata"]["name"].as_str().unwrap();
    assert!(name.len() <= 63 && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'));
}

/// The pods' claims are templates of this manifest, but for the channel, which a ComputeDomain's controller makes; each is
/// used by the container.
fn pods_hold(objects: &[Value], pod: &Value) {
    let claims = pod["resourceClaims"].as_array().unwrap();
    let template = of_kind(objects, "ResourceClaimTemplate");
    let channel = objects.iter().find(|object| object["kind"] == "ComputeDomain");
    let channel = channel.map(|domain| &domain["spec"]["channel"]["resourceClaimTemplate"]["name"]);
    let made = [Some(&template["metadata"]["name"]), channel];
    let named: Vec<Option<&Value>> = claims.iter().map(|claim| claim.get("resourceClaimTemplateName")).collect();
    assert_eq!(named, made.into_iter().filter(Option::is_some).collect::<Vec<_>>());
    let used = pod["containers"][0]["resources"]["claims"].as_array().unwrap();
    let names = |list: &[Value]| list.iter().map(|one| one["name"].clone()).collect::<Vec<_>>();
    assert_eq!(names(used), names(claims));
}

/// Kueue's rules of claims (0.19.2, pkg/dra/claims.go): templates only, `exactly` and `ExactCount` only.
fn kueue_counts(template: &Value) -> u64 {
    let requests = template["spec"]["spec"]["devices"]["requests"].as_array().unwrap().iter();
    let gpus = requests.map(|request| {
        assert!(
            request["firstAvailable"].is_null() && request["exactly"]["allocationMode"] == "ExactCount",
            "{request}"
        );
        let is_gpu = request["exactly"]["deviceClassName"] == "gpu.nvidia.com";
        if is_gpu { request["exactly"]["count"].as_u64().unwrap() } else { 0 }
    });
    gpus.sum()
}

/// The Workload that Kueue makes of a job.
fn workload(job: &Value) -> Value {
    let annotations = &job["spec"]["template"]["metadata"]["annotations"];
    let mut set = json!({"name": "main", "count": job["spec"]["parallelism"], "template": job["spec"]["template"]});
    for (field, key) in [("required", "podset-required-topology"), ("preferred", "podset-preferred-topology")] {
        if let Some(label) = annotations.get(format!("kueue.x-k8s.io/{key}")) {
            set["topologyRequest"] = json!({ field: label });
        }
    }
    let queue = &job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"];
    json!({
        "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": {"name": "job"},
        "spec": {"queueName": queue, "podSets": [set]},
    })
}

/// The PodGroup that KAI makes of a job (0.17, pkg/podgrouper).
fn kai_group(job: &Value) -> Value {
    let annotation = |key: &str| job["metadata"]["annotations"].get(format!("kai.scheduler/{key}"));
    let members: u32 = annotation("batch-min-member").unwrap().as_str().unwrap().parse().unwrap();
    let queue = &job["spec"]["template"]["metadata"]["labels"]["kai.scheduler/queue"];
    let mut spec = json!({"minMember": members, "queue": queue});
    for (field, key) in [
        ("topology", "topology"),
        ("requiredTopologyLevel", "topology-required-placement"),
        ("preferredTopologyLevel", "topology-preferred-placement"),
    ] {
        if let Some(value) = annotation(key) {
            spec["topologyConstraint"][field] = value.clone();
        }
    }
    json!({"apiVersion": "scheduling.run.ai/v2alpha2", "kind": "PodGroup", "metadata": {"name": "job"}, "spec": spec})
}

#[test]
fn each_scheduler_gets_what_its_schema_has() {
    let schemas = schemas();
    let shapes: [&[&str]; 7] = [
        &["--gpus", "1"],
        &["--gpus", "8"],
        &["--gpus", "4", "--exact", "--within", "leaf"],
        &["--gpus", "8", "--near", "nic", "--within", "example.com/rack", "--prefer"],
        &["--gpus", "4", "--near", "nic", "--exact"],
        &["--gpus", "4", "--exact", "--node", "gb200-nvl72-node", "--within", "nvlink"],
        &["--gpus", "2", "--queue", "research", "--name", "train", "--image", "a.b/c:d"],
    ];
    for scheduler in SCHEDULERS {
        for shape in shapes {
            let (objects, _) = gang(scheduler, &[&["--pods", "4"], shape].concat());
            objects.iter().for_each(|object| holds(&schemas, object));
            let job = of_kind(&objects, "Job");
            let template = of_kind(&objects, "ResourceClaimTemplate");
            let has_queue = |queue: &Value| !shape.contains(&"--queue") || *queue == "research";
            let within = shape.iter().position(|word| *word == "--within").map(|at| shape[at + 1]);
            let is_preferred = shape.contains(&"--prefer");
            let pod = match scheduler {
                "volcano" => &job["spec"]["tasks"][0]["template"]["spec"],
                _ => &job["spec"]["template"]["spec"],
            };
            pods_hold(&objects, pod);
            match scheduler {
                "kube" => {
                    let group = of_kind(&objects, "PodGroup");
                    assert_eq!(group["metadata"]["name"], pod["schedulingGroup"]["podGroupName"]);
                    assert_eq!(group["spec"]["schedulingPolicy"]["gang"]["minCount"], 4);
                    assert_eq!(group["spec"]["schedulingConstraints"].is_null(), within.is_none() || is_preferred);
                    assert_eq!(pod["affinity"].is_null(), !is_preferred);
                }
                "kueue" => {
                    let workload = workload(job);
                    holds(&schemas, &workload);
                    assert_eq!((&job["spec"]["suspend"], pod.get("schedulerName")), (&json!(true), None));
                    assert!(has_queue(&workload["spec"]["queueName"]), "{workload}");
                    assert_eq!(workload["spec"]["podSets"][0]["topologyRequest"].is_null(), within.is_none());
                    assert_eq!(kueue_counts(template), shape[1].parse::<u64>().unwrap());
                }
                "kai" => {
                    let group = kai_group(job);
                    holds(&schemas, &group);
                    assert_eq!(
                        (&group["spec"]["minMember"], &pod["schedulerName"]),
                        (&json!(4), &json!("kai-scheduler"))
                    );
                    assert!(has_queue(&group["spec"]["queue"]), "{group}");
                    // KAI counts GPUs of `exactly` alone (0.17, pkg/common/resources/dra.go).
                    assert_eq!(kueue_counts(template), shape[1].parse::<u64>().unwrap());
                    let placement = &group["spec"]["topologyConstraint"];
                    assert_eq!(placement.is_null(), within.is_none());
                    if within.is_some() {
                        let topology = of_kind(&objects, "Topology");
                        assert_eq!(topology["metadata"]["name"], placement["topology"]);
                        let level = if is_preferred { "preferredTopologyLevel" } else { "requiredTopologyLevel" };
                        assert_eq!(topology["spec"]["levels"][0]["nodeLabel"], placement[level]);
                    }
                }
                _ => {
                    assert_eq!(
                        (&job["spec"]["minAvailable"], &job["spec"]["tasks"][0]["replicas"]),
                        (&json!(4), &json!(4))
                    );
                    assert!(has_queue(&job["spec"]["queue"]), "{job}");
                    let mode = job["spec"]["networkTopology"]["mode"].as_str();
                    assert_eq!(mode, within.map(|_| if is_preferred { "soft" } else { "hard" }));
                }
            }
        }
    }
}

/// Schemas that take everything would hold nothing.
#[test]
fn broken_objects_are_found() {
    let schemas = schemas();
    let of = |kind: &str, version: &str| {
        schemas.iter().find(|schema| schema.kind == kind && schema.api_version.contains(version)).unwrap()
    };
    let (kube, _) = gang("kube", &["--pods", "2", "--within", "nvlink"]);
    let (volcano, _) = gang("volcano", &["--pods", "2", "--within", "nvlink"]);
    let cases = [
        (
            of_kind(&kube, "PodGroup"),
            of("PodGroup", "scheduling.k8s.io"),
            "/spec/schedulingPolicy/gang/minCount",
            json!("2"),
        ),
        (
            of_kind(&kube, "PodGroup"),
            of("PodGroup", "scheduling.k8s.io"),
            "/spec/schedulingConstraints/topology/0",
            json!({}),
        ),
        (of_kind(&kube, "Job"), of("Job", "batch/v1"), "/spec/completionMode", json!("indexed")),
        (of_kind(&kube, "Job"), of("Job", "batch/v1"), "/spec/template/spec/containers", json!([])),
        (of_kind(&kube, "ComputeDomain"), of("ComputeDomain", "nvidia"), "/spec/channel", json!({"template": 1})),
        (of_kind(&volcano, "Job"), of("Job", "volcano"), "/spec/networkTopology/mode", json!("strict")),
        (of_kind(&volcano, "Job"), of("Job", "volcano"), "/spec/tasks/0/name", json!("Worker")),
        (
            of_kind(&volcano, "Job"),
            of("Job", "volcano"),
            "/spec/tasks/0/template/spec/resourceClaims/0",
            json!({"claim": "a"}),
        ),
    ];
    for (object, schema, place, value) in cases {
        let mut broken = object.clone();
        *broken.pointer_mut(place).unwrap() = value;
        assert!(!schema.faults(&broken).is_empty(), "{place}");
    }
}

#[test]
fn alternatives_go_to_schedulers_that_read_them() {
    for scheduler in SCHEDULERS {
        let (objects, said) = gang(scheduler, &["--pods", "2", "--gpus", "4"]);
        let request = &of_kind(&objects, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"][0];
        let reads = ["kube", "volcano"].contains(&scheduler);
        assert_eq!(request["firstAvailable"].is_array(), reads, "{scheduler}");
        assert!(said.lines().count() >= 1 && said.lines().all(|line| line.starts_with("linkwise: needs ")), "{said}");
    }
    // The group that suits the machine: behind NVSwitches all GPUs are alike.
    let (objects, said) = gang("kai", &["--pods", "2", "--gpus", "4", "--node", "dgx-h100"]);
    let constraint = &of_kind(&objects, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["constraints"][0];
    assert_eq!(constraint["matchAttribute"], "linkwise.dev/octet1a");
    assert!(said.contains("dgx-h100: against alternatives it waits in no state"), "{said}");
}

#[test]
fn impossible_gangs_are_refused_by_name() {
    for (args, named) in [
        (&["--gpus", "4", "--scheduler", "kube"][..], "--pods"),
        (&["--pods", "0", "--scheduler", "kube"], "'0' for '--pods"),
        (&["--pods", "2", "--scheduler", "slurm"], "'slurm' for '--scheduler"),
        (&["--pods", "2", "--scheduler", "kai", "--within", "a b"], "the key of a node's label"),
        (&["--pods", "2", "--scheduler", "kai", "--within", "/a"], "the key of a node's label"),
        (&["--pods", "2", "--scheduler", "kai", "--prefer"], "--within"),
        (&["--pods", "2", "--scheduler", "kai", "--gpus", "17", "--near", "nic"], "--gpus 17 with --near"),
        (&["--pods", "2", "--scheduler", "kube", "--gpus", "2", "--cluster"], "no API server"),
        (&["--pods", "2", "--scheduler", "kube", "--near", "nic", "--cluster"], "--cluster with --near"),
        (&["--pods", "2", "--scheduler", "kai", "--cluster", "--spare-nvswitch"], "--spare-nvswitch orders"),
        (&["--pods", "2", "--scheduler", "kueue", "--gpus", "9", "--node", "dgx-h100"], "no group of 9 GPUs"),
        (&["--pods", "2", "--scheduler", "kube", "--near", "nic", "--node", "dgx-h100"], "--node with --near"),
        (&["--pods", "2", "--scheduler", "kube", "--name", &"a".repeat(51)], "--name"),
    ] {
        let output = run(args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty() && error.contains(named), "{args:?}: {error}");
    }
}

#[test]
fn gang_is_printed_as_people_read_it() {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    for scheduler in SCHEDULERS {
        let output = run(&["--pods", "4", "--gpus", "4", "--exact", "--within", "nvlink", "--scheduler", scheduler]);
        let (text, said) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        settings.bind(|| insta::assert_snapshot!(format!("gang-{scheduler}"), format!("{text}\n{said}")));
    }
}
