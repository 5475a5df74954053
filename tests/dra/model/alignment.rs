//! Claims with `matchAttribute`: a GPU and a NIC of one PCIe root, and GPUs that NVLink connects.

use std::collections::BTreeSet;

use linkwise_core::topology::{NicKind, Rank};
use serde_json::{Value, json};

use crate::dra::model::published::{Node, accepted, claim, gpus, list, nodes};
use crate::oracle::{Set, places};

const ROOT: &str = "resource.kubernetes.io/pcieRoot";

/// The NICs of a machine as DRANET publishes them, and for each NIC the set of GPUs on its PCIe root. A NIC is on the
/// root of the GPUs below the same host bridge. The set has only GPUs that publish their root, and none without RDMA.
pub fn dranet(node: &Node) -> (Vec<Value>, Vec<Set>) {
    let (mut nics, mut near) = (Vec::new(), Vec::new());
    for (index, nic) in node.topology.nics().iter().enumerate() {
        let is_rdma = nic.kind == NicKind::Rdma;
        let below =
            |gpu: &usize| is_rdma && nic.level[*gpu] <= Rank::HOST_BRIDGE && node.attribute(*gpu, ROOT).is_some();
        let gpus = (0..node.devices.len()).filter(below).fold(0, |set: Set, gpu| set | 1 << gpu);
        let root =
            places(gpus).find_map(|gpu| node.attribute(gpu, ROOT)).unwrap_or_else(|| format!("pci{index:04x}:ff"));
        let attributes = json!({ROOT: {"string": root}, "rdma": {"bool": is_rdma}});
        nics.push(json!({"name": format!("nic-{index}"), "attributes": attributes}));
        near.push(gpus);
    }
    let pool = json!({"name": node.name, "generation": 1, "resourceSliceCount": 1});
    let slice = json!({
        "kind": "ResourceSlice", "metadata": {"name": format!("00000-dra.net-{}", node.name)},
        "spec": {"driver": "dra.net", "nodeName": node.name, "pool": pool, "devices": nics},
    });
    (vec![accepted(&slice, None)], near)
}

/// A claim for a GPU and a NIC of one PCIe root.
fn aligned() -> Value {
    claim(&["--gpus", "1", "--near", "nic"])
}

#[test]
fn free_gpu_with_a_nic_on_its_pcie_root_is_found() {
    let (mut found, mut refused, mut without) = (0, 0, Vec::new());
    for node in nodes() {
        let (nics, near) = dranet(&node);
        let cluster = node.cluster(&nics);
        let aligned = aligned();
        let knows_roots = near.iter().any(|gpus| *gpus != 0);
        for free in node.availabilities() {
            let is_there = near.iter().any(|gpus| gpus & free != 0);
            let allocation = node.allocated(&cluster, free, &aligned);
            assert_eq!(allocation.is_some(), is_there, "{}: {:?}", node.name, list(free));
            let Some(allocation) = allocation else {
                refused += usize::from(knows_roots);
                continue;
            };
            found += 1;
            let nic = allocation["devices"]["results"][1]["device"].as_str().unwrap().strip_prefix("nic-").unwrap();
            let near = near[nic.parse::<usize>().unwrap()];
            assert_ne!(near & node.set_of(&allocation), 0, "{}: {allocation}", node.name);
        }
        if !knows_roots {
            without.push(node.name);
        }
    }
    // These machines have no NIC on a GPU's root, or are virtual machines, which hide the roots.
    without.sort_unstable();
    let expected = ["azure-ndv2-v100", "azure-ndv4-a100", "gb200-nvl72-node", "pcie-8x-pix-pairs", "power9-v100"];
    assert_eq!(without, [expected.as_slice(), &["workstation-a6000"]].concat());
    assert!(found > 1000 && refused > 10, "{found} found, {refused} refused");
}

#[test]
fn as_many_gpus_and_nics_are_aligned_as_roots_allow() {
    for node in nodes() {
        let (nics, near) = dranet(&node);
        // NICs of one root are near the same GPUs.
        let roots: BTreeSet<Set> = near.iter().copied().filter(|gpus| *gpus != 0).collect();
        let pairs = |root: &Set| near.iter().filter(|gpus| *gpus == root).count().min(root.count_ones() as usize);
        let (possible, claim) = (roots.iter().map(pairs).sum::<usize>(), aligned());
        let mut cluster = node.cluster(&nics);
        for number in 0..=possible {
            match cluster.allocate(node.name, std::slice::from_ref(&claim)) {
                Ok(placement) => cluster.occupy(&placement.allocations[0]).unwrap(),
                Err(why) => assert_eq!(number, possible, "{}: {why}", node.name),
            }
        }
        assert!(cluster.allocate(node.name, &[claim]).is_err(), "{}", node.name);
    }
}

/// The sets of more than one GPU that NVLink connects over any number of hops.
fn nvlink_domains(node: &Node) -> Vec<Set> {
    let count = node.devices.len();
    let mut domains = BTreeSet::new();
    for gpu in 0..count {
        let mut domain: Set = 1 << gpu;
        for _ in 0..count {
            for one in list(domain) {
                domain =
                    (0..count).filter(|other| node.topology.nvlink(one, *other) > 0).fold(domain, |d, o| d | 1 << o);
            }
        }
        domains.insert(domain);
    }
    domains.into_iter().filter(|domain| domain.count_ones() > 1).collect()
}

#[test]
fn free_gpus_of_one_nvlink_domain_are_found() {
    let (mut found, mut refused) = (0, 0);
    for node in nodes() {
        let (domains, cluster) = (nvlink_domains(&node), node.cluster(&[]));
        for count in [2, 4].into_iter().filter(|count| *count <= node.gpus()) {
            let connected = gpus(count, Some("linkwise.dev/nvlinkDomain"));
            for free in node.availabilities() {
                let is_there = domains.iter().any(|domain| (domain & free).count_ones() >= count);
                let chosen = node.chosen(&cluster, free, &connected);
                assert_eq!(chosen.is_some(), is_there, "{}: {count} of {:?}", node.name, list(free));
                match chosen {
                    Some(chosen) => assert!(domains.iter().any(|domain| chosen & !domain == 0), "{}", node.name),
                    None => refused += usize::from(free.count_ones() >= count),
                }
                found += usize::from(chosen.is_some());
            }
        }
    }
    assert!(found > 1000 && refused > 100, "{found} found, {refused} refused");
}
