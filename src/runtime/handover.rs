//! Keeps up to date what containers are handed: CDI specs, the device nodes that an answer to Allocate names, NCCL's
//! topology file.
//!
//! One task follows the snapshot, looks at the node off the path of an admission, writes what changed and publishes the
//! nodes. What goes wrong later than at the start leaves the last good state as it is.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::nccl::TopologyFile;
use super::readiness::{Part, Readiness};
use crate::cdi;
use crate::config::Settings;
use crate::config::settings::{DeviceIdStrategy, DeviceListStrategy};
use crate::hwloc;
use crate::kubelet::{CdiNames, DeviceIds, Handover, MpsClient, MpsClients, RdmaNodes, Surroundings};
use crate::mps;
use crate::state::{NodeState, ResourceName};
use crate::topology::NodeObservation;

/// How often the node is looked at where the snapshot does not change: /dev/nvidia-uvm comes with its first use, and a
/// folder of specs may be emptied. As often as NVML is polled.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// What is looked at and kept up to date.
pub(super) struct Upkeep {
    sight: Arc<Sight>,
    surroundings: watch::Sender<Arc<Surroundings>>,
    /// Whether the specs were written for the first GPUs.
    ready: watch::Sender<bool>,
}

/// What one look needs.
struct Sight {
    roots: cdi::Roots,
    options: cdi::Options,
    /// Where specs go; `None` where containers do without CDI.
    folder: Option<PathBuf>,
    /// Whether RDMA NICs are looked for.
    nics: bool,
    /// The topology file for NCCL, where containers get one.
    nccl: Option<TopologyFile>,
}

/// What one look brought.
struct Round {
    surroundings: Surroundings,
    oddities: Vec<cdi::Oddity>,
    /// Files that changed.
    written: Vec<String>,
    error: Option<cdi::WriteError>,
    /// Whether NCCL's topology file changed; `None` where there is none.
    nccl: Option<io::Result<bool>>,
}

/// How containers get their GPUs, and what has to be kept up to date for it. Fails where CDI specs are wanted and their folder
/// cannot be written, the same with NCCL's topology file, or where an IMEX channel that is required is not there.
pub(super) fn prepare(
    settings: &Settings,
    sysfs: &Path,
    seen: watch::Receiver<Arc<NodeObservation>>,
) -> Result<(Handover, Option<Upkeep>)> {
    let wants = |strategy| settings.device_list_strategy.value.contains(&strategy);
    let annotations = wants(DeviceListStrategy::CdiAnnotations).then(|| settings.cdi_annotation_prefix.value.clone());
    let cri = wants(DeviceListStrategy::CdiCri);
    let names = CdiNames { kind: cdi::kind(cdi::GPU_CLASS), annotations, cri };
    let names = (cri || names.annotations.is_some()).then_some(names);
    let extras = [
        (cdi::Extra::GdrCopy, "NVIDIA_GDRCOPY", settings.gdrcopy_enabled.value),
        (cdi::Extra::Gds, "NVIDIA_GDS", settings.gds_enabled.value),
        (cdi::Extra::Mofed, "NVIDIA_MOFED", settings.mofed_enabled.value),
    ];
    let extras: Vec<(cdi::Extra, &str)> =
        extras.into_iter().filter(|(_, _, enabled)| *enabled).map(|(extra, variable, _)| (extra, variable)).collect();
    let sight = Sight {
        roots: roots(settings, sysfs),
        options: cdi::Options {
            hook: settings.nvidia_cdi_hook_path.value.as_ref().map(|hook| hook.display().to_string()),
            disabled_hooks: settings.cdi_disable_hooks.value.iter().cloned().collect(),
            extras: extras.iter().map(|(extra, _)| *extra).collect(),
            imex_channels: settings.imex_channel_ids.value.clone(),
        },
        folder: names.is_some().then(|| settings.cdi_dir.value.clone()),
        nics: settings.expose_nics.value,
        nccl: TopologyFile::prepare(settings, seen)?,
    };
    if let Some(folder) = &sight.folder {
        cdi::prepare(folder).context("--device-list-strategy asks for CDI")?;
    }
    let around = sight.surroundings();
    if settings.imex_required.value {
        let missing = settings.imex_channel_ids.value.iter().find(|channel| !around.imex_channels.contains(channel));
        if let Some(channel) = missing {
            bail!("--imex-required: IMEX channel {channel} is not there");
        }
    }
    let surroundings = watch::Sender::new(Arc::new(around));
    let handover = Handover {
        envvar: wants(DeviceListStrategy::Envvar),
        volume_mounts: wants(DeviceListStrategy::VolumeMounts),
        ids: match settings.device_id_strategy.value {
            DeviceIdStrategy::Uuid => DeviceIds::Uuid,
            DeviceIdStrategy::Index => DeviceIds::Index,
        },
        variables: extras.iter().map(|(_, variable)| ((*variable).to_owned(), "enabled".to_owned())).collect(),
        device_nodes: settings.pass_device_specs.value,
        nccl_topology: sight.nccl.as_ref().map(TopologyFile::folder),
        cdi: names,
        mps: MpsClients { root: settings.mps_root.value.clone(), grant: mps_client },
        surroundings: surroundings.subscribe(),
    };
    let beside = sight.nics || sight.nccl.is_some() || !sight.options.imex_channels.is_empty();
    let needed = handover.cdi.is_some() || handover.device_nodes || beside;
    let ready = watch::Sender::new(sight.folder.is_none() && sight.nccl.is_none());
    Ok((handover, needed.then(|| Upkeep { sight: Arc::new(sight), surroundings, ready })))
}

