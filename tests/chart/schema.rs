//! The fields that the ready examples use, as strict types: an unknown field, or one of another type, is an error. Each kind names
//! the version of its API whose definition it retells.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub type Texts = BTreeMap<String, String>;

macro_rules! strict {
    ($($(#[$doc:meta])* $name:ident { $($(#[$inner:meta])* $field:ident: $type:ty),+ $(,)? })+) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Deserialize)]
            #[serde(rename_all = "camelCase", deny_unknown_fields)]
            #[allow(dead_code, reason = "a field is there to be known")]
            pub struct $name { $($(#[$inner])* pub $field: $type,)+ }
        )+
    };
}

strict! {
    /// `metadata` of every object.
    Metadata {
        name: Option<String>,
        namespace: Option<String>,
        labels: Option<Texts>,
        annotations: Option<Texts>,
    }

    // Kubernetes 1.37: core/v1 and batch/v1.
    Pod { spec: PodSpec }
    PodTemplate { metadata: Option<Metadata>, spec: PodSpec }
    PodSpec {
        containers: Vec<Container>,
        restart_policy: Option<String>,
        scheduler_name: Option<String>,
        /// 1.36, feature gate GenericWorkload.
        scheduling_group: Option<SchedulingGroup>,
        node_selector: Option<Texts>,
        affinity: Option<Affinity>,
        tolerations: Option<Vec<Toleration>>,
        resource_claims: Option<Vec<PodClaim>>,
        /// Knative's alone: serving.knative.dev/v1 puts it beside the pod's fields.
        container_concurrency: Option<u32>,
    }
    Container {
        name: Option<String>,
        image: String,
        command: Option<Vec<String>>,
        args: Option<Vec<String>>,
        ports: Option<Vec<Port>>,
        resources: Option<Resources>,
    }
    Port { container_port: u16 }
    Resources {
        requests: Option<BTreeMap<String, Quantity>>,
        limits: Option<BTreeMap<String, Quantity>>,
        claims: Option<Vec<ContainerClaim>>,
    }
    ContainerClaim { name: String, request: Option<String> }
    PodClaim { name: String, resource_claim_template_name: String }
    SchedulingGroup { pod_group_name: String }
    Toleration { key: Option<String>, operator: Option<TolerationOperator>, value: Option<String>, effect: Option<Effect> }
    Affinity { node_affinity: Option<NodeAffinity>, pod_affinity: Option<PodAffinity> }
    NodeAffinity {
        required_during_scheduling_ignored_during_execution: Option<NodeSelector>,
        preferred_during_scheduling_ignored_during_execution: Option<Vec<PreferredNodes>>,
    }
    NodeSelector { node_selector_terms: Vec<NodeTerm> }
    NodeTerm { match_expressions: Vec<Expression> }
    PreferredNodes { weight: u8, preference: NodeTerm }
    Expression { key: String, operator: Operator, values: Option<Vec<String>> }
    PodAffinity { preferred_during_scheduling_ignored_during_execution: Vec<PreferredPods> }
    PreferredPods { weight: u8, pod_affinity_term: PodTerm }
    PodTerm { topology_key: String, label_selector: LabelSelector }
    LabelSelector { match_labels: Texts }
    Job {
        parallelism: u32,
        completions: u32,
        completion_mode: Option<String>,
        suspend: Option<bool>,
        template: PodTemplate,
    }

    // Kubernetes 1.34: resource.k8s.io/v1.
    ClaimTemplate { spec: ClaimSpec }
    ClaimSpec { devices: ClaimedDevices }
    ClaimedDevices { requests: Vec<DeviceRequest> }
    DeviceRequest { name: String, exactly: ExactRequest }
    ExactRequest { device_class_name: String, count: u64 }

    // Kubernetes 1.37: scheduling.k8s.io/v1beta1 (KEP-4671 and KEP-5732).
    PodGroup { scheduling_policy: SchedulingPolicy, scheduling_constraints: Option<SchedulingConstraints> }
    SchedulingPolicy { gang: Gang }
    Gang { min_count: u32 }
    SchedulingConstraints { topology: Vec<TopologyKey> }
    TopologyKey { key: String }

    // Kueue 0.20: kueue.x-k8s.io/v1beta2. KAI Scheduler 0.17: kai.scheduler/v1alpha1 has the same Topology.
    Topology { levels: Vec<Level> }
    Level { node_label: String }
    ResourceFlavor {
        node_labels: Option<Texts>,
        topology_name: Option<String>,
        tolerations: Option<Vec<Toleration>>,
    }
    ClusterQueue { namespace_selector: Option<BTreeMap<String, Value>>, resource_groups: Vec<ResourceGroup> }
    ResourceGroup { covered_resources: Vec<String>, flavors: Vec<FlavorQuotas> }
    FlavorQuotas { name: String, resources: Vec<ResourceQuota> }
    ResourceQuota { name: String, nominal_quota: Quantity }
    LocalQueue { cluster_queue: String }

    // Volcano 1.16: batch.volcano.sh/v1alpha1, and the controller's configuration.
    VolcanoJob {
        scheduler_name: String,
        queue: Option<String>,
        min_available: u32,
        network_topology: Option<NetworkTopology>,
        tasks: Vec<VolcanoTask>,
    }
    NetworkTopology { mode: NetworkTopologyMode, highest_tier_allowed: Option<u32> }
    VolcanoTask { name: String, replicas: u32, template: PodTemplate }
    VolcanoController { network_topology_discovery: Vec<Discovery> }
    Discovery { source: String, enabled: bool, config: DiscoveryConfig }
    DiscoveryConfig { network_topology_types: BTreeMap<String, Vec<Level>> }

    // KubeRay 1.4: ray.io/v1.
    RayCluster { ray_version: String, head_group_spec: RayHead, worker_group_specs: Vec<RayWorkers> }
    RayHead { ray_start_params: Texts, template: PodTemplate }
    RayWorkers {
        group_name: String,
        replicas: u32,
        min_replicas: u32,
        max_replicas: u32,
        ray_start_params: Texts,
        template: PodTemplate,
    }

    // Kubeflow's training operator 1.9: kubeflow.org/v1.
    PyTorchJob { nproc_per_node: Option<String>, pytorch_replica_specs: BTreeMap<PyTorchRole, PyTorchReplicas> }
    PyTorchReplicas { replicas: u32, restart_policy: String, template: PodTemplate }

    // Knative 1.19: serving.knative.dev/v1.
    KnativeService { template: PodTemplate }
}

/// Kubernetes' quantity: a number, or a text with a suffix.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Quantity {
    Number(u64),
    Text(String),
}

#[derive(Debug, Deserialize, PartialEq, Eq)]
pub enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
    Gt,
    Lt,
}

#[derive(Debug, Deserialize)]
pub enum TolerationOperator {
    Exists,
    Equal,
}

#[derive(Debug, Deserialize)]
pub enum Effect {
    NoSchedule,
    PreferNoSchedule,
    NoExecute,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkTopologyMode {
    Hard,
    Soft,
}

#[derive(Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub enum PyTorchRole {
    Master,
    Worker,
}

/// An object of an example, read by the schema of its kind.
#[derive(Debug)]
pub enum Spec {
    Pod(Pod),
    Job(Job),
    ClaimTemplate(ClaimTemplate),
    ConfigMap(Texts),
    PodGroup(PodGroup),
    KueueTopology(Topology),
    ResourceFlavor(ResourceFlavor),
    ClusterQueue(ClusterQueue),
    LocalQueue(LocalQueue),
    KaiTopology(Topology),
    VolcanoJob(VolcanoJob),
    RayCluster(RayCluster),
    PyTorchJob(PyTorchJob),
    Knative(KnativeService),
}

#[derive(Debug)]
pub struct Object {
    pub metadata: Metadata,
    pub spec: Spec,
}

impl Object {
    /// The object in this document, or the place and the reason why its kind has no such field.
    pub fn read(document: &Value) -> Result<Self, String> {
        let mut fields = document.as_object().ok_or("no mapping")?.clone();
        let mut take = |name: &str| fields.remove(name).ok_or_else(|| format!("{name} is missing"));
        let text = |value: Value| value.as_str().map(str::to_owned).ok_or_else(|| format!("{value} is no text"));
        let (version, kind) = (text(take("apiVersion")?)?, text(take("kind")?)?);
        let metadata: Metadata = part(take("metadata")?, "metadata")?;
        let body = take(if kind == "ConfigMap" { "data" } else { "spec" })?;
        if let Some(other) = fields.keys().next() {
            return Err(format!("{kind} has no field {other}"));
        }
        let spec = match (version.as_str(), kind.as_str()) {
            ("v1", "Pod") => part(body, "spec").map(|spec| Spec::Pod(Pod { spec })),
            ("v1", "ConfigMap") => part(body, "data").map(Spec::ConfigMap),
            ("batch/v1", "Job") => part(body, "spec").map(Spec::Job),
            ("resource.k8s.io/v1", "ResourceClaimTemplate") => part(body, "spec").map(Spec::ClaimTemplate),
            ("scheduling.k8s.io/v1beta1", "PodGroup") => part(body, "spec").map(Spec::PodGroup),
            ("kueue.x-k8s.io/v1beta2", "Topology") => part(body, "spec").map(Spec::KueueTopology),
            ("kueue.x-k8s.io/v1beta2", "ResourceFlavor") => part(body, "spec").map(Spec::ResourceFlavor),
            ("kueue.x-k8s.io/v1beta2", "ClusterQueue") => part(body, "spec").map(Spec::ClusterQueue),
            ("kueue.x-k8s.io/v1beta2", "LocalQueue") => part(body, "spec").map(Spec::LocalQueue),
            ("kai.scheduler/v1alpha1", "Topology") => part(body, "spec").map(Spec::KaiTopology),
            ("batch.volcano.sh/v1alpha1", "Job") => part(body, "spec").map(Spec::VolcanoJob),
            ("ray.io/v1", "RayCluster") => part(body, "spec").map(Spec::RayCluster),
            ("kubeflow.org/v1", "PyTorchJob") => part(body, "spec").map(Spec::PyTorchJob),
            ("serving.knative.dev/v1", "Service") => part(body, "spec").map(Spec::Knative),
            _ => Err(format!("no schema for {kind} of {version}")),
        };
        Ok(Self { metadata, spec: spec? })
    }

    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// The pods that the object makes, with their templates' labels and annotations.
    pub fn pods(&self) -> Vec<(&PodSpec, Option<&Metadata>)> {
        fn of(template: &PodTemplate) -> (&PodSpec, Option<&Metadata>) {
            (&template.spec, template.metadata.as_ref())
        }
        match &self.spec {
            Spec::Pod(pod) => vec![(&pod.spec, None)],
            Spec::Job(job) => vec![of(&job.template)],
            Spec::VolcanoJob(job) => job.tasks.iter().map(|task| of(&task.template)).collect(),
            Spec::RayCluster(ray) => {
                let workers = ray.worker_group_specs.iter().map(|group| of(&group.template));
                std::iter::once(of(&ray.head_group_spec.template)).chain(workers).collect()
            }
            Spec::PyTorchJob(job) => job.pytorch_replica_specs.values().map(|role| of(&role.template)).collect(),
            Spec::Knative(service) => vec![of(&service.template)],
            _ => Vec::new(),
        }
    }
}

fn part<T: DeserializeOwned>(value: Value, name: &str) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| format!("{name}: {error}"))
}
