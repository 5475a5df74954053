//! [`Comparison`]: compares a measured all-reduce with the machine that it ran on, and finds the likeliest causes of a
//! difference.

use crate::prelude::*;
use alloc::collections::BTreeSet;

use serde::{Serialize, Serializer};

use super::report::{NcclReport, Row, gb_per_s};
use super::{Expectation, with_links_up};
use crate::quote::quoted;
use crate::topology::{Gpu, NodeObservation, NodeTopology, PciAddress, TopologyWarning};

/// The least share of the expectation, in percent, at which a measurement is as expected. The published results of
/// healthy machines reach it.
const MIN_PERCENT: u64 = 90;

/// The share of the expectation, in percent, from which on the expectation must be that of another machine.
const MAX_PERCENT: u64 = 125;

/// The least time of the largest operation, ns: in a shorter one, latency hides the bandwidth.
const MIN_NANOSECONDS: u64 = 4_000_000;

/// The judgement of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The run computed wrong values, whatever its bandwidth.
    WrongValues,
    /// The measurement is at least nine tenths of the expectation.
    AsExpected,
    /// The measurement is less than nine tenths of the expectation.
    Below,
    /// The measurement is so much more that the expectation must be that of another machine.
    Above,
    /// The measurement is less than nine tenths, but the largest size was too small to show the bandwidth.
    TooSmall,
    /// No published result confirms the model for these GPUs, or the expectation is unknown.
    NotCalibrated,
    /// The run used several hosts, which the model does not cover.
    SeveralHosts,
}

/// A cause of a difference between measurement and expectation. Most texts say what to look at.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// NVLinks that are down.
    #[error("GPU {pci}: {down} of its {of} NVLinks are down; look at nvidia-smi nvlink -s and at XIDs in the log")]
    LinksDown {
        /// The GPU.
        pci: PciAddress,
        /// Links that are down.
        down: usize,
        /// All of its links.
        of: usize,
    },
    /// Wrong values.
    #[error(
        "{0} wrong values: data is corrupted on the way; drain the node, run dcgmi diag -r 3, look for XIDs in the log"
    )]
    WrongValues(u64),
    /// A warning about these GPUs: one differs from the others of its model, its NVLinks are unknown, or the driver
    /// refuses P2P.
    #[error("{0}")]
    Warning(String),
    /// Traffic through the host's memory, by NCCL's log.
    #[error("NCCL's log shows traffic through the host's memory (SHM){}", note(.0))]
    SharedMemory(Option<String>),
    /// No more than PCIe carries, although NVLink joins the GPUs.
    #[error(
        "no more than PCIe carries: NCCL did not use NVLink{}; look for NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, and for \
         containers that see one GPU each",
        note(.0)
    )]
    NvlinkUnused(Option<String>),
    /// The bandwidth of rings where NVLink SHARP is faster.
    #[error(
        "rings carry {}: NVLink SHARP was not used{}; look for NCCL_NVLS_ENABLE=0, NCCL_ALGO and the fabric manager",
        gb_per_s(*ring), note(setting)
    )]
    NvlsUnused {
        /// The bandwidth of rings, MB/s.
        ring: u64,
        /// The variable that turns NVLink SHARP off.
        setting: Option<String>,
    },
    /// Less than rings carry, and more than PCIe.
    #[error(
        "rings over all links carry {}; look for fewer channels{}, a throttled GPU (nvidia-smi -q -d PERFORMANCE), or \
         another job on these GPUs",
        gb_per_s(*ring), note(setting)
    )]
    SlowRings {
        /// The bandwidth of rings, MB/s.
        ring: u64,
        /// The variable that limits the rings.
        setting: Option<String>,
    },
    /// No cause that linkwise can see.
    #[error(
        "cause unknown; look for a throttled GPU (nvidia-smi -q -d PERFORMANCE), PCIe Access Control \
         Services, or another job on these GPUs"
    )]
    Unknown,
    /// A GPU without a NIC at its host bridge or closer, in a run over several hosts.
    #[error("GPU {0}: no NIC at its host bridge, its traffic to other hosts goes through the processor")]
    FarNic(PciAddress),
}

