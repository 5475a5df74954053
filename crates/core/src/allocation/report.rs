//! [`AllocationReport`]: why a set was chosen. The log, `linkwise allocate --explain` and the golden tests print it.
//!
//! [`Explanation`] is the part that `--explain` adds: the best set of this size on the idle machine, the best sets
//! among the GPUs that stay free, the nearest NICs. Only commands make one, because it takes more choices.

use crate::prelude::*;
use core::fmt;

use serde::Serialize;

use super::AllocationPolicy;
use super::set::GpuSet;
use super::tables::AllocationTables;
use crate::quote::excerpt;
use crate::topology::{GpuUuid, NodeTopology, PciAddress};
use crate::words::list;

/// The values by which sets are compared, in this order; more is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Value {
    /// The ring bandwidth of the set by NCCL's model, MB/s.
    Collective,
    /// The value of the GPUs that stay free: over group sizes j of 2, 4 and 8, the sum of j times the largest total
    /// value of disjoint groups of j free GPUs. A group's value is its collective in thousandths of the machine's best
    /// for j.
    Remaining,
    /// The sum of the bandwidths of the set's pairs, MB/s.
    Pairs,
    /// Minus the sum of the ranks of the set's pairs.
    Closeness,
    /// The number of free GPUs in whole groups that fit a package: over group sizes of 2, 4 and 8 and over packages,
    /// the sum of the free GPUs there, each number rounded down to whole groups.
    Room,
    /// Minus the smallest sum of ranks that a division of the free GPUs into pairs has.
    RemainingCloseness,
    /// The sum of the rates of the NICs nearest to the set's GPUs, each NIC once, Mbit/s.
    Nics,
    /// The sum of the bandwidths of the pairs of free GPUs, MB/s. Thus a request for one GPU takes a poorly linked one.
    RemainingPairs,
    /// The sorted list of PCI addresses.
    PciAddresses,
}

/// The values of a set, in the order of comparison; more is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Values {
    /// [`Value::Collective`], MB/s; 0 for one GPU.
    pub collective: u64,
    /// [`Value::Remaining`].
    pub remaining: u64,
    /// [`Value::Pairs`], MB/s.
    pub pairs: u64,
    /// [`Value::Closeness`], at most 0.
    pub closeness: i64,
    /// [`Value::Room`], GPUs.
    pub room: u64,
    /// [`Value::RemainingCloseness`], at most 0.
    pub remaining_closeness: i64,
    /// [`Value::Nics`], Mbit/s.
    pub nics: u64,
    /// [`Value::RemainingPairs`], MB/s.
    pub remaining_pairs: u64,
}

impl Values {
    /// The values as numbers, in the order of comparison.
    pub fn numbers(&self) -> [(Value, i64); 8] {
        let plain = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        [
            (Value::Collective, plain(self.collective)),
            (Value::Remaining, plain(self.remaining)),
            (Value::Pairs, plain(self.pairs)),
            (Value::Closeness, self.closeness),
            (Value::Room, plain(self.room)),
            (Value::RemainingCloseness, self.remaining_closeness),
            (Value::Nics, plain(self.nics)),
            (Value::RemainingPairs, plain(self.remaining_pairs)),
        ]
    }

    /// One of the values. The PCI addresses are not a number; their value is 0.
    pub fn get(&self, value: Value) -> i64 {
        self.numbers().into_iter().find(|(known, _)| *known == value).map_or(0, |(_, number)| number)
    }

    /// The first value in which two sets differ.
    pub fn difference(&self, other: &Self) -> Value {
        let mut pairs = self.numbers().into_iter().zip(other.numbers());
        pairs.find(|(own, theirs)| own != theirs).map_or(Value::PciAddresses, |((value, _), _)| value)
    }
}

/// One GPU of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChosenGpu {
    /// NVML's index.
    pub index: u32,
    /// Its UUID.
    pub uuid: GpuUuid,
    /// Its PCI address.
    pub pci: PciAddress,
}

