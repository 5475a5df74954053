//! `linkwise demo --dra`: the cluster around the node.
//!
//! A composition root: an API server in a box, over HTTPS, with the client that `linkwise run` has, the model of
//! kube-scheduler's allocator, and what makes the claims of pods. `linkwise::demo` says what happens in this cluster, and
//! prints it.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use linkwise::config::DemoArgs;
use linkwise::demo::{DemoCluster, Scheduled, demo_dra, on_terminal};
use linkwise::machines::Machine;
use linkwise_api_server_box::{ApiServerBox, Key, ResourceType};
use linkwise_kubelet_box::dra::Wipe;
use linkwise_scheduler_box::{Cluster, Failure};
use serde_json::{Value, json};

use crate::access::Access;
use crate::dra::client;
use crate::metrics::ApiMetrics;
use crate::server::Pace;

/// The node's name.
const NODE: &str = "node";
/// What the DeviceClass of whole GPUs selects.
pub(crate) const WHOLE_GPUS: &str =
    "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
/// The namespace of pods and their claims.
const NAMESPACE: &str = "training";
/// What pods ask for.
const GPUS: &str = "nvidia.com/gpu";
/// The kinds of objects that the server has.
const TYPES: [ResourceType; 9] = [
    ResourceType::NODES,
    ResourceType::NAMESPACES,
    ResourceType::PODS,
    ResourceType::RESOURCE_SLICES,
    ResourceType::RESOURCE_CLAIMS,
    ResourceType::RESOURCE_CLAIM_TEMPLATES,
    ResourceType::DEVICE_CLASSES,
    ResourceType::MUTATING_ADMISSION_POLICIES,
    ResourceType::MUTATING_ADMISSION_POLICY_BINDINGS,
];
/// The token of the service account.
const TOKEN: &str = "demo";

/// Runs the command.
pub fn run(args: &DemoArgs) -> ExitCode {
    let played = on_terminal(args, async |machine, out| play(args, machine, out).await);
    played.map_or_else(|error| linkwise::failed(&error), |()| ExitCode::SUCCESS)
}

/// Plays the demo on a machine; `out` prints.
///
/// # Errors
///
/// Something does what it should not.
pub async fn play(args: &DemoArgs, machine: Machine, out: &(dyn Fn(&str) -> Result<()> + Sync)) -> Result<()> {
    let cluster = BoxedCluster::start().await?;
    let account = tempfile::Builder::new().prefix("linkwise-").tempdir().context("cannot make a temporary folder")?;
    for (file, text) in [("token", TOKEN), ("ca.crt", cluster.server.ca())] {
        std::fs::write(account.path().join(file), text).context("cannot write the service account's files")?;
    }
    let access = Access::InCluster { url: cluster.server.url(), service_account: account.path().to_owned() };
    demo_dra(args, machine, (&cluster, &client(access, Pace::DEFAULT, ApiMetrics::default())), out).await
}

/// API server and scheduler.
struct BoxedCluster {
    server: Arc<ApiServerBox>,
}

impl BoxedCluster {
    async fn start() -> Result<Self> {
        let listening = ApiServerBox::start_on("127.0.0.1:0", &TYPES).await;
        let server = listening.context("the API server in a box cannot listen on 127.0.0.1")?;
        server.accept_tokens(&[TOKEN]);
        server.put("kubelet", &ResourceType::NODES.key(None, NODE), json!({}));
        let selectors = json!([{"cel": {"expression": WHOLE_GPUS}}]);
        let class = json!({"spec": {"selectors": selectors, "extendedResourceName": GPUS}});
        let made = server.create("helm", &ResourceType::DEVICE_CLASSES.key(None, "gpu.nvidia.com"), class);
        made.map_err(|status| anyhow!("the DeviceClass is refused: {status}"))?;
        let labels = json!({"linkwise.dev/unchanged-pods": "true"});
        let namespace = json!({"metadata": {"labels": labels}});
        server.put("kubectl", &ResourceType::NAMESPACES.key(None, NAMESPACE), namespace);
        Ok(Self { server: Arc::new(server) })
    }

