//! The layout of the pictures of built-in and odd machines, checked by its rectangles.

use super::Picture;
use super::layout::{Layout, Rect, Text};
use super::style::{Kind, LineKind, width};
use crate::machines::{self, Machine};
use linkwise_core::topology::{NodeObservation, NodeTopology, NumaNodeObservation, NvLinkRemote, PciObservation};

/// The rectangle of a text, by its measured width.
fn around(text: &Text) -> Rect {
    let wide = width(&text.text, text.style);
    let x = if text.is_centred { text.x - wide / 2 } else { text.x };
    Rect { x, y: text.y - text.style.size(), width: wide, height: text.style.size() + 2 }
}

fn overlap(a: Rect, b: Rect) -> bool {
    a.x < b.right() && b.x < a.right() && a.y < b.bottom() && b.y < a.bottom()
}

fn inside(inner: Rect, outer: Rect) -> bool {
    inner.x >= outer.x && inner.y >= outer.y && inner.right() <= outer.right() && inner.bottom() <= outer.bottom()
}

/// Checks that no boxes or texts overlap, each text stays in its box, and every GPU, link and port is drawn once.
fn check(machine: &Machine) {
    let name = &machine.name;
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let picture = Picture::new(&machine.title, &machine.observed, &topology);
    let layout = Layout::new(&picture);
    let page = Rect { x: 0, y: 0, width: layout.width, height: layout.height };

    for shape in layout.frames.iter().chain(&layout.shapes) {
        assert!(inside(shape.rect, page), "{name}: {:?}", shape.rect);
        for text in shape.texts() {
            assert!(inside(around(&text), shape.rect), "{name}: {text:?} outside of {:?}", shape.rect);
        }
    }
    let shapes = || layout.frames.iter().chain(&layout.shapes);
    let mut texts: Vec<Rect> =
        shapes().flat_map(|shape| shape.texts().iter().map(around).collect::<Vec<_>>()).collect();
    texts.extend(layout.texts.iter().map(around));
    for (number, a) in texts.iter().enumerate() {
        assert!(inside(*a, page), "{name}: {a:?} outside of {page:?}");
        for b in &texts[number + 1..] {
            assert!(!overlap(*a, *b), "{name}: {a:?} and {b:?}");
        }
    }
    for (number, a) in layout.shapes.iter().enumerate() {
        for b in &layout.shapes[number + 1..] {
            assert!(!overlap(a.rect, b.rect), "{name}: {:?} and {:?}", a.rect, b.rect);
        }
    }
    for gpu in topology.gpus() {
        let uuid = gpu.uuid.as_str();
        let drawn: Vec<Kind> = layout.shapes.iter().filter(|s| s.tooltip.contains(uuid)).map(|s| s.kind).collect();
        assert_eq!(drawn, [Kind::Gpu], "{name}: {uuid}");
    }
    let counts = layout.shapes.iter().filter(|shape| matches!(shape.kind, Kind::Count(_))).count();
    let ports = picture.planes.iter().map(|plane| plane.ports.len()).sum::<usize>();
    assert_eq!(counts, picture.links.len() + ports, "{name}");
    let routes = layout.lines.iter().filter(|line| line.kind != LineKind::Pcie && line.points.len() == 4).count();
    assert_eq!(routes, picture.links.len(), "{name}");
}

fn load(name: &str) -> Machine {
    machines::load(name).unwrap()
}

#[test]
fn built_in_machines_are_drawn_without_overlaps() {
    for machine in machines::built_in() {
        check(&load(machine.name));
    }
}

#[test]
fn unknown_places_are_drawn() {
    let mut machine = load("dgx1-v100");
    machine.name = "half of the host bridges".to_owned();
    machine.observed.host.host_bridges.truncate(2);
    check(&machine);
    machine.name = "no NUMA node".to_owned();
    machine.observed.host.host_bridges.iter_mut().for_each(|bridge| bridge.numa = None);
    check(&machine);
    machine.name = "memory-only nodes".to_owned();
    let memory =
        |id| NumaNodeObservation { id: linkwise_core::topology::NumaNodeId(id), package: None, cpus: String::new() };
    machine.observed.host.numa_nodes.extend((2..40).map(memory));
    check(&machine);
    machine.name = "no host".to_owned();
    machine.observed.host = Default::default();
    check(&machine);
    machine.name = "nothing at all".to_owned();
    machine.observed = NodeObservation::default();
    check(&machine);
}

#[test]
fn sixteen_gpus_are_drawn_without_overlaps() {
    let mut machine = load("dgx-h100");
    let mut more = machine.to_yaml().unwrap().replace("\"0000:", "\"0001:").replace("0000:", "0001:");
    more = more.replace("GPU-00000002", "GPU-0000000a");
    let more = Machine::parse(&more).unwrap().observed;
    machine.observed.gpus.extend(more.gpus.into_iter().map(|gpu| {
        let index = gpu.index + 8;
        linkwise_core::topology::GpuObservation { index, ..gpu }
    }));
    machine.observed.host.host_bridges.extend(more.host.host_bridges);
    machine.name = "sixteen".to_owned();
    check(&machine);
    machine.name = "sixteen without NVLinks".to_owned();
    let mut alone = machine.clone();
    alone.observed.gpus.iter_mut().for_each(|gpu| gpu.nvlinks = None);
    check(&alone);
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let layout = Layout::new(&Picture::new(&machine.title, &machine.observed, &topology));
    assert!(layout.width < 2000, "not in two rows of packages: {} px wide", layout.width);
    machine.name = "two planes".to_owned();
    for (number, gpu) in machine.observed.gpus.iter_mut().enumerate() {
        let clique = u32::from(number % 2 == 0);
        gpu.fabric = Some(linkwise_core::topology::FabricObservation { cluster: "a".to_owned(), clique });
    }
    check(&machine);
    machine.name = "all to all".to_owned();
    let addresses: Vec<_> = machine.observed.gpus.iter().map(|gpu| gpu.pci).collect();
    for gpu in &mut machine.observed.gpus {
        let links = gpu.nvlinks.as_mut().unwrap();
        let mut number = 100;
        for remote in addresses.iter().filter(|pci| **pci != gpu.pci) {
            let remote = NvLinkRemote::Gpu(*remote);
            links.push(linkwise_core::topology::NvLinkObservation {
                links: vec![number, number + 1],
                remote,
                active: true,
            });
            number += 2;
        }
    }
    check(&machine);
}

#[test]
fn long_names_stay_in_boxes() {
    let mut machine = load("dgx1-v100");
    machine.name = "long names".to_owned();
    machine.title = "A title without an end ".repeat(40);
    for (number, gpu) in machine.observed.gpus.iter_mut().enumerate() {
        gpu.model = Some(format!("{}{number}", "é&<W".repeat(60)));
    }
    machine.observed.host.numa_nodes[0].cpus = (0..200).map(|cpu| (2 * cpu).to_string()).collect::<Vec<_>>().join(",");
    fn widen(device: &mut PciObservation) {
        let more: Vec<_> = device.nics.iter().cycle().take(device.nics.len() * 9).cloned().collect();
        device.nics = more;
        device.nics.iter_mut().for_each(|nic| nic.name = "an_interface_with_a_name_".repeat(4));
        device.devices.iter_mut().for_each(widen);
    }
    machine.observed.host.host_bridges.iter_mut().flat_map(|bridge| &mut bridge.devices).for_each(widen);
    check(&machine);
}
