//! `linkwise-lab simulate`: shows what the jobs of a trace get from each policy on one machine.
//!
//! The figures for scripts are an interface. `cluster` simulates a cluster with the same traces.

#[cfg(feature = "cluster")]
mod cluster;
mod draws;
mod options;
mod replay;
mod trace;

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use linkwise_core::allocation::AllocationTables;
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines;
use linkwise_system::output::{open, print};
use linkwise_system::progress::Progress;
use replay::{CLASSES, Figures, replay};

pub use draws::Draws;
pub use options::{ClusterArgs, CpuRequests, Door, Format, MachineWeight, SimulateArgs, SimulatePolicy, word_of};
pub use replay::{best_set, collective, values};
pub use trace::Job;

/// The longest trace, in bytes: some five million jobs.
const MAX_TRACE: u64 = 64 << 20;

/// The answer for scripts.
#[derive(Serialize)]
struct Simulation {
    machine: String,
    gpus: usize,
    policies: Vec<Outcome>,
}

#[derive(Serialize)]
struct Outcome {
    policy: String,
    /// The seed of `random`.
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(flatten)]
    figures: Figures,
}

/// Runs the command.
pub fn run(args: &SimulateArgs) -> Result<()> {
    if args.cluster.nodes.is_some() {
        #[cfg(feature = "cluster")]
        return cluster::run(args);
        #[cfg(not(feature = "cluster"))]
        bail!(
            "--nodes needs a scheduler, and this program was built without one: cargo run -p linkwise-lab -- simulate"
        );
    }
    simulate(args)
}

fn simulate(args: &SimulateArgs) -> Result<()> {
    let trace = args.trace.as_deref().context("no --trace")?;
    let jobs = read_trace(trace)?;
    if jobs.iter().any(|job| job.pods > 1) {
        bail!("{} has jobs of several pods; add --nodes N", trace.display());
    }
    let machine = machines::load(args.node.as_deref().context("no --node")?)?;
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let comparing = Progress::start("comparing the sets of this machine's GPUs");
    let tables = AllocationTables::new(topology.into());
    drop(comparing);
    let gpus = tables.topology().gpus().len();
    if jobs.iter().all(|job| job.size > gpus) {
        bail!("trace {}: no job fits this machine (it has {gpus} GPUs)", trace.display());
    }
    ensure!(args.format != Format::Choices, "--format choices shows a scheduler's choices; add --nodes N");
    let policies = args.policy.iter().map(|policy| outcome(&tables, &jobs, *policy, args.seed)).collect();
    let simulation = Simulation { machine: machine.title, gpus, policies };
    print(&match args.format {
        Format::Json => serde_json::to_string(&simulation)? + "\n",
        Format::Text | Format::Choices => text(&simulation),
    })?;
    Ok(())
}

/// The jobs of a trace, in the order of their arrivals.
pub fn read_trace(path: &Path) -> Result<Vec<Job>> {
    let mut bytes = Vec::new();
    open(path)?
        .take(MAX_TRACE + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {}", path.display()))?;
    if bytes.len() as u64 > MAX_TRACE {
        bail!("{} is longer than {} MiB", path.display(), MAX_TRACE >> 20);
    }
    let text = String::from_utf8(bytes).ok().with_context(|| format!("{} is not UTF-8", path.display()))?;
    trace::parse(&text).with_context(|| path.display().to_string())
}

fn outcome(tables: &AllocationTables, jobs: &[Job], policy: SimulatePolicy, seed: u64) -> Outcome {
    let name = word_of(&policy);
    let _progress = Progress::start(&name);
    let figures = replay(tables, jobs, (policy, seed));
    let seed = (policy == SimulatePolicy::Random).then_some(seed);
    Outcome { policy: name, seed, figures }
}

fn text(simulation: &Simulation) -> String {
    let mut text = format!("{}\n", simulation.machine);
    if let Some(Outcome { figures, .. }) = simulation.policies.first() {
        text += &format!("{} jobs, {} of several GPUs", figures.jobs, figures.several);
        if figures.skipped > 0 {
            text += &format!("; {} left out: more GPUs than the {} here", figures.skipped, simulation.gpus);
        }
        text += &format!("; all done after {} s\n\n", figures.end_seconds);
    }
    text += &format!("{:<16}{:>12}{:>14}", "policy", "collective", "by GPU-hours");
    text += &CLASSES.map(|class| format!("{class:>8}")).concat();
    text += &format!("{:>11}{:>11}  NUMA nodes: jobs\n", "mean wait", "max wait");
    for Outcome { policy, seed, figures } in &simulation.policies {
        let name = seed.map_or_else(|| policy.clone(), |seed| format!("{policy} (seed {seed})"));
        text += &format!("{name:<16}{:>12}", percent(figures.collective_by_count));
        text += &format!("{:>14}", percent(figures.collective_by_gpu_hours));
        let class = |class| figures.link_classes.get(class).copied().unwrap_or(0);
        text += &CLASSES.map(|name| format!("{:>8}", class(name))).concat();
        text += &format!("{:>9} s{:>9} s", figures.mean_wait_seconds, figures.max_wait_seconds);
        let mut spans: Vec<String> =
            figures.numa_nodes.iter().map(|(nodes, jobs)| format!("{nodes}: {jobs}")).collect();
        if figures.numa_unknown > 0 {
            spans.push(format!("unknown: {}", figures.numa_unknown));
        }
        text += &format!("  {}\n", spans.join(", "));
    }
    text + "\ncollective: of the idle machine's best for that size, mean over the jobs of several GPUs; \
            classes: worst pair\n"
}

/// Turns millionths into percent, rounded down to hundredths.
fn percent(millionths: Option<u64>) -> String {
    millionths.map_or_else(|| "-".to_owned(), |share| format!("{}.{:02} %", share / 10_000, share % 10_000 / 100))
}
