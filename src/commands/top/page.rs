//! The page of `top` for a state: the GPUs with their pods, the quality of each pod's set, the result of each possible
//! request, and the parts that are not ready. A function of its arguments.

use std::collections::BTreeMap;

use super::line::{Column, Line, Piece, Table, Tint};
use crate::commands::since::lasting;
use linkwise_core::state::{Availability, Timestamp};
use linkwise_node::admin::{AllocationState, GpuState, State};

/// The shares of the best, in percent: a set of GPUs is good from the first on, and fair from the second on.
const GOOD: u64 = 90;
const FAIR: u64 = 50;

const UNKNOWN: &str = "unknown";

#[derive(Clone, Debug, Default)]
pub(super) struct Shown {
    /// The last state, and the time at which it was read.
    pub state: Option<(State, Timestamp)>,
    /// The reason why the last request had no answer.
    pub trouble: Option<String>,
}

/// The lines, each laid out for `room` columns.
pub(super) fn page(shown: &Shown, now: Timestamp, room: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Some(trouble) = &shown.trouble {
        let old =
            |(_, seen): &(State, Timestamp)| lasting(seen.as_secs(), now).map(|age| format!("; this is {age} old"));
        let age = shown.state.as_ref().and_then(old).unwrap_or_default();
        lines.push(vec![piece(Tint::Bad, &format!("linkwise does not answer: {trouble}"))]);
        lines.push(vec![piece(Tint::Bad, &format!("trying again{age}"))]);
    }
    if let Some((state, _)) = &shown.state {
        let names = state.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.index)).collect();
        let view = View { state, names, now, room };
        lines.push(view.title());
        lines.extend(view.standing());
        for part in [view.gpus(), view.pods(), view.outlook(), view.parts(), view.warnings()] {
            if !part.is_empty() {
                lines.push(Line::new());
                lines.extend(part);
            }
        }
    }
    lines
}

struct View<'a> {
    state: &'a State,
    /// GPU indices by UUID.
    names: BTreeMap<&'a str, u32>,
    now: Timestamp,
    room: usize,
}

