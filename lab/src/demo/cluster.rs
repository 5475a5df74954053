//! `linkwise-lab demo --dra`: the cluster around the node.
//!
//! It has an API server in a box, to which linkwise's own client talks over HTTPS, a model of kube-scheduler's
//! allocator, and the controller that makes the claims of pods. `dra` says what happens in this cluster.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use linkwise_api_server_box::{ApiServerBox, Key, ResourceType};
use linkwise_cluster::{Access, ApiMetrics, ApiServer, Pace};
use linkwise_core::state::DRA_DRIVER;
use linkwise_host::machines::Machine;
use linkwise_kubelet_box::dra::{ClaimRef, Wipe};
use linkwise_scheduler_box::{Cluster as Scheduler, Failure};
use serde_json::{Value, json};

use super::dra::demo_dra;
use super::{DemoArgs, Print};

pub(super) const NODE: &str = "node";
/// The selector of the DeviceClass of whole GPUs.
pub const WHOLE_GPUS: &str = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
/// The namespace of pods and their claims.
const NAMESPACE: &str = "training";
/// The resource that pods request.
const GPUS: &str = "nvidia.com/gpu";
const TOKEN: &str = "demo";

/// Runs the demo on a machine. `out` prints. A result that is not as expected is an error.
pub async fn play(args: &DemoArgs, machine: Machine, out: Print<'_>) -> Result<()> {
    let cluster = Cluster::start().await?;
    let account = tempfile::Builder::new().prefix("linkwise-").tempdir().context("cannot make a temporary folder")?;
    for (file, text) in [("token", TOKEN), ("ca.crt", cluster.server.ca())] {
        std::fs::write(account.path().join(file), text).context("cannot write the service account's files")?;
    }
    let access = Access::InCluster { url: cluster.server.url(), service_account: account.path().to_owned() };
    demo_dra(args, machine, &cluster, &ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default()), out).await
}

/// The scheduler's result for a pod.
pub(super) enum Scheduled {
    /// A claim with its `spec` and `status.allocation`.
    Allocated { claim: ClaimRef, spec: Value, allocation: Value },
    /// The pod waits, for this reason.
    Waits(String),
}

/// The API server and the scheduler.
pub(super) struct Cluster {
    server: Arc<ApiServerBox>,
}

impl Cluster {
    async fn start() -> Result<Self> {
        let listening = ApiServerBox::start_on("127.0.0.1:0", &ResourceType::ALL).await;
        let server = listening.context("the API server in a box cannot listen on 127.0.0.1")?;
        server.accept_tokens(&[TOKEN]);
        server.put("kubelet", &ResourceType::NODES.key(None, NODE), json!({}));
        let selectors = json!([{"cel": {"expression": WHOLE_GPUS}}]);
        let class = json!({"spec": {"selectors": selectors, "extendedResourceName": GPUS}});
        let made = server.create("helm", &ResourceType::DEVICE_CLASSES.key(None, DRA_DRIVER), class);
        made.map_err(|status| anyhow!("the DeviceClass is refused: {status}"))?;
        let labels = json!({"linkwise.dev/unchanged-pods": "true"});
        let namespace = json!({"metadata": {"labels": labels}});
        server.put("kubectl", &ResourceType::NAMESPACES.key(None, NAMESPACE), namespace);
        Ok(Self { server: Arc::new(server) })
    }

    /// A scheduler that knows the current state of the cluster.
    fn scheduler(&self) -> Result<Scheduler> {
        let [slices, classes, claims] =
            [ResourceType::RESOURCE_SLICES, ResourceType::DEVICE_CLASSES, ResourceType::RESOURCE_CLAIMS]
                .map(|resource| self.server.objects(&resource));
        Scheduler::new(&slices, &classes, &claims).context("the scheduler cannot read the cluster")
    }

    fn pod(&self, name: &str) -> Result<Value> {
        self.server.object(&ResourceType::PODS.key(Some(NAMESPACE), name)).with_context(|| format!("no pod {name}"))
    }

