//! Keeps the files for containers up to date: CDI specs, the host's device nodes for answers to Allocate, NCCL's
//! topology file.
//!
//! One task follows the snapshot, scans the host apart from admissions, writes the files that changed and publishes the
//! nodes. A failure at the start ends the process; a later one leaves the files as they were written last.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::sync::{Notify, watch};

use crate::config::Settings;
use crate::config::settings::{DeviceIdStrategy, DeviceListStrategy};
use linkwise_core::once::Once;
use linkwise_core::publish::RdmaNodes;
use linkwise_core::publish::injection::{CdiOptions, DeviceIds, HostDevices, InjectionOptions, NCCL_FILE};
use linkwise_core::state::NodeState;
use linkwise_core::topology::NodeObservation;
use linkwise_host::cdi;
use linkwise_host::hwloc;
use linkwise_host::machines;
use linkwise_kubelet::dra::SpecsLink;
use linkwise_node::readiness::{Part, Readiness};
use linkwise_system::files;

/// The time from one scan of the host to the next while the snapshot does not change: /dev/nvidia-uvm appears at its
/// first use, and an operator may empty the folder of specs. NVML is polled as often.
const SCAN_EVERY: Duration = Duration::from_secs(10);

/// The way in which containers get their GPUs, and the task behind it.
pub(super) struct Prepared {
    /// The operator's options.
    pub options: InjectionOptions,
    /// The host's devices, as last scanned.
    pub host_devices: watch::Receiver<Arc<HostDevices>>,
    /// The task, if any file has to be kept up to date.
    pub sync: Option<CdiSync>,
}

pub(super) struct CdiSync {
    scan: HostScan,
    host_devices: watch::Sender<Arc<HostDevices>>,
    /// Becomes true when containers can get the first GPUs: their files are written.
    pub ready: watch::Sender<bool>,
    /// The generation of the files: see [`SpecsLink::generation`].
    generation: watch::Sender<u64>,
    /// See [`SpecsLink::repair`].
    repair: Arc<Notify>,
    scan_every: Duration,
    /// The phase of a plugin that waits for this.
    pub awaited: &'static str,
}

/// Scans the host and writes the files that changed.
struct HostScan {
    scanner: cdi::Scanner,
    /// The folder of CDI specs; `None` if containers get their GPUs without CDI.
    folder: Option<PathBuf>,
    /// Set if containers get RDMA NICs.
    nics: bool,
    nccl: Option<TopologyFile>,
}

/// Reads the operator's options. Fails if CDI specs or NCCL's topology file are wanted and their folder cannot be
/// written, or if a required IMEX channel does not exist.
pub(super) fn prepare(
    settings: &Settings,
    sysfs: &Path,
    observed: watch::Receiver<Arc<NodeObservation>>,
    uses_dra: bool,
) -> Result<Prepared> {
    let wants = |strategy| settings.device_list_strategy.value.contains(&strategy);
    let annotations = wants(DeviceListStrategy::CdiAnnotations);
    let cri = wants(DeviceListStrategy::CdiCri);
    // Claims name CDI devices, regardless of the device plugin.
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
        nics: settings.expose_nics.value,
        nccl: TopologyFile::prepare(settings, observed)?,
    };
    if let Some(folder) = &scan.folder {
        cdi::prepare(folder).context(if uses_dra { "DRA needs CDI" } else { "--device-list-strategy asks for CDI" })?;
    }
    let host_devices = scan.host_devices();
    if settings.imex_required.value {
        let wanted = &settings.imex_channel_ids.value;
        if let Some(channel) = wanted.iter().find(|channel| !host_devices.imex_channels.contains(channel)) {
            bail!("--imex-required: IMEX channel {channel} is not there");
        }
    }
    let options = InjectionOptions {
        envvar: wants(DeviceListStrategy::Envvar),
        volume_mounts: wants(DeviceListStrategy::VolumeMounts),
        cdi,
        ids: match settings.device_id_strategy.value {
            DeviceIdStrategy::Uuid => DeviceIds::Uuid,
            DeviceIdStrategy::Index => DeviceIds::Index,
        },
        env: extras.iter().map(|(_, variable, _)| ((*variable).to_owned(), "enabled".to_owned())).collect(),
        device_nodes: settings.pass_device_specs.value,
        mps_root: settings.mps_root.value.display().to_string(),
        nccl_folder: scan.nccl.as_ref().map(|file| file.folder.display().to_string()),
    };
    let host_devices = watch::Sender::new(Arc::new(host_devices));
    let awaited = if scan.folder.is_some() { "waiting for CDI specs" } else { "waiting for NCCL's topology file" };
    let files = scan.folder.is_some() || scan.nccl.is_some();
    let nodes = options.device_nodes || scan.nics || !settings.imex_channel_ids.value.is_empty();
    Ok(Prepared {
        options,
        host_devices: host_devices.subscribe(),
        sync: (files || nodes).then(|| CdiSync {
            scan,
            host_devices,
            ready: watch::Sender::new(!files),
            generation: watch::Sender::new(u64::from(!files)),
            repair: Arc::default(),
            scan_every: SCAN_EVERY,
            awaited,
        }),
    })
}

