//! Series about the holders of GPUs and the quality of their sets, read at scrape. Through [`PlacementReader`] the page
//! and the admin socket read the same values.
//!
//! The values are computed once for a snapshot, at the first read: no admission and no event waits for it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::gauges;
use linkwise_core::publish::placement::{Allocation, Placements};
use linkwise_core::state::{ContainerName, NodeState};

/// Reads the holders of GPUs in the current snapshot. Clones share the computed values.
#[derive(Clone, Debug)]
pub struct PlacementReader {
    snapshot: watch::Receiver<Arc<NodeState>>,
    last: Arc<Mutex<Option<Computed>>>,
    hides_pods: Arc<AtomicBool>,
    stands_by: Arc<AtomicBool>,
}

/// The values computed from one snapshot.
#[derive(Debug)]
struct Computed {
    /// The snapshot; it keeps its address as long as this reference exists.
    of: Weak<NodeState>,
    named: Arc<Placements>,
    /// The same without the names of pods, once a caller needed it.
    hidden: Option<Arc<Placements>>,
}

impl PlacementReader {
    pub(super) fn new(snapshot: watch::Receiver<Arc<NodeState>>) -> Self {
        Self { snapshot, last: Arc::default(), hides_pods: Arc::default(), stands_by: Arc::default() }
    }

    /// Hides the names of pods in [`Self::shown`] from now on.
    pub fn hide_pods(&self) {
        self.hides_pods.store(true, Ordering::Relaxed);
    }

    /// Sets whether another linkwise serves this node and has the series: two would count each pod twice.
    pub fn stand_by(&self, stands_by: bool) {
        self.stands_by.store(stands_by, Ordering::Relaxed);
    }

    /// The current snapshot, and its placements for an operator of the node.
    pub fn named(&self) -> (Arc<NodeState>, Arc<Placements>) {
        self.read(|computed| Arc::clone(&computed.named))
    }

    /// The same for any client of the metrics port: without the names of pods, if they are hidden.
    pub fn shown(&self) -> (Arc<NodeState>, Arc<Placements>) {
        if !self.hides_pods.load(Ordering::Relaxed) {
            return self.named();
        }
        self.read(|computed| {
            let named = &computed.named;
            Arc::clone(computed.hidden.get_or_insert_with(|| Arc::new(without_names(named))))
        })
    }

    /// A container's names in the form of [`Self::shown`].
    pub fn shown_name(&self, name: &ContainerName) -> ContainerName {
        let mut shown = name.clone();
        if self.hides_pods.load(Ordering::Relaxed) {
            shown.pod = hidden_name(name);
        }
        shown
    }

    fn read<T>(&self, read: impl FnOnce(&mut Computed) -> T) -> (Arc<NodeState>, T) {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        // A panic during a computation leaves the values before.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_current = |computed: &Computed| Weak::as_ptr(&computed.of) == Arc::as_ptr(&snapshot);
        let computed = match last.take().filter(is_current) {
            Some(computed) => computed,
            None => {
                let named = Arc::new(Placements::of(&snapshot));
                Computed { of: Arc::downgrade(&snapshot), named, hidden: None }
            }
        };
        let read = read(last.insert(computed));
        (snapshot, read)
    }
}

/// The same with another name for each pod, so that its series stay apart and can be joined.
fn without_names(named: &Placements) -> Placements {
    let mut hidden = named.clone();
    for allocation in &mut hidden.allocations {
        allocation.holder.pod = hidden_name(&allocation.holder);
    }
    hidden
}

/// `pod-` and 12 hexadecimal digits: the same for a pod in every process and on every node.
fn hidden_name(holder: &ContainerName) -> String {
    let hash = Sha256::digest(format!("{}/{}", holder.namespace, holder.pod));
    let digits: String = hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    format!("pod-{digits}")
}

#[derive(Debug)]
pub(super) struct Series(pub PlacementReader);

#[allow(clippy::cast_precision_loss, reason = "MB/s of GPUs are far below 2^52")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn labels(allocation: &Allocation) -> [(&'static str, &str); 4] {
    let holder = &allocation.holder;
    [
        ("namespace", &holder.namespace),
        ("pod", &holder.pod),
        ("container", &holder.container),
        ("resource", &allocation.resource),
    ]
}

