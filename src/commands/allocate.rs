//! `linkwise allocate`: shows the choice for a request, and the reasons.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde::Serialize;

use super::{find_gpu, print};
use crate::config::{AllocateArgs, Format, UnitName};
use linkwise_core::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, AllocationTables, ChosenGpu, DeviceId, Explanation,
    FallbackReason, Units, preferred_allocation, preferred_units,
};
use linkwise_core::topology::NodeTopology;

/// A machine's GPUs, and the rules by which the command chooses among them.
struct Choice {
    tables: AllocationTables,
    /// The number of slots of each GPU, and the slots; `None` if GPUs are not shared.
    shared: Option<(usize, Units)>,
    policy: AllocationPolicy,
}

/// The chosen GPUs, as scripts read them.
#[derive(Serialize)]
struct Chosen<R> {
    #[serde(flatten)]
    report: R,
    /// The bus bandwidth with NVLink SHARP, MB/s.
    #[serde(skip_serializing_if = "Option::is_none")]
    nvls: Option<u64>,
    /// The chosen slots, if GPUs are shared.
    #[serde(skip_serializing_if = "Option::is_none")]
    slots: Option<Vec<Slot>>,
    elapsed_ns: u64,
}

#[derive(Serialize)]
struct Slot {
    id: DeviceId,
    #[serde(flatten)]
    gpu: ChosenGpu,
}

/// Runs the command.
pub async fn allocate(args: &AllocateArgs) -> Result<()> {
    let machine = super::machine(&args.node).await?;
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    super::note_unknown_nvlinks(&machine.name, &topology);
    let shared = args.replicas.map(usize::from).map(|replicas| (replicas, Units::slots(&topology, replicas)));
    let usual = if shared.is_some() { AllocationPolicy::Distributed } else { AllocationPolicy::BestEffort };
    let policy = args.policy.unwrap_or(usual);
    let choice = Choice { tables: super::tables(topology), shared, policy };
    let chosen = choice.answer(args)?;
    let (tables, report) = (&choice.tables, &chosen.report);
    print(&match args.format {
        Format::Json if args.explain => {
            let report = Explanation::new(tables, report);
            json(&Chosen { report, nvls: chosen.nvls, slots: chosen.slots, elapsed_ns: chosen.elapsed_ns })?
        }
        Format::Json => json(&chosen)?,
        Format::Text if args.explain => {
            let rings = report.values.map_or(0, |values| values.collective);
            let nvls = chosen.nvls.map(|nvls| {
                let slower = if nvls > rings { "" } else { ": rings are faster" };
                format!("with NVLink SHARP: {nvls} MB/s{slower}\n")
            });
            text(tables.topology(), &chosen)
                + &Explanation::new(tables, report).to_string()
                + nvls.as_deref().unwrap_or_default()
        }
        Format::Text => {
            let elapsed = Duration::from_nanos(chosen.elapsed_ns);
            text(tables.topology(), &chosen) + &format!("{report}, {elapsed:?}\n")
        }
    })?;
    Ok(())
}

fn json(chosen: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(chosen)? + "\n")
}

impl Choice {
    fn answer(&self, args: &AllocateArgs) -> Result<Chosen<AllocationReport>> {
        let ids = |names: &[UnitName]| -> Result<Vec<DeviceId>> {
            Ok(names.iter().map(|name| self.ids(name)).collect::<Result<Vec<_>>>()?.concat())
        };
        let available = match (&args.available, &self.shared) {
            (Some(names), _) => ids(names)?,
            (None, Some((_, units))) => units.ids().cloned().collect(),
            (None, None) => self.tables.topology().gpus().iter().map(|gpu| DeviceId::from(&gpu.uuid)).collect(),
        };
        let request = AllocationRequest { available, must_include: ids(&args.must_include)?, size: args.size };
        let start = Instant::now();
        let (answer, report) = match &self.shared {
            Some((_, units)) => preferred_units(&self.tables, units, &request, self.policy),
            None => preferred_allocation(&self.tables, &request, self.policy),
        };
        let elapsed_ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if report.fallback == Some(FallbackReason::Size) {
            let must = request.must_include.iter().collect::<std::collections::BTreeSet<_>>().len();
            let (size, what) = (request.size, if self.shared.is_some() { "slots" } else { "GPUs" });
            bail!("cannot choose {size} {what}: {} are available, {must} must be included", report.candidates);
        }
        let topology = self.tables.topology();
        let slots = self.shared.as_ref().map(|(_, units)| {
            let slot = |id| Some(Slot { gpu: ChosenGpu::at(topology, units.gpu(&id)?)?, id });
            answer.devices.into_iter().filter_map(slot).collect()
        });
        let places = report.devices.iter().filter_map(|gpu| topology.position(&gpu.uuid));
        Ok(Chosen { nvls: topology.nvls(places), report, slots, elapsed_ns })
    }

    /// The device ids that a name stands for: a GPU, a slot, or all slots of a GPU.
    fn ids(&self, name: &UnitName) -> Result<Vec<DeviceId>> {
        let (_, gpu) = find_gpu(self.tables.topology(), &name.gpu)?;
        let named = &name.gpu;
        let Some((replicas, _)) = &self.shared else {
            if let Some(slot) = name.slot {
                bail!("cannot choose slot {named}::{slot}: GPUs are not shared; add --replicas");
            }
            return Ok(vec![DeviceId::from(&gpu.uuid)]);
        };
        let slots = match name.slot {
            Some(slot) => slot..slot.saturating_add(1),
            None => 0..*replicas,
        };
        ensure!(slots.end <= *replicas, "GPU {named} has no slot {}: it has {replicas} slots, from 0", slots.start);
        Ok(slots.map(|slot| Units::slot(&gpu.uuid, slot)).collect())
    }
}

/// The GPUs or slots and the links between the GPUs, for people.
fn text(topology: &NodeTopology, chosen: &Chosen<AllocationReport>) -> String {
    let mut text = match &chosen.slots {
        Some(slots) => slots.iter().map(|slot| line(&slot.gpu, &slot.id)).collect(),
        None => chosen.report.devices.iter().map(|gpu| line(gpu, &gpu.uuid)).collect::<String>(),
    };
    let links = links(topology, &chosen.report.devices);
    if !links.is_empty() {
        text += &format!("links: {links}\n");
    }
    text
}

fn line(gpu: &ChosenGpu, id: &impl std::fmt::Display) -> String {
    format!("GPU {}  {}  {id}\n", gpu.index, gpu.pci)
}

/// The links between the GPUs of a set: `0-1 NV2, 0-4 SYS`.
fn links(topology: &NodeTopology, devices: &[ChosenGpu]) -> String {
    let places: Vec<(u32, usize)> =
        devices.iter().filter_map(|gpu| Some((gpu.index, topology.position(&gpu.uuid)?))).collect();
    let pairs = places.iter().enumerate().flat_map(|(first, a)| places.iter().skip(first + 1).map(move |b| (a, b)));
    pairs.map(|((a, at), (b, to))| format!("{a}-{b} {}", topology.symbol(*at, *to))).collect::<Vec<_>>().join(", ")
}
