//! Tests of the ready examples: against schemas, against rules that their APIs have beyond types, and for the labels
//! that linkwise writes.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::chart::helm::{list, repository};
use crate::examples::schema::{Schema, of_parts};

const GPU: &str = "nvidia.com/gpu";
const FABRIC: &str = "linkwise.dev/nvlink-fabric";
const HOST: &str = "kubernetes.io/hostname";

/// The labels that the examples use and their possible values. `None` allows any number, an empty list only the key.
const LABELS: [(&str, Option<&[&str]>); 5] = [
    (FABRIC, Some(&[])),
    (
        "linkwise.dev/gpu.link",
        Some(&["nvswitch", "nvlink-mesh", "nvlink-partial", "pcie-switch", "pcie-host", "single"]),
    ),
    ("linkwise.dev/gpu.island-size", None),
    ("linkwise.dev/gpu.per-numa", None),
    ("linkwise.dev/gpu.models", None),
];

fn files() -> Vec<PathBuf> {
    let entries = fs::read_dir(repository("manifests/examples")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect();
    files.sort();
    files
}

/// The objects of a text; the error names the first problem.
fn checked(text: &str) -> Result<Vec<Value>, String> {
    let documents = text.split("\n---\n").map(serde_saphyr::from_str::<Value>);
    let objects = documents.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    let schemas = of_parts(&fs::read_to_string(repository("tests/chart/schemas.yaml")).unwrap());
    for object in &objects {
        check_fields(&schemas, object)?;
    }
    for object in &objects {
        let checked = check_object(&schemas, object, &objects).and_then(|()| {
            pods(object).into_iter().try_for_each(|(pod, metadata)| check_pod(pod, metadata, object, &objects))
        });
        checked.map_err(|error| format!("{}: {error}", name(object)))?;
    }
    Ok(objects)
}

/// Checks that an object has the fields of its kind's schema, and no others.
fn check_fields(schemas: &[Schema], object: &Value) -> Result<(), String> {
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    let schema = schemas.iter().find(|schema| (schema.api_version.as_str(), schema.kind.as_str()) == (version, kind));
    let schema = schema.ok_or_else(|| format!("no schema for {kind} of {version}"))?;
    let known = ["name", "namespace", "labels", "annotations"];
    let mut metadata = object["metadata"].as_object().into_iter().flatten();
    check(metadata.all(|(field, _)| known.contains(&field.as_str())), format!("metadata: {}", object["metadata"]))?;
    let faults = schema.faults(object);
    check(faults.is_empty(), faults.join("; "))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn name(object: &Value) -> &str {
    text(&object["metadata"]["name"])
}

fn texts<'a>(value: &'a Value, pointer: &str) -> Vec<&'a str> {
    list(value, pointer).into_iter().map(text).collect()
}

fn entries(map: &Value) -> impl Iterator<Item = (&str, &str)> {
    map.as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), text(value)))
}

/// Returns true if an object of a kind has the name.
fn is_there(objects: &[Value], kind: &str, named: &Value) -> bool {
    objects.iter().any(|object| object["kind"] == kind && object["metadata"]["name"] == *named)
}

/// The pods that an object makes, each with the metadata beside its specification.
fn pods(object: &Value) -> Vec<(&Value, &Value)> {
    fn find<'a>(value: &'a Value, metadata: &'a Value, found: &mut Vec<(&'a Value, &'a Value)>) {
        match value {
            _ if value.get("containers").is_some() => found.push((value, metadata)),
            Value::Object(fields) => fields.values().for_each(|field| find(field, &value["metadata"], found)),
            Value::Array(items) => items.iter().for_each(|item| find(item, &Value::Null, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    find(object, &Value::Null, &mut found);
    found
}

fn check(holds: bool, why: impl Into<String>) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why.into()) }
}

/// Checks that a label of linkwise is in [`LABELS`], with a possible value.
fn check_label(key: &str, value: Option<&str>) -> Result<(), String> {
    if !key.starts_with("linkwise.dev/") {
        return Ok(());
    }
    let Some((_, values)) = LABELS.iter().find(|(label, _)| *label == key) else {
        return Err(format!("{key} is not in LABELS"));
    };
    let Some(value) = value else { return Ok(()) };
    let known = values.map_or_else(|| value.parse::<u32>().is_ok(), |values| values.contains(&value));
    check(known, format!("{key} is never {value}"))
}

fn check_selector(labels: &Value) -> Result<(), String> {
    entries(labels).try_for_each(|(key, value)| check_label(key, Some(value)))
}

