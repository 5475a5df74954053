//! `linkwise demo --dra`: the cluster around the node.
//!
//! A composition root: an API server in a box, over HTTPS, with the client that `linkwise run` has, and the model of
//! kube-scheduler's allocator. `linkwise::demo` says what happens in this cluster, and prints it.

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
use crate::server::Pace;

/// The node's name.
const NODE: &str = "node";
/// The namespace of claims.
const NAMESPACE: &str = "default";
/// What the DeviceClass of whole GPUs selects.
pub(crate) const WHOLE_GPUS: &str =
    "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
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
    demo_dra(args, machine, (&cluster, &client(access, Pace::DEFAULT)), out).await
}

/// API server and scheduler.
struct BoxedCluster {
    server: Arc<ApiServerBox>,
}

impl BoxedCluster {
    async fn start() -> Result<Self> {
        let types = [
            ResourceType::NODES,
            ResourceType::RESOURCE_SLICES,
            ResourceType::RESOURCE_CLAIMS,
            ResourceType::DEVICE_CLASSES,
        ];
        let listening = ApiServerBox::start_on("127.0.0.1:0", &types).await;
        let server = listening.context("the API server in a box cannot listen on 127.0.0.1")?;
        server.accept_tokens(&[TOKEN]);
        server.put("kubelet", &ResourceType::NODES.key(None, NODE), json!({}));
        let class = json!({"spec": {"selectors": [{"cel": {"expression": WHOLE_GPUS}}]}});
        let made = server.create("helm", &ResourceType::DEVICE_CLASSES.key(None, "gpu.nvidia.com"), class);
        made.map_err(|status| anyhow!("the DeviceClass is refused: {status}"))?;
        Ok(Self { server: Arc::new(server) })
    }

    fn key(claim: &str) -> Key {
        ResourceType::RESOURCE_CLAIMS.key(Some(NAMESPACE), claim)
    }
}

impl DemoCluster for BoxedCluster {
    fn schedule(&self, claim: &str, spec: &Value) -> Result<Scheduled> {
        let key = Self::key(claim);
        let refused = |status: Value| anyhow!("claim {claim} is refused: {status}");
        let mut made = self.server.create("kubectl", &key, json!({"spec": spec})).map_err(refused)?;
        let [slices, classes, claims] =
            [ResourceType::RESOURCE_SLICES, ResourceType::DEVICE_CLASSES, ResourceType::RESOURCE_CLAIMS]
                .map(|resource| self.server.objects(&resource));
        let scheduler = Cluster::new(&slices, &classes, &claims).context("the scheduler cannot read the cluster")?;
        let placement = match scheduler.schedule(&[NODE], &[made.clone()]) {
            Ok(placement) => placement,
            Err(why @ Failure::Refused(_)) => return Ok(Scheduled::Waits(why.to_string())),
            Err(failure) => return Err(failure).context("the scheduler fails"),
        };
        let allocation = placement.allocations.into_iter().next().context("a claim has one allocation")?;
        let pod = json!({"resource": "pods", "name": claim, "uid": format!("uid-of-{claim}")});
        made["status"] = json!({"allocation": allocation, "reservedFor": [pod]});
        let stored = self.server.replace_status("kube-scheduler", &key, &made).map_err(refused)?;
        let uid = stored["metadata"]["uid"].as_str().context("the API server gives UIDs")?.to_owned();
        Ok(Scheduled::Allocated { uid, allocation })
    }

    fn delete(&self, claim: &str) {
        self.server.remove(&Self::key(claim));
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
