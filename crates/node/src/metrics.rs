//! The metrics' registry: the content of /metrics. docs/metrics.md documents each metric; a golden test checks names,
//! types and help.
//!
//! Each module that counts makes its metrics and registers them here; the node passes the registry around. Series
//! that mirror the node (`Series`) print its view at scrape, so that the series of removed items end.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::views::Views;
use linkwise_core::publish::placement::Allocation;
use linkwise_core::publish::view::{CORDONED, NodeView, Sums};
use linkwise_system::lock;
use linkwise_system::metrics::number;

/// The content type of [`Metrics::encode`]'s text. Prometheus refuses that text as text/plain.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics of the process.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Mutex<Registry>>);

impl Metrics {
    /// Metrics of a process of this version, with the series of a node.
    pub fn new(version: &'static str, views: Views) -> Self {
        let mut registry = Registry::with_prefix("linkwise");
        registry.register("build", "The version that runs", Info::new(vec![("version", version)]));
        registry.register_collector(Box::new(Series(views)));
        Self(Arc::new(Mutex::new(registry)))
    }

    /// Registers a module's metrics.
    pub fn register<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut lock(&self.0))
    }

    /// All metrics as OpenMetrics text.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &lock(&self.0))?;
        Ok(text)
    }
}

/// The series of a node, printed from its view.
#[derive(Debug)]
struct Series(Views);

impl Collector for Series {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let view = self.0.for_metrics();
        gpus(&view, &mut encoder)?;
        devices(&view, &mut encoder)?;
        allocations(&view, &mut encoder)?;
        sums(&view.sums, &mut encoder)
    }
}