/// Writes ` (NCCL_ALGO=Ring is set)`, or nothing without a setting.
fn note(setting: &Option<String>) -> String {
    setting.as_ref().map(|setting| format!(" ({setting} is set)")).unwrap_or_default()
}

/// The reason why a measurement cannot be compared with a machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    /// Fewer than two GPUs.
    #[error("an all-reduce of one GPU has no bandwidth")]
    OneGpu,
    /// The GPUs of the run are not known.
    #[error("cannot tell which of the machine's {gpus} GPUs the run used{}; name them with --gpus",
        if *ranks == 0 { String::new() } else { format!(" for its {ranks} ranks") })]
    Unplaced {
        /// The ranks that the text lists; 0 if it lists none.
        ranks: usize,
        /// The machine's GPUs.
        gpus: usize,
    },
    /// The run had another number of GPUs.
    #[error("the run had {ranks} GPUs, not {gpus}")]
    OtherNumber {
        /// The ranks.
        ranks: usize,
        /// The GPUs that were named.
        gpus: usize,
    },
    /// The run was on GPUs of another model.
    #[error("the run was on {run}, the machine has {machine}")]
    OtherModel {
        /// The model in the text.
        run: String,
        /// The machine's.
        machine: String,
    },
    /// Bandwidths that are not those of an all-reduce.
    #[error("the bus bandwidths are not those of an all-reduce of {0} GPUs")]
    OtherFactor(usize),
}

/// A measurement compared with its expectation. `linkwise verify` prints it as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// The judgement.
    pub verdict: Verdict,
    /// The highest bus bandwidth, MB/s.
    pub measured: u64,
    /// The bandwidth that the GPUs should reach with all NVLinks up, MB/s. The measurement is compared with it. `None`
    /// for a run over several hosts, and if the bandwidth is unknown.
    #[serde(rename = "expected")]
    pub whole: Option<u64>,
    /// The share in percent, rounded down: 100 × `measured` / `whole`.
    pub percent: Option<u64>,
    /// The causes of a difference, the likeliest first.
    #[serde(serialize_with = "as_texts")]
    pub causes: Vec<Cause>,
    /// The size with the highest bandwidth.
    pub best: Row,
    /// The expectation of the GPUs with the NVLinks that are up now.
    #[serde(flatten)]
    pub expectation: Expectation,
}

fn as_texts<S: Serializer>(causes: &[Cause], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(causes.iter().map(ToString::to_string))
}

/// Finds the places of a run's GPUs by the addresses that the report lists, or else all places of a machine with as
/// many GPUs as the run.
pub(super) fn places(report: &NcclReport, topology: &NodeTopology) -> Result<Vec<usize>, MatchError> {
    let gpus = topology.gpus();
    let ranks = report.devices.len() / report.hosts();
    let by_address = report.devices.values().take(ranks).map(|device| {
        let mut fitting = gpus.iter().enumerate().filter(|(_, gpu)| device.is_at(gpu));
        let place = fitting.next().map(|(place, _)| place);
        place.filter(|_| fitting.next().is_none())
    });
    let by_address: Option<BTreeSet<usize>> = by_address.collect();
    match by_address.filter(|places| places.len() == ranks && ranks > 0) {
        Some(places) => Ok(places.into_iter().collect()),
        None if ranks == gpus.len() || report.devices.is_empty() && report.is_of(gpus.len()) => {
            Ok((0..gpus.len()).collect())
        }
        None => Err(MatchError::Unplaced { ranks, gpus: gpus.len() }),
    }
}

