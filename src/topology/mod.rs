//! The machine as a graph: observations in, [`NodeTopology`] and warnings out.
//!
//! Pure: no I/O, no clock, no environment, no logging, no floats, no unordered maps; it cannot
//! panic on any observation. Called by the composition roots and by `inventory`; it calls nobody.

mod address;
mod level;
mod observation;

pub use address::{GpuUuid, GpuUuidError, NumaNodeId, PackageId, PciAddress, PciAddressError};
pub use level::{Rank, TopologyLevel};
pub use observation::{
    ComputeCapability, CpuObservation, FabricObservation, GpuObservation, HostBridgeObservation, HostObservation,
    NicKind, NicObservation, NodeObservation, NumaNodeObservation, NvLinkObservation, NvLinkRemote, PciKind,
    PciObservation, PcieLink, ProbeFailure,
};