impl View<'_> {
    fn title(&self) -> Line {
        let State { version, gpus, .. } = self.state;
        let healthy = gpus.iter().filter(|gpu| gpu.healthy).count();
        let mut text = format!("linkwise {version}: {} GPUs, {healthy} healthy", gpus.len());
        if self.state.allocations.is_some() {
            text += &format!(", {} held", gpus.iter().filter(|gpu| gpu.availability == Availability::Held).count());
        }
        vec![piece(Tint::Title, &text)]
    }

    fn standing(&self) -> Vec<Line> {
        let mut lines = Vec::new();
        if self.state.driver_released {
            let words = "an operator released the driver: GPUs are not watched until linkwise admin resume";
            lines.push(vec![piece(Tint::Fair, words)]);
        }
        if let Some(idle) = &self.state.idle {
            lines.push(vec![piece(Tint::Fair, &format!("nothing is offered: {idle}"))]);
        }
        lines
    }

    fn holders(&self, gpu: &GpuState) -> Vec<&AllocationState> {
        let all = self.state.allocations.iter().flatten();
        all.filter(|allocation| allocation.gpus.contains(&gpu.uuid)).collect()
    }

    fn gpus(&self) -> Vec<Line> {
        let columns = [
            column("GPU", true, 0),
            column("MODEL", false, 3),
            column("DOOR", false, 2),
            column("HEALTH", false, 0),
            column("HELD BY", false, 0),
            column("OF BEST", true, 1),
        ];
        let mut sick = Vec::new();
        let rows = self.state.gpus.iter().map(|gpu| {
            let holders = self.holders(gpu);
            let pods: Vec<String> = holders.iter().map(|held| format!("{}/{}", held.namespace, held.pod)).collect();
            let held = match (pods.as_slice(), gpu.availability) {
                ([], Availability::Held) => piece(Tint::Plain, "no listed pod"),
                ([], Availability::Free) => piece(Tint::Dim, "free"),
                ([], Availability::Mig) => piece(Tint::Dim, "free, MIG"),
                ([], Availability::Unhealthy) => piece(Tint::Dim, "-"),
                ([], Availability::Unknown) => piece(Tint::Dim, UNKNOWN),
                (pods, _) => piece(Tint::Plain, &pods.join(", ")),
            };
            let worst = holders.iter().filter_map(|held| percent(held.collective, held.best)).min();
            let health = match (gpu.healthy, gpu.reasons.first()) {
                (true, None) => piece(Tint::Good, "healthy"),
                (true, Some(_)) => piece(Tint::Fair, "partly"),
                (false, _) => piece(Tint::Bad, "unhealthy"),
            };
            for reason in &gpu.reasons {
                let time = lasting(reason.since, self.now).map(|time| format!(", for {time}")).unwrap_or_default();
                sick.push(vec![
                    piece(Tint::Bad, &format!("GPU {}: {}{time}", gpu.index, reason.reason)),
                    piece(Tint::Dim, &format!("; until: {}", reason.ends_with)),
                ]);
            }
            [
                piece(Tint::Plain, &gpu.index.to_string()),
                piece(Tint::Plain, gpu.model.as_deref().unwrap_or_default()),
                piece(Tint::Plain, gpu.door.as_deref().unwrap_or_default()),
                health,
                held,
                share(worst),
            ]
        });
        let table = Table { columns, rows: rows.collect() };
        let mut lines = table.lines(self.room);
        lines.extend(sick);
        lines
    }

    fn pods(&self) -> Vec<Line> {
        let columns = [
            column("POD", false, 0),
            column("CONTAINER", false, 3),
            column("RESOURCE", false, 4),
            column("GPUS", false, 0),
            column("MB/s", true, 2),
            column("OF BEST", true, 0),
            column("WHEN GIVEN", true, 5),
            column("WHY", false, 1),
        ];
        let rows = self.state.allocations.iter().flatten().map(|held| {
            [
                piece(Tint::Plain, &format!("{}/{}", held.namespace, held.pod)),
                piece(Tint::Plain, &held.container),
                piece(Tint::Plain, &held.resource),
                piece(Tint::Plain, &self.indices(&held.gpus)),
                number(held.collective),
                share(percent(held.collective, held.best)),
                share(percent(held.collective, held.best_at_admission)),
                piece(Tint::Fair, &held.why.join(", ")),
            ]
        });
        Table { columns, rows: rows.collect() }.lines(self.room)
    }

    fn outlook(&self) -> Vec<Line> {
        let columns = [
            column("A REQUEST FOR", true, 0),
            column("WOULD GET NOW", false, 0),
            column("MB/s", true, 1),
            column("OF BEST", true, 0),
        ];
        let rows = self.state.outlook.iter().flatten().map(|outlook| {
            let gpus = match outlook.gpus.as_slice() {
                [] => piece(Tint::Bad, "nothing"),
                gpus => piece(Tint::Plain, &format!("GPU {}", self.indices(gpus))),
            };
            let share = if outlook.gpus.is_empty() {
                Piece::default()
            } else {
                share(percent(outlook.collective, outlook.best))
            };
            [piece(Tint::Plain, &outlook.size.to_string()), gpus, number(outlook.collective), share]
        });
        Table { columns, rows: rows.collect() }.lines(self.room)
    }

    /// The GPUs by index; a GPU that is gone by its UUID.
    fn indices(&self, uuids: &[String]) -> String {
        let name = |uuid: &String| self.names.get(uuid.as_str()).map_or_else(|| uuid.clone(), u32::to_string);
        uuids.iter().map(name).collect::<Vec<_>>().join(",")
    }

    fn parts(&self) -> Vec<Line> {
        let columns = [
            column("PART", false, 0),
            column("STATE", false, 0),
            column("DEVICES", false, 2),
            column("TROUBLE", false, 1),
        ];
        let tint = |fine: bool| if fine { Tint::Good } else { Tint::Fair };
        let trouble = |trouble: &Option<String>| piece(Tint::Bad, trouble.as_deref().unwrap_or_default());
        let resources = self.state.resources.iter().map(|(name, resource)| {
            let devices = match (resource.healthy, resource.unhealthy) {
                (healthy, 0) => format!("{healthy} healthy"),
                (healthy, unhealthy) => format!("{healthy} healthy, {unhealthy} unhealthy"),
            };
            let state = piece(tint(resource.trouble.is_none()), &resource.phase);
            [piece(Tint::Plain, name), state, piece(Tint::Plain, &devices), trouble(&resource.trouble)]
        });
        let parts = self.state.parts.iter().map(|(name, part)| {
            [piece(Tint::Plain, name), piece(tint(part.ready), &part.phase), Piece::default(), trouble(&part.trouble)]
        });
        Table { columns, rows: resources.chain(parts).collect() }.lines(self.room)
    }

    fn warnings(&self) -> Vec<Line> {
        let line = |text: &String| vec![piece(Tint::Fair, &format!("warning: {text}"))];
        self.state.warnings.iter().map(line).collect()
    }
}

fn piece(tint: Tint, text: &str) -> Piece {
    Piece::new(tint, text)
}

fn column(title: &'static str, right: bool, drop: u8) -> Column {
    Column { title, right, drop }
}

fn number(value: Option<u64>) -> Piece {
    piece(Tint::Plain, &value.map(|value| value.to_string()).unwrap_or_default())
}

/// The share of the best in percent, rounded down; `None` if either is unknown, or if the best is 0.
fn percent(value: Option<u64>, best: Option<u64>) -> Option<u64> {
    let percent = (u128::from(value?) * 100).checked_div(u128::from(best?))?;
    u64::try_from(percent).ok()
}

fn share(percent: Option<u64>) -> Piece {
    match percent {
        None => Piece::default(),
        Some(percent) if percent >= GOOD => piece(Tint::Good, &format!("{percent} %")),
        Some(percent) if percent >= FAIR => piece(Tint::Fair, &format!("{percent} %")),
        Some(percent) => piece(Tint::Bad, &format!("{percent} %")),
    }
}
