//! The CDI folders of the container runtime, and their specs for NVIDIA devices.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::Node;
use super::finding::Findings;
use linkwise_core::quote::{excerpt, one_line};
use linkwise_core::words::count;

/// The part of a CDI spec that is checked (CDI specification, SPEC.md: `kind` is vendor/class).
#[derive(Deserialize)]
struct Spec {
    kind: String,
    #[serde(default)]
    devices: Vec<Device>,
}

#[derive(Deserialize)]
struct Device {
    name: String,
}

pub(super) fn check(found: &mut Findings, node: &Node) {
    let folders = ["etc/cdi", "var/run/cdi"].map(|folder| node.at(folder));
    let mut specs = 0;
    let mut devices: BTreeMap<String, PathBuf> = BTreeMap::new();
    for folder in &folders {
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries.flatten(),
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => {
                found.warning(
                    format!("{}: {error}", folder.display()),
                    "run as uid 0 with the folder mounted to look at its specs",
                );
                continue;
            }
        };
        let is_spec = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "json" || kind == "yaml");
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_spec).collect();
        paths.sort();
        for path in paths {
            let text = std::fs::read_to_string(&path).map_err(|error| error.to_string());
            // JSON is YAML.
            let spec = text.and_then(|text| serde_saphyr::from_str::<Spec>(&text).map_err(|error| first_line(&error)));
            match spec {
                Ok(spec) if is_nvidias(&spec.kind) => {
                    specs += 1;
                    found.ok(format!("{}: {} of {}", path.display(), count(spec.devices.len(), "device"), excerpt(&spec.kind)));
                    twice(found, &mut devices, spec, &path);
                }
                Ok(_) => {}
                Err(error) => found.warning(
                    format!("{} is no CDI spec: {error}", path.display()),
                    "a runtime with CDI leaves it out, and some refuse every container: write it anew (nvidia-ctk cdi generate) or remove it",
                ),
            }
        }
    }
    if specs == 0 {
        let [first, second] = folders.map(|folder| folder.display().to_string());
        found.skipped(
            format!("no CDI spec for NVIDIA devices in {first} or {second}"),
            Some("not needed where containers get their GPUs by NVIDIA_VISIBLE_DEVICES, from the NVIDIA container runtime"),
        );
    }
}

/// Returns true if devices of a kind are NVIDIA's: `nvidia.com/gpu`, and `k8s.device-plugin.nvidia.com/gpu` of device
/// plugins.
fn is_nvidias(kind: &str) -> bool {
    let vendor = kind.split('/').next().unwrap_or_default();
    vendor == "nvidia.com" || vendor.ends_with(".nvidia.com")
}

/// Reports devices that two specs have.
fn twice(found: &mut Findings, devices: &mut BTreeMap<String, PathBuf>, spec: Spec, path: &Path) {
    let mut common = 0;
    let mut other = None;
    for device in spec.devices {
        let name = format!("{}={}", spec.kind, device.name);
        match devices.get(&name) {
            Some(known) => {
                common += 1;
                other = Some(known.clone());
            }
            None => drop(devices.insert(name, path.to_owned())),
        }
    }
    if let Some(other) = other {
        found.warning(
            format!(
                "{} and {} both have {} of {}",
                other.display(),
                path.display(),
                count(common, "device"),
                excerpt(&spec.kind)
            ),
            "of two in one folder a runtime takes neither, else that of /var/run/cdi: remove the older one",
        );
    }
}

fn first_line(error: &impl ToString) -> String {
    one_line(error.to_string().lines().next().unwrap_or_default())
}
