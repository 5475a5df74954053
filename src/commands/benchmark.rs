//! `linkwise expect` computes the bus bandwidth of an all-reduce by NCCL's model, and `linkwise verify` compares it
//! with the output of nccl-tests.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::{admin, find_gpu, open, print};
use crate::config::{ExpectArgs, Format, PodArgs, VerifyArgs};
use linkwise_core::allocation::ChosenGpu;
use linkwise_core::benchmark::{Comparison, Expectation, MODEL, NcclReport, Verdict, gb_per_s, odd_among};
use linkwise_core::publish::placement::Allocation;
use linkwise_core::quote::excerpt;
use linkwise_core::state::GpuSelector;
use linkwise_core::topology::{GpuUuid, NodeTopology};

/// The longest output of nccl-tests that is read, in bytes: enough for an NCCL log with all ranks of a large job.
const MAX_OUTPUT: u64 = 64 << 20;

/// The JSON output of `expect`.
#[derive(Serialize)]
struct Expected {
    gpus: Vec<ChosenGpu>,
    /// The bus bandwidth of the faster algorithm, MB/s.
    bus: Option<u64>,
    #[serde(flatten)]
    expectation: Expectation,
    /// A sentence for each GPU that differs from the others of its model, and one if NVLinks or rates are unknown.
    odd: Vec<String>,
    model: &'static str,
}

/// The JSON output of `verify`.
#[derive(Serialize)]
struct Verified<'a> {
    #[serde(flatten)]
    comparison: &'a Comparison,
    unreadable_lines: usize,
    model: &'static str,
}

/// Prints the expectation.
pub async fn expect(args: &ExpectArgs) -> Result<()> {
    let machine = super::machine(&args.node).await?;
    let (topology, warnings) = NodeTopology::assemble(&machine.observed);
    let named = places(&topology, &args.pod, args.gpus.as_deref()).await?;
    let places = named.unwrap_or_else(|| (0..topology.gpus().len()).collect());
    ensure!(places.len() > 1, "an all-reduce of one GPU has no bandwidth; name two or more");
    let expectation = Expectation::of(&topology, &places);
    let set = topology.restricted(&places);
    let gpus = places.iter().filter_map(|place| ChosenGpu::at(&topology, *place));
    let mut odd: Vec<String> = odd_among(&warnings, set.gpus()).collect();
    if set.knows_nvlinks() && !set.knows_rates() {
        odd.push("the GPUs' model and link rates are unknown; name the model with --gpu-model".to_owned());
    }
    let expected = Expected { gpus: gpus.collect(), bus: expectation.bandwidth(), expectation, odd, model: MODEL };
    print(&match args.format {
        Format::Json => serde_json::to_string(&expected)? + "\n",
        Format::Text => {
            let indices: Vec<String> = expected.gpus.iter().map(|gpu| gpu.index.to_string()).collect();
            let known = |bandwidth: Option<u64>| bandwidth.map_or("unknown".to_owned(), gb_per_s);
            format!(
                "GPU {}\nrings         {}\nNVLink SHARP  {}\n{}model: {MODEL}\n{}\n",
                indices.join(", "),
                known(expectation.ring),
                match (expectation.nvls, set.knows_rates()) {
                    (None, false) => "unknown".to_owned(),
                    (nvls, _) => nvls.map_or("none".to_owned(), gb_per_s),
                },
                expected.odd.iter().map(|odd| format!("note: {odd}\n")).collect::<String>(),
                match expectation.calibration {
                    Some(calibration) => format!("compared with published results: {}", calibration.name()),
                    None => "not compared with any published result".to_owned(),
                }
            )
        }
    })?;
    Ok(())
}