impl ChosenGpu {
    /// The GPU at a place of the topology.
    pub fn at(topology: &NodeTopology, place: usize) -> Option<Self> {
        let gpu = topology.gpus().get(place)?;
        Some(Self { index: gpu.index, uuid: gpu.uuid.clone(), pci: gpu.pci })
    }
}

/// The second best set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunnerUp {
    /// Its GPUs.
    pub devices: Vec<ChosenGpu>,
    /// Its values.
    pub values: Values,
    /// The first value in which it is worse.
    pub lost_at: Value,
}

/// The reason why a request was answered in sorted order and not with the best set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FallbackReason {
    /// The request names a device that this node does not have.
    UnknownDevice,
    /// No set of the requested size holds all of `must_include`.
    Size,
}

/// The result of one choice, with its reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AllocationReport {
    /// The GPUs chosen, as far as the node has them.
    pub devices: Vec<ChosenGpu>,
    /// Their values; `None` after a fallback.
    pub values: Option<Values>,
    /// The second best set; `None` if there was no other.
    pub runner_up: Option<RunnerUp>,
    /// True if it is proven that no better set exists.
    pub exact: bool,
    /// The number of sets compared.
    pub compared: u64,
    /// The number of GPUs that could have been chosen.
    pub candidates: usize,
    /// The number of requested GPUs.
    pub size: usize,
    /// The policy of the choice.
    pub policy: AllocationPolicy,
    /// The reason why no choice was made, if none was.
    pub fallback: Option<FallbackReason>,
    /// The GPUs chosen, by their places; empty after a fallback.
    #[serde(skip)]
    pub(super) chosen: GpuSet,
    /// The GPUs that stay free; empty after a fallback.
    #[serde(skip)]
    pub remains: GpuSet,
}

impl fmt::Display for AllocationReport {
    /// One line for the log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({} of {})", indices(&self.devices), self.size, self.candidates)?;
        if let Some(reason) = self.fallback {
            return write!(f, ": in sorted order, {reason}");
        }
        if let Some(values) = self.values {
            // One GPU has no peers.
            match self.devices.len() {
                1 => write!(f, ": remaining {}", values.remaining)?,
                _ => write!(f, ": collective {} MB/s, remaining {}", values.collective, values.remaining)?,
            }
            if let Some(second) = &self.runner_up {
                write!(f, "; before GPU {} by {}", indices(&second.devices), second.lost_at)?;
                if second.lost_at != Value::PciAddresses {
                    let (ours, theirs) = (values.get(second.lost_at), second.values.get(second.lost_at));
                    write!(f, " ({ours} to {theirs})")?;
                }
            }
        }
        let kind = if self.exact { "exact" } else { "not exact" };
        let sets = if self.compared == 1 { "set" } else { "sets" };
        write!(f, "; {kind}, {} {sets} compared", self.compared)
    }
}

/// GPU indices as nvidia-smi takes them: `0,1,4`.
pub(super) fn indices(devices: &[ChosenGpu]) -> String {
    let indices: Vec<String> = devices.iter().map(|gpu| gpu.index.to_string()).collect();
    if indices.is_empty() { "none".to_owned() } else { indices.join(",") }
}

/// A report with its comparison to the idle machine, the free GPUs and the NICs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation<'a> {
    /// The report.
    #[serde(flatten)]
    pub report: &'a AllocationReport,
    /// The values of the best set of that size on the idle machine.
    pub idle: Option<Values>,
    /// The GPUs that stay free.
    pub free: Vec<ChosenGpu>,
    /// The best sets that the free GPUs offer to the next request.
    pub offers: Vec<Offer>,
    /// The NICs nearest to each chosen GPU.
    pub nearest_nics: Vec<NearestNics>,
}

