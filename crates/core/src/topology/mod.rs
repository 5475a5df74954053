//! The machine as a graph: takes observations, returns [`NodeTopology`] and warnings.
//!
//! Pure: no I/O, no clock, no environment, no logging, no floats, no unordered maps. It cannot panic on any
//! observation. The other layers, the adapters and the commands use it; it uses no other layer.

mod address;
pub mod bandwidth;
mod device_names;
mod level;
mod mig;
mod node;
mod nvlink;
mod observation;
mod pcie;
mod rails;
mod warning;

pub use address::{GpuUuid, Guid, MigUuid, NumaNodeId, PackageId, PciAddress, Uuid};
pub(crate) use device_names::names;
pub use device_names::{device_name, device_names, hardware_of, is_mig, is_set};
pub use level::{Rank, TopologyLevel};
pub use mig::{
    MigCapabilities, MigDevice, MigDeviceObservation, MigEngines, MigExtension, MigObservation, MigPlacement,
    MigProfile, MigProfileObservation, MigSlot, PossibleMig, possible_mig,
};
pub use node::{Gpu, Nic, NodeTopology};
pub use observation::{
    AddressingMode, ComputeCapability, CpuObservation, CudaVersion, DisplayClass, FabricObservation, GpuObservation,
    HostBridgeObservation, HostObservation, MAX_CPUS, MAX_MEMORY_MIB, MAX_NVLINKS, NicKind, NicObservation,
    NodeObservation, NumaNodeObservation, NvLinkObservation, NvLinkRemote, PciKind, PciObservation, PcieLink,
    ProbeFailure, is_cpu_list, thousandths,
};
pub use warning::{Compared, Oddity, P2pRefusal, TopologyWarning};
