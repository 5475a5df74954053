//! The named groups of a node, on machines whose groups are known from their makers' drawings.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may panic")]

use std::sync::Arc;

use linkwise_core::allocation::{AllocationTables, GpuSet, Groups};
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines;

fn groups(machine: &str) -> (Groups, AllocationTables) {
    let (topology, _) = NodeTopology::assemble(&machines::load(machine).unwrap().observed);
    let tables = AllocationTables::new(Arc::new(topology));
    (Groups::of(&tables), tables)
}

fn places(sets: &[GpuSet]) -> Vec<Vec<usize>> {
    sets.iter().map(|set| set.places().collect()).collect()
}

#[test]
fn dgx1_has_one_nvlink_domain_four_switches_and_two_packages() {
    let (groups, _) = groups("dgx1-v100");
    assert_eq!(places(&groups.nvlink_domains), [(0..8).collect::<Vec<_>>()]);
    assert_eq!(places(&groups.pcie_switches), [vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7]]);
    let packages: Vec<GpuSet> = groups.packages.values().copied().collect();
    assert_eq!(places(&packages), [vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
    let numa: Vec<GpuSet> = groups.numa_nodes.values().copied().collect();
    assert_eq!(numa, packages);
    // Pairs with two NVLinks, after the drawing of the hybrid cube mesh.
    for pair in &groups.best[&2] {
        let pair: Vec<usize> = pair.places().collect();
        assert!(
            [[0, 3], [0, 4], [1, 2], [1, 5], [2, 3], [3, 7], [4, 7], [5, 6], [6, 7], [2, 6]]
                .contains(&[pair[0], pair[1]]),
            "{pair:?}"
        );
    }
    assert_eq!(places(&groups.best[&4]), [vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
    assert_eq!(groups.best[&8].len(), 1);
}

#[test]
fn gpus_without_nvlink_have_no_domain() {
    let (groups, _) = groups("pcie-8x-pix-pairs");
    assert_eq!(groups.nvlink_domains, []);
    assert_eq!(places(&groups.pcie_switches), places(&groups.best[&2]), "the best pairs share a switch");
}

#[test]
fn every_machine_is_divided_without_gaps_or_overlaps() {
    for machine in machines::built_in().map(|machine| machine.name) {
        let (groups, tables) = groups(machine);
        let gpus = tables.topology().gpus().len();
        for (what, sets) in [("switches", &groups.pcie_switches), ("roots", &groups.pcie_roots)] {
            let mut seen: Vec<usize> = sets.iter().flat_map(|set| set.places()).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..gpus).collect::<Vec<_>>(), "{machine}: {what}");
        }
        for (size, sets) in &groups.best {
            let mut seen: Vec<usize> = sets.iter().flat_map(|set| set.places()).collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!((sets.len(), seen.len()), (gpus / size, gpus / size * size), "{machine}: best {size}");
            assert!(sets.iter().all(|set| set.len() == *size), "{machine}");
        }
    }
}
