//! The format of a fact sheet, reduced to the fields that tests read.

use std::collections::BTreeMap;

use serde::Deserialize;

#[derive(Debug, Deserialize)]
pub struct Sheet {
    pub cpu: Option<Cpu>,
    pub numa: Vec<Numa>,
    pub pcie: Vec<Root>,
    pub gpus: Vec<Gpu>,
    pub nics: Vec<Nic>,
    pub nvlink: NvLink,
    pub fabric: Option<Fabric>,
    pub topo_matrix: Matrix,
    pub gpu_pcie_matrix: Option<BTreeMap<String, String>>,
}

/// The processor, with family and model as NCCL prints them.
#[derive(Debug, Deserialize)]
pub struct Cpu {
    pub arch: String,
    pub vendor: Option<String>,
    pub family: Option<u32>,
    pub model: Option<u32>,
}

/// A NUMA node; its id is -1 if the kernel reports none.
#[derive(Debug, Deserialize)]
pub struct Numa {
    pub id: i64,
    pub cpus: Option<String>,
    pub socket: Option<u32>,
}

/// A host bridge, or, if `root` is null, the devices that NCCL prints below one NUMA node.
#[derive(Debug, Deserialize)]
pub struct Root {
    pub numa: Option<i64>,
    pub root: Option<String>,
    pub children: Vec<Device>,
}

/// A PCI function.
#[derive(Debug, Deserialize)]
pub struct Device {
    pub bdf: Option<String>,
    pub kind: String,
    pub link_gts: Option<f64>,
    pub link_width: Option<u32>,
    #[serde(default)]
    pub names: Vec<String>,
    #[serde(default)]
    pub os_devices: Vec<String>,
    #[serde(default)]
    pub children: Vec<Device>,
}

#[derive(Debug, Deserialize)]
pub struct Gpu {
    pub index: u8,
    pub model: Option<String>,
    pub bdf: Option<String>,
    pub numa: Option<i64>,
    pub nvlinks: Option<Vec<Links>>,
    pub compute: Option<bool>,
}

/// The NVLinks of a GPU that lead to one NVSwitch.
#[derive(Debug, Deserialize)]
pub struct Links {
    pub target: String,
    pub count: u32,
}

#[derive(Debug, Deserialize)]
pub struct Nic {
    pub name: Option<String>,
    pub bdf: Option<String>,
    pub numa: Option<i64>,
    pub speed_mbps: Option<u32>,
}

/// The machine's NVLinks.
#[derive(Debug, Deserialize)]
pub struct NvLink {
    pub kind: String,
    pub matrix: Option<Vec<Vec<u32>>>,
    pub nvswitch: Option<NvSwitch>,
    pub cpu_links: Option<CpuLinks>,
}

/// The links of each GPU to NVSwitches.
#[derive(Debug, Deserialize)]
pub struct NvSwitch {
    pub links_per_gpu: u32,
}

/// NVLinks to the processor, in words: `3 per GPU ...`, or for each GPU `socket 0 x2`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum CpuLinks {
    Uniform(String),
    ByGpu(BTreeMap<String, String>),
}

#[derive(Debug, Deserialize)]
pub struct Fabric {
    pub cluster_uuid: String,
    pub clique_id: String,
}

/// The matrix of `nvidia-smi topo -m`.
#[derive(Debug, Deserialize)]
pub struct Matrix {
    pub kind: String,
    pub columns: String,
    pub rows: BTreeMap<String, String>,
}

impl Matrix {
    /// The symbol in the row and column of these names.
    pub fn symbol(&self, row: &str, column: &str) -> Option<&str> {
        let at = self.columns.split_whitespace().position(|name| name == column)?;
        self.rows.get(row)?.split_whitespace().nth(at)
    }
}
