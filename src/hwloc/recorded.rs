//! Hosts recorded as hwloc XML (what `lstopo host.xml` writes), with the NVIDIA GPUs that hwloc saw.
//!
//! The text must be well-formed and its nesting bounded: hwloc's own reader is C and recurses. Whoever calls has seen to that.

use hwlocality::Topology;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::ObjectAttributes;
use hwlocality::topology::builder::TypeFilter;

use super::{DISPLAY, NVIDIA, Sysfs, address, walk};
use crate::topology::{GpuObservation, GpuUuid, HostObservation, PciAddress};

/// What a hwloc XML says of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// The host. What links can do and what NICs carry is not in such a file.
    pub host: HostObservation,
    /// The NVIDIA GPUs, in NVML's order where hwloc recorded it, else by PCI address. hwloc knows no NVLinks.
    pub gpus: Vec<GpuObservation>,
}

/// Why a hwloc XML cannot be read, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HwlocXmlError {
    /// A later hwloc wrote it.
    #[error(
        "hwloc XML version {found}; the hwloc of this build reads up to version {major}.x (lstopo --export-xml-flags v{major} writes that)"
    )]
    Newer {
        /// The version in the file.
        found: String,
        /// The major version of the hwloc we run with.
        major: usize,
    },
    /// hwloc refuses it.
    #[error("hwloc cannot read it: {0}")]
    Refused(String),
}

/// Reads a hwloc XML of the versions that the hwloc we run with knows.
pub fn read_xml(text: &str) -> Result<Recorded, HwlocXmlError> {
    let major = hwlocality::hwloc_api_version() >> 16;
    if let Some(found) = version(text)
        && found.split('.').next().and_then(|number| number.parse::<usize>().ok()).is_some_and(|number| number > major)
    {
        let found = found.chars().filter(|c| !c.is_control()).take(20).collect();
        return Err(HwlocXmlError::Newer { found, major });
    }
    let topology = load(text)?;
    // There is no sysfs beside a file: nothing is to be read from this machine's.
    let host = walk(&topology, &Sysfs::nowhere());
    Ok(Recorded { host, gpus: gpus(&topology) })
}

/// The `version` of the root element; hwloc 1 wrote none.
fn version(text: &str) -> Option<&str> {
    let (_, from) = text.split_once("<topology")?;
    let (tag, _) = from.split_once('>')?;
    let (_, value) = tag.split_once("version=")?;
    let quote = value.chars().next().filter(|quote| ['"', '\''].contains(quote))?;
    value.strip_prefix(quote)?.split_once(quote).map(|(version, _)| version)
}

fn load(text: &str) -> Result<Topology, HwlocXmlError> {
    fn refused(error: impl std::fmt::Display) -> HwlocXmlError {
        HwlocXmlError::Refused(error.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
    }
    let builder = Topology::builder().with_io_type_filter(TypeFilter::KeepAll).map_err(refused)?;
    builder.from_xml(text).map_err(refused)?.build().map_err(|error| {
        let cause = error.errno.map_or_else(|| "no cause given".to_owned(), |errno| errno.to_string());
        refused(format!("{}: {cause}", error.api))
    })
}

/// The NVIDIA GPUs of the PCI tree, with what the NVML and CUDA devices below them tell.
fn gpus(topology: &Topology) -> Vec<GpuObservation> {
    let mut seen: Vec<(Option<u32>, PciAddress, &TopologyObject)> = topology
        .pci_devices()
        .filter_map(|object| match object.attributes() {
            Some(ObjectAttributes::PCIDevice(pci)) if pci.vendor_id() == NVIDIA && pci.class_id() >> 8 == DISPLAY => {
                Some((nvml_index(object), address(pci)?, object))
            }
            _ => None,
        })
        .collect();
    seen.sort_unstable_by_key(|(index, pci, _)| (index.is_none(), *index, *pci));
    let gpus = seen.into_iter().zip(0..).map(|((_, pci, object), index)| GpuObservation {
        index,
        uuid: info(object, "NVIDIAUUID").and_then(|uuid| uuid.parse().ok()).unwrap_or_else(|| GpuUuid::made_up(pci)),
        pci,
        model: info(object, "GPUModel"),
        minor: None,
        compute_capability: None,
        memory_mib: None,
        numa: None,
        pcie: None,
        nvlinks: None,
        c2c: None,
        display: None,
        mig: None,
        fabric: None,
        common_ancestors: Default::default(),
    });
    gpus.collect()
}

/// N of the `nvmlN` below a PCI function.
fn nvml_index(function: &TopologyObject) -> Option<u32> {
    let mut names = function.io_children().filter_map(|device| device.name()?.to_str().ok());
    names.find_map(|name| name.strip_prefix("nvml")?.parse().ok())
}

/// A fact about a PCI function, from whichever device below it tells.
fn info(function: &TopologyObject, key: &str) -> Option<String> {
    let mut values = function.io_children().filter_map(|device| device.info(key)?.to_str().ok());
    values.find(|value| !value.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{NodeObservation, NodeTopology};

    /// Two packages; on the first a switch with two GPUs and a NIC, on the second a GPU on a root port.
    const HOST: &str = include_str!("testdata/two-packages.xml");

    #[test]
    fn a_host_and_its_gpus_are_read() {
        let recorded = read_xml(HOST).unwrap();
        assert_eq!(recorded.host.numa_nodes.len(), 2);
        let gpus: Vec<_> = recorded.gpus.iter().map(|gpu| (gpu.index, gpu.pci.to_string())).collect();
        let expected = [(0, "0000:03:00.0"), (1, "0000:04:00.0"), (2, "0000:81:00.0")];
        assert_eq!(gpus, expected.map(|(index, pci)| (index, pci.to_owned())));
        let observed = NodeObservation { gpus: recorded.gpus, host: recorded.host, ..NodeObservation::default() };
        let (topology, warnings) = NodeTopology::assemble(&observed);
        assert_eq!(warnings, []);
        assert_eq!([topology.symbol(0, 1), topology.symbol(0, 2)], ["PIX", "SYS"]);
    }

    #[test]
    fn versions_are_found_however_they_are_quoted() {
        for (text, found) in [
            ("<topology version=\"3.0\">", Some("3.0")),
            ("<!DOCTYPE topology SYSTEM \"x\"><topology  version='2.0'>", Some("2.0")),
            ("<topology>\n<object version=\"3.0\"/>", None),
            ("<topology version=3>", None),
            ("<topology version=\"3", None),
            ("", None),
        ] {
            assert_eq!(version(text), found, "{text}");
        }
    }

    #[test]
    fn what_hwloc_cannot_read_is_refused_in_a_line() {
        let newer = HOST.replacen("version=\"2.0\"", "version=\"3.0\"", 1);
        assert_ne!(newer, HOST);
        let cuts = (0..HOST.len() - 20).step_by(97).filter_map(|cut| HOST.get(..cut).map(str::to_owned));
        let others =
            ["", "words", "<topology version=\"2.0\"/>", "<topology version=\"2.0\"><object/></topology>", "\0"];
        for text in cuts.chain(others.map(str::to_owned)).chain([newer.clone()]) {
            let message = read_xml(&text).unwrap_err().to_string();
            assert!(!message.contains('\n') && !message.is_empty(), "{message}");
        }
        assert!(read_xml(&newer).unwrap_err().to_string().contains("version 3.0"));
    }
}