/// What a container with a slot of a resource that is shared by MPS gets, under the MPS root on the host.
fn mps_client(root: &Path, resource: &ResourceName) -> MpsClient {
    let mps::Grant { environment, mounts } = mps::grant(root, resource);
    let mount = |mount: mps::Mount| (mount.host.display().to_string(), mount.container.display().to_string());
    MpsClient { variables: environment, mounts: mounts.into_iter().map(mount).collect() }
}

fn roots(settings: &Settings, sysfs: &Path) -> cdi::Roots {
    let dev = &settings.dev_root.value;
    // The folder that holds /dev is meant, and /dev itself is understood.
    let dev = if dev.ends_with("dev") { dev.parent().unwrap_or(Path::new("/")) } else { dev };
    cdi::Roots {
        driver: settings.driver_root.value.clone(),
        driver_here: settings.driver_root_ctr_path.value.clone(),
        dev: dev.to_owned(),
        sysfs: sysfs.to_owned(),
    }
}

impl Upkeep {
    /// Becomes true when containers can be handed the first GPUs.
    pub fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// The phase of a plugin that waits for this.
    pub fn awaited(&self) -> &'static str {
        if self.sight.folder.is_some() { "waiting for CDI specs" } else { "waiting for NCCL's topology file" }
    }

    /// Lives until `shutdown`; fails where the first specs cannot be written.
    pub async fn run(
        self,
        snapshot: watch::Receiver<Arc<NodeState>>,
        metrics: cdi::CdiMetrics,
        readiness: Readiness,
        shutdown: CancellationToken,
    ) -> Result<()> {
        shutdown.run_until_cancelled(self.live(snapshot, &metrics, &readiness)).await.unwrap_or(Ok(()))
    }

    async fn live(
        &self,
        mut snapshot: watch::Receiver<Arc<NodeState>>,
        metrics: &cdi::CdiMetrics,
        readiness: &Readiness,
    ) -> Result<()> {
        readiness.add(Part::CdiSync, "writing the first files");
        let mut told = BTreeSet::new();
        let mut failing = None;
        loop {
            let current = Arc::clone(&snapshot.borrow_and_update());
            let some = !current.offers().resources().is_empty();
            let sight = Arc::clone(&self.sight);
            // Files of a device or disk in trouble may not answer, and would hold a thread that admissions need.
            let round = tokio::task::spawn_blocking(move || sight.round(&current));
            let round = round.await.context("the look at what containers need broke off")?;
            self.surroundings.send_replace(Arc::new(round.surroundings));
            for oddity in round.oddities {
                if told.insert(oddity.clone()) {
                    tracing::warn!("{oddity}");
                }
            }
            for path in round.written {
                tracing::info!(path, "CDI spec written");
                metrics.cdi_written(true);
            }
            if let Some(Ok(true)) = round.nccl {
                tracing::info!("NCCL topology file written");
            }
            if round.error.is_some() {
                metrics.cdi_written(false);
            }
            let nccl = round
                .nccl
                .and_then(Result::err)
                .map(|error| anyhow::Error::from(error).context("cannot write NCCL's topology file"));
            if let Some(error) = round.error.map(anyhow::Error::from).or(nccl) {
                if !*self.ready.borrow() {
                    return Err(error);
                }
                // Not the words in between: they have the name of a temporary file, another one each time.
                let kind = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
                let cause = (error.to_string(), kind);
                if failing.as_ref() != Some(&cause) {
                    let error = format!("{error:#}");
                    readiness.trouble(&Part::CdiSync, error.clone());
                    tracing::error!(error, "what was written last stays; further failures are not logged");
                    failing = Some(cause);
                }
            } else {
                failing = None;
                readiness.enter(&Part::CdiSync, "up to date", some);
                self.ready.send_if_modified(|ready| !std::mem::replace(ready, *ready || some) && some);
            }
            tokio::select! {
                changed = snapshot.changed() => if changed.is_err() { return Ok(()) },
                () = tokio::time::sleep(LOOK_AGAIN) => {}
            }
        }
    }
}

impl Sight {
    /// What the node has beside its GPUs, CDI devices left out.
    fn surroundings(&self) -> Surroundings {
        Surroundings {
            dev_root: self.roots.dev.clone(),
            control_nodes: cdi::control_nodes(&self.roots),
            imex_channels: cdi::imex_channels(&self.roots, &self.options),
            cdi: Vec::new(),
            rdma: self.nics.then(|| RdmaNodes {
                devices: hwloc::rdma_nodes(&self.roots.sysfs),
                common: hwloc::rdma_cm_node(&self.roots.sysfs).into_iter().collect(),
            }),
        }
    }

    /// Looks, and writes what is new. On a node without GPUs there is nothing to write, and nothing odd.
    fn round(&self, snapshot: &NodeState) -> Round {
        let surroundings = self.surroundings();
        let mut round = Round { surroundings, oddities: Vec::new(), written: Vec::new(), error: None, nccl: None };
        if snapshot.offers().resources().is_empty() {
            return round;
        }
        round.nccl = self.nccl.as_ref().map(TopologyFile::write);
        let Some(folder) = self.folder.as_deref() else { return round };
        let look = cdi::look(&self.roots, &self.options, snapshot);
        round.oddities = look.oddities;
        for spec in cdi::specs(&look.description) {
            match cdi::write(folder, &spec) {
                Ok(true) => round.written.push(folder.join(spec.file_name()).display().to_string()),
                Ok(false) => {}
                Err(error) => {
                    round.error = Some(error);
                    continue;
                }
            }
            // What has no spec cannot be asked for: a runtime refuses a container that names it.
            if spec.kind != cdi::kind(cdi::GPU_CLASS) {
                round.surroundings.cdi.extend(spec.names());
            }
        }
        round
    }
}