impl Comparison {
    /// Compares a report with a machine's GPUs: those at `named`, or else those that the report names.
    pub fn of(report: &NcclReport, machine: &NodeObservation, named: Option<&[usize]>) -> Result<Self, MatchError> {
        let (topology, warnings) = NodeTopology::assemble(machine);
        let places = match named {
            Some(places) => places.to_vec(),
            None => places(report, &topology)?,
        };
        let (hosts, gpus) = (report.hosts(), places.len());
        let ranks = match report.devices.len() {
            0 => gpus,
            ranks if hosts == 1 && ranks != gpus => return Err(MatchError::OtherNumber { ranks, gpus }),
            ranks => ranks,
        };
        if ranks < 2 {
            return Err(MatchError::OneGpu);
        }
        let set = topology.restricted(&places);
        refuse_other_model(report, set.gpus())?;
        let best = report.best().filter(|_| report.is_of(ranks)).ok_or(MatchError::OtherFactor(ranks))?.clone();
        let expectation = Expectation::of(&topology, &places);
        let up = with_links_up(machine);
        // The GPUs have the same places in `up`.
        let healthy = Expectation::of(&NodeTopology::assemble(&up).0, &places);
        let whole = healthy.bandwidth().max(expectation.bandwidth()).filter(|_| hosts == 1);
        let measured = best.best().bus;
        let percent = whole.filter(|whole| *whole > 0).map(|whole| measured.saturating_mul(100) / whole);
        let largest = report.rows.iter().max_by_key(|row| row.bytes).map_or(0, |row| row.best().nanoseconds);
        let verdict = match percent {
            _ if report.wrong > 0 => Verdict::WrongValues,
            _ if hosts > 1 => Verdict::SeveralHosts,
            None => Verdict::NotCalibrated,
            Some(_) if healthy.calibration.is_none() => Verdict::NotCalibrated,
            Some(MAX_PERCENT..) => Verdict::Above,
            Some(MIN_PERCENT..) => Verdict::AsExpected,
            Some(_) if largest < MIN_NANOSECONDS => Verdict::TooSmall,
            Some(_) => Verdict::Below,
        };
        let wrong = (report.wrong > 0).then_some(Cause::WrongValues(report.wrong));
        let mut known = links_down(machine, &up, set.gpus());
        if known.is_empty() {
            known.extend(odd_among(&warnings, set.gpus()).map(Cause::Warning));
        }
        let mut comparison = Self { verdict, measured, whole, percent, causes: Vec::new(), best, expectation };
        let likely = comparison.likely_causes(report, &set, &warnings);
        comparison.causes = wrong.into_iter().chain(known).chain(likely).collect();
        Ok(comparison)
    }

    /// The causes other than wrong values, links that are down and the warnings of [`odd_among`].
    fn likely_causes(&self, report: &NcclReport, set: &NodeTopology, warnings: &[TopologyWarning]) -> Vec<Cause> {
        let mut causes = Vec::new();
        if self.verdict == Verdict::SeveralHosts {
            let far = set.gpus().iter().enumerate().filter(|(place, _)| set.nearest_nics(*place).is_empty());
            return far.map(|(_, gpu)| Cause::FarNic(gpu.pci)).collect();
        }
        if !matches!(self.verdict, Verdict::Below | Verdict::NotCalibrated) {
            return causes;
        }
        let is_in_run = |pci: &PciAddress| set.gpus().iter().any(|gpu| gpu.pci == *pci);
        for warning in warnings {
            if let TopologyWarning::P2pRefused { pairs, .. } = warning
                && pairs.iter().any(|(a, b)| is_in_run(a) && is_in_run(b))
            {
                causes.push(Cause::Warning(warning.to_string()));
            }
        }
        let setting = |names: &[&str]| {
            let found = report.settings.iter().find(|(name, _)| names.contains(&name.as_str()));
            found.map(|(name, value)| format!("{name}={value}"))
        };
        let p2p = || setting(&["NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"]);
        if report.shm > 0 {
            causes.push(Cause::SharedMemory(p2p()));
        }
        if self.verdict != Verdict::Below || report.shm > 0 {
            return causes;
        }
        let all = 0..set.gpus().len();
        let pairs = || all.clone().flat_map(|a| (0..a).map(move |b| (a, b)));
        let pcie = pairs().map(|(a, b)| set.pcie(a, b)).max().map_or(0, u64::from);
        let has_nvlinks = pairs().any(|(a, b)| set.nvlink_count(a, b) > 0);
        let (ring, measured) = (self.expectation.ring.unwrap_or(0), self.measured);
        // Below `MIN_PERCENT` of `ring` the rings are slow; above it they work, and only NVLink SHARP was unused.
        let is_below_rings = measured.saturating_mul(100) < ring.saturating_mul(MIN_PERCENT);
        match self.expectation.nvls {
            _ if has_nvlinks && measured <= pcie => causes.push(Cause::NvlinkUnused(p2p())),
            _ if has_nvlinks && is_below_rings => {
                let names = ["NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_ALGO", "NCCL_PROTO"];
                causes.push(Cause::SlowRings { ring, setting: setting(&names) });
            }
            Some(nvls) if nvls > ring => {
                let setting = setting(&["NCCL_NVLS_ENABLE", "NCCL_ALGO"]);
                causes.push(Cause::NvlsUnused { ring, setting });
            }
            _ if causes.is_empty() => causes.push(Cause::Unknown),
            _ => {}
        }
        causes
    }
}

