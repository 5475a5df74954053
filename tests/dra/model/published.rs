//! Built-in machines as nodes of a cluster: their slices, and the GPUs that are free.

use std::sync::Arc;

use linkwise_api_server_box::{Gates, ResourceType, stored};
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines;
use linkwise_scheduler_box::{Cluster, Failure};
use serde_json::{Value, json};

use crate::dra::published::golden::run;
use crate::oracle::{Set, places};

/// NVIDIA's driver name, which linkwise uses by default.
pub const DRIVER: &str = "gpu.nvidia.com";

/// NVIDIA's class of whole GPUs, as its DRA driver's chart has it.
pub const CLASS: &str = "gpu.nvidia.com";

/// The class of GPUs that several claims share.
pub const SHARED: &str = "shared-gpu.linkwise.dev";

/// A machine as a node.
pub struct Node {
    pub name: &'static str,
    pub topology: Arc<NodeTopology>,
    /// The slices as the API server stores them.
    pub slices: Vec<Value>,
    /// The device name of each GPU, by the GPU's place; empty if unpublished.
    pub devices: Vec<String>,
}

pub fn nodes() -> impl Iterator<Item = Node> {
    machines::built_in().map(|machine| node(machine.name))
}

pub fn node(name: &'static str) -> Node {
    node_with(name, &[])
}

/// A built-in machine as `linkwise dra` prints it with these options.
pub fn node_with(name: &'static str, options: &[&str]) -> Node {
    let (topology, _) = NodeTopology::assemble(&machines::load(name).unwrap().observed);
    let topology = Arc::new(topology);
    let list = printed(&[&["dra", "--node", name, "--node-name", name], options].concat());
    let slices: Vec<Value> = list["items"].as_array().unwrap().iter().map(|slice| accepted(slice, None)).collect();
    let device_of = |uuid: &str| {
        let mut devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
        let device = devices.find(|device| device["attributes"]["uuid"]["string"] == uuid);
        device.map_or_else(String::new, |device| device["name"].as_str().unwrap().to_owned())
    };
    let devices = topology.gpus().iter().map(|gpu| device_of(&gpu.uuid.to_string())).collect();
    Node { name, topology, slices, devices }
}

/// The JSON that a command of linkwise prints.
pub fn printed(arguments: &[&str]) -> Value {
    let (text, _) = run(&[arguments, &["--format", "json"]].concat()).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// An object as the API server stores it.
pub fn accepted(object: &Value, namespace: Option<&str>) -> Value {
    let resource = match object["kind"].as_str().unwrap() {
        "ResourceSlice" => ResourceType::RESOURCE_SLICES,
        "ResourceClaim" => ResourceType::RESOURCE_CLAIMS,
        other => panic!("{other}"),
    };
    stored(&resource, namespace, Gates::default(), object).unwrap()
}

/// DeviceClasses: NVIDIA's, that of shared GPUs, and DRANET's.
pub fn classes() -> Vec<Value> {
    let class = |name: &str, expression: &str| {
        let selectors = json!([{"cel": {"expression": expression}}]);
        json!({"metadata": {"name": name}, "spec": {"selectors": selectors}})
    };
    vec![
        class(CLASS, "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"),
        class(SHARED, "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'shared-gpu'"),
        class("dra.net", "device.driver == 'dra.net'"),
    ]
}

/// A claim, as `linkwise claim` prints it.
pub fn claim(arguments: &[&str]) -> Value {
    accepted(&printed(&[&["claim"], arguments].concat()), Some("default"))
}

/// A claim for this many GPUs, which match in the attribute if one is given.
pub fn gpus(count: u32, attribute: Option<&str>) -> Value {
    let constraints: Vec<Value> = attribute.iter().map(|attribute| json!({"matchAttribute": attribute})).collect();
    exactly(json!({"deviceClassName": CLASS, "count": count}), &constraints)
}

/// A claim with one request.
pub fn exactly(request: Value, constraints: &[Value]) -> Value {
    let requests = json!([{"name": "gpus", "exactly": request}]);
    let object = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
        "spec": {"devices": {"requests": requests, "constraints": constraints}},
    });
    accepted(&object, Some("default"))
}

impl Node {
    pub fn gpus(&self) -> u32 {
        self.topology.gpus().len() as u32
    }

    /// A cluster of this node alone, with further slices.
    pub fn cluster(&self, more: &[Value]) -> Cluster {
        let slices: Vec<Value> = self.slices.iter().chain(more).cloned().collect();
        Cluster::new(&slices, &classes(), &[]).unwrap()
    }

    /// A copy of the cluster in which these GPUs are free and the others in use.
    pub fn occupied(&self, cluster: &Cluster, free: Set) -> Cluster {
        let mut cluster = cluster.clone();
        cluster.occupy(&allocation(self, self.name, !free)).unwrap();
        cluster
    }

    /// The GPUs that a claim gets of the free ones, or `None` if it waits.
    pub fn chosen(&self, cluster: &Cluster, free: Set, claim: &Value) -> Option<Set> {
        self.allocated(cluster, free, claim).map(|allocation| self.set_of(&allocation))
    }

    /// The allocation of a claim, with these GPUs free.
    pub fn allocated(&self, cluster: &Cluster, free: Set, claim: &Value) -> Option<Value> {
        match self.occupied(cluster, free).allocate(self.name, std::slice::from_ref(claim)) {
            Ok(mut placement) => placement.allocations.pop(),
            Err(Failure::Refused(_)) => None,
            Err(other) => panic!("{}: {other}", self.name),
        }
    }

    /// The GPUs of an allocation. Panics if it has a GPU twice.
    pub fn set_of(&self, allocation: &Value) -> Set {
        let mut set = 0;
        for result in allocation["devices"]["results"].as_array().unwrap() {
            if result["driver"] == DRIVER {
                let device = result["device"].as_str().unwrap();
                let gpu = 1 << self.devices.iter().position(|own| own == device).expect("a GPU of the node");
                assert_eq!(set & gpu, 0, "{}: {device} twice", self.name);
                set |= gpu;
            }
        }
        set
    }

    pub fn attribute(&self, gpu: usize, name: &str) -> Option<String> {
        let mut devices = self.slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().unwrap());
        let own = devices.find(|device| device["name"] == self.devices[gpu].as_str())?;
        own["attributes"][name]["string"].as_str().map(str::to_owned)
    }

    /// Sets of free GPUs to test: all sets if the node has up to 8 GPUs, else 300 random ones.
    pub fn availabilities(&self) -> Vec<Set> {
        let every = (1_u64 << self.gpus()) as Set - 1;
        if self.gpus() <= 8 {
            return (0..=every).collect();
        }
        // A linear congruential generator: the same states in every run.
        let step = |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        std::iter::successors(Some(1), step).map(|state| (state >> 24) as Set & every).take(300).collect()
    }
}

/// The allocation of these GPUs of a machine that is called `name` in the cluster.
pub fn allocation(node: &Node, name: &str, gpus: Set) -> Value {
    let held = (0..node.devices.len()).filter(|gpu| gpus & 1 << gpu != 0);
    let pool = format!("{name}/gpu");
    let result = |gpu: usize| json!({"request": "r", "driver": DRIVER, "pool": pool, "device": node.devices[gpu]});
    json!({"devices": {"results": held.map(result).collect::<Vec<_>>()}})
}

/// The GPUs of a set.
pub fn list(set: Set) -> Vec<usize> {
    places(set).collect()
}
