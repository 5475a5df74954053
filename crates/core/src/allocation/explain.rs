//! [`Explanation`]: the part of a report that `--explain` adds: the best that this size could be, the sets that others
//! still find, the nearest NICs.
//!
//! Commands ask for it, admissions do not. It repeats the choice for the idle machine and for the GPUs that stay free.

use crate::prelude::*;
use core::fmt;

use serde::Serialize;

use super::choose::Question;
use super::report::{AllocationReport, ChosenGpu, Value, Values, indices};
use super::set::GpuSet;
use super::tables::AllocationTables;

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
    /// The number of GPUs asked for.
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
    /// The names of the interfaces; empty if no NIC is as near as PHB.
    pub nics: Vec<String>,
    /// The level of these NICs: PIX, PXB or PHB.
    pub level: Option<&'static str>,
}

impl<'a> Explanation<'a> {
    /// Explains a report that was made from `tables`.
    pub fn new(tables: &AllocationTables, report: &'a AllocationReport) -> Self {
        let all: GpuSet = (0..tables.topology().gpus().len()).collect();
        let best = |of: GpuSet, size: usize| {
            let question = Question::of(GpuSet::default(), of, size, report.policy);
            (1..=of.len()).contains(&size).then(|| question.answer(tables).values).flatten()
        };
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
    /// Writes the report for people: the values side by side, the free GPUs, the NICs.
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
            writeln!(f, "GPU {}: nearest NIC {} ({})", near.index, near.nics.join(", "), near.level.unwrap_or("-"))?;
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
        for value in Value::NUMBERS {
            write!(f, "  {:<20}{:>12}", value.to_string(), chosen.get(value))?;
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
