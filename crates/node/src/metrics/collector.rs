//! Series that mirror the snapshot, read at scrape.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use tokio::sync::watch;

use super::gauges;
use linkwise_core::state::{Door, GpuStatus, NodeState};

#[derive(Debug)]
pub(super) struct State {
    pub snapshot: watch::Receiver<Arc<NodeState>>,
}

impl Collector for State {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        let gpus = snapshot.gpus();
        let gpu = |status: &GpuStatus<'_>| ("uuid", status.gpu.uuid.to_string());

        let count = i64::try_from(gpus.len()).unwrap_or(i64::MAX);
        let help = "GPUs of the node, healthy or not; 0 on a node without";
        ConstGauge::new(count).encode(encoder.encode_descriptor("gpus", help, None, MetricType::Gauge)?)?;

        let info = gpus.iter().map(|status| {
            let or_empty = |text: Option<String>| text.unwrap_or_default();
            let labels = vec![
                gpu(status),
                ("index", status.gpu.index.to_string()),
                ("pci", status.gpu.pci.to_string()),
                ("model", or_empty(status.gpu.model.clone())),
                ("numa", or_empty(status.gpu.numa.map(|numa| numa.to_string()))),
            ];
            (labels, 1)
        });
        gauges(&mut encoder, ("gpu", "1 for each GPU; its labels say which it is"), info)?;

        let healthy = gpus.iter().map(|status| (vec![gpu(status)], i64::from(status.is_healthy)));
        gauges(&mut encoder, ("gpu_healthy", "1 while the GPU may be given to pods"), healthy)?;

        if snapshot.has_dra() {
            let door = |uuid| snapshot.door(uuid).map_or("none", Door::label).to_owned();
            let gpus = snapshot.topology().gpus().iter();
            let doors = gpus.map(|gpu| (vec![("uuid", gpu.uuid.to_string()), ("door", door(&gpu.uuid))], 1));
            let help = "1 for the API through which the GPU is offered: plugin, dra, or on its way between them";
            gauges(&mut encoder, ("gpu_door", help), doors)?;
        }

        // Several reasons of one kind may exist: there is one series for each kind, since the first of them.
        let mut reasons: BTreeMap<(String, &'static str), i64> = BTreeMap::new();
        for status in &gpus {
            for (reason, since) in &status.reasons {
                let since = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
                let series = reasons.entry((status.gpu.uuid.to_string(), reason.label())).or_insert(since);
                *series = since.min(*series);
            }
        }
        let reasons = reasons
            .into_iter()
            .map(|((uuid, reason), since)| (vec![("uuid", uuid), ("reason", reason.to_owned())], since));
        let help = "Since when (Unix time) a reason stands against the GPU; several may, none while it is healthy";
        gauges(&mut encoder, ("gpu_unhealthy_since_seconds", help), reasons)?;

        let devices = snapshot.offers().resources().iter().flat_map(|(name, resource)| {
            let (healthy, unhealthy) = resource.counts();
            [("healthy", healthy), ("unhealthy", unhealthy)].map(|(health, count)| {
                let labels = vec![("resource", name.to_string()), ("health", health.to_owned())];
                (labels, i64::try_from(count).unwrap_or(i64::MAX))
            })
        });
        gauges(&mut encoder, ("devices", "Devices on the kubelet's list, by resource and health"), devices)?;

        let unhealthy = snapshot.offers().resources().iter().flat_map(|(name, resource)| {
            resource.unhealthy().into_iter().map(|(reason, count)| {
                let labels = vec![("resource", name.to_string()), ("reason", reason.to_owned())];
                (labels, i64::try_from(count).unwrap_or(i64::MAX))
            })
        });
        let help = "Devices on the kubelet's list that are not given out, by resource and reason";
        gauges(&mut encoder, ("unhealthy_devices", help), unhealthy)?;

        let warnings = i64::try_from(snapshot.hardware().warnings().len()).unwrap_or(i64::MAX);
        let help = "Odd things about the node; the log names them";
        ConstGauge::new(warnings).encode(encoder.encode_descriptor(
            "topology_warnings",
            help,
            None,
            MetricType::Gauge,
        )?)
    }
}
