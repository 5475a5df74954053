//! Claims that come and go: no GPU is in two of them.

use proptest::prelude::*;

use crate::dra_model::published::{gpus, node};

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_two_claims_share_a_gpu(
        machine in prop::sample::select(vec!["dgx1-v100", "dgx-h100", "pcie-8x-pix-pairs", "dgx2-v100"]),
        steps in prop::collection::vec((prop::sample::select(vec![1_u32, 2, 4]), any::<prop::sample::Index>(), any::<bool>()), 1..30),
    ) {
        let node = node(machine);
        let mut cluster = node.cluster(&[]);
        let mut held: Vec<serde_json::Value> = Vec::new();
        for (count, which, ends) in steps {
            if ends && !held.is_empty() {
                let ended = held.swap_remove(which.index(held.len()));
                cluster.release(&ended).unwrap();
            }
            let taken = held.iter().map(|allocation| node.set_of(allocation)).fold(0, |all, set| {
                assert_eq!(all & set, 0, "{machine}: a GPU in two claims");
                all | set
            });
            let outcome = cluster.allocate(node.name, &[gpus(count, None)]);
            prop_assert_eq!(outcome.is_ok(), node.gpus() - taken.count_ones() >= count);
            if let Ok(placement) = outcome {
                cluster.occupy(&placement.allocations[0]).unwrap();
                held.extend(placement.allocations);
            }
        }
    }
}
