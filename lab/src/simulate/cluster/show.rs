//! The output of the command: JSON for scripts, a table for people.

use serde::Serialize;

use super::figures::Figures;

/// The answer for scripts.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Simulation {
    pub nodes: usize,
    pub machines: Vec<Kind>,
    /// The requests of pods besides GPUs.
    pub cpu: String,
    /// The parameters of the generated jobs; absent with a trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
    /// The number of jobs left out, because they want more GPUs than a node has or a claim may request.
    pub skipped: usize,
    pub doors: Vec<Outcome>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Kind {
    pub machine: String,
    /// The number of whole GPUs of each node.
    pub gpus: usize,
    pub nodes: usize,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Load {
    pub seed: u64,
    /// The share of the GPUs that the jobs would keep busy, in per mille.
    pub load: u32,
    pub jobs: u32,
    /// The number of jobs that come first, fill the cluster and are not counted.
    pub filling: u32,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Outcome {
    pub door: String,
    #[serde(flatten)]
    pub figures: Figures,
}

/// A table for people, with a column for each door.
pub(super) fn text(simulation: &Simulation) -> String {
    let gpus: usize = simulation.machines.iter().map(|kind| kind.nodes * kind.gpus).sum();
    let kinds: Vec<String> =
        simulation.machines.iter().map(|kind| format!("{} {}", kind.nodes, kind.machine)).collect();
    let mut text = format!("{} nodes, {gpus} GPUs: {}\n", simulation.nodes, kinds.join(", "));
    let (jobs, several) = simulation.doors.first().map_or((0, 0), |door| (door.figures.jobs, door.figures.several));
    match &simulation.load {
        Some(Load { seed, load, jobs: all, filling }) => {
            text += &format!("{all} jobs for a load of {} with seed {seed}, of which {filling} fill", percent(*load));
            text += &format!(" the cluster and {jobs} count, {several} of several GPUs");
        }
        None => text += &format!("{jobs} jobs, {several} of several GPUs"),
    }
    if simulation.skipped > 0 {
        text += &format!("; {} left out: more GPUs than a node or a claim has", simulation.skipped);
    }
    text += "\n\n";
    row(&mut text, "", simulation, |door| door.door.clone());
    let share = |share: Option<u64>| share.map_or_else(|| "-".to_owned(), percent);
    row(&mut text, "collective of the cluster's best", simulation, |door| share(door.figures.collective_of_cluster));
    row(&mut text, "jobs that got the cluster's best", simulation, |door| share(door.figures.best_of_cluster));
    row(&mut text, "collective of their node's best", simulation, |door| share(door.figures.collective_of_node));
    row(&mut text, "collective of the idle machine's", simulation, |door| share(door.figures.collective_of_machine));
    if simulation.doors.iter().any(|door| door.figures.equal_rails.is_some()) {
        row(&mut text, "pairs of pods on equal rails", simulation, |door| share(door.figures.equal_rails));
    }
    row(&mut text, "jobs that waited", simulation, |door| percent(door.figures.waited));
    row(&mut text, "wait, mean", simulation, |door| format!("{} s", door.figures.mean_wait_seconds));
    row(&mut text, "wait, 99 of 100 jobs", simulation, |door| format!("{} s", door.figures.p99_wait_seconds));
    row(&mut text, "GPUs in use", simulation, |door| share(door.figures.busy));
    row(&mut text, "free GPUs that are in no best four", simulation, |door| share(door.figures.fragmentation));
    row(&mut text, "slices of a node, bytes", simulation, |door| door.figures.slice_bytes_per_node.to_string());
    row(&mut text, "slices of all nodes, bytes", simulation, |door| door.figures.slice_bytes.to_string());
    row(&mut text, "claim, bytes", simulation, |door| door.figures.claim_bytes.to_string());
    row(&mut text, "writes to the API server per hour", simulation, |door| {
        door.figures.writes_per_hour.map_or_else(|| "-".to_owned(), |writes| writes.to_string())
    });
    row(&mut text, "allocator steps per pod, mean", simulation, |door| door.figures.steps_mean.to_string());
    row(&mut text, "allocator steps per pod, most", simulation, |door| door.figures.steps_worst.to_string());
    if simulation.doors.iter().any(|door| door.figures.never_started > 0) {
        row(&mut text, "jobs that never started", simulation, |door| door.figures.never_started.to_string());
    }
    text + "\ncollective: means over the jobs of several GPUs; docs/scale.md explains each line\n"
}

fn row(text: &mut String, label: &str, simulation: &Simulation, cell: impl Fn(&Outcome) -> String) {
    let cells: Vec<String> = simulation.doors.iter().map(|door| format!("{:>14}", cell(door))).collect();
    *text += format!("{label:<36}{}", cells.concat()).trim_end();
    *text += "\n";
}

/// Turns per mille into percent.
fn percent(mille: impl Into<u64>) -> String {
    let mille = mille.into();
    format!("{}.{} %", mille / 10, mille % 10)
}
