//! Keeps up to date what containers get of the host: CDI specs, and the host's device nodes for answers to Allocate.
//! Publishes the CDI devices, of which claims get copies.
//!
//! One task follows the snapshot, scans the host apart from admissions, writes the files that changed and publishes the
//! nodes. A failure at the start ends the process; a later one leaves the files as they were written last.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::sync::watch;

use crate::config::Settings;
use crate::config::settings::DeviceListStrategy;
use linkwise_core::publish::RdmaNodes;
use linkwise_core::publish::injection::{CdiOptions, HostDevices, InjectionOptions};
use linkwise_core::reported::Reported;
use linkwise_core::state::NodeState;
use linkwise_host::cdi;
use linkwise_host::hwloc;
use linkwise_kubelet::dra::{CdiDevices, CdiLink};
use linkwise_node::readiness::{Part, Readiness};
use linkwise_system::right::Right;
use linkwise_system::send_if_new;

/// The time from one scan of the host to the next while the snapshot does not change: /dev/nvidia-uvm appears at its
/// first use, and an operator may empty the folder of specs. NVML is polled as often.
const SCAN_EVERY: Duration = Duration::from_secs(10);

/// The way in which containers get their GPUs, and the task that keeps it up to date. Made by [`prepare`] at each
/// start.
pub(super) struct PreparedInjection {
    /// The operator's options.
    pub options: InjectionOptions,
    /// The host's devices, as last scanned.
    pub host_devices: watch::Receiver<Arc<HostDevices>>,
    /// The task; `None` if containers need neither CDI specs nor device nodes.
    pub sync: Option<CdiSync>,
}

/// The task that scans the host, before it runs.
pub(super) struct CdiSync {
    scan: HostScan,
    host_devices: watch::Sender<Arc<HostDevices>>,
    /// Becomes true when containers can get the first GPUs: their files are written.
    pub ready: watch::Sender<bool>,
    /// The CDI devices; `None` before the first scan with GPUs, if claims need them.
    cdi: watch::Sender<Option<Arc<CdiDevices>>>,
    scan_every: Duration,
}

/// Scans the host and writes the files that changed.
struct HostScan {
    scanner: cdi::Scanner,
    /// The folder of CDI specs; `None` if containers get their GPUs without CDI.
    folder: Option<PathBuf>,
    /// Set if claims get copies of the CDI devices.
    serves_claims: bool,
    /// Set if containers get RDMA NICs.
    exposes_nics: bool,
}

/// Reads the operator's options. Fails if CDI specs are wanted and their folder cannot be written, or if a required
/// IMEX channel does not exist.
pub(super) fn prepare(settings: &Settings, sysfs: &Path, uses_dra: bool) -> Result<PreparedInjection> {
    let wants = |strategy| settings.device_list_strategy.value.contains(&strategy);
    let annotations = wants(DeviceListStrategy::CdiAnnotations);
    let cri = wants(DeviceListStrategy::CdiCri);
    // These options are for the device plugin alone: claims name CDI devices in any case.
    let cdi = (cri || annotations).then(|| CdiOptions {
        kind: cdi::kind(cdi::GPU_CLASS),
        annotation_prefix: annotations.then(|| settings.cdi_annotation_prefix.value.clone()),
        cri,
    });
    let mut extras = vec![
        (cdi::Extra::GdrCopy, "NVIDIA_GDRCOPY", settings.gdrcopy_enabled.value),
        (cdi::Extra::Gds, "NVIDIA_GDS", settings.gds_enabled.value),
        (cdi::Extra::Mofed, "NVIDIA_MOFED", settings.mofed_enabled.value),
    ];
    extras.retain(|(_, _, enabled)| *enabled);
    let cdi_options = cdi::Options {
        hook: settings.nvidia_cdi_hook_path.value.as_ref().map(|hook| hook.display().to_string()),
        disabled_hooks: settings.cdi_disable_hooks.value.iter().cloned().collect(),
        extras: extras.iter().map(|(extra, ..)| *extra).collect(),
        imex_channels: settings.imex_channel_ids.value.clone(),
    };
    let scan = HostScan {
        scanner: cdi::Scanner::new(roots(settings, sysfs), cdi_options),
        folder: (cdi.is_some() || uses_dra).then(|| settings.cdi_dir.value.clone()),
        serves_claims: uses_dra,
        exposes_nics: settings.expose_nics.value,
    };
    if let Some(folder) = &scan.folder {
        cdi::prepare(folder).context(if uses_dra { "DRA needs CDI" } else { "--device-list-strategy needs CDI" })?;
    }
    let host_devices = scan.host_devices();
    if settings.imex_required.value {
        let wanted = &settings.imex_channel_ids.value;
        if let Some(channel) = wanted.iter().find(|channel| !host_devices.imex_channels.contains(channel)) {
            bail!("IMEX channel {channel} does not exist; create it, or unset --imex-required");
        }
    }
    let options = InjectionOptions {
        envvar: wants(DeviceListStrategy::Envvar),
        volume_mounts: wants(DeviceListStrategy::VolumeMounts),
        cdi,
        ids: settings.device_id_strategy.value,
        env: extras.iter().map(|(_, variable, _)| ((*variable).to_owned(), "enabled".to_owned())).collect(),
        device_nodes: settings.pass_device_specs.value,
        mps_root: settings.mps_root.value.display().to_string(),
    };
    let host_devices = watch::Sender::new(Arc::new(host_devices));
    let needs_specs = scan.folder.is_some();
    let needs_nodes = options.device_nodes || scan.exposes_nics || !settings.imex_channel_ids.value.is_empty();
    Ok(PreparedInjection {
        options,
        host_devices: host_devices.subscribe(),
        sync: (needs_specs || needs_nodes).then(|| CdiSync {
            scan,
            host_devices,
            ready: watch::Sender::new(!needs_specs),
            cdi: watch::Sender::new((!uses_dra).then(Arc::default)),
            scan_every: SCAN_EVERY,
        }),
    })
}