fn check_expression(expression: &Value) -> Result<(), String> {
    let (key, values) = (text(&expression["key"]), texts(expression, "/values"));
    match text(&expression["operator"]) {
        "Gt" | "Lt" => {
            let number = matches!(values[..], [value] if value.parse::<i64>().is_ok());
            check(number, format!("{key} is not compared with one whole number"))?;
        }
        "Exists" | "DoesNotExist" => check(values.is_empty(), "Exists takes no values")?,
        _ => check(!values.is_empty(), "In needs values")?,
    }
    values.iter().try_for_each(|value| check_label(key, Some(value)))?;
    check_label(key, None)
}

/// Checks the levels of a topology: known labels of linkwise, each level once, [`HOST`] only at the end.
fn check_levels(levels: &[&Value]) -> Result<(), String> {
    let levels: Vec<&str> = levels.iter().map(|level| text(&level["nodeLabel"])).collect();
    check(levels.iter().collect::<BTreeSet<_>>().len() == levels.len(), "a level twice")?;
    let host = levels.iter().position(|level| *level == HOST);
    check(host.is_none_or(|place| place + 1 == levels.len()), format!("{HOST} is not the lowest level"))?;
    levels.iter().try_for_each(|level| check_label(level, None))
}

fn check_object(schemas: &[Schema], object: &Value, all: &[Value]) -> Result<(), String> {
    check(!name(object).is_empty(), "no name")?;
    let spec = &object["spec"];
    match (text(&object["apiVersion"]), text(&object["kind"])) {
        (_, "Topology") => check_levels(&list(spec, "/levels")),
        (_, "ResourceFlavor") => {
            let (labels, topology) =
                (spec["nodeLabels"].as_object().map_or(0, |labels| labels.len()), &spec["topologyName"]);
            check(labels <= 8, "at most 8 node labels")?;
            check(topology.is_null() || labels > 0, "a topology needs a node label")?;
            check(topology.is_null() || is_there(all, "Topology", topology), "no such Topology")?;
            check_selector(&spec["nodeLabels"])
        }
        (_, "NodeReadinessRule") => {
            let name = text(&spec["taint"]["key"]).strip_prefix("readiness.k8s.io/").unwrap_or_default();
            check(!name.is_empty() && !name.contains('/'), "the taint's key is not readiness.k8s.io/NAME")?;
            let types = texts(spec, "/conditions").len();
            check(types == 1 && spec["conditions"][0]["type"] == "linkwise.dev/GPUsReady", "not linkwise's condition")
        }
        (_, "ClusterQueue") => {
            for group in list(spec, "/resourceGroups") {
                for flavor in list(group, "/flavors") {
                    let named = is_there(all, "ResourceFlavor", &flavor["name"]);
                    check(named, format!("no ResourceFlavor {}", flavor["name"]))?;
                    let resources = list(flavor, "/resources");
                    let quotas: Vec<&str> = resources.iter().map(|resource| text(&resource["name"])).collect();
                    let covered = texts(group, "/coveredResources");
                    check(quotas == covered, "the quotas are not those of coveredResources, in their order")?;
                    resources.iter().try_for_each(|resource| check_quantity(&resource["nominalQuota"]))?;
                }
            }
            Ok(())
        }
        (_, "LocalQueue") => check(is_there(all, "ClusterQueue", &spec["clusterQueue"]), "no such ClusterQueue"),
        (_, "ConfigMap") => {
            let text = object["data"]["volcano-controller.conf"].as_str().ok_or("no volcano-controller.conf")?;
            let config: Value = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
            let schema = schemas.iter().find(|schema| schema.kind == "volcano-controller.conf").unwrap();
            let faults = schema.faults(&config);
            check(faults.is_empty(), faults.join("; "))?;
            for discovery in list(&config, "/networkTopologyDiscovery") {
                check(discovery["enabled"] == true, "the discovery is not enabled")?;
                for (name, levels) in discovery["config"]["networkTopologyTypes"].as_object().into_iter().flatten() {
                    check(name.len() <= 20, format!("{name} is longer than 20 characters"))?;
                    let levels = list(levels, "");
                    let is_level =
                        |level: &&Value| level.as_object().is_some_and(|level| level.keys().eq(["nodeLabel"]));
                    check((1..=16).contains(&levels.len()) && levels.iter().all(is_level), "not 1 to 16 node labels")?;
                    check_levels(&levels)?;
                }
            }
            Ok(())
        }
        (_, "PodGroup") => {
            let keys = list(spec, "/schedulingConstraints/topology").into_iter().map(|topology| text(&topology["key"]));
            keys.into_iter().try_for_each(|key| check_label(key, None))?;
            let gangs = all.iter().filter(|job| job.pointer("/spec/template/spec/schedulingGroup").is_some());
            let pods: u64 = gangs.map(|job| number(&job["spec"]["parallelism"])).sum();
            check(number(&spec["schedulingPolicy"]["gang"]["minCount"]) <= pods, "minCount is more than the pods")
        }
        ("batch.volcano.sh/v1alpha1", _) => {
            let pods: u64 = list(spec, "/tasks").iter().map(|task| number(&task["replicas"])).sum();
            check(number(&spec["minAvailable"]) <= pods, "minAvailable is more than the pods")
        }
        (_, "RayCluster") => {
            let fits = |group: &&Value| {
                let [least, now, most] = ["minReplicas", "replicas", "maxReplicas"].map(|field| number(&group[field]));
                least <= now && now <= most
            };
            check(list(spec, "/workerGroupSpecs").iter().all(fits), "replicas not from minReplicas to maxReplicas")
        }
        (_, "PyTorchJob") => {
            let processes = &spec["nprocPerNode"];
            for (pod, _) in pods(object) {
                let containers = list(pod, "/containers");
                let named = containers.iter().any(|container| container["name"] == "pytorch");
                check(named, "the operator looks for a container pytorch")?;
                let gpus: u64 = containers.into_iter().map(gpus).sum();
                let is_gpus = processes.as_str().is_none_or(|text| text.parse() == Ok(gpus));
                check(is_gpus && !processes.is_number(), "nprocPerNode is not the number of GPUs, as a text")?;
            }
            Ok(())
        }
        ("batch/v1", _) => {
            check(number(&spec["parallelism"]) <= number(&spec["completions"]), "more pods than completions")
        }
        _ => Ok(()),
    }
}

