//! `linkwise top`: prints the state of the linkwise on this host as text, again and again. `linkwise admin state
//! --format text` prints the same text once.
//!
//! The text is the [`NodeView`] in tables: the GPUs with their pods, the quality of each pod's set, the result of each
//! possible request, and the parts that must be ready. All text from outside goes through `one_line`, which escapes
//! control characters, because a terminal would obey them.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use tokio::time::sleep;

use super::{admin, print};
use crate::config::TopArgs;
use linkwise_core::publish::view::{GpuView, NodeView, ReasonView, percent};
use linkwise_core::quote::{escaped, one_line};
use linkwise_core::state::{Availability, Timestamp};
use linkwise_core::topology::GpuUuid;
use linkwise_system::output::{print_styled, table};

/// Moves the cursor to the first column of the first line, and clears the terminal.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Prints the state once, or again and again.
pub async fn top(args: &TopArgs) -> Result<()> {
    if args.once || !io::stdout().is_terminal() {
        return Ok(print(&state_text(&args.socket).await?)?);
    }
    loop {
        let text = state_text(&args.socket).await;
        let failure = |error| format!("linkwise does not answer, trying again: {}\n", one_line(&format!("{error:#}")));
        print_styled(&format!("{CLEAR}{}", escaped(&text.unwrap_or_else(failure))))?;
        sleep(Duration::from_secs(args.interval.into())).await;
    }
}

/// The state of the linkwise that serves this socket, for people.
pub(super) async fn state_text(socket: &Path) -> Result<String> {
    Ok(text(&admin::state(socket, admin::STATE_TIMEOUT).await?, now()))
}

