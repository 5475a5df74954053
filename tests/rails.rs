//! The rails of GPUs, compared with a second implementation of their definition and with vendors' drawings of machines.

use std::collections::BTreeSet;

use crate::random_node;

use linkwise_core::topology::{Guid, Nic, NicKind, NodeObservation, NodeTopology, PciKind, PciObservation};
use linkwise_host::machines;
use proptest::prelude::*;

/// The rails by definition: nothing is sorted, and each NIC is compared with every other.
fn expected(topology: &NodeTopology) -> Vec<Option<u32>> {
    let nics: Vec<&Nic> = topology.nics().iter().filter(|nic| nic.kind == NicKind::Rdma).collect();
    let all = || 0..nics.len();
    let first_of = |nic: usize| {
        let same = all().filter(|other| one_card(nics[*other], nics[nic]));
        same.reduce(|a, b| if before(&nics, b, a) { b } else { a }).unwrap()
    };
    let near = |gpu: usize| -> BTreeSet<usize> {
        let closer = |a: &Nic, b: &Nic| {
            a.level[gpu] < b.level[gpu]
                || a.level[gpu] == b.level[gpu] && !a.port_guids.is_empty() && b.port_guids.is_empty()
        };
        let nearest = || all().filter(|nic| !all().any(|other| closer(nics[other], nics[*nic])));
        // At one distance a slower NIC does not count, but a NIC of unknown rate does.
        let slower = |nic: usize| nics[nic].mbps.is_some_and(|own| nearest().any(|other| nics[other].mbps > Some(own)));
        let nearest = nearest().filter(|nic| !slower(*nic));
        nearest.filter(|nic| ["PIX", "PXB", "PHB"].contains(&nics[*nic].level[gpu].symbol())).map(first_of).collect()
    };
    let gpus = 0..topology.gpus().len();
    let chosen: Vec<Option<usize>> = gpus
        .map(|gpu| {
            let own = near(gpu);
            let earlier = (0..gpu).filter(|other| near(*other) == own).count();
            let place = *turns(own.len()).get(earlier % own.len().max(1))?;
            let behind = |card: &usize| own.iter().filter(|other| before(&nics, **other, *card)).count();
            own.iter().copied().find(|card| behind(card) == place)
        })
        .collect();
    let used: BTreeSet<usize> = chosen.iter().flatten().copied().collect();
    let rail = |card: usize| used.iter().filter(|other| before(&nics, **other, card)).count();
    chosen.iter().map(|card| card.map(|card| u32::try_from(rail(card)).unwrap())).collect()
}

fn one_card(a: &Nic, b: &Nic) -> bool {
    let device = |nic: &Nic| nic.pci.map(|pci| pci.to_string().split('.').next().unwrap().to_owned());
    match (a.system_guid, b.system_guid, device(a), device(b)) {
        (Some(a), Some(b), ..) => a == b,
        (None, None, Some(a), Some(b)) => a == b,
        (None, None, None, None) => a.names.first() == b.names.first(),
        _ => false,
    }
}

/// Returns true if NIC `a` is before `b`: by address, else by the number in its name, else by its place.
fn before(nics: &[&Nic], a: usize, b: usize) -> bool {
    let number = |name: &str| name.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap().to_owned();
    let name = |nic: usize| nics[nic].names[0].clone();
    match (nics[a].pci, nics[b].pci) {
        (Some(one), Some(other)) if one != other => one < other,
        (Some(_), None) => true,
        (None, Some(_)) => false,
        _ if name(a) == name(b) => a < b,
        // The names in these tests are letters and a number.
        _ => number(&name(a)).parse::<u32>().unwrap() < number(&name(b)).parse().unwrap(),
    }
}

/// The order in which GPUs take turns at equally near NICs: each turn with its bits mirrored if the number of NICs is a
/// power of two, else as it is.
fn turns(nics: usize) -> Vec<usize> {
    let mut turns = vec![0];
    while turns.len() < nics {
        turns = [0, 1].map(|odd| turns.iter().map(move |turn| 2 * turn + odd).collect::<Vec<_>>()).concat();
    }
    if turns.len() == nics { turns } else { (0..nics).collect() }
}

fn rails(observed: &NodeObservation) -> Vec<Option<u32>> {
    NodeTopology::assemble(observed).0.gpus().iter().map(|gpu| gpu.rail).collect()
}

fn load(name: &str) -> NodeObservation {
    machines::load(name).unwrap().observed
}

