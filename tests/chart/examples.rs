//! The ready examples: read by the schema, then by the rules that their APIs have beyond types, and by linkwise's labels.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::chart::helm::repository;
use crate::chart::schema::{Expression, Metadata, Object, Operator, PodSpec, Quantity, Spec, Texts, VolcanoController};

const GPU: &str = "nvidia.com/gpu";
const FABRIC: &str = "linkwise.dev/nvlink-fabric";
const HOST: &str = "kubernetes.io/hostname";

/// linkwise's labels and the values that they can have; `None`: any number.
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

/// The objects of a text, or what is wrong with it.
fn checked(text: &str) -> Result<Vec<Object>, String> {
    let documents = text.split("\n---\n").map(serde_saphyr::from_str::<Value>);
    let documents = documents.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    let objects = documents.iter().map(Object::read).collect::<Result<Vec<_>, _>>()?;
    for object in &objects {
        object_holds(object, &objects).map_err(|error| format!("{}: {error}", object.name()))?;
        for (pod, metadata) in object.pods() {
            pod_holds(pod, metadata, object, &objects).map_err(|error| format!("{}: {error}", object.name()))?;
        }
    }
    Ok(objects)
}

fn check(holds: bool, why: impl Into<String>) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why.into()) }
}

/// A label of ours is one that linkwise writes, with a value that it can have.
fn label_holds(key: &str, value: Option<&str>) -> Result<(), String> {
    if !key.starts_with("linkwise.dev/") {
        return Ok(());
    }
    let Some((_, values)) = LABELS.iter().find(|(label, _)| *label == key) else {
        return Err(format!("linkwise writes no label {key}"));
    };
    let Some(value) = value else { return Ok(()) };
    let known = values.map_or_else(|| value.parse::<u32>().is_ok(), |values| values.contains(&value));
    check(known, format!("{key} is never {value}"))
}

fn selector_holds(labels: &Texts) -> Result<(), String> {
    labels.iter().try_for_each(|(key, value)| label_holds(key, Some(value)))
}

fn expression_holds(expression: &Expression) -> Result<(), String> {
    let values = expression.values.as_deref().unwrap_or_default();
    match expression.operator {
        Operator::Gt | Operator::Lt => {
            let number = matches!(values, [value] if value.parse::<i64>().is_ok());
            check(number, format!("{} is compared with one whole number", expression.key))?;
        }
        Operator::Exists | Operator::DoesNotExist => check(values.is_empty(), "Exists has no values")?,
        Operator::In | Operator::NotIn => check(!values.is_empty(), "In needs values")?,
    }
    values.iter().try_for_each(|value| label_holds(&expression.key, Some(value)))?;
    label_holds(&expression.key, None)
}

/// Levels of a topology: at most 16, each once, the node last.
fn levels_hold<'a>(levels: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let levels: Vec<&str> = levels.collect();
    check((1..=16).contains(&levels.len()), "1 to 16 levels")?;
    check(levels.iter().collect::<BTreeSet<_>>().len() == levels.len(), "a level twice")?;
    let host = levels.iter().position(|level| *level == HOST);
    check(host.is_none_or(|place| place + 1 == levels.len()), format!("{HOST} is not the lowest level"))?;
    levels.iter().try_for_each(|level| label_holds(level, None))
}