fn roots(settings: &Settings, sysfs: &Path) -> cdi::Roots {
    let dev = &settings.dev_root.value;
    // The option names the folder that has /dev in it; /dev itself is accepted.
    let dev = if dev.ends_with("dev") { dev.parent().unwrap_or(Path::new("/")) } else { dev };
    cdi::Roots {
        driver: settings.driver_root.value.clone(),
        driver_here: settings.driver_root_ctr_path.value.clone(),
        dev: dev.to_owned(),
        sysfs: sysfs.to_owned(),
    }
}

impl CdiSync {
    /// The way to this task, for claims.
    pub fn link(&self) -> SpecsLink {
        SpecsLink { generation: self.generation.subscribe(), repair: Arc::clone(&self.repair) }
    }

    /// Runs as long as snapshots come; fails if the first files cannot be written. Writes while `files` is true.
    pub async fn run(
        self,
        mut snapshot: watch::Receiver<Arc<NodeState>>,
        mut files: watch::Receiver<bool>,
        metrics: cdi::CdiMetrics,
        readiness: Readiness,
    ) -> Result<()> {
        readiness.add(Part::CdiSync, "writing the first files");
        let Self { mut scan, host_devices, ready, generation, repair, scan_every, .. } = self;
        let (mut warned, mut failing) = (Once::new(), Once::new());
        loop {
            let current = Arc::clone(&snapshot.borrow_and_update());
            if !*files.borrow_and_update() {
                // The last scan stays valid for the containers of this process.
                tokio::select! {
                    changed = files.changed() => if changed.is_err() { return Ok(()) },
                    changed = snapshot.changed() => if changed.is_err() { return Ok(()) },
                }
                continue;
            }
            let has_gpus = current.offers_any();
            let counted = metrics.clone();
            // A file system that hangs must not hold a thread that admissions need.
            let task = tokio::task::spawn_blocking(move || {
                let scanned = scan.run(&current, &counted);
                (scan, scanned)
            });
            let (devices, warnings, written);
            (scan, (devices, warnings, written)) = task.await.context("the host scan panicked")?;
            host_devices.send_replace(Arc::new(devices));
            for warning in warned.replace(warnings) {
                tracing::warn!("{warning}");
            }
            match written {
                Err(error) if !*ready.borrow() => return Err(error),
                Err(error) => {
                    if !failing.replace([cause(&error)]).is_empty() {
                        let error = format!("{error:#}");
                        readiness.trouble(&Part::CdiSync, error.clone());
                        tracing::error!(error, "cannot update files for containers, keeping the previous ones");
                    }
                }
                Ok(()) => {
                    failing.clear();
                    readiness.enter(&Part::CdiSync, "up to date", has_gpus);
                    ready.send_if_modified(|ready| !std::mem::replace(ready, *ready || has_gpus) && has_gpus);
                }
            }
            if *ready.borrow() {
                generation.send_modify(|generation| *generation = generation.saturating_add(1));
            }
            tokio::select! {
                changed = snapshot.changed() => if changed.is_err() { return Ok(()) },
                changed = files.changed() => if changed.is_err() { return Ok(()) },
                () = repair.notified() => {}
                () = tokio::time::sleep(scan_every) => {}
            }
        }
    }
}

/// The NCCL topology file for containers with GPUs (`--expose-nccl-topology`): this machine as last observed.
struct TopologyFile {
    /// The folder, at the same path on the host and in our container.
    folder: PathBuf,
    observed: watch::Receiver<Arc<NodeObservation>>,
}

impl TopologyFile {
    /// Prepares the file; `None` if the operator did not ask for it. Fails if its folder cannot be written.
    fn prepare(settings: &Settings, observed: watch::Receiver<Arc<NodeObservation>>) -> Result<Option<Self>> {
        if !settings.expose_nccl_topology.value {
            return Ok(None);
        }
        let folder = settings.nccl_topology_dir.value.clone();
        files::prepare_folder(&folder)
            .with_context(|| format!("cannot write NCCL's topology file to {}", folder.display()))?;
        Ok(Some(Self { folder, observed }))
    }