fn roots(settings: &Settings, sysfs: &Path) -> cdi::Roots {
    let dev = &settings.dev_root.value;
    // The setting names the folder that has /dev in it; /dev itself is accepted.
    let dev = if dev.ends_with("dev") { dev.parent().unwrap_or(Path::new("/")) } else { dev };
    cdi::Roots {
        driver: settings.driver_root.value.clone(),
        driver_here: settings.driver_root_ctr_path.value.clone(),
        dev: dev.to_owned(),
        sysfs: sysfs.to_owned(),
    }
}

impl CdiSync {
    /// Follows the CDI devices, for claims.
    pub fn cdi(&self) -> CdiLink {
        self.cdi.subscribe()
    }

    /// Runs until the channel of the snapshots or of the right to write (`files`) closes; fails if the first files
    /// cannot be written. Writes only while it has the right.
    pub async fn run(
        self,
        mut snapshot: watch::Receiver<Arc<NodeState>>,
        mut files: watch::Receiver<Option<Right>>,
        metrics: cdi::CdiMetrics,
        readiness: Readiness,
    ) -> Result<()> {
        readiness.add(Part::CdiSync, "writing the first files");
        let Self { mut scan, host_devices, ready, cdi, scan_every, .. } = self;
        let (mut warned, mut failing) = (Reported::new(), Reported::new());
        loop {
            // Without the right, the last scan stays valid for the containers of this process.
            let Ok(right) = files.wait_for(Option::is_some).await.map(|right| right.clone()) else { return Ok(()) };
            let current = Arc::clone(&snapshot.borrow_and_update());
            let has_gpus = current.offers_any();
            let counted = metrics.clone();
            // A file system that hangs must not hold a thread that admissions need.
            let task = tokio::task::spawn_blocking(move || {
                let _right = right;
                let scanned = scan.run(&current, &counted);
                (scan, scanned)
            });
            let scanned;
            (scan, scanned) = task.await.context("the host scan panicked")?;
            send_if_new(&host_devices, Arc::new(scanned.devices));
            for warning in warned.replace(scanned.warnings) {
                tracing::warn!("{warning}");
            }
            match scanned.failed {
                Some(error) if !*ready.borrow() => return Err(error),
                Some(error) => {
                    if !failing.replace([cause(&error)]).is_empty() {
                        let error = format!("{error:#}");
                        readiness.trouble(&Part::CdiSync, error.clone());
                        tracing::error!(error, "cannot update files for containers, keeping the previous ones");
                    }
                }
                None => {
                    failing.clear();
                    readiness.enter(&Part::CdiSync, "up to date", has_gpus);
                    let is_ready = *ready.borrow() || has_gpus;
                    send_if_new(&ready, is_ready);
                }
            }
            if let Some(found) = scanned.cdi {
                cdi.send_if_modified(|known| {
                    // A program that removed these specs may have removed claims' too: the claim manager rewrites them.
                    let is_news = scanned.has_written || known.as_deref() != Some(&found);
                    *known = Some(Arc::new(found));
                    is_news
                });
            }
            tokio::select! {
                changed = snapshot.changed() => if changed.is_err() { return Ok(()) },
                changed = files.changed() => if changed.is_err() { return Ok(()) },
                () = tokio::time::sleep(scan_every) => {}
            }
        }
    }
}

/// A key that is equal for the same failure. The middle of the chain is left out: it has the name of a temporary file,
/// which is different each time.
fn cause(error: &anyhow::Error) -> (String, Option<io::ErrorKind>) {
    let system = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    (error.to_string(), system.map(io::Error::kind))
}

#[derive(Default)]
struct Scanned {
    devices: HostDevices,
    /// The CDI devices, if claims need them and there are GPUs.
    cdi: Option<CdiDevices>,
    /// True if a CDI spec was missing or different, and is written now.
    has_written: bool,
    warnings: Vec<cdi::Warning>,
    /// The last error.
    failed: Option<anyhow::Error>,
}

