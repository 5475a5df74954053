//! The bus bandwidth of an all-reduce: the expectation by NCCL's model, the measurement by nccl-tests, and the
//! likeliest cause of a difference.
//!
//! Pure: `linkwise expect` calls it with a machine, `linkwise verify` also with the text that nccl-tests printed. It
//! uses `topology` and `allocation`. docs/bandwidth.md has the published results that the model was compared with.

mod comparison;
mod report;

use crate::prelude::*;
use alloc::collections::BTreeSet;
use alloc::sync::Arc;

use serde::Serialize;

use crate::allocation::AllocationTables;
use crate::topology::{
    ComputeCapability, Gpu, GpuObservation, NodeObservation, NodeTopology, NvLinkObservation, NvLinkRemote,
};

pub use comparison::{Cause, Comparison, MatchError, Verdict, odd_among};
pub use report::{NcclReport, RankDevice, ReportError, Row, Run, gb_per_s};

/// The source of the model.
pub const MODEL: &str = "NCCL v2.30.7-1 (src/graph/topo.h, src/graph/tuning.cc), docs/bandwidth.md";

/// A kind of machine for which the model was compared with published results of nccl-tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Calibration {
    /// Eight V100 in a cube mesh.
    VoltaMesh,
    /// A100 behind NVSwitches.
    AmpereSwitch,
    /// Two GPUs of compute capability 8.6 with an NVLink bridge.
    AmpereBridge,
    /// H100 or H200 behind NVSwitches.
    HopperSwitch,
    /// B200 or GB200 behind NVSwitches.
    BlackwellSwitch,
}

impl Calibration {
    /// The kind as people read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::VoltaMesh => "8 x V100 in a cube mesh",
            Self::AmpereSwitch => "A100 behind NVSwitches",
            Self::AmpereBridge => "two GPUs of compute capability 8.6 with an NVLink bridge",
            Self::HopperSwitch => "H100 and H200 behind NVSwitches",
            Self::BlackwellSwitch => "B200 and GB200 behind NVSwitches",
        }
    }
}

/// The bus bandwidths that a set of GPUs should reach in a large all-reduce. All fields are `None` if the NVLinks of a
/// GPU or their rate are unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Expectation {
    /// The bandwidth of rings, MB/s; `None` for fewer than two GPUs and for large parts of a mesh of NVLinks.
    pub ring: Option<u64>,
    /// The bandwidth of NVLink SHARP, MB/s; `None` where NCCL has no NVLink SHARP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvls: Option<u64>,
    /// The kind of machine whose published results confirm the model; `None` if no results do.
    pub calibration: Option<Calibration>,
}

impl Expectation {
    /// Computes the expectation of the GPUs at some places of a topology.
    pub fn of(topology: &NodeTopology, places: &[usize]) -> Self {
        let set = topology.restricted(places);
        let all = 0..set.gpus().len();
        if !set.knows_rates() {
            return Self { ring: None, nvls: None, calibration: None };
        }
        let (nvls, calibration) = (set.nvls(all.clone()), calibration(&set));
        let ring = AllocationTables::new(Arc::new(set)).collective(all.collect());
        Self { ring, nvls, calibration }
    }

    /// The bandwidth of the faster algorithm, MB/s: the larger of `ring` and `nvls`.
    pub fn bandwidth(&self) -> Option<u64> {
        self.ring.max(self.nvls)
    }
}

/// Finds the kind of machine that a topology's GPUs make up.
fn calibration(set: &NodeTopology) -> Option<Calibration> {
    let gpus = set.gpus();
    let first = gpus.first().filter(|_| gpus.len() > 1)?;
    let ComputeCapability { major, minor } = first.facts.compute_capability?;
    let is_alike = |gpu: &Gpu| gpu.facts.compute_capability == first.facts.compute_capability && !gpu.mig_enabled;
    if !gpus.iter().all(is_alike) {
        return None;
    }
    let has_one_plane =
        first.nvswitch_plane.is_some() && gpus.iter().all(|gpu| gpu.nvswitch_plane == first.nvswitch_plane);
    let links = |a: usize| (0..gpus.len()).filter(|b| *b != a).map(|b| set.nvlink_count(a, b)).sum::<u32>();
    match (major, minor) {
        (8, 0) if has_one_plane => Some(Calibration::AmpereSwitch),
        (9, 0) if has_one_plane => Some(Calibration::HopperSwitch),
        (10, 0) if has_one_plane => Some(Calibration::BlackwellSwitch),
        _ if first.nvswitch_plane.is_some() => None,
        // A machine with some links down is faulty, and still of its kind.
        (7, 0) if gpus.len() == 8 && (0..gpus.len()).all(|place| links(place) > 0) => Some(Calibration::VoltaMesh),
        (8, 6) if gpus.len() == 2 && links(0) > 0 => Some(Calibration::AmpereBridge),
        // Over PCIe the bandwidth of one machine differs between versions of NCCL.
        _ => None,
    }
}

/// Returns the machine with all its NVLinks up, except those whose other end is unknown. Each GPU gets as many links to
/// NVSwitches as the GPU of its model with the most of them, even if it has none.
fn with_links_up(machine: &NodeObservation) -> NodeObservation {
    let mut machine = machine.clone();
    for group in machine.gpus.iter_mut().flat_map(|gpu| gpu.nvlinks.iter_mut().flatten()) {
        group.active |= group.remote != NvLinkRemote::Unknown;
    }
    let is_switch = |group: &&NvLinkObservation| group.active && matches!(group.remote, NvLinkRemote::Switch(_));
    let port = |gpu: &GpuObservation| {
        let groups = gpu.nvlinks.iter().flatten().filter(is_switch);
        (gpu.model.clone(), groups.map(|group| group.links.len()).sum())
    };
    let ports: Vec<(Option<String>, usize)> = machine.gpus.iter().map(port).collect();
    for (gpu, (model, links)) in machine.gpus.iter_mut().zip(&ports) {
        let max_links = ports.iter().filter(|(other, _)| other == model).map(|(_, links)| *links).max().unwrap_or(0);
        let groups = gpu.nvlinks.iter().flatten().filter(|group| group.active);
        let used: BTreeSet<u32> = groups.flat_map(|group| group.links.iter().copied()).collect();
        let more = (0..).filter(|link| !used.contains(link)).take(max_links.saturating_sub(*links));
        let Some(groups) = &mut gpu.nvlinks else { continue };
        match groups.iter_mut().filter(|group| is_switch(&&**group)).last() {
            Some(switch) => switch.links.extend(more),
            None if max_links > 0 => {
                let (links, remote) = (more.collect(), NvLinkRemote::Switch(None));
                groups.push(NvLinkObservation { links, remote, active: true });
            }
            None => {}
        }
    }
    machine
}