fn object_holds(object: &Object, all: &[Object]) -> Result<(), String> {
    check(!object.name().is_empty(), "no name")?;
    match &object.spec {
        Spec::KueueTopology(topology) | Spec::KaiTopology(topology) => {
            levels_hold(topology.levels.iter().map(|level| level.node_label.as_str()))
        }
        Spec::ResourceFlavor(flavor) => {
            let labels = flavor.node_labels.clone().unwrap_or_default();
            check(labels.len() <= 8, "at most 8 node labels")?;
            check(flavor.topology_name.is_none() || !labels.is_empty(), "a topology needs a node label")?;
            let named =
                |name: &String| all.iter().any(|o| matches!(&o.spec, Spec::KueueTopology(_)) && o.name() == name);
            check(flavor.topology_name.as_ref().is_none_or(named), "no such Topology")?;
            selector_holds(&labels)
        }
        Spec::ClusterQueue(queue) => {
            for group in &queue.resource_groups {
                for flavor in &group.flavors {
                    let named = |o: &Object| matches!(&o.spec, Spec::ResourceFlavor(_)) && o.name() == flavor.name;
                    check(all.iter().any(named), format!("no ResourceFlavor {}", flavor.name))?;
                    let quotas: Vec<&String> = flavor.resources.iter().map(|resource| &resource.name).collect();
                    let covered: Vec<&String> = group.covered_resources.iter().collect();
                    check(quotas == covered, "the quotas are not those of coveredResources, in their order")?;
                    flavor.resources.iter().try_for_each(|resource| quantity_holds(&resource.nominal_quota))?;
                }
            }
            Ok(())
        }
        Spec::LocalQueue(queue) => {
            let named = |o: &Object| matches!(&o.spec, Spec::ClusterQueue(_)) && o.name() == queue.cluster_queue;
            check(all.iter().any(named), "no such ClusterQueue")
        }
        Spec::ConfigMap(data) => {
            let text = data.get("volcano-controller.conf").ok_or("no volcano-controller.conf")?;
            let config: VolcanoController = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
            for discovery in &config.network_topology_discovery {
                check(discovery.source == "label" && discovery.enabled, "not the discovery by labels")?;
                for (name, levels) in &discovery.config.network_topology_types {
                    check(name.len() <= 20, format!("{name} is longer than 20 characters"))?;
                    levels_hold(levels.iter().map(|level| level.node_label.as_str()))?;
                }
            }
            Ok(())
        }
        Spec::PodGroup(group) => {
            let keys: Vec<&str> =
                group.scheduling_constraints.iter().flat_map(|c| &c.topology).map(|t| &*t.key).collect();
            check(keys.len() <= 1, "one topology constraint at most")?;
            keys.iter().try_for_each(|key| label_holds(key, None))?;
            let members = |o: &Object| match &o.spec {
                Spec::Job(job) => job.template.spec.scheduling_group.as_ref().map(|_| job.parallelism),
                _ => None,
            };
            let pods: u32 = all.iter().filter_map(members).sum();
            check(group.scheduling_policy.gang.min_count <= pods, "minCount is more than the pods")
        }
        Spec::VolcanoJob(job) => {
            let pods: u32 = job.tasks.iter().map(|task| task.replicas).sum();
            check(job.min_available <= pods, "minAvailable is more than the pods")?;
            let highest = job.network_topology.as_ref().and_then(|topology| topology.highest_tier_allowed);
            // The label above the node is tier 1.
            check(highest.is_none_or(|tier| tier == 1), "there is one tier")
        }
        Spec::RayCluster(ray) => {
            let sizes =
                |g: &crate::chart::schema::RayWorkers| g.min_replicas <= g.replicas && g.replicas <= g.max_replicas;
            check(ray.worker_group_specs.iter().all(sizes), "replicas between minReplicas and maxReplicas")
        }
        Spec::PyTorchJob(job) => {
            let named = |pod: &PodSpec| pod.containers.iter().any(|c| c.name.as_deref() == Some("pytorch"));
            check(object.pods().iter().all(|(pod, _)| named(pod)), "the operator looks for a container pytorch")?;
            let gpus = |pod: &PodSpec| pod.containers.iter().map(gpus).sum::<u64>().to_string();
            let processes = job.nproc_per_node.as_ref();
            check(
                object.pods().iter().all(|(pod, _)| processes.is_none_or(|n| *n == gpus(pod))),
                "nprocPerNode is the GPUs",
            )
        }
        Spec::Job(job) => check(job.parallelism <= job.completions, "more pods than completions"),
        Spec::ClaimTemplate(template) => {
            let requests = &template.spec.devices.requests;
            let whole = |request: &crate::chart::schema::DeviceRequest| {
                request.exactly.device_class_name == "gpu.nvidia.com" && (1..=32).contains(&request.exactly.count)
            };
            check(!requests.is_empty() && requests.iter().all(whole), "1 to 32 GPUs of linkwise's class")
        }
        Spec::Pod(_) | Spec::Knative(_) => Ok(()),
    }
}

