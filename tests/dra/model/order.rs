//! Claims without constraints, which get GPUs in the order in which linkwise publishes them.

use crate::dra::model::published::{gpus, nodes};
use crate::oracle::{Oracle, Set, places};

/// The first free GPUs in the order of the PCI addresses, which is also the order of the places in a set.
fn first_on_the_bus(free: Set, count: u32) -> Set {
    places(free).take(count as usize).fold(0, |set, gpu| set | 1 << gpu)
}

#[test]
fn published_order_is_no_worse_than_bus_order() {
    for node in nodes() {
        let (oracle, cluster) = (Oracle::new(&node.topology), node.cluster(&[]));
        for count in [2, 4, 8].into_iter().filter(|count| *count <= node.gpus()) {
            let claim = gpus(count, None);
            let (mut published, mut on_the_bus) = (0, 0);
            for free in node.availabilities() {
                let chosen = node.chosen(&cluster, free, &claim);
                assert_eq!(chosen.is_some(), free.count_ones() >= count, "{}: {count} of {free:b}", node.name);
                if let Some(chosen) = chosen {
                    published += oracle.collective(chosen);
                    on_the_bus += oracle.collective(first_on_the_bus(free, count));
                }
            }
            assert!(published >= on_the_bus, "{}: {count} GPUs: {published} < {on_the_bus}", node.name);
        }
    }
}