impl HostScan {
    /// The host's devices other than GPUs. The list of CDI devices is empty: [`Self::run`] fills it.
    fn host_devices(&self) -> HostDevices {
        let roots = self.scanner.roots();
        HostDevices {
            dev_root: roots.dev.display().to_string(),
            control_nodes: self.scanner.control_nodes(),
            imex_channels: self.scanner.imex_channels(),
            cdi_devices: Vec::new(),
            rdma: self.exposes_nics.then(|| RdmaNodes {
                devices: hwloc::rdma_nodes(&roots.sysfs),
                common: hwloc::rdma_cm_node(&roots.sysfs).into_iter().collect(),
            }),
        }
    }

    /// Scans, and writes the files that changed. Writes as many as possible, and keeps the last error. A node without
    /// GPUs needs no files, and no warnings.
    fn run(&mut self, snapshot: &NodeState, metrics: &cdi::CdiMetrics) -> Scanned {
        let mut scanned = Scanned { devices: self.host_devices(), ..Scanned::default() };
        if !snapshot.offers_any() {
            return scanned;
        }
        let Some(folder) = self.folder.as_deref() else { return scanned };
        let cdi::Scan { description, warnings } = self.scanner.scan(snapshot);
        scanned.warnings = warnings;
        let specs = cdi::specs(&description);
        for spec in &specs {
            match cdi::write(folder, spec) {
                Ok(true) => {
                    tracing::info!(path = %folder.join(spec.file_name()).display(), "CDI spec written");
                    metrics.cdi_written(true);
                    scanned.has_written = true;
                }
                Ok(false) => {}
                Err(error) => {
                    scanned.failed = Some(error.into());
                    metrics.cdi_written(false);
                    continue;
                }
            }
            // Only devices with a spec are listed, because a runtime refuses a container that names any other.
            if spec.kind != cdi::kind(cdi::GPU_CLASS) {
                scanned.devices.cdi_devices.extend(spec.names());
            }
        }
        scanned.cdi = self.serves_claims.then(|| for_claims(&specs));
        scanned
    }
}

/// The devices of all specs, and the edits that every container with a GPU gets.
fn for_claims(specs: &[cdi::Spec]) -> CdiDevices {
    let of_gpus = specs.iter().find(|spec| spec.kind == cdi::kind(cdi::GPU_CLASS));
    let common = of_gpus.filter(|spec| !spec.container_edits.is_empty());
    let common = common.and_then(|spec| serde_json::to_string(&spec.container_edits).ok()).unwrap_or_default();
    let named =
        specs.iter().flat_map(|spec| spec.names().zip(spec.devices.iter().map(|device| &device.container_edits)));
    let edits = |(name, edits): (String, _)| match serde_json::to_value(edits) {
        Ok(Value::Object(edits)) => Some((name, edits)),
        _ => None,
    };
    CdiDevices { common, devices: named.filter_map(edits).collect::<BTreeMap<_, _>>() }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;
    use linkwise_core::state::Event;
    use linkwise_host::machines;
    use linkwise_nvml::supervisor::Idle;

    #[tokio::test]
    async fn deleted_spec_is_written_again_and_claims_follow() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let roots = cdi::Roots { driver: at("driver"), driver_here: at("driver"), dev: at("dev"), sysfs: at("sys") };
        std::fs::create_dir(at("cdi")).unwrap();
        let sync = CdiSync {
            scan: HostScan {
                scanner: cdi::Scanner::new(roots, cdi::Options::default()),
                folder: Some(at("cdi")),
                serves_claims: true,
                exposes_nics: false,
            },
            host_devices: watch::Sender::default(),
            ready: watch::Sender::new(false),
            cdi: watch::Sender::default(),
            scan_every: Duration::from_millis(10),
        };
        let observed = Event::Observed(Box::new(machines::load("dgx1-v100").unwrap().observed));
        let state = NodeState::default().apply(observed, Duration::ZERO).0;
        let (snapshot, files) = (watch::Sender::new(Arc::new(state)), watch::Sender::new(Some(Right::default())));
        let mut cdi = sync.cdi();
        let (metrics, readiness) =
            (cdi::CdiMetrics::register(&mut Registry::default()), Readiness::new(Idle::Waiting(String::new())));
        let task = tokio::spawn(sync.run(snapshot.subscribe(), files.subscribe(), metrics, readiness));
        let written = async {
            let first = cdi.wait_for(Option::is_some).await.unwrap().clone().unwrap();
            assert_eq!(first.devices.keys().filter(|name| name.contains("=GPU-")).count(), 8);
            assert!(first.common.contains("NVIDIA_VISIBLE_DEVICES=void"), "{}", first.common);
            let spec = std::fs::read_dir(at("cdi")).unwrap().next().unwrap().unwrap().path();
            std::fs::remove_file(&spec).unwrap();
            cdi.changed().await.unwrap();
            assert_eq!(cdi.borrow_and_update().as_ref(), Some(&first), "published again, for claims that lost files");
            assert!(spec.exists());
        };
        tokio::time::timeout(Duration::from_secs(60), written).await.unwrap();
        drop(snapshot);
        task.await.unwrap().unwrap();
    }
}