/// The warnings that one of these GPUs is the odd one of its model, or that its NVLinks are unknown.
pub fn odd_among<'w>(warnings: &'w [TopologyWarning], gpus: &[Gpu]) -> impl Iterator<Item = String> + use<'w> {
    let addresses: BTreeSet<PciAddress> = gpus.iter().map(|gpu| gpu.pci).collect();
    let concerns = move |warning: &&TopologyWarning| match warning {
        TopologyWarning::OddGpu { pci, .. } => addresses.contains(pci),
        TopologyWarning::NvLinksUnknown(gpus) => gpus.iter().any(|pci| addresses.contains(pci)),
        _ => false,
    };
    warnings.iter().filter(concerns).map(ToString::to_string)
}

/// Finds the GPUs with fewer active NVLinks than on `up`, the machine with its links up.
fn links_down(machine: &NodeObservation, up: &NodeObservation, gpus: &[Gpu]) -> Vec<Cause> {
    let links = |machine: &NodeObservation, pci: PciAddress| -> usize {
        let gpu = machine.gpus.iter().find(|gpu| gpu.pci == pci);
        let groups = gpu.iter().flat_map(|gpu| gpu.nvlinks.iter().flatten()).filter(|group| group.active);
        groups.map(|group| group.links.len()).sum()
    };
    let links = gpus.iter().map(|gpu| (gpu.pci, links(up, gpu.pci), links(machine, gpu.pci)));
    let down = links.filter(|(_, of, active)| active < of);
    down.map(|(pci, of, active)| Cause::LinksDown { pci, down: of - active, of }).collect()
}

/// Refuses a run on GPUs of another model than the machine's. An unknown model is never refused.
fn refuse_other_model(report: &NcclReport, gpus: &[Gpu]) -> Result<(), MatchError> {
    let machine = gpus.iter().find_map(|gpu| gpu.model.as_deref());
    let run = report.devices.values().find_map(|device| device.model.as_deref());
    match (run, machine) {
        // Newer drivers begin names with NVIDIA, older ones with the brand.
        (Some(run), Some(machine)) if chip(run) != chip(machine) => {
            Err(MatchError::OtherModel { run: quoted(run), machine: quoted(machine) })
        }
        _ => Ok(()),
    }
}

/// The chip in a product's name: the first word with a letter and a digit, without the part after a hyphen.
fn chip(model: &str) -> Option<&str> {
    let has = |word: &str, is: fn(&u8) -> bool| word.bytes().any(|byte| is(&byte));
    model.split([' ', '-']).find(|word| has(word, u8::is_ascii_digit) && has(word, u8::is_ascii_alphabetic))
}
