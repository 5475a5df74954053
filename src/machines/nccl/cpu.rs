//! `cpu`: to NCCL a NUMA node with its CPUs and their model.

use super::Notes;
use crate::machines::xml::Element;
use crate::quote::quoted;
use crate::topology::{CpuObservation, HostObservation, NumaNodeId, NumaNodeObservation};

/// Takes down a NUMA node; answers its number, `None` where the kernel has none (-1).
pub(super) fn observe(cpu: &Element, host: &mut HostObservation, notes: &mut Notes) -> Option<NumaNodeId> {
    let model = model(cpu, notes);
    match (&host.cpu, &model) {
        (None, Some(_)) => host.cpu = model,
        (Some(first), Some(other)) if first != other => {
            notes.add(cpu, "another processor model than the first one; the first is taken for all");
        }
        _ => {}
    }
    let id = match cpu.get("numaid") {
        // The kernel's word for unknown.
        Some("-1") => return None,
        Some(_) => NumaNodeId(notes.number(cpu, "numaid")?),
        None => {
            notes.add(cpu, "without a numaid; its NUMA node is unknown");
            return None;
        }
    };
    if host.numa_nodes.iter().any(|node| node.id == id) {
        notes.add(cpu, format!("NUMA node {id} twice; taken as one, with the CPUs of the first"));
        return Some(id);
    }
    let affinity = cpu.get("affinity").unwrap_or_default();
    let cpus = cpu_list(affinity).unwrap_or_else(|| {
        notes.add(cpu, format!("affinity {} is no CPU mask; its CPUs are unknown", quoted(affinity)));
        String::new()
    });
    host.numa_nodes.push(NumaNodeObservation { id, package: None, cpus });
    Some(id)
}

fn model(cpu: &Element, notes: &mut Notes) -> Option<CpuObservation> {
    let arch = match cpu.get("arch")? {
        "arm64" => "aarch64",
        // NVIDIA's driver on POWER is little-endian only.
        "ppc64" => "ppc64le",
        other => other,
    };
    // NCCL adds CPUID's extended family times 16, the display family adds it as it is, and only to 15.
    let family = notes.number(cpu, "familyid").map(|id| if id & 0xf == 0xf { 0xf + (id >> 4) } else { id });
    Some(CpuObservation {
        arch: arch.to_owned(),
        vendor: cpu.get("vendor").map(str::to_owned),
        family,
        model: notes.number(cpu, "modelid"),
    })
}

/// The kernel's list (`0-15,32-47`) of its mask (`0000ffff,0000ffff`: words of 32 bits, the highest first).
fn cpu_list(mask: &str) -> Option<String> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    let words = if mask.is_empty() { Vec::new() } else { mask.rsplit(',').collect() };
    for (number, word) in words.into_iter().enumerate() {
        let word = u32::from_str_radix(word, 16).ok()?;
        let first = u32::try_from(number).ok()?.checked_mul(32)?;
        for cpu in (0..32).filter(|bit| word >> bit & 1 == 1).map(|bit| first + bit) {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
    }
    let text = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    Some(ranges.iter().map(text).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_become_lists() {
        for (mask, list) in [
            ("", ""),
            ("00000000", ""),
            ("0000ffff,0000ffff", "0-15,32-47"),
            ("00000001,80000000,ffffffff", "0-31,63-64"),
            ("fff0000", "16-27"),
            ("5", "0,2"),
        ] {
            assert_eq!(cpu_list(mask).as_deref(), Some(list), "{mask}");
        }
        for mask in [",", "x", "1ffffffff", "0x1", "-1"] {
            assert_eq!(cpu_list(mask), None, "{mask}");
        }
    }
}
