//! `linkwise snapshot`: writes a machine's observations as a node file.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::print;
use crate::config::SnapshotArgs;
use linkwise_core::topology::{GpuUuid, Guid, MigUuid, NodeObservation, PciObservation};
use linkwise_host::machines::Machine;
use linkwise_system::files;

/// The mode of an ordinary file; the umask applies.
const MODE: u32 = 0o666;
/// The file in which Linux has the host's name.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// The default name in a redacted snapshot, and of a machine whose host has none.
const NO_NAME: &str = "node";
/// The cluster UUID of a machine that is an NVLink fabric by itself: it identifies no machine.
const OWN_FABRIC: &str = "00000000-0000-0000-0000-000000000000";

/// Runs the command.
pub async fn snapshot(args: &SnapshotArgs) -> Result<()> {
    // The refusal comes before the observation, which takes seconds.
    if let Some(path) = args.output.as_deref() {
        may_write(path, args.force)?;
    }
    let mut machine = super::machine(&args.node).await?;
    let live = args.node.node.is_none();
    for gpu in &mut machine.observed.gpus {
        // A node file has no serials and no current widths, so they would not read back.
        (gpu.serial, gpu.pcie_width_now) = (None, None);
    }
    if args.redact {
        redact(&mut machine.observed);
        machine.reconstructed.push("UUIDs are made up (linkwise snapshot --redact)".to_owned());
    }
    match &args.name {
        Some(name) => machine.name.clone_from(name),
        None if args.redact => NO_NAME.clone_into(&mut machine.name),
        None if live => machine.name = host_name(),
        None => {}
    }
    if live || args.redact {
        machine.title = title(&machine.observed);
    }
    machine.source.push(format!("written by linkwise {} snapshot", env!("CARGO_PKG_VERSION")));
    let text = machine.to_yaml()?;
    // A file that is not read back as it was written must not be sent to anyone.
    let is_same = Machine::parse(&text).is_ok_and(|read| read == machine);
    ensure!(
        is_same,
        "cannot write the snapshot: it does not read back as observed; report this with the output of linkwise topology"
    );
    match args.output.as_deref() {
        Some(path) => {
            let write = if args.force { files::write } else { files::write_new };
            write(path, text.as_bytes(), MODE).with_context(|| format!("cannot write {}", path.display()))
        }
        None => Ok(print(&text)?),
    }
}

fn host_name() -> String {
    let name = fs::read_to_string(HOST_NAME).unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { NO_NAME.to_owned() } else { name.to_owned() }
}

/// "8x NVIDIA H100 80GB HBM3", the models in the order of the GPUs.
fn title(observed: &NodeObservation) -> String {
    let mut models: Vec<(&str, usize)> = Vec::new();
    for gpu in &observed.gpus {
        let model = gpu.model.as_deref().unwrap_or("GPU of unknown model");
        match models.iter_mut().find(|(known, _)| *known == model) {
            Some((_, count)) => *count += 1,
            None => models.push((model, 1)),
        }
    }
    let parts: Vec<String> = models.into_iter().map(|(model, count)| format!("{count}x {model}")).collect();
    if parts.is_empty() { "no GPUs".to_owned() } else { parts.join(", ") }
}

/// Replaces values that identify this machine by invented ones, UUIDs in error texts too.
fn redact(observed: &mut NodeObservation) {
    let devices = observed.host.host_bridges.iter_mut().flat_map(|bridge| &mut bridge.devices);
    let mut guids = BTreeMap::new();
    devices.for_each(|device| redact_guids(device, &mut guids));
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for gpu in &mut observed.gpus {
        let made_up = GpuUuid::made_up(gpu.pci);
        names.insert(gpu.uuid.to_string(), made_up.to_string());
        gpu.uuid = made_up;
        for device in gpu.mig.iter_mut().flat_map(|mig| &mut mig.devices) {
            let made_up = MigUuid::made_up(gpu.pci, device.index);
            names.insert(device.uuid.to_string(), made_up.to_string());
            device.uuid = made_up;
        }
        if let Some(fabric) = gpu.fabric.as_mut().filter(|fabric| fabric.cluster != OWN_FABRIC) {
            let next = format!("00000000-0000-0000-0000-{:012}", names.len());
            fabric.cluster = names.entry(fabric.cluster.clone()).or_insert(next).clone();
        }
    }
    for failure in &mut observed.failures {
        for (name, made_up) in &names {
            for text in [&mut failure.subject, &mut failure.error] {
                *text = text.replace(name, made_up);
            }
        }
    }
}