impl Collector for Series {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let placements = if self.0.stands_by.load(Ordering::Relaxed) { Arc::default() } else { self.0.shown().1 };
        let allocations = &placements.allocations;

        let gpus = allocations.iter().flat_map(|allocation| {
            let [namespace, pod, container, resource] = labels(allocation);
            let door = ("door", allocation.door.label());
            let labels = move |uuid| [namespace, pod, container, ("UUID", uuid), resource, door];
            allocation.gpus.iter().map(move |gpu| (labels(gpu.as_str()), 1_u64))
        });
        let help = "1 for each GPU that a container has, or has slots or MIG devices of";
        gauges(&mut encoder, ("allocation_info", help), gpus)?;

        let collectives = allocations.iter().filter_map(|one| Some((labels(one), one.collective?)));
        let help = "The ring bandwidth of the container's GPUs, by NCCL's model";
        gauges(&mut encoder, ("allocation_collective_megabytes_per_second", help), collectives)?;

        let nvls = allocations.iter().filter_map(|one| Some((labels(one), one.nvls?)));
        let help =
            "The bus bandwidth of an all-reduce over them with NVLink SHARP, by NCCL's model; no series without it";
        gauges(&mut encoder, ("allocation_nvls_megabytes_per_second", help), nvls)?;

        let quality = |of: fn(&Allocation) -> Option<u64>| {
            allocations.iter().filter_map(move |one| Some((labels(one), ratio(one.collective?, of(one)?))))
        };
        let help = "The collective of the container's GPUs over the best of so many GPUs of this machine, 0 to 1";
        gauges(&mut encoder, ("allocation_quality", help), quality(|one| one.best))?;
        let help = "The same over the best of so many that were free when they were given; no series where unknown";
        gauges(&mut encoder, ("allocation_quality_at_admission", help), quality(|one| one.best_at_admission))?;

        let shortfalls = allocations.iter().flat_map(|allocation| {
            let [namespace, pod, container, resource] = labels(allocation);
            let labels = move |why| [namespace, pod, container, resource, ("why", why)];
            allocation.why.iter().map(move |why| (labels(why.label()), 1_u64))
        });
        let help = "1 for each reason why the container's GPUs are not the machine's best; no series where unknown";
        gauges(&mut encoder, ("allocation_shortfall", help), shortfalls)?;

        let sizes: Vec<_> = placements.outlook.iter().map(|outlook| (outlook, outlook.size.to_string())).collect();
        let best = sizes.iter().filter_map(|(outlook, size)| Some(([("size", size.as_str())], outlook.best?)));
        let help = "The best collective that so many GPUs of this machine have";
        gauges(&mut encoder, ("best_collective_megabytes_per_second", help), best)?;
        let free = sizes.iter();
        let free = free.filter_map(|(outlook, size)| Some(([("size", size.as_str())], outlook.collective?)));
        let help = "The best collective of so many free GPUs; no series where no request for so many can be met";
        gauges(&mut encoder, ("free_collective_megabytes_per_second", help), free)?;

        let nodes = placements.free.iter();
        let nodes: Vec<_> =
            nodes.map(|(numa, free)| (numa.map(|numa| numa.to_string()).unwrap_or_default(), *free)).collect();
        let nodes = nodes.iter().map(|(numa, free)| ([("numa", numa.as_str())], *free));
        let help = "GPUs that a request can have whole now, by NUMA node; no series where unknown";
        gauges(&mut encoder, ("free_gpus", help), nodes)?;

        let counts = placements.gpus.iter();
        let counts = counts.map(|(availability, gpus)| ([("availability", availability.label())], *gpus));
        let help = "GPUs by who can have them: held, free, mig, unhealthy, unknown; together all GPUs";
        gauges(&mut encoder, ("gpus_by_availability", help), counts)?;

        let help =
            "How many times better the best free GPUs could be, for the size where that is the most; 1: not at all";
        let fragmentation = encoder.encode_descriptor("fragmentation", help, None, MetricType::Gauge)?;
        match placements.fragmentation() {
            Some((best, now)) => ConstGauge::new(ratio(best, now)).encode(fragmentation),
            None => Ok(()),
        }
    }
}
