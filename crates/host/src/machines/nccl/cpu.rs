//! `cpu`: NCCL's element for a NUMA node with its CPUs and their model.

use super::Notes;
use crate::machines::cpu_list;
use crate::machines::xml::Element;
use linkwise_core::quote::excerpt;
use linkwise_core::topology::{CpuObservation, HostObservation, NumaNodeId, NumaNodeObservation};

/// Records a NUMA node; returns its number, `None` if the kernel has none (-1).
pub(super) fn observe(cpu: Element<'_>, host: &mut HostObservation, notes: &mut Notes) -> Option<NumaNodeId> {
    let model = model(cpu, notes);
    match (&host.cpu, &model) {
        (None, Some(_)) => host.cpu = model,
        (Some(first), Some(other)) if first != other => {
            notes.add(cpu, "another processor model than the first one; the first is taken for all");
        }
        _ => {}
    }
    let id = match cpu.attribute("numaid") {
        // This is the kernel's value for unknown.
        Some("-1") => return None,
        Some(_) => NumaNodeId(notes.number(cpu, "numaid")?),
        None => return notes.none(cpu, "without a numaid; its NUMA node is unknown"),
    };
    if host.numa_nodes.iter().any(|node| node.id == id) {
        notes.add(cpu, format!("NUMA node {id} twice; taken as one, with the CPUs of the first"));
        return Some(id);
    }
    let affinity = cpu.attribute("affinity").unwrap_or_default();
    let cpus = cpu_list(affinity).unwrap_or_else(|| {
        notes.add(cpu, format!("affinity '{}' is no CPU mask; its CPUs are unknown", excerpt(affinity)));
        String::new()
    });
    host.numa_nodes.push(NumaNodeObservation { id, package: None, cpus });
    Some(id)
}

fn model(cpu: Element<'_>, notes: &mut Notes) -> Option<CpuObservation> {
    let arch = match cpu.attribute("arch")? {
        "arm64" => "aarch64",
        // NVIDIA's driver on POWER is little-endian only.
        "ppc64" => "ppc64le",
        other => other,
    };
    // NCCL adds CPUID's extended family times 16. The displayed family adds it as it is, and only to 15.
    let family = notes.number(cpu, "familyid").map(|id| if id & 0xf == 0xf { 0xf + (id >> 4) } else { id });
    Some(CpuObservation {
        arch: arch.to_owned(),
        vendor: cpu.attribute("vendor").map(str::to_owned),
        family,
        model: notes.number(cpu, "modelid"),
    })
}
