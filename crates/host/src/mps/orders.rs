//! Orders: the control daemons that the plugin wants for shared resources and for prepared claims, in one file under
//! the MPS root.
//!
//! The plugin (`linkwise run`) derives the file from its configuration, its GPUs and the claims' checkpoints, and
//! writes it; `linkwise mps-control-daemon` follows it and needs none of them. The file is written whole, so that the
//! next plugin corrects what a killed one left behind. Earlier orders of claims with unread checkpoints stay.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::daemon::{MpsError, Settings};
use super::layout::Layout;
use super::limits::Limits;
use super::shm::label;
use linkwise_core::claims::MpsOrder;
use linkwise_core::state::ResourceName;
use linkwise_core::topology::GpuUuid;
use linkwise_system::files;

const VERSION: u32 = 1;

/// The longest file that is read, in bytes: an order takes about 150 for each GPU.
const MAX_FILE: u64 = 256 << 10;

/// The content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// The GPUs that DRA has. The file has them for an `mps-control-daemon` of an earlier release.
    pub gpus: BTreeSet<GpuUuid>,
    /// The control daemons for claims, by their names under the MPS root.
    pub daemons: BTreeMap<ResourceName, MpsOrder>,
    /// The limits of the resources that are shared by MPS.
    pub resources: BTreeMap<ResourceName, Limits>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    version: u32,
    gpus: BTreeSet<GpuUuid>,
    daemons: Vec<MpsOrder>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    resources: BTreeMap<ResourceName, Limits>,
}

impl Orders {
    /// Writes the orders under the MPS root; removes the file if there are no orders. Fails if there are orders and no
    /// MPS root.
    pub fn write(&self, layout: &Layout) -> io::Result<()> {
        let path = layout.orders();
        if *self == Self::default() {
            return files::remove(&path).map(drop);
        }
        if !layout.root().is_dir() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the MPS root is not mounted"));
        }
        let daemons = self.daemons.values().cloned().collect();
        let (gpus, resources) = (self.gpus.clone(), self.resources.clone());
        let file = File { version: VERSION, gpus, daemons, resources };
        files::write_if_changed(&path, &serde_json::to_vec_pretty(&file)?, 0o600).map(drop)
    }

    /// Reads the orders; none if there is no file. Fails if the file has another version, or orders that are
    /// invalid or contradict each other.
    pub fn read(layout: &Layout) -> io::Result<Self> {
        let bytes = match files::read(&layout.orders(), MAX_FILE) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            bytes => bytes?,
        };
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        let File { version, gpus, daemons, resources } = serde_json::from_slice(&bytes)?;
        if version != VERSION {
            return Err(invalid(&format!("its version is {version}; this linkwise reads {VERSION}")));
        }
        for (name, limits) in &resources {
            layout.check(name).map_err(|error| invalid(&error.to_string()))?;
            if limits.memory.is_empty() {
                return Err(invalid(&format!("the order for {name} names no GPU")));
            }
        }
        let mut orders = Self { gpus, resources, ..Self::default() };
        for order in daemons {
            let percent = order.thread_percentage;
            if !(1..=100).contains(&percent) {
                return Err(invalid(&format!("an order has {percent} percent of the threads, not 1 to 100")));
            }
            if order.gpus.iter().any(|gpu| gpu.mib == Some(0)) {
                return Err(invalid("an order has a memory limit of 0 MiB"));
            }
            let name = order.name().ok_or_else(|| invalid("an order names no GPU"))?;
            let mut seen = BTreeSet::new();
            let is_twice = !order.gpus.iter().all(|gpu| seen.insert(&gpu.gpu));
            if is_twice || orders.daemons.values().any(|other| other.overlaps(&order)) {
                return Err(invalid("a GPU is twice in the orders"));
            }
            layout.check(&name).map_err(|error| invalid(&error.to_string()))?;
            orders.daemons.insert(name, order);
        }
        Ok(orders)
    }

    /// The limits of the control daemons for claims.
    pub fn of_claims(&self) -> impl Iterator<Item = (ResourceName, Limits)> {
        self.daemons.iter().map(|(name, order)| (name.clone(), Limits::of_order(order)))
    }
}

/// Makes the folder of the file, and labels it for SELinux: the plugin writes there from another container.
pub fn prepare_orders(settings: &Settings) -> Result<(), MpsError> {
    let path = settings.layout.orders_folder();
    fs::create_dir_all(&path).map_err(|source| MpsError::Write(path.clone(), source))?;
    label(&path, &settings.selinuxfs)
}

impl Layout {
    /// The folder of the file; only the plugin writes there. No resource's folder has a name that begins with a dot.
    pub fn orders_folder(&self) -> std::path::PathBuf {
        self.root().join(".dra")
    }

    fn orders(&self) -> std::path::PathBuf {
        self.orders_folder().join("orders.json")
    }
}

/// The GPUs that `mps-control-daemon` set to EXCLUSIVE_PROCESS, by its records.
pub fn exclusive_gpus(layout: &Layout) -> io::Result<BTreeSet<GpuUuid>> {
    let entries = match Path::read_dir(&layout.exclusive()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries?,
    };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter_map(|name| name.parse().ok()).collect())
}