/// Writes one gauge with all its series.
fn gauges<L: EncodeLabelSet, V: EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    series: impl IntoIterator<Item = (L, V)>,
) -> fmt::Result
where
    ConstGauge<V>: EncodeMetric,
{
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in series {
        ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

/// Writes one gauge without labels.
fn gauge<V: EncodeGaugeValue>(encoder: &mut DescriptorEncoder<'_>, (name, help): (&str, &str), value: V) -> fmt::Result
where
    ConstGauge<V>: EncodeMetric,
{
    ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
}

#[allow(clippy::cast_precision_loss, reason = "MB/s of GPUs are far below 2^52")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn gpus(view: &NodeView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    gauge(encoder, ("gpus", "GPUs that no filter leaves out or that still have a device"), number(view.gpus.len()))?;

    let info = view.gpus.iter().map(|gpu| {
        let labels = [
            ("uuid", gpu.uuid.clone()),
            ("index", gpu.index.to_string()),
            ("pci", gpu.pci.clone()),
            ("model", gpu.model.clone().unwrap_or_default()),
            ("numa", gpu.numa.map(|numa| numa.to_string()).unwrap_or_default()),
        ];
        (labels, 1)
    });
    gauges(encoder, ("gpu", "1 for each GPU; the labels identify it"), info)?;

    let healthy = view.gpus.iter().map(|gpu| ([("uuid", gpu.uuid.as_str())], i64::from(gpu.healthy)));
    gauges(encoder, ("gpu_healthy", "1 while a device of the GPU is healthy; a cordon does not count"), healthy)?;

    if !view.sums.doors.is_empty() {
        let doors = view.sums.doors.iter().map(|(uuid, door)| ([("uuid", uuid.as_str()), ("door", door)], 1));
        let help = "1 for the API through which the GPU is offered: plugin or dra; none if a filter leaves it out";
        gauges(encoder, ("gpu_door", help), doors)?;
    }

    // A GPU may have several reasons of one kind. They share a series, which has the time of the first.
    let mut reasons: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for (gpu, reason) in view.gpus.iter().flat_map(|gpu| gpu.reasons.iter().map(move |reason| (gpu, reason))) {
        let since = reasons.entry((&gpu.uuid, &reason.kind)).or_insert(reason.since);
        *since = reason.since.min(*since);
    }
    let (cordoned, reasons): (BTreeMap<_, _>, _) = reasons.into_iter().partition(|((_, kind), _)| *kind == CORDONED);
    let reasons = reasons.into_iter().map(|((uuid, reason), since)| ([("uuid", uuid), ("reason", reason)], since));
    let help = "Unix time since when the GPU is unhealthy for this reason; no series while it is healthy";
    gauges(encoder, ("gpu_unhealthy_since_seconds", help), reasons)?;
    let cordoned = cordoned.into_iter().map(|((uuid, _), since)| ([("uuid", uuid)], since));
    let help = "Unix time since when an operator keeps new pods from the GPU";
    gauges(encoder, ("gpu_cordoned_since_seconds", help), cordoned)
}

fn devices(view: &NodeView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let devices = view.sums.devices.iter().flat_map(|(name, devices)| {
        let counts = [("healthy", devices.healthy), ("unhealthy", devices.unhealthy)];
        counts.map(|(health, count)| ([("resource", name.as_str()), ("health", health)], number(count)))
    });
    gauges(encoder, ("devices", "Devices on the kubelet's list, by resource and health"), devices)?;

    let unhealthy = view.sums.devices.iter().flat_map(|(name, devices)| {
        let reasons = devices.reasons.iter();
        reasons.map(move |(reason, count)| ([("resource", name.as_str()), ("reason", reason)], number(*count)))
    });
    let help = "Unhealthy devices on the kubelet's list, by resource and reason";
    gauges(encoder, ("unhealthy_devices", help), unhealthy)?;

    let odd = view.sums.odd.iter().map(|(uuid, what)| ([("uuid", uuid.as_str()), ("what", what)], 1));
    gauges(encoder, ("gpu_odd", "1 for each way in which one GPU differs from all others of its model"), odd)?;

    let lacks = view.shortfalls.iter().map(|lack| {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        ([("uuid", text(&lack.uuid)), ("pci", text(&lack.pci)), ("what", lack.kind.to_string())], lack.since)
    });
    let help = "Unix time since when the node lacks hardware that it had or should have; no series while it lacks none";
    gauges(encoder, ("hardware_lacking_since_seconds", help), lacks)?;

    let problems = view.sums.problems.iter();
    let problems = problems
        .map(|((resource, reason), count)| ([("resource", resource.as_str()), ("reason", reason)], number(*count)));
    let help = "Parts of the configuration that this node cannot offer, by resource (empty: no single one) and reason";
    gauges(encoder, ("plan_problems", help), problems)?;

    let help = "Warnings about the node's topology; the log has each once";
    gauge(encoder, ("topology_warnings", help), number(view.warnings.len()))
}

fn labels(held: &Allocation) -> [(&'static str, &str); 4] {
    let Allocation { namespace, pod, container, resource, .. } = held;
    [("namespace", namespace), ("pod", pod), ("container", container), ("resource", resource)]
}

fn allocations(view: &NodeView, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let gpus = view.held().iter().flat_map(|held| {
        let [namespace, pod, container, resource] = labels(held);
        let labels = move |uuid| [namespace, pod, container, ("UUID", uuid), resource, ("door", &*held.door)];
        held.gpus.iter().map(move |gpu| (labels(gpu.as_str()), 1_u64))
    });
    let help = "1 for each GPU that a container has, whole or in part";
    gauges(encoder, ("allocation_info", help), gpus)?;

    let collectives = view.held().iter().filter_map(|held| Some((labels(held), held.collective?)));
    let help = "The ring bandwidth of the container's GPUs, by NCCL's model";
    gauges(encoder, ("allocation_collective_megabytes_per_second", help), collectives)?;

    let nvls = view.held().iter().filter_map(|held| Some((labels(held), held.nvls?)));
    let help = "The bus bandwidth of the GPUs' all-reduce with NVLink SHARP, by NCCL's model; no series without SHARP";
    gauges(encoder, ("allocation_nvls_megabytes_per_second", help), nvls)?;

    let quality = |of: fn(&Allocation) -> Option<u64>| {
        view.held().iter().filter_map(move |held| Some((labels(held), ratio(held.collective?, of(held)?))))
    };
    let help = "Ring bandwidth of the container's GPUs / best of as many GPUs of this machine, 0 to 1";
    gauges(encoder, ("allocation_quality", help), quality(|held| held.best))?;
    let help = "Ring bandwidth of the container's GPUs / best of as many GPUs free at admission; no series if unknown";
    gauges(encoder, ("allocation_quality_at_admission", help), quality(|held| held.best_at_admission))?;

    let shortfalls = view
        .held()
        .iter()
        .flat_map(|held| held.why.iter().map(move |why| ((labels(held), [("why", why.to_string())]), 1_u64)));
    let help = "1 for each reason why the container's GPUs are not the machine's best; no series where unknown";
    gauges(encoder, ("allocation_shortfall", help), shortfalls)?;

    let free = view.outlook.iter().flatten();
    let free = free.filter_map(|outlook| Some(([("size", outlook.size.to_string())], outlook.collective?)));
    let help = "The best ring bandwidth of this many free GPUs; no series if no request for this many can be met";
    gauges(encoder, ("free_collective_megabytes_per_second", help), free)
}

fn sums(sums: &Sums, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let best = sums.best.iter().map(|(size, best)| ([("size", size.to_string())], *best));
    let help = "The best ring bandwidth of this many GPUs of this machine";
    gauges(encoder, ("best_collective_megabytes_per_second", help), best)?;

    let name = |numa: &Option<_>| numa.map(|numa: linkwise_core::topology::NumaNodeId| numa.to_string());
    let free = sums.free.iter().map(|(numa, free)| ([("numa", name(numa).unwrap_or_default())], number(*free)));
    gauges(
        encoder,
        ("free_gpus", "GPUs that a request can have whole now, by NUMA node; no series where unknown"),
        free,
    )?;

    let gpus =
        sums.gpus.iter().map(|(availability, gpus)| ([("availability", availability.to_string())], number(*gpus)));
    let help = "GPUs by availability: held, free, mig, unhealthy, cordoned, withheld, unknown; the sum is all GPUs";
    gauges(encoder, ("gpus_by_availability", help), gpus)?;

    let help = "Best ring bandwidth of the machine / that of its free GPUs, for the size where this is largest";
    let fragmentation = encoder.encode_descriptor("fragmentation", help, None, MetricType::Gauge)?;
    match sums.fragmentation {
        Some((best, now)) => ConstGauge::new(ratio(best, now)).encode(fragmentation),
        None => Ok(()),
    }
}