    /// Writes the last observation; returns true if the file changed.
    fn write(&self) -> io::Result<bool> {
        let observed = Arc::clone(&self.observed.borrow());
        let path = self.folder.join(NCCL_FILE);
        files::write_if_changed(&path, machines::nccl_topology_file(&observed).as_bytes(), 0o644)
    }
}

/// A key that is equal for the same failure. The middle of the chain is left out: it has the name of a temporary file,
/// which is different each time.
fn cause(error: &anyhow::Error) -> (String, Option<io::ErrorKind>) {
    let system = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    (error.to_string(), system.map(io::Error::kind))
}

impl HostScan {
    /// The host's devices beside its GPUs, without CDI devices.
    fn host_devices(&self) -> HostDevices {
        let roots = self.scanner.roots();
        HostDevices {
            dev_root: roots.dev.display().to_string(),
            control_nodes: self.scanner.control_nodes(),
            imex_channels: self.scanner.imex_channels(),
            cdi_devices: Vec::new(),
            rdma: self.nics.then(|| RdmaNodes {
                devices: hwloc::rdma_nodes(&roots.sysfs),
                common: hwloc::rdma_cm_node(&roots.sysfs).into_iter().collect(),
            }),
        }
    }

    /// Scans, and writes the files that changed. Writes as many as possible, and returns the last error. A node without
    /// GPUs needs no files, and no warnings.
    fn run(&mut self, snapshot: &NodeState, metrics: &cdi::CdiMetrics) -> (HostDevices, Vec<cdi::Warning>, Result<()>) {
        let (mut devices, mut written) = (self.host_devices(), Ok(()));
        if !snapshot.offers_any() {
            return (devices, Vec::new(), written);
        }
        match self.nccl.as_ref().map(TopologyFile::write) {
            Some(Ok(true)) => tracing::info!("NCCL topology file written"),
            Some(Err(error)) => written = Err(error).context("cannot write NCCL's topology file"),
            Some(Ok(false)) | None => {}
        }
        let Some(folder) = self.folder.as_deref() else { return (devices, Vec::new(), written) };
        let cdi::Scan { description, warnings } = self.scanner.scan(snapshot);
        for spec in cdi::specs(&description) {
            match cdi::write(folder, &spec) {
                Ok(true) => {
                    tracing::info!(path = %folder.join(spec.file_name()).display(), "CDI spec written");
                    metrics.cdi_written(true);
                }
                Ok(false) => {}
                Err(error) => {
                    written = Err(error.into());
                    metrics.cdi_written(false);
                    continue;
                }
            }
            // Only devices with a spec count: a runtime refuses a container that names any other.
            if spec.kind != cdi::kind(cdi::GPU_CLASS) {
                devices.cdi_devices.extend(spec.names());
            }
        }
        (devices, warnings, written)
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;
    use linkwise_core::state::Event;
    use linkwise_nvml::supervisor::Idle;

    #[tokio::test]
    async fn deleted_spec_is_written_again_when_a_claim_asks() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let roots = cdi::Roots { driver: at("driver"), driver_here: at("driver"), dev: at("dev"), sysfs: at("sys") };
        std::fs::create_dir(at("cdi")).unwrap();
        let sync = CdiSync {
            scan: HostScan {
                scanner: cdi::Scanner::new(roots, cdi::Options::default()),
                folder: Some(at("cdi")),
                nics: false,
                nccl: None,
            },
            host_devices: watch::Sender::default(),
            ready: watch::Sender::new(false),
            generation: watch::Sender::new(0),
            repair: Arc::default(),
            // Never.
            scan_every: Duration::from_secs(1 << 20),
            awaited: "",
        };
        let observed = Event::Observed(Box::new(machines::load("dgx1-v100").unwrap().observed));
        let state = NodeState::default().apply(observed, Duration::ZERO).0;
        let (snapshot, files) = (watch::Sender::new(Arc::new(state)), watch::Sender::new(true));
        let mut link = sync.link();
        let (metrics, readiness) =
            (cdi::CdiMetrics::register(&mut Registry::default()), Readiness::new(Idle::Waiting(String::new())));
        let task = tokio::spawn(sync.run(snapshot.subscribe(), files.subscribe(), metrics, readiness));
        let written = async {
            let first = *link.generation.wait_for(|generation| *generation > 0).await.unwrap();
            let spec = std::fs::read_dir(at("cdi")).unwrap().next().unwrap().unwrap().path();
            std::fs::remove_file(&spec).unwrap();
            link.repair.notify_one();
            link.generation.wait_for(|generation| *generation > first).await.unwrap();
            assert!(spec.exists());
        };
        tokio::time::timeout(Duration::from_secs(60), written).await.unwrap();
        drop(snapshot);
        task.await.unwrap().unwrap();
    }
}