fn quantity_holds(quantity: &Quantity) -> Result<(), String> {
    let Quantity::Text(text) = quantity else { return Ok(()) };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let suffix = text.strip_prefix(digits).unwrap_or_default();
    let known = ["", "m", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"].contains(&suffix);
    check(digits.parse::<u64>().is_ok() && known, format!("{text} is no quantity"))
}

/// The GPUs of a container's limit.
fn gpus(container: &crate::chart::schema::Container) -> u64 {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    match limits.and_then(|limits| limits.get(GPU)) {
        Some(Quantity::Number(count)) => *count,
        _ => 0,
    }
}

fn pod_holds(pod: &PodSpec, metadata: Option<&Metadata>, owner: &Object, all: &[Object]) -> Result<(), String> {
    check(!pod.containers.is_empty(), "no container")?;
    let knative = matches!(owner.spec, Spec::Knative(_));
    check(knative || pod.container_concurrency.is_none(), "containerConcurrency is Knative's")?;
    for container in &pod.containers {
        check(knative || container.name.is_some(), "a container without a name")?;
        let Some(resources) = &container.resources else { continue };
        for quantities in [&resources.requests, &resources.limits].into_iter().flatten() {
            quantities.values().try_for_each(quantity_holds)?;
        }
        // An extended resource: whole, in the limits; a request alone is refused.
        let requested = resources.requests.as_ref().is_some_and(|requests| requests.contains_key(GPU));
        check(!requested, format!("{GPU} belongs into the limits"))?;
        let limit = resources.limits.as_ref().and_then(|limits| limits.get(GPU));
        check(limit.is_none_or(|limit| matches!(limit, Quantity::Number(1..))), format!("{GPU} is a whole number"))?;
    }
    let claims = pod.resource_claims.as_deref().unwrap_or_default();
    for claim in claims {
        let named =
            |o: &Object| matches!(&o.spec, Spec::ClaimTemplate(_)) && o.name() == claim.resource_claim_template_name;
        check(all.iter().any(named), format!("no ResourceClaimTemplate {}", claim.resource_claim_template_name))?;
    }
    let used = pod.containers.iter().flat_map(|c| &c.resources).flat_map(|resources| resources.claims.iter().flatten());
    for used in used {
        check(claims.iter().any(|claim| claim.name == used.name), format!("the pod has no claim {}", used.name))?;
    }
    selector_holds(pod.node_selector.as_ref().unwrap_or(&Texts::new()))?;
    if let Some(nodes) = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref()) {
        let required = nodes.required_during_scheduling_ignored_during_execution.iter();
        let preferred = nodes.preferred_during_scheduling_ignored_during_execution.iter().flatten();
        let terms = required.flat_map(|nodes| &nodes.node_selector_terms).chain(preferred.map(|p| &p.preference));
        terms.flat_map(|term| &term.match_expressions).try_for_each(expression_holds)?;
    }
    if let Some(pods) = pod.affinity.as_ref().and_then(|affinity| affinity.pod_affinity.as_ref()) {
        for preferred in &pods.preferred_during_scheduling_ignored_during_execution {
            check((1..=100).contains(&preferred.weight), "a weight of 1 to 100")?;
            label_holds(&preferred.pod_affinity_term.topology_key, None)?;
            let labels = metadata.and_then(|metadata| metadata.labels.clone()).unwrap_or_default();
            let wanted = &preferred.pod_affinity_term.label_selector.match_labels;
            check(wanted.iter().all(|(key, value)| labels.get(key) == Some(value)), "pods that are not the job's own")?;
        }
    }
    if let Some(group) = &pod.scheduling_group {
        let named = |o: &Object| matches!(&o.spec, Spec::PodGroup(_)) && o.name() == group.pod_group_name;
        check(all.iter().any(named), format!("no PodGroup {}", group.pod_group_name))?;
    }
    // A job starts at the place of its owner's annotations and labels too.
    let annotations = [Some(&owner.metadata), metadata].into_iter().flatten().filter_map(|m| m.annotations.as_ref());
    for (key, value) in annotations.flatten() {
        let placement = key.starts_with("kueue.x-k8s.io/podset-") || key.ends_with("-placement");
        let levels = all.iter().filter_map(|o| match &o.spec {
            Spec::KueueTopology(topology) | Spec::KaiTopology(topology) => Some((o.name(), &topology.levels)),
            _ => None,
        });
        let levels: Vec<_> = levels.collect();
        if placement {
            let known = levels.iter().flat_map(|(_, levels)| levels.iter()).any(|level| level.node_label == *value);
            check(known, format!("{key}: no level {value}"))?;
        }
        if key == "kai.scheduler/topology" {
            check(levels.iter().any(|(name, _)| name == value), format!("no Topology {value}"))?;
        }
    }
    if let Some(queue) = owner.metadata.labels.as_ref().and_then(|labels| labels.get("kueue.x-k8s.io/queue-name")) {
        let named = |o: &Object| matches!(&o.spec, Spec::LocalQueue(_)) && o.name() == queue;
        check(all.iter().any(named), format!("no LocalQueue {queue}"))?;
    }
    Ok(())
}