/// Replaces the GUIDs of RDMA cards and ports. Equal GUIDs stay equal.
fn redact_guids(device: &mut PciObservation, known: &mut BTreeMap<Guid, Guid>) {
    for nic in &mut device.nics {
        for guid in nic.system_guid.iter_mut().chain(&mut nic.port_guids) {
            let next = Guid::new(known.len() as u64 + 1).unwrap_or(*guid);
            *guid = *known.entry(*guid).or_insert(next);
        }
    }
    device.devices.iter_mut().for_each(|below| redact_guids(below, known));
}

/// Checks that the file may be written: over an existing file only with --force, and never over anything else.
fn may_write(path: &Path, force: bool) -> Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot write {}", path.display())),
        Ok(existing) if !existing.is_file() => bail!("cannot write {}: it exists and is not a file", path.display()),
        Ok(_) if !force => bail!("cannot write {}: the file exists; replace it with --force", path.display()),
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::topology::{FabricObservation, MigObservation, NodeTopology, ProbeFailure};
    use linkwise_host::machines;

    fn mig_of_one_device() -> MigObservation {
        let device = serde_json::json!({"index": 0, "uuid": "MIG-5ec7e7", "gpu_instance": 1, "compute_instance": 0,
            "gpu_slices": 1, "compute_slices": 1, "memory_mib": 9728});
        let device = serde_json::from_value(device).unwrap();
        MigObservation { enabled: true, devices: vec![device], profiles: Vec::new() }
    }

    /// Gives the NICs at and below a device these GUIDs, as long as there are some.
    fn give_guids(device: &mut PciObservation, guids: &mut impl Iterator<Item = Option<Guid>>) {
        for nic in &mut device.nics {
            nic.system_guid = guids.next().flatten();
            nic.port_guids.extend(nic.system_guid);
        }
        device.devices.iter_mut().for_each(|below| give_guids(below, guids));
    }

    #[test]
    fn redaction_keeps_topology_without_identifiers() {
        let mut observed = machines::load("dgx-h100").unwrap().observed;
        let cluster = "3143b15b-c2cd-192b-28cc-9b5473fb5b93".to_owned();
        for gpu in &mut observed.gpus {
            gpu.fabric = Some(FabricObservation { cluster: cluster.clone(), clique: 7 });
        }
        let uuid = observed.gpus[0].uuid.to_string();
        let (subject, error) = (uuid.clone(), format!("{uuid} of {cluster}"));
        observed.failures = vec![ProbeFailure { subject, call: "nvmlDeviceGetName".to_owned(), error }];
        observed.gpus[1].mig = Some(mig_of_one_device());
        // Four functions of one card, and one of another. In decimal, all these GUIDs begin with 13316851.
        let guid = |number: u64| Guid::new(0xb8ce_f603_00a1_b200 + number);
        let mut cards = [1, 1, 1, 1, 2].map(guid).into_iter();
        let devices = observed.host.host_bridges.iter_mut().flat_map(|bridge| &mut bridge.devices);
        devices.for_each(|device| give_guids(device, &mut cards));
        let before = observed.clone();
        redact(&mut observed);
        let text = format!("{observed:?}");
        assert!(!text.contains(&cluster) && !text.contains("MIG-5ec7e7"));
        assert!(!text.contains("Guid(13316851"), "{text}");
        assert!(before.gpus.iter().all(|gpu| !text.contains(gpu.uuid.as_str())));
        let kept = |observed: &NodeObservation| {
            let topology = NodeTopology::assemble(observed).0;
            let all = topology.gpus().iter().map(|gpu| (gpu.pci, gpu.numa, gpu.rail)).collect::<Vec<_>>();
            (all, format!("{:?}", (0..8).map(|b| topology.bandwidth(0, b)).collect::<Vec<_>>()))
        };
        assert_eq!(kept(&observed), kept(&before));
        let once = observed.clone();
        redact(&mut observed);
        assert_eq!(observed, once, "made-up names stay");
    }

    #[test]
    fn titles_count_models() {
        let mut observed = machines::load("dgx-h100").unwrap().observed;
        assert_eq!(title(&observed), "8x NVIDIA H100 80GB HBM3");
        observed.gpus[7].model = None;
        assert_eq!(title(&observed), "7x NVIDIA H100 80GB HBM3, 1x GPU of unknown model");
        assert_eq!(title(&NodeObservation::default()), "no GPUs");
    }
}
