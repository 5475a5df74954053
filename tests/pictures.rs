//! `linkwise topology --format svg`, through the binary: golden files, well-formed pictures of every built-in machine,
//! and harmless pictures and text of machines with hostile names.

use std::fs;
use std::process::Command;

use linkwise_core::topology::PciObservation;
use linkwise_host::machines::{self, Machine};
use roxmltree::Document;

/// Names with characters that XML or a browser interprets.
const HOSTILE: [&str; 4] =
    ["\"<&>]]>", "back\\slash\\N \\\" \\", "</text><script>alert('1')</script>&lt;&#60;", "] } // /* -- <!-- <b>"];

fn printed(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_linkwise")).arg("topology").args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn nic_names(machine: &Machine) -> Vec<String> {
    fn walk(device: &PciObservation, names: &mut Vec<String>) {
        names.extend(device.nics.iter().map(|nic| nic.name.clone()));
        device.devices.iter().for_each(|device| walk(device, names));
    }
    let mut names = Vec::new();
    let bridges = machine.observed.host.host_bridges.iter();
    bridges.flat_map(|bridge| &bridge.devices).for_each(|device| walk(device, &mut names));
    names
}

/// The texts of an SVG file. Checks that it loads no other file and runs no script.
fn texts(svg: &str) -> Vec<String> {
    let document = Document::parse(svg).unwrap();
    for element in document.descendants().filter(|node| node.is_element()) {
        let name = element.tag_name().name();
        assert!(["svg", "g", "title", "rect", "path", "text"].contains(&name), "<{name}>");
        for attribute in element.attributes() {
            assert!(!attribute.name().starts_with("on") && attribute.name() != "href", "{}", attribute.name());
        }
    }
    let texts = document.descendants().filter(|node| node.is_text());
    texts.filter_map(|node| node.text()).map(str::to_owned).collect()
}

#[test]
fn pictures_match_golden_files() {
    for name in ["dgx1-v100", "dgx-h100", "pcie-8x-pix-pairs"] {
        insta::assert_snapshot!(format!("{name}.svg"), printed(&["--node", name, "--format", "svg"]));
    }
}

#[test]
fn picture_in_docs_matches_command_output() {
    let drawn = printed(&["--node", "dgx1-v100", "--format", "svg"]);
    let kept = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/images/dgx1-v100.svg")).unwrap();
    assert!(drawn == kept, "docs/images/dgx1-v100.svg is outdated: run the command of docs/pictures.md again");
}

#[test]
fn pictures_show_each_gpu_and_nic() {
    for built_in in machines::built_in() {
        let machine = machines::load(built_in.name).unwrap();
        let svg = texts(&printed(&["--node", built_in.name, "--format", "svg"]));
        for gpu in &machine.observed.gpus {
            let (name, uuid) = (format!("GPU {}", gpu.index), gpu.uuid.as_str());
            assert!(svg.contains(&name), "{}: no {name}", built_in.name);
            assert!(svg.iter().any(|text| text.contains(uuid)), "{}: no {uuid}", built_in.name);
        }
        for nic in nic_names(&machine) {
            assert!(svg.iter().any(|text| text.contains(&nic)), "{}: no {nic}", built_in.name);
        }
    }
}

#[test]
fn markup_in_names_is_escaped() {
    let folder = tempfile::tempdir().unwrap();
    for hostile in HOSTILE {
        let mut machine = machines::load("dgx1-v100").unwrap();
        machine.title = hostile.to_owned();
        machine.observed.gpus[3].model = Some(hostile.to_owned());
        let nic = &mut machine.observed.host.host_bridges[0].devices[0].devices[0].nics[0];
        nic.name = hostile.to_owned();
        let file = folder.path().join("node.yaml");
        fs::write(&file, machine.to_yaml().unwrap()).unwrap();
        let file = file.to_str().unwrap();

        let svg = texts(&printed(&["--node", file, "--format", "svg"]));
        let exact = |text: &String| text == &format!("GPU 3: {hostile}");
        assert!(svg.iter().any(|text| text == hostile) && svg.iter().any(exact), "{svg:?}");
        assert!(svg.iter().any(|text| text.starts_with("NIC ") && text.contains(hostile)), "{svg:?}");
    }
}

#[test]
fn topology_text_has_no_control_characters() {
    let folder = tempfile::tempdir().unwrap();
    let hostile = "\u{1b}[2J\u{9b}31m\u{202e}x";
    let mut machine = machines::load("dgx1-v100").unwrap();
    machine.title = hostile.to_owned();
    machine.observed.gpus[3].model = Some(hostile.to_owned());
    machine.observed.host.host_bridges[0].devices[0].devices[0].nics[0].name = hostile.to_owned();
    let long_list: Vec<String> = (0..4_000).map(|cpu| (2 * cpu).to_string()).collect();
    machine.observed.host.numa_nodes[0].cpus = long_list.join(",");
    let file = folder.path().join("node.yaml");
    fs::write(&file, machine.to_yaml().unwrap()).unwrap();
    let text = printed(&["--node", file.to_str().unwrap()]);
    assert!(text.chars().all(|char| char == '\n' || char != '\u{202e}' && !char.is_control()), "{text:.2000}");
    assert_eq!(text.matches("\u{fffd}[2J\u{fffd}31m\u{fffd}x").count(), 4, "title, tree twice, matrix");
}