/// Compares the output of nccl-tests with the machine.
pub async fn verify(args: &VerifyArgs) -> Result<ExitCode> {
    let text = read_output(&args.file)?;
    let report = NcclReport::read(&text).with_context(|| args.file.display().to_string())?;
    let machine = super::machine(&args.node).await?;
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let places = places(&topology, &args.pod, args.gpus.as_deref()).await?;
    let comparison = Comparison::of(&report, &machine.observed, places.as_deref())
        .with_context(|| format!("cannot compare {} with {}", args.file.display(), excerpt(&machine.name)))?;
    print(&match args.format {
        Format::Json => {
            let verified = Verified { comparison: &comparison, unreadable_lines: report.unreadable, model: MODEL };
            serde_json::to_string(&verified)? + "\n"
        }
        Format::Text => comparison_text(&comparison, report.unreadable),
    })?;
    Ok(match comparison.verdict {
        Verdict::WrongValues | Verdict::Below | Verdict::Above => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    })
}

/// The comparison for people.
fn comparison_text(comparison: &Comparison, unreadable: usize) -> String {
    let Comparison { best, measured, whole, percent, verdict, .. } = comparison;
    let expected = whole.map_or("an unknown bandwidth".to_owned(), gb_per_s);
    let share = percent.map(|percent| format!(" ({percent} %)")).unwrap_or_default();
    let (begins, ends) = match verdict {
        Verdict::WrongValues => ("wrong values", ""),
        Verdict::AsExpected => ("as expected", ""),
        Verdict::Below => ("below", ""),
        Verdict::Above => ("above", ": the model describes other GPUs"),
        Verdict::TooSmall => ("too small a size to tell", ": run all_reduce_perf with -e 8G"),
        Verdict::NotCalibrated => ("no verdict", ": no published result confirms the model for such GPUs"),
        Verdict::SeveralHosts => ("no verdict", ": the model is of one host, the run used several"),
    };
    let (bus, bytes, data_type) = (gb_per_s(*measured), best.bytes, best.data_type);
    let causes = comparison.causes.iter().map(|cause| format!("  {cause}\n")).collect::<String>();
    let ignored = match unreadable {
        0 => String::new(),
        lines => format!("  {lines} lines were cut off or mixed, and ignored\n"),
    };
    format!("{begins}: {bus} of {expected}{share}, at {bytes} bytes of {data_type}{ends}\n{causes}{ignored}")
}

/// The positions of the GPUs that a person named, one by one or by their pod; `None` if none is named.
async fn places(topology: &NodeTopology, pod: &PodArgs, gpus: Option<&[GpuSelector]>) -> Result<Option<Vec<usize>>> {
    let of_pod = match &pod.pod {
        Some(name) => Some(of_pod(topology, name, &pod.socket).await?),
        None => None,
    };
    let Some(named) = of_pod.as_deref().or(gpus) else { return Ok(None) };
    let places = named.iter().map(|name| Ok(find_gpu(topology, name)?.0)).collect::<Result<BTreeSet<_>>>()?;
    Ok(Some(places.into_iter().collect()))
}

/// The GPUs of a pod, or of one of its containers.
async fn of_pod(topology: &NodeTopology, name: &str, socket: &Path) -> Result<Vec<GpuSelector>> {
    let state = admin::state(socket, admin::STATE_TIMEOUT).await?;
    let Some(allocations) = &state.allocations else {
        bail!("linkwise does not know yet which pods have which GPUs");
    };
    let is_of_pod = |held: &&Allocation| {
        let pod = format!("{}/{}", held.namespace, held.pod);
        name == pod || name == format!("{pod}/{}", held.container)
    };
    let uuids: BTreeSet<&GpuUuid> = allocations.iter().filter(is_of_pod).flat_map(|held| &held.gpus).collect();
    ensure!(!uuids.is_empty(), "{name} has no GPU on this node");
    let mut with_mig = topology.mig_devices().iter().filter_map(|mig| topology.gpus().get(mig.parent));
    if let Some(gpu) = with_mig.find(|gpu| uuids.contains(&gpu.uuid)) {
        bail!("{name} has MIG devices of GPU {}, for which there is no model", gpu.index);
    }
    Ok(uuids.into_iter().cloned().map(GpuSelector::Uuid).collect())
}

/// Reads the output of nccl-tests. Bytes that are not UTF-8 become U+FFFD.
fn read_output(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let read = open(path)?.take(MAX_OUTPUT + 1).read_to_end(&mut bytes);
    read.with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(bytes.len() as u64 <= MAX_OUTPUT, "{} is longer than {MAX_OUTPUT} bytes", path.display());
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