/// The best set of one size among the free GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Offer {
    /// The number of requested GPUs.
    pub size: usize,
    /// The collective of the best set among the free GPUs, MB/s.
    pub collective: u64,
    /// The collective of the best set of the idle machine, MB/s.
    pub idle: u64,
}

/// The NICs nearest to one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NearestNics {
    /// NVML's index of the GPU.
    pub index: u32,
    /// The names of the interfaces; empty if no NIC is at PHB or closer.
    pub nics: Vec<String>,
    /// The level of these NICs: PIX, PXB or PHB.
    pub level: Option<&'static str>,
}

impl<'a> Explanation<'a> {
    /// Explains a report that was made from `tables`.
    pub fn new(tables: &AllocationTables, report: &'a AllocationReport) -> Self {
        let all: GpuSet = (0..tables.topology().gpus().len()).collect();
        let best = |of: GpuSet, size: usize| tables.best(of, size)?.values;
        let offer = |size: usize| {
            let (free, idle) = (best(report.remains, size)?, best(all, size)?);
            Some(Offer { size, collective: free.collective, idle: idle.collective })
        };
        Self {
            report,
            idle: report.values.and_then(|_| best(all, report.size)),
            free: report.remains.places().filter_map(|place| ChosenGpu::at(tables.topology(), place)).collect(),
            offers: [2, 4, 8].into_iter().filter_map(offer).collect(),
            nearest_nics: report.devices.iter().map(|gpu| nearest_nics(tables, gpu)).collect(),
        }
    }
}

fn nearest_nics(tables: &AllocationTables, gpu: &ChosenGpu) -> NearestNics {
    let topology = tables.topology();
    let place = topology.position(&gpu.uuid);
    let cards = place.map(|place| topology.nearest_nics(place)).unwrap_or_default();
    let cards: Vec<_> = cards.into_iter().filter_map(|card| topology.nics().get(card)).collect();
    let level = cards.first().and_then(|card| card.level.get(place?)).map(|rank| rank.symbol());
    NearestNics { index: gpu.index, nics: cards.iter().flat_map(|card| card.names.clone()).collect(), level }
}

impl fmt::Display for Explanation<'_> {
    /// Writes the report for people: the values in columns, the free GPUs, the NICs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.report)?;
        if let Some(values) = self.report.values {
            self.values(f, &values)?;
        }
        match self.free.is_empty() {
            true => writeln!(f, "stays free: nothing")?,
            false => writeln!(f, "stays free: GPU {}", indices(&self.free))?,
        }
        for Offer { size, collective, idle } in &self.offers {
            writeln!(f, "  a job of {size} would reach {collective} of {idle} MB/s there")?;
        }
        for near in self.nearest_nics.iter().filter(|near| !near.nics.is_empty()) {
            let names = list(near.nics.iter().map(|name| excerpt(name)));
            writeln!(f, "GPU {}: nearest NIC {names} ({})", near.index, near.level.unwrap_or("-"))?;
        }
        Ok(())
    }
}

impl Explanation<'_> {
    /// Writes up to three columns: the chosen set, the runner-up, the best set of the idle machine.
    fn values(&self, f: &mut fmt::Formatter<'_>, chosen: &Values) -> fmt::Result {
        let second = self.report.runner_up.as_ref();
        write!(f, "  {:<20}{:>12}", "", "chosen")?;
        if second.is_some() {
            write!(f, "{:>12}", "runner-up")?;
        }
        writeln!(f, "{:>12}", "idle best")?;
        for (value, number) in chosen.numbers() {
            write!(f, "  {:<20}{number:>12}", value.to_string())?;
            if let Some(second) = second {
                write!(f, "{:>12}", second.values.get(value))?;
            }
            if let Some(idle) = self.idle {
                write!(f, "{:>12}", idle.get(value))?;
            }
            let decided = second.is_some_and(|second| second.lost_at == value);
            writeln!(f, "{}", if decided { "  <- decided" } else { "" })?;
        }
        Ok(())
    }
}