    /// The scheduler, with the cluster as it is now.
    fn scheduler(&self) -> Result<Cluster> {
        let [slices, classes, claims] =
            [ResourceType::RESOURCE_SLICES, ResourceType::DEVICE_CLASSES, ResourceType::RESOURCE_CLAIMS]
                .map(|resource| self.server.objects(&resource));
        Cluster::new(&slices, &classes, &claims).context("the scheduler cannot read the cluster")
    }

    fn pod(&self, name: &str) -> Result<Value> {
        self.server.object(&ResourceType::PODS.key(Some(NAMESPACE), name)).with_context(|| format!("no pod {name}"))
    }

    /// Makes the claim of a pod: what the controller of claims makes of its template, or else the scheduler of its
    /// extended resource.
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
}

impl DemoCluster for BoxedCluster {
    fn create(&self, manifest: &Value) -> Result<Value> {
        let (kind, name) = (&manifest["kind"], manifest["metadata"]["name"].as_str().unwrap_or_default());
        let resource = TYPES.iter().find(|resource| *kind == resource.kind);
        let resource = resource.with_context(|| format!("the demo's API server has no kind {kind}"))?;
        let key = resource.key(resource.namespaced.then_some(NAMESPACE), name);
        let made = self.server.create("kubectl", &key, manifest.clone());
        made.map_err(|status| anyhow!("{kind} {name} is refused: {status}"))
    }

    fn schedule(&self, pod: &str) -> Result<Scheduled> {
        let mut made = self.claim(pod)?;
        let name = made["metadata"]["name"].as_str().context("the API server gives names")?.to_owned();
        let placement = match self.scheduler()?.schedule(&[NODE], &[made.clone()]) {
            Ok(placement) => placement,
            Err(why @ Failure::Refused(_)) => return Ok(Scheduled::Waits(why.to_string())),
            Err(failure) => return Err(failure).context("the scheduler fails"),
        };
        let allocation = placement.allocations.into_iter().next().context("a claim has one allocation")?;
        let reserved = json!({"resource": "pods", "name": pod, "uid": self.pod(pod)?["metadata"]["uid"]});
        made["status"] = json!({"allocation": allocation, "reservedFor": [reserved]});
        let stored = self.server.replace_status("kube-scheduler", &Self::key(&name), &made);
        let stored = stored.map_err(|status| anyhow!("claim {name} is refused: {status}"))?;
        let uid = stored["metadata"]["uid"].as_str().context("the API server gives UIDs")?.to_owned();
        Ok(Scheduled::Allocated { claim: name, uid, spec: stored["spec"].clone(), allocation })
    }

    fn singles(&self, count: usize) -> Result<Vec<String>> {
        let exactly = json!({"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": count});
        let spec = json!({"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}});
        let claim = json!({"metadata": {"name": "singles", "namespace": NAMESPACE}, "spec": spec});
        let allocation = match self.scheduler()?.schedule(&[NODE], &[claim]) {
            Ok(placement) => placement.allocations.into_iter().next().unwrap_or_default(),
            Err(Failure::Refused(_)) => return Ok(Vec::new()),
            Err(failure) => return Err(failure).context("the scheduler fails"),
        };
        let results = allocation["devices"]["results"].as_array().cloned().unwrap_or_default();
        Ok(results.iter().filter_map(|result| Some(result["device"].as_str()?.to_owned())).collect())
    }

    fn delete(&self, pod: &str) {
        for claim in self.server.objects(&ResourceType::RESOURCE_CLAIMS) {
            if claim["metadata"]["ownerReferences"][0]["name"] == pod {
                self.server.remove(&Self::key(claim["metadata"]["name"].as_str().unwrap_or_default()));
            }
        }
        self.server.remove(&ResourceType::PODS.key(Some(NAMESPACE), pod));
    }

    fn slices(&self) -> Vec<Value> {
        self.server.objects(&ResourceType::RESOURCE_SLICES)
    }

    async fn wait_for_slices(&self, wanted: impl Fn(&[Value]) -> bool + Send) {
        self.server.wait_for_objects(&ResourceType::RESOURCE_SLICES, wanted).await;
    }

    fn wipe(&self) -> Wipe {
        let server = Arc::clone(&self.server);
        Arc::new(move |driver| match driver {
            Some(driver) => server.wipe_slices_of(NODE, driver),
            None => server.wipe_slices(NODE),
        })
    }
}