/// The current time, counted from 1970 as `run` counts it.
pub(super) fn now() -> Timestamp {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// The time from `since` to `now`, as `3 h`; `None` if it is less than a second, or negative because the clock was set
/// back.
pub(super) fn duration_text(since: u64, now: Timestamp) -> Option<String> {
    match now.as_secs().saturating_sub(since) {
        0 => None,
        seconds @ 1..=119 => Some(format!("{seconds} s")),
        seconds @ 120..=7199 => Some(format!("{} min", seconds / 60)),
        seconds @ 7200..=172_799 => Some(format!("{} h", seconds / 3600)),
        seconds => Some(format!("{} days", seconds / 86_400)),
    }
}

fn text(view: &NodeView, now: Timestamp) -> String {
    let parts = [head(view, now), gpus(view, now), pods(view), outlook(view), parts(view), remarks(view)];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
}

/// A table without its empty columns; empty if there are no rows.
fn dense_table<const N: usize>(titles: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> = rows.collect();
    let kept: Vec<usize> =
        (0..N).filter(|at| rows.iter().any(|row| row.get(*at).is_some_and(|cell| !cell.is_empty()))).collect();
    let titles = titles.map(str::to_owned);
    let line = |row: &[String; N]| kept.iter().filter_map(|at| row.get(*at)).map(|cell| one_line(cell)).collect();
    if rows.is_empty() {
        String::new()
    } else {
        table(&std::iter::once(&titles).chain(&rows).map(line).collect::<Vec<_>>())
    }
}

fn head(view: &NodeView, now: Timestamp) -> String {
    let healthy = view.gpus.iter().filter(|gpu| gpu.healthy).count();
    let mut head = format!("linkwise {}", one_line(&view.version));
    if let Some(node) = &view.node {
        head += &format!(" on {}", one_line(node));
    }
    head += &format!(": {} GPUs, {healthy} healthy", view.gpus.len());
    if view.allocations.is_some() {
        head += &format!(", {} held", view.gpus.iter().filter(|gpu| gpu.availability == Availability::Held).count());
    }
    head.push('\n');
    for line in &view.unready {
        head += &format!("not ready: {}\n", one_line(line));
    }
    if view.driver_released {
        head += "an operator released the driver: the GPUs are not monitored until linkwise admin resume\n";
    }
    if let Some(idle) = &view.idle {
        head += &format!("nothing is offered: {}\n", one_line(idle));
    }
    for lack in &view.shortfalls {
        let time = duration_text(lack.since, now).map(|time| format!(", for {time}")).unwrap_or_default();
        head += &format!("lacking: {}{time}; until: it is back, or linkwise admin accept\n", one_line(&lack.what));
    }
    head
}

fn gpus(view: &NodeView, now: Timestamp) -> String {
    let titles = ["GPU", "MODEL", "DOOR", "HEALTH", "HELD BY", "OF BEST"];
    let rows = view.gpus.iter().map(|gpu| {
        let held = || view.held().iter().filter(|held| held.gpus.iter().any(|uuid| uuid.as_str() == gpu.uuid));
        let pods: Vec<String> = held().map(|held| format!("{}/{}", held.namespace, held.pod)).collect();
        let held_by = match (pods.as_slice(), gpu.availability) {
            ([], Availability::Held) => "no listed pod".to_owned(),
            ([], Availability::Free) => "free".to_owned(),
            ([], Availability::Mig) => "free, MIG".to_owned(),
            ([], Availability::Unhealthy | Availability::Cordoned) => "-".to_owned(),
            ([], Availability::Withheld) => "not offered".to_owned(),
            ([], Availability::Unknown) => "unknown".to_owned(),
            (pods, _) => pods.join(", "),
        };
        [
            gpu.index.to_string(),
            gpu.model.clone().unwrap_or_default(),
            gpu.door.as_deref().unwrap_or_default().to_owned(),
            gpu.health().to_owned(),
            held_by,
            percent_text(held().filter_map(|held| percent(held.collective, held.best)).min()),
        ]
    });
    let reasons = |gpu: &GpuView| {
        let reason = |reason: &ReasonView| {
            let time = duration_text(reason.since, now).map(|time| format!(", for {time}")).unwrap_or_default();
            let (why, until) = (one_line(&reason.reason), one_line(&reason.ends_with));
            format!("GPU {}: {why}{time}; until: {until}\n", gpu.index)
        };
        gpu.reasons.iter().map(reason).collect::<String>()
    };
    dense_table(titles, rows) + &view.gpus.iter().map(reasons).collect::<String>()
}

fn pods(view: &NodeView) -> String {
    let titles = ["POD", "CONTAINER", "RESOURCE", "GPUS", "GONE", "MB/s", "OF BEST", "WHEN GIVEN", "WHY"];
    let rows = view.held().iter().map(|held| {
        [
            format!("{}/{}", held.namespace, held.pod),
            held.container.clone(),
            held.resource.clone(),
            indices(view, held.gpus.iter().map(GpuUuid::as_str)),
            held.gone.iter().cloned().collect::<Vec<_>>().join(", "),
            number(held.collective),
            percent_text(percent(held.collective, held.best)),
            percent_text(percent(held.collective, held.best_at_admission)),
            held.why.iter().map(|why| why.to_string()).collect::<Vec<_>>().join(", "),
        ]
    });
    dense_table(titles, rows)
}

fn outlook(view: &NodeView) -> String {
    let rows = view.outlook.iter().flatten().map(|outlook| {
        let gpus = indices(view, outlook.gpus.iter().map(GpuUuid::as_str));
        let (gpus, of_best) = match gpus.as_str() {
            "" => ("nothing".to_owned(), None),
            gpus => (format!("GPU {gpus}"), percent(outlook.collective, outlook.best)),
        };
        [outlook.size.to_string(), gpus, number(outlook.collective), percent_text(of_best)]
    });
    dense_table(["A REQUEST FOR", "WOULD GET NOW", "MB/s", "OF BEST"], rows)
}

fn parts(view: &NodeView) -> String {
    let resources = view.resources.iter().map(|(name, resource)| {
        let devices = match (resource.healthy, resource.unhealthy) {
            (healthy, 0) => format!("{healthy} healthy"),
            (healthy, unhealthy) => format!("{healthy} healthy, {unhealthy} unhealthy"),
        };
        [name.clone(), resource.phase.to_string(), devices, resource.trouble.clone().unwrap_or_default()]
    });
    let parts = view.parts.iter().map(|(name, part)| {
        [name.clone(), part.phase.to_string(), String::new(), part.trouble.clone().unwrap_or_default()]
    });
    dense_table(["PART", "STATE", "DEVICES", "TROUBLE"], resources.chain(parts))
}

/// The last choices, the resources of the configuration that cannot be offered, and the warnings.
fn remarks(view: &NodeView) -> String {
    let choices = view.choices.iter().map(|choice| {
        let gpus = indices(view, choice.gpus.iter().map(String::as_str));
        let (resource, why) = (one_line(&choice.resource), one_line(&choice.why));
        format!("chosen: {} of {} {resource}: GPU {gpus}. {why}\n", choice.size, choice.candidates)
    });
    let problems = view.problems.iter().map(|problem| format!("cannot be offered: {}\n", one_line(problem)));
    let warnings = view.warnings.iter().map(|warning| format!("warning: {}\n", one_line(warning)));
    choices.chain(problems).chain(warnings).collect()
}

/// NVML's indices of these GPUs. A GPU that is gone has none, so its UUID stands for it.
fn indices<'a>(view: &NodeView, uuids: impl Iterator<Item = &'a str>) -> String {
    let index = |uuid| view.gpu(uuid).map_or_else(|| one_line(uuid), |gpu| gpu.index.to_string());
    uuids.map(index).collect::<Vec<_>>().join(",")
}

fn number(value: Option<u64>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

fn percent_text(percent: Option<u64>) -> String {
    percent.map(|percent| format!("{percent} %")).unwrap_or_default()
}