#[test]
fn examples_hold_by_their_schemas() {
    let files = files();
    for file in &files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let objects = checked(&fs::read_to_string(file).unwrap()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let asked: u64 = objects.iter().flat_map(Object::pods).flat_map(|(pod, _)| &pod.containers).map(gpus).sum();
        let claimed = objects.iter().any(|object| matches!(object.spec, Spec::ClaimTemplate(_)));
        assert!(asked > 0 || claimed, "{name} asks for no GPU");
        let readme = fs::read_to_string(repository("manifests/examples/README.md")).unwrap();
        assert!(readme.contains(&format!("`{name}`")), "README.md does not have {name}");
    }
    assert_eq!(files.len(), 9);
}

#[test]
fn schema_refuses_what_the_apis_refuse() {
    for (file, from, to, message) in [
        ("kueue.yaml", "topologyName", "topology", "unknown field `topology`"),
        ("kueue.yaml", "v1beta2\nkind: Topology", "v1\nkind: Topology", "no schema for Topology of kueue.x-k8s.io/v1"),
        ("kueue.yaml", "nodeLabel: linkwise.dev/nvlink-fabric", "nodeLabel: linkwise.dev/nvlink", "writes no label"),
        ("kueue.yaml", "gpu.link: nvswitch", "gpu.link: NVSwitch", "linkwise.dev/gpu.link is never NVSwitch"),
        ("kueue.yaml", "topologyName: nvlink", "topologyName: rack", "no such Topology"),
        ("kueue.yaml", "queue-name: gpus", "queue-name: all", "no LocalQueue all"),
        ("kueue.yaml", "topology: linkwise.dev/nvlink-fabric", "topology: rack", "no level rack"),
        ("kueue.yaml", "nominalQuota: 8Ti", "nominalQuota: 8 TiB", "no quantity"),
        ("kai.yaml", "kai.scheduler/topology: nvlink", "kai.scheduler/topology: rack", "no Topology rack"),
        ("kai.yaml", "parallelism: 4", "parallelism: four", "invalid type"),
        ("volcano.yaml", "            nvlink:", "            nvlink-fabric-of-racks:", "longer than 20"),
        ("volcano.yaml", "mode: hard", "mode: strict", "unknown variant `strict`"),
        ("volcano.yaml", "minAvailable: 4", "minAvailable: 5", "minAvailable"),
        ("kube-scheduler.yaml", "podGroupName: train", "podGroupName: other", "no PodGroup other"),
        ("kube-scheduler.yaml", "minCount: 4", "minCount: 8", "minCount"),
        ("kube-scheduler.yaml", "- key: linkwise.dev/nvlink-fabric", "- level: rack", "unknown field `level`"),
        ("node-affinity.yaml", "values: [\"3\"]", "values: [many]", "one whole number"),
        ("node-affinity.yaml", "nvidia.com/gpu: 4", "nvidia.com/gpu: 0", "whole number"),
        ("node-affinity.yaml", "nvidia.com/gpu: 4", "nvidia.com/gpu: 500m", "whole number"),
        ("ray.yaml", "minReplicas: 0", "minReplicas: 3", "minReplicas"),
        ("ray.yaml", "groupName", "name", "unknown field `name`"),
        ("pytorchjob.yaml", "- name: pytorch", "- name: train", "container pytorch"),
        ("pytorchjob.yaml", "nprocPerNode: \"8\"", "nprocPerNode: \"4\"", "nprocPerNode"),
        ("knative.yaml", "containerConcurrency", "concurrency", "unknown field `concurrency`"),
        ("knative.yaml", "limits:", "requests:", "belongs into the limits"),
        (
            "nccl-tests.yaml",
            "resourceClaimTemplateName: nccl-tests",
            "resourceClaimTemplateName: x",
            "no ResourceClaim",
        ),
        ("nccl-tests.yaml", "              - name: gpus", "              - name: gpu", "the pod has no claim gpu"),
        ("nccl-tests.yaml", "count: 8", "count: 0", "1 to 32 GPUs"),
    ] {
        let text = fs::read_to_string(repository("manifests/examples").join(file)).unwrap();
        assert!(text.contains(from), "{file}: {from}");
        let error = checked(&text.replacen(from, to, 1)).expect_err(&format!("{file}: {to}"));
        assert!(error.contains(message), "{file}: {to}: {error}");
    }
}
