//! The command prints the claims of docs/dra.md and docs/sharing.md; the tables of docs/dra.md have every attribute.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use linkwise_core::publish::dra::Attribute;
use linkwise_host::machines;

use super::golden::linkwise;
use super::limits::{cut_into_mig, published, with_all_facts};

/// A page of docs/.
fn page(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/{name}.md"))).unwrap()
}

#[test]
fn documented_claims_are_what_the_command_prints() {
    let page = page("dra");
    for (documentation, args) in [
        ("dra", &["claim", "--gpus", "4"][..]),
        ("sharing", &["claim", "--shares", "2", "--name", "half-gpu"]),
        ("sharing", &["claim", "--memory", "20Gi", "--kind", "template", "--name", "gpu-20gi"]),
    ] {
        let printed: String = linkwise(args).lines().map(|line| format!("    {line}\n")).collect();
        assert!(self::page(documentation).contains(&printed), "docs/{documentation}.md does not have\n{printed}");
    }
    for gpus in ["2", "4", "8"] {
        let printed = linkwise(&["claim", "--gpus", gpus]);
        let attributes = printed.lines().filter_map(|line| line.trim().strip_prefix("matchAttribute: linkwise.dev/"));
        let row: Vec<String> = attributes.map(|attribute| format!("`{attribute}`")).collect();
        assert!(page.contains(&format!("| {} | any |", row.join(" "))), "docs/dra.md: groups of {gpus}");
    }
}

#[test]
fn documented_groups_are_those_of_a_dgx_1() {
    let mut devices = published(&machines::load("dgx1-v100").unwrap().observed, &[]);
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    let groups: BTreeSet<&String> = devices.iter().flat_map(|device| device.attributes.keys()).collect();
    let is_group = |name: &&str| ["pair", "quad", "octet"].iter().any(|word| name.starts_with(word));
    let names = groups.iter().filter_map(|key| key.strip_prefix("linkwise.dev/")).filter(is_group);
    let page = page("dra");
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("    ") && line.contains(" A ")).collect();
    let names: Vec<&str> = names.collect();
    assert_eq!(rows.len(), names.len(), "{names:?}");
    for name in names {
        let mut known: Vec<&Attribute> = Vec::new();
        let mut letters = String::new();
        for device in &devices {
            let value = device.attributes.get(&format!("linkwise.dev/{name}"));
            known.extend(value.filter(|value| !known.contains(value)));
            let place = value.and_then(|value| known.iter().position(|other| *other == value));
            letters.push_str(place.map_or(" -", |place| [" A", " B", " C", " D"][place]));
        }
        assert!(rows.iter().any(|row| row.starts_with(&format!("    {name:<7} {letters} "))), "{name} {letters}");
    }
}

#[test]
fn documented_attributes_are_those_that_are_published() {
    let mut keys = BTreeSet::new();
    for machine in machines::built_in() {
        let observed = with_all_facts(machines::load(machine.name).unwrap().observed);
        for observed in [observed.clone(), cut_into_mig(observed, 7)] {
            for device in published(&observed, &[]) {
                keys.extend(device.attributes.into_keys().chain(device.capacity.into_keys()));
            }
        }
    }
    let page = page("dra");
    let is_group = |key: &str| ["pair", "quad", "octet"].iter().any(|word| key.contains(word));
    for key in keys.iter().filter(|key| !is_group(key) && !key.starts_with("memorySlice")) {
        assert!(page.contains(&format!("`{key}`")), "docs/dra.md has no row for {key}");
    }
    let named = page.lines().filter(|line| line.starts_with('|')).flat_map(|line| {
        let cell = line.split('|').nth(1).unwrap_or_default();
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()
    });
    let is_taint = |key: &str| ["linkwise.dev/unhealthy", "linkwise.dev/cordoned"].contains(&key);
    for key in named.filter(|name| name.starts_with("linkwise.dev/") && !is_group(name) && !is_taint(name)) {
        assert!(keys.contains(&key), "docs/dra.md: no machine has {key}");
    }
}
