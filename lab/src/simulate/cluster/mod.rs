//! `linkwise-lab simulate --nodes N`: shows what the jobs of a trace, or generated jobs, get in a cluster through each
//! door.
//!
//! linkwise's own code publishes the slices, writes the claims and chooses the sets. `linkwise-scheduler-box` models
//! the allocator, and `scheduler` the choice among nodes. There is no API server and no network. The figures for
//! scripts are an interface, and docs/scale.md explains each of them.

mod choices;
mod figures;
mod jobs;
mod machines;
mod replay;
mod scheduler;
mod shapes;
mod show;
mod states;
#[cfg(test)]
mod tests;

use anyhow::{Context, Result, ensure};
use linkwise_system::output::print;
use linkwise_system::progress::Progress;

use super::{Door, Draws, Format, Job, SimulateArgs, read_trace, word_of};

use choices::Choices;
use figures::Figures;
use machines::Machine;
use replay::{Event, Replay};
use scheduler::Scheduler;
use shapes::Shapes;
use show::{Kind, Load, Outcome, Simulation};

/// The default number of jobs for each node.
const JOBS_PER_NODE: u32 = 20;

/// The least default number of jobs.
const MIN_JOBS: u32 = 1000;

/// The most GPUs of a claim (`resource.k8s.io/v1`, `AllocationResultsMaxSize`).
const MAX_GPUS: usize = 32;

struct Cluster {
    machines: Vec<Machine>,
    /// The machine of each node, as an index in `machines`.
    kinds: Vec<usize>,
    /// The jobs, in the order of their arrivals.
    jobs: Vec<Job>,
    /// The index of the first counted job: the jobs before it fill the cluster.
    counted: usize,
    /// The number of jobs left out, because they want more GPUs than a node has or a claim may request.
    skipped: usize,
    /// The parameters of the generated jobs; `None` for a trace.
    load: Option<Load>,
}

pub(super) fn run(args: &SimulateArgs) -> Result<()> {
    let mut choices = Choices::of(args.format);
    let simulation = simulate(args, &mut choices)?;
    print(&match args.format {
        Format::Json => serde_json::to_string(&simulation)? + "\n",
        Format::Text => show::text(&simulation),
        Format::Choices => choices.text,
    })?;
    Ok(())
}

/// Replays the jobs through each door.
fn simulate(args: &SimulateArgs, choices: &mut Choices) -> Result<Simulation> {
    let cluster = cluster(args)?;
    let mut doors: Vec<Outcome> = Vec::new();
    for door in &args.cluster.door {
        let name = word_of(door);
        if !doors.iter().any(|known| known.door == name) {
            let _progress = Progress::start(&name);
            let figures = through(&cluster, *door, args, &mut |event| choices.add(&name, &cluster, event))?;
            doors.push(Outcome { door: name, figures });
        }
    }
    let of_kind = |kind: usize| cluster.kinds.iter().filter(|one| **one == kind).count();
    let kinds = cluster.machines.iter().enumerate().map(|(kind, machine)| Kind {
        machine: machine.name.clone(),
        gpus: machine.whole.len(),
        nodes: of_kind(kind),
    });
    Ok(Simulation {
        nodes: cluster.kinds.len(),
        machines: kinds.filter(|kind| kind.nodes > 0).collect(),
        cpu: word_of(&args.cluster.cpu),
        load: cluster.load,
        skipped: cluster.skipped,
        doors,
    })
}

/// Replays the jobs through one door.
fn through(cluster: &Cluster, door: Door, args: &SimulateArgs, watch: &mut dyn FnMut(&Event)) -> Result<Figures> {
    let Cluster { machines, kinds, jobs, counted, .. } = cluster;
    let shapes = Shapes::of(machines, jobs, door)?;
    let scheduler = Scheduler::new(machines, kinds, &shapes, door, args.cluster.cpu)?;
    let mut figures = Replay::new(scheduler, jobs, *counted, watch).run()?;
    if !matches!(door, Door::Plugin | Door::PluginRails) {
        let bytes = |slices: Vec<serde_json::Value>| slices.iter().map(|slice| slice.to_string().len() as u64).sum();
        let of_kind: Vec<u64> = machines.iter().map(|machine| bytes(machine.slices(states::NODE))).collect();
        figures.slice_bytes = kinds.iter().filter_map(|kind| of_kind.get(*kind)).sum();
        figures.slice_bytes_per_node = figures.slice_bytes.checked_div(kinds.len() as u64).unwrap_or(0);
    }
    Ok(figures)
}

/// The cluster and the jobs from the command line.
fn cluster(args: &SimulateArgs) -> Result<Cluster> {
    let options = &args.cluster;
    let nodes = options.nodes.context("no --nodes")?;
    let (machines, weights) = machines::load(args.node.as_deref(), options)?;
    let kinds = machines::kinds(usize::try_from(nodes)?, &weights)?;
    let whole = |kind: &usize| machines.get(*kind).map_or(0, |machine| machine.whole.len());
    let most = kinds.iter().map(whole).max().unwrap_or(0).min(MAX_GPUS);
    let (jobs, load) = match &args.trace {
        Some(trace) => (read_trace(trace)?, None),
        None => {
            let gpus = kinds.iter().map(whole).sum::<usize>() as u64;
            let count = options.jobs.unwrap_or_else(|| nodes.saturating_mul(JOBS_PER_NODE).max(MIN_JOBS));
            let load = Load { seed: args.seed, load: options.load, jobs: count, filling: count / 4 };
            (jobs::generate(count, gpus, most, options.load, &mut Draws::new(args.seed)), Some(load))
        }
    };
    let all = jobs.len();
    let jobs: Vec<Job> = jobs.into_iter().filter(|job| job.size <= most).collect();
    let trace = args.trace.as_deref().map_or_else(String::new, |trace| trace.display().to_string());
    ensure!(!jobs.is_empty(), "trace {trace}: no job fits a node of this cluster (the largest serves {most} GPUs)");
    let counted = load.as_ref().map_or(0, |load| load.filling as usize);
    Ok(Cluster { skipped: all - jobs.len(), machines, kinds, jobs, counted, load })
}
