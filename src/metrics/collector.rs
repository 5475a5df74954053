//! Series that mirror the snapshot, read at scrape.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use tokio::sync::watch;

use crate::state::{Device, Health, NodeState};
use crate::topology::{GpuUuid, PciAddress};

/// Reads the current snapshot at each scrape.
pub(super) struct State {
    pub snapshot: watch::Receiver<Arc<NodeState>>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

type Labels = Vec<(&'static str, String)>;

/// Writes one gauge with all its series.
fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    series: impl IntoIterator<Item = (Labels, i64)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in series {
        let value = ConstGauge::new(value);
        if labels.is_empty() {
            return value.encode(metric);
        }
        value.encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

impl Collector for State {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        // A GPU may be many devices: slots, MIG devices. The healthiest stands for it.
        let mut gpus: BTreeMap<(&PciAddress, &GpuUuid), &Device> = BTreeMap::new();
        for device in snapshot.resources().values().flat_map(BTreeMap::values) {
            let of_gpu = gpus.entry((&device.gpu.pci, &device.gpu.uuid)).or_insert(device);
            if device.health == Health::Healthy {
                *of_gpu = device;
            }
        }
        let devices = || gpus.values().copied();
        let gpu = |device: &Device| ("uuid", device.gpu.uuid.to_string());

        let count = i64::try_from(gpus.len()).unwrap_or(i64::MAX);
        gauge(&mut encoder, "gpus", "GPUs of the node, healthy or not; 0 on a node without", [(Vec::new(), count)])?;

        let info = devices().map(|device| {
            let or_empty = |text: Option<String>| text.unwrap_or_default();
            let labels = vec![
                gpu(device),
                ("index", device.gpu.index.to_string()),
                ("pci", device.gpu.pci.to_string()),
                ("model", or_empty(device.gpu.model.clone())),
                ("numa", or_empty(device.gpu.numa.map(|numa| numa.to_string()))),
            ];
            (labels, 1)
        });
        gauge(&mut encoder, "gpu", "1 for each GPU; its labels say which it is", info)?;

        let healthy = devices().map(|device| (vec![gpu(device)], i64::from(device.health == Health::Healthy)));
        gauge(&mut encoder, "gpu_healthy", "1 while the GPU may be given to pods", healthy)?;

        // A GPU has several devices once it is shared or cut, and several reasons may stand: one series for each kind.
        let mut reasons: BTreeMap<(String, &'static str), i64> = BTreeMap::new();
        for device in devices() {
            let first = match &device.health {
                Health::Unhealthy { reason, since } => Some((reason, *since)),
                Health::Healthy => None,
            };
            for (reason, since) in snapshot.standing(&device.gpu.uuid).chain(first) {
                let since = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
                let series = reasons.entry((device.gpu.uuid.to_string(), reason.label())).or_insert(since);
                *series = since.min(*series);
            }
        }
        let reasons = reasons
            .into_iter()
            .map(|((uuid, reason), since)| (vec![("uuid", uuid), ("reason", reason.to_owned())], since));
        let help = "Since when (Unix time) a reason stands against the GPU; several may, none while it is healthy";
        gauge(&mut encoder, "gpu_unhealthy_since_seconds", help, reasons)?;

        let mut counts: BTreeMap<(String, &'static str), i64> = BTreeMap::new();
        for (resource, devices) in snapshot.resources() {
            for health in ["healthy", "unhealthy"] {
                counts.entry((resource.to_string(), health)).or_default();
            }
            for device in devices.values() {
                let health = if device.health == Health::Healthy { "healthy" } else { "unhealthy" };
                *counts.entry((resource.to_string(), health)).or_default() += 1;
            }
            let absent = i64::try_from(snapshot.absent(resource).count()).unwrap_or(i64::MAX);
            *counts.entry((resource.to_string(), "unhealthy")).or_default() += absent;
        }
        let devices = counts
            .into_iter()
            .map(|((resource, health), count)| (vec![("resource", resource), ("health", health.to_owned())], count));
        gauge(&mut encoder, "devices", "Devices on the kubelet's list, by resource and health", devices)?;

        let warnings = i64::try_from(snapshot.warnings().len()).unwrap_or(i64::MAX);
        gauge(
            &mut encoder,
            "topology_warnings",
            "Odd things about the node; the log names them",
            [(Vec::new(), warnings)],
        )
    }
}
