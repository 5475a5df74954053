//! `linkwise allocate`: what would be chosen, and why.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{NoSuchGpu, find_gpu, print};
use crate::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, AllocationTables, ChosenGpu, DeviceId, Explanation,
    FallbackReason, preferred_allocation,
};
use crate::config::{AllocateArgs, Format, GpuName};
use crate::topology::NodeTopology;

/// The longest request line, in bytes: a request for 64 GPUs by UUID takes 6 KiB.
const MAX_LINE: u64 = 1 << 20;

/// A request as a person or a script writes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    size: usize,
    /// All GPUs where it is left out.
    available: Option<Vec<GpuName>>,
    #[serde(default)]
    must_include: Vec<GpuName>,
}

/// Why a question has no answer.
#[derive(Debug, Error)]
enum QuestionError {
    #[error(transparent)]
    NoSuchGpu(#[from] NoSuchGpu),
    #[error("no set of {size} GPUs: {candidates} may be taken, {must} must be included")]
    Size { size: usize, candidates: usize, must: usize },
    #[error("not a request")]
    Nonsense(#[from] serde_json::Error),
    #[error("the line is longer than {MAX_LINE} bytes")]
    TooLong,
    #[error("the line is not UTF-8")]
    NotText,
}

/// An answer for a script.
#[derive(Serialize)]
struct Answer<'a, R> {
    #[serde(flatten)]
    report: &'a R,
    elapsed_ns: u64,
}

/// Runs the command.
pub async fn allocate(args: &AllocateArgs) -> Result<()> {
    let machine = super::machine(&args.node).await?;
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let tables = AllocationTables::new(Arc::new(topology));
    if let Some(path) = &args.requests {
        return answer_all(&tables, path);
    }
    let question = Question {
        size: args.size.unwrap_or_default(),
        available: args.available.clone(),
        must_include: args.must_include.clone(),
    };
    let (report, elapsed) = answer(&tables, &question)?;
    print(&match args.format {
        Format::Json if args.explain => {
            json(&Answer { report: &Explanation::new(&tables, &report), elapsed_ns: nanoseconds(elapsed) })?
        }
        Format::Json => json(&Answer { report: &report, elapsed_ns: nanoseconds(elapsed) })?,
        Format::Text if args.explain => {
            text(tables.topology(), &report) + &Explanation::new(&tables, &report).to_string()
        }
        Format::Text => text(tables.topology(), &report) + &format!("{report}, {elapsed:?}\n"),
    })?;
    Ok(())
}

/// One JSON line for each request line; one that cannot be answered does not end the others.
fn answer_all(tables: &AllocationTables, path: &Path) -> Result<()> {
    let input: Box<dyn Read> = match path.to_str() {
        Some("-") => Box::new(io::stdin().lock()),
        _ => Box::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?),
    };
    let mut input = BufReader::new(input);
    loop {
        let mut line = Vec::new();
        let read = (&mut input).take(MAX_LINE).read_until(b'\n', &mut line);
        if read.with_context(|| format!("cannot read {}", path.display()))? == 0 {
            return Ok(());
        }
        if line.len() as u64 == MAX_LINE && !line.ends_with(b"\n") {
            // The rest of such a line is no request either.
            input.skip_until(b'\n')?;
            print(&refused(&QuestionError::TooLong)?)?;
            continue;
        }
        let question = match std::str::from_utf8(&line) {
            Ok(text) if text.trim().is_empty() => continue,
            Ok(text) => serde_json::from_str::<Question>(text).map_err(QuestionError::from),
            Err(_) => Err(QuestionError::NotText),
        };
        let answer = match question.and_then(|question| answer(tables, &question)) {
            Ok((report, elapsed)) => json(&Answer { report: &report, elapsed_ns: nanoseconds(elapsed) })?,
            Err(error) => refused(&error)?,
        };
        print(&answer)?;
    }
}

fn refused(error: &QuestionError) -> Result<String> {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    Ok(serde_json::to_string(&serde_json::json!({ "error": format!("{error}{cause}") }))? + "\n")
}

fn json(answer: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(answer)? + "\n")
}

fn nanoseconds(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

fn answer(tables: &AllocationTables, question: &Question) -> Result<(AllocationReport, Duration), QuestionError> {
    let gpus = tables.topology().gpus();
    let find = |name: &GpuName| -> Result<DeviceId, QuestionError> {
        let (_, gpu) = find_gpu(tables.topology(), name)?;
        Ok(DeviceId::from(&gpu.uuid))
    };
    let all = || Ok(gpus.iter().map(|gpu| DeviceId::from(&gpu.uuid)).collect());
    let available = question.available.as_ref().map_or_else(all, |names| names.iter().map(find).collect())?;
    let must_include: Vec<DeviceId> = question.must_include.iter().map(find).collect::<Result<_, _>>()?;
    let request = AllocationRequest { available, must_include, size: question.size };
    let start = Instant::now();
    let (_, report) = preferred_allocation(tables, &request, AllocationPolicy::BestEffort);
    let elapsed = start.elapsed();
    if report.fallback == Some(FallbackReason::Size) {
        let must = request.must_include.iter().collect::<std::collections::BTreeSet<_>>().len();
        return Err(QuestionError::Size { size: request.size, candidates: report.candidates, must });
    }
    Ok((report, elapsed))
}

/// The GPUs and the links between them, for people.
fn text(topology: &NodeTopology, report: &AllocationReport) -> String {
    let mut text = String::new();
    for gpu in &report.devices {
        text += &format!("GPU {}  {}  {}\n", gpu.index, gpu.pci, gpu.uuid);
    }
    let links = links(topology, &report.devices);
    if !links.is_empty() {
        text += &format!("links: {links}\n");
    }
    text
}

/// The links between the GPUs of a set: `0-1 NV2, 0-4 SYS`.
fn links(topology: &NodeTopology, devices: &[ChosenGpu]) -> String {
    let places: Vec<(u32, usize)> =
        devices.iter().filter_map(|gpu| Some((gpu.index, topology.position(&gpu.uuid)?))).collect();
    let pairs = places.iter().enumerate().flat_map(|(first, a)| places.iter().skip(first + 1).map(move |b| (a, b)));
    pairs.map(|(a, b)| format!("{}-{} {}", a.0, b.0, topology.symbol(a.1, b.1))).collect::<Vec<_>>().join(", ")
}