fn check_quantity(quantity: &Value) -> Result<(), String> {
    let Some(text) = quantity.as_str() else { return Ok(()) };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let suffix = text.strip_prefix(digits).unwrap_or_default();
    let known = ["", "m", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"].contains(&suffix);
    check(digits.parse::<u64>().is_ok() && known, format!("{text} is not a quantity"))
}

fn gpus(container: &Value) -> u64 {
    number(&container["resources"]["limits"][GPU])
}

fn check_pod(pod: &Value, metadata: &Value, owner: &Value, all: &[Value]) -> Result<(), String> {
    let knative = owner["apiVersion"] == "serving.knative.dev/v1";
    check(knative || pod["containerConcurrency"].is_null(), "containerConcurrency is Knative's")?;
    let (containers, claims) = (list(pod, "/containers"), list(pod, "/resourceClaims"));
    for container in &containers {
        check(knative || container["name"].is_string(), "a container without a name")?;
        let resources = &container["resources"];
        for quantities in [&resources["requests"], &resources["limits"]] {
            quantities.as_object().into_iter().flatten().try_for_each(|(_, quantity)| check_quantity(quantity))?;
        }
        check(resources["requests"][GPU].is_null(), format!("{GPU} belongs into the limits"))?;
        let limit = &resources["limits"][GPU];
        check(limit.is_null() || number(limit) > 0, format!("{GPU} must be a whole number above 0"))?;
        for used in list(resources, "/claims") {
            let known = claims.iter().any(|claim| claim["name"] == used["name"]);
            check(known, format!("the pod has no claim {}", text(&used["name"])))?;
        }
    }
    for claim in claims {
        let template = &claim["resourceClaimTemplateName"];
        let known = is_there(all, "ResourceClaimTemplate", template);
        check(known, format!("no ResourceClaimTemplate {}", text(template)))?;
    }
    check_selector(&pod["nodeSelector"])?;
    let terms = list(pod, "/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms");
    let preferred = list(pod, "/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution");
    let terms = terms.into_iter().chain(preferred.into_iter().map(|preferred| &preferred["preference"]));
    terms.flat_map(|term| list(term, "/matchExpressions")).try_for_each(check_expression)?;
    for preferred in list(pod, "/affinity/podAffinity/preferredDuringSchedulingIgnoredDuringExecution") {
        let term = &preferred["podAffinityTerm"];
        check_label(text(&term["topologyKey"]), None)?;
        let mut wanted = entries(&term["labelSelector"]["matchLabels"]);
        check(wanted.all(|(key, value)| metadata["labels"][key] == value), "pods that are not the job's own")?;
    }
    if let Some(group) = pod["schedulingGroup"].as_object() {
        let known = is_there(all, "PodGroup", &group["podGroupName"]);
        check(known, format!("no PodGroup {}", text(&group["podGroupName"])))?;
    }
    let topologies: Vec<&Value> = all.iter().filter(|object| object["kind"] == "Topology").collect();
    for (key, value) in [&owner["metadata"], metadata].into_iter().flat_map(|of| entries(&of["annotations"])) {
        if key.starts_with("kueue.x-k8s.io/podset-") || key.ends_with("-placement") {
            let mut levels = topologies.iter().flat_map(|topology| list(topology, "/spec/levels"));
            check(levels.any(|level| level["nodeLabel"] == value), format!("{key}: no level {value}"))?;
        }
        if key == "kai.scheduler/topology" {
            check(topologies.iter().any(|topology| name(topology) == value), format!("no Topology {value}"))?;
        }
    }
    let queue = &owner["metadata"]["labels"]["kueue.x-k8s.io/queue-name"];
    check(queue.is_null() || is_there(all, "LocalQueue", queue), format!("no LocalQueue {}", text(queue)))
}

#[test]
fn examples_satisfy_their_schemas_and_rules() {
    let files = files();
    for file in &files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let objects = checked(&fs::read_to_string(file).unwrap()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let containers = objects.iter().flat_map(pods).flat_map(|(pod, _)| list(pod, "/containers"));
        let asked: u64 = containers.map(gpus).sum();
        let needs_no_limit =
            |object: &Value| ["ResourceClaimTemplate", "NodeReadinessRule"].contains(&text(&object["kind"]));
        assert!(asked > 0 || objects.iter().any(needs_no_limit), "{name} asks for no GPU");
        let readme = fs::read_to_string(repository("manifests/examples/README.md")).unwrap();
        assert!(readme.contains(&format!("`{name}`")), "README.md lacks {name}");
    }
    assert_eq!(files.len(), 10);
}

#[test]
fn schemas_and_rules_refuse_invalid_examples() {
    for (file, from, to, message) in [
        ("kueue.yaml", "topologyName", "topology", "spec.topology: unknown"),
        ("kueue.yaml", "v1beta2\nkind: Topology", "v1\nkind: Topology", "no schema for Topology of kueue.x-k8s.io/v1"),
        ("kueue.yaml", "nodeLabel: linkwise.dev/nvlink-fabric", "nodeLabel: linkwise.dev/nvlink", "is not in LABELS"),
        ("kueue.yaml", "gpu.link: nvswitch", "gpu.link: NVSwitch", "linkwise.dev/gpu.link is never NVSwitch"),
        ("kueue.yaml", "topologyName: nvlink", "topologyName: rack", "no such Topology"),
        ("kueue.yaml", "queue-name: gpus", "queue-name: all", "no LocalQueue all"),
        ("kueue.yaml", "topology: linkwise.dev/nvlink-fabric", "topology: rack", "no level rack"),
        ("kueue.yaml", "nominalQuota: 8Ti", "nominalQuota: 8 TiB", "not a quantity"),
        ("kai.yaml", "kai.scheduler/topology: nvlink", "kai.scheduler/topology: rack", "no Topology rack"),
        ("kai.yaml", "parallelism: 4", "parallelism: four", "is not of type integer"),
        ("volcano.yaml", "            nvlink:", "            nvlink-fabric-of-racks:", "longer than 20"),
        ("volcano.yaml", "mode: hard", "mode: strict", "in=hard|soft"),
        ("volcano.yaml", "minAvailable: 4", "minAvailable: 5", "minAvailable"),
        ("kube-scheduler.yaml", "podGroupName: train", "podGroupName: other", "no PodGroup other"),
        ("kube-scheduler.yaml", "minCount: 4", "minCount: 8", "minCount"),
        ("kube-scheduler.yaml", "- key: linkwise.dev/nvlink-fabric", "- level: rack", "[].level: unknown"),
        ("node-affinity.yaml", "values: [\"3\"]", "values: [many]", "one whole number"),
        ("node-affinity.yaml", "nvidia.com/gpu: 4", "nvidia.com/gpu: 0", "whole number"),
        ("node-affinity.yaml", "nvidia.com/gpu: 4", "nvidia.com/gpu: 500m", "whole number"),
        ("ray.yaml", "minReplicas: 0", "minReplicas: 3", "minReplicas"),
        ("ray.yaml", "groupName", "name", "workerGroupSpecs[].name: unknown"),
        ("pytorchjob.yaml", "- name: pytorch", "- name: train", "container pytorch"),
        ("pytorchjob.yaml", "nprocPerNode: \"8\"", "nprocPerNode: \"4\"", "nprocPerNode"),
        ("knative.yaml", "containerConcurrency", "concurrency", ".concurrency: unknown"),
        ("knative.yaml", "            limits:\n", "", "belongs into the limits"),
        (
            "nccl-tests.yaml",
            "resourceClaimTemplateName: nccl-tests",
            "resourceClaimTemplateName: x",
            "no ResourceClaim",
        ),
        ("nccl-tests.yaml", "              - name: gpus", "              - name: gpu", "the pod has no claim gpu"),
        ("nccl-tests.yaml", "count: 8", "count: 0", "min=1"),
    ] {
        let text = fs::read_to_string(repository("manifests/examples").join(file)).unwrap();
        assert!(text.contains(from), "{file}: {from}");
        let error = checked(&text.replacen(from, to, 1)).expect_err(&format!("{file}: {to}"));
        assert!(error.contains(message), "{file}: {to}: {error}");
    }
}