/// Changes every device below the host bridges, each before the devices below it.
fn each_device(observed: &mut NodeObservation, change: &mut impl FnMut(&mut PciObservation)) {
    fn below(device: &mut PciObservation, change: &mut impl FnMut(&mut PciObservation)) {
        change(device);
        device.devices.iter_mut().for_each(|device| below(device, change));
    }
    let devices = observed.host.host_bridges.iter_mut().flat_map(|bridge| &mut bridge.devices);
    devices.for_each(|device| below(device, change));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_machines_have_the_rails_of_the_definition(
        observed in prop_oneof![4 => random_node::node(16).boxed(), 1 => random_node::odd_node(8).boxed()],
        addresses in any::<bool>(),
    ) {
        let mut observed = observed;
        if addresses {
            // Every two NICs become functions 0 and 1 of one device.
            let mut cards = 0_u8;
            each_device(&mut observed, &mut |device| {
                if device.kind == PciKind::Nic && device.pci.is_none() && cards < 60 {
                    device.pci = format!("0000:{:02x}:00.{}", 0xf0 - cards / 2, cards % 2).parse().ok();
                    cards += 1;
                }
            });
        }
        let topology = NodeTopology::assemble(&observed).0;
        prop_assert_eq!(rails(&observed), expected(&topology));
    }
}

#[test]
fn built_in_machines_have_the_rails_of_the_definition() {
    for machine in machines::built_in() {
        let observed = load(machine.name);
        let topology = NodeTopology::assemble(&observed).0;
        assert_eq!(rails(&observed), expected(&topology), "{}", machine.name);
    }
}

#[test]
fn rails_match_vendors_drawings() {
    let pairs = |rails: u32| (0..rails).flat_map(|rail| [Some(rail); 2]).collect::<Vec<_>>();
    let own = |gpus: u32| (0..gpus).map(Some).collect::<Vec<_>>();
    for (machine, expected) in [
        // The storage NICs (mlx5_1, 2, 7, 8) are numbered among those of the GPUs.
        ("dgx-h100", own(8)),
        ("dgx-a100", own(8)),
        ("hgx-h200", own(8)),
        ("hgx-b200", own(8)),
        ("dgx2-v100", pairs(8)),
        ("dgx1-v100", pairs(4)),
        ("workstation-a6000", vec![None; 2]),
    ] {
        assert_eq!(rails(&load(machine)), expected, "{machine}");
    }
}

#[test]
fn lost_nics_and_down_links_change_no_other_rail() {
    let mut observed = load("dgx-h100");
    let before = rails(&observed);
    each_device(&mut observed, &mut |device| {
        device.nics.iter_mut().for_each(|nic| nic.mbps = None);
        // The storage NICs are removed.
        device.nics.retain(|nic| !["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"].contains(&nic.name.as_str()));
    });
    assert_eq!(rails(&observed), before);
    let topology = NodeTopology::assemble(&observed).0;
    assert_eq!((topology.rails().len(), topology.gpus_per_rail()), (8, 1));
    // Without its NIC GPU 7 has no rail. The other GPUs keep theirs.
    each_device(&mut observed, &mut |device| device.nics.retain(|nic| nic.name != "mlx5_11"));
    let topology = NodeTopology::assemble(&observed).0;
    assert_eq!(rails(&observed), [&before[..7], &[None]].concat());
    assert_eq!((topology.rails().len(), topology.gpus_per_rail()), (7, 0));
}

#[test]
fn functions_of_a_card_are_one_rail() {
    let mut observed = load("dgx-h100");
    let guid = |number: u64| Guid::new(0xb8ce_f603_00a1_0000 + number);
    let mut number = 0;
    each_device(&mut observed, &mut |device| {
        for nic in &mut device.nics {
            // GPUs 0 and 1 are each near one half of the same card, as with Socket Direct.
            let is_half = nic.name == "mlx5_0" || nic.name == "mlx5_3";
            number += 1;
            nic.system_guid = guid(if is_half { 99 } else { number });
        }
    });
    assert_eq!(rails(&observed), [0, 0, 1, 2, 3, 4, 5, 6].map(Some));
}

#[test]
fn gpus_take_turns_at_equally_near_nics() {
    // As in a VM, everything is below one host bridge. NCCL mirrors the bits of the turn: 0, 4, 2, 6 ...
    let mut observed = load("dgx-h100");
    let mut flat = Vec::new();
    each_device(&mut observed, &mut |device| {
        let is_storage = device.nics.iter().any(|nic| nic.mbps == Some(200_000));
        if matches!(device.kind, PciKind::Gpu | PciKind::Nic) && !is_storage {
            flat.push(device.clone());
        }
    });
    observed.host.host_bridges.truncate(1);
    observed.host.host_bridges[0].devices = flat;
    assert_eq!(rails(&observed), [0, 4, 2, 6, 1, 5, 3, 7].map(Some));
    assert_eq!(rails(&observed), expected(&NodeTopology::assemble(&observed).0));
    // Six is not a power of two, so the turns are not mirrored, and two GPUs take a second round.
    let nics = observed.host.host_bridges[0].devices.iter().filter(|device| device.kind == PciKind::Nic);
    let gone: Vec<_> = nics.skip(6).map(|device| device.pci).collect();
    observed.host.host_bridges[0].devices.retain(|device| !gone.contains(&device.pci));
    assert_eq!(rails(&observed), [0, 1, 2, 3, 4, 5, 0, 1].map(Some));
}