    /// Makes the claim of a pod: from its template, as the controller of claims does, or if it has none, for its
    /// extended resource, as the scheduler does.
    fn claim(&self, pod: &str) -> Result<Value> {
        let spec = self.pod(pod)?["spec"].clone();
        let reference = &spec["resourceClaims"][0];
        let (base, mut claim) = if let Some(template) = reference["resourceClaimTemplateName"].as_str() {
            let template = self.server.object(&ResourceType::RESOURCE_CLAIM_TEMPLATES.key(Some(NAMESPACE), template));
            let template = template.with_context(|| format!("pod {pod}: its template is not there"))?;
            (reference["name"].as_str().unwrap_or_default().to_owned(), json!({"spec": template["spec"]["spec"]}))
        } else {
            let limit = spec["containers"][0]["resources"]["limits"][GPUS].as_str().and_then(|text| text.parse().ok());
            let resources = [vec![(GPUS, limit.with_context(|| format!("pod {pod} wants no GPUs"))?)]];
            let claim = self.scheduler()?.extended_claim(NAMESPACE, pod, &resources);
            ("extended-resources".to_owned(), claim.context("no DeviceClass has the extended resource")?)
        };
        claim["metadata"]["name"].take();
        claim["metadata"]["generateName"] = json!(format!("{pod}-{base}-"));
        claim["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Pod", "name": pod}]);
        let made = self.server.create("kube-controller-manager", &Self::key(""), claim);
        made.map_err(|status| anyhow!("the claim of pod {pod} is refused: {status}"))
    }

    fn key(claim: &str) -> Key {
        ResourceType::RESOURCE_CLAIMS.key(Some(NAMESPACE), claim)
    }

    /// Creates the object of a manifest. A namespaced object goes into the demo's namespace.
    pub fn create(&self, manifest: &Value) -> Result<Value> {
        let (kind, name) = (&manifest["kind"], manifest["metadata"]["name"].as_str().unwrap_or_default());
        let resource = ResourceType::ALL.into_iter().find(|resource| *kind == resource.kind);
        let resource = resource.with_context(|| format!("the demo's API server has no kind {kind}"))?;
        let key = resource.key(resource.namespaced.then_some(NAMESPACE), name);
        let made = self.server.create("kubectl", &key, manifest.clone());
        made.map_err(|status| anyhow!("{kind} {name} is refused: {status}"))
    }

    /// Makes the claim of a pod, and lets the scheduler try once to allocate it.
    pub fn schedule(&self, pod: &str) -> Result<Scheduled> {
        let mut made = self.claim(pod)?;
        let name = made["metadata"]["name"].as_str().context("the API server gave no name")?.to_owned();
        let placement = match self.scheduler()?.schedule(&[NODE], &[made.clone()]) {
            Ok(placement) => placement,
            Err(why @ Failure::Refused(_)) => return Ok(Scheduled::Waits(why.to_string())),
            Err(failure) => return Err(failure).context("the scheduler fails"),
        };
        let allocation = placement.allocations.into_iter().next().context("the claim has no allocation")?;
        let reserved = json!({"resource": "pods", "name": pod, "uid": self.pod(pod)?["metadata"]["uid"]});
        made["status"] = json!({"allocation": allocation, "reservedFor": [reserved]});
        let stored = self.server.replace_status("kube-scheduler", &Self::key(&name), &made);
        let stored = stored.map_err(|status| anyhow!("claim {name} is refused: {status}"))?;
        let uid = stored["metadata"]["uid"].as_str().context("the API server gave no UID")?.to_owned();
        let claim = ClaimRef { namespace: NAMESPACE.to_owned(), name, uid };
        Ok(Scheduled::Allocated { claim, spec: stored["spec"].clone(), allocation })
    }

    /// The devices that a claim for `count` GPUs would get now if it named no groups, or none if it would wait.
    pub fn without_groups(&self, count: usize) -> Result<Vec<String>> {
        let exactly = json!({"deviceClassName": DRA_DRIVER, "allocationMode": "ExactCount", "count": count});
        let spec = json!({"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}});
        let claim = json!({"metadata": {"name": "without-groups", "namespace": NAMESPACE}, "spec": spec});
        let allocation = match self.scheduler()?.schedule(&[NODE], &[claim]) {
            Ok(placement) => placement.allocations.into_iter().next().unwrap_or_default(),
            Err(Failure::Refused(_)) => return Ok(Vec::new()),
            Err(failure) => return Err(failure).context("the scheduler fails"),
        };
        let results = allocation["devices"]["results"].as_array().cloned().unwrap_or_default();
        Ok(results.iter().filter_map(|result| Some(result["device"].as_str()?.to_owned())).collect())
    }

    pub fn delete(&self, pod: &str) {
        for claim in self.server.objects(&ResourceType::RESOURCE_CLAIMS) {
            if claim["metadata"]["ownerReferences"][0]["name"] == pod {
                self.server.remove(&Self::key(claim["metadata"]["name"].as_str().unwrap_or_default()));
            }
        }
        self.server.remove(&ResourceType::PODS.key(Some(NAMESPACE), pod));
    }

    pub fn slices(&self) -> Vec<Value> {
        self.server.objects(&ResourceType::RESOURCE_SLICES)
    }

    pub async fn wait_for_slices(&self, wanted: impl Fn(&[Value]) -> bool + Send) {
        self.server.wait_for_objects(&ResourceType::RESOURCE_SLICES, wanted).await;
    }

    /// The function that deletes the node's ResourceSlices, as the kubelet does: those of one driver or of all drivers.
    pub fn wipe(&self) -> Wipe {
        let server = Arc::clone(&self.server);
        Arc::new(move |driver| server.wipe_slices(NODE, driver))
    }
}
