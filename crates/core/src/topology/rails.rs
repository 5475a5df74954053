//! Rails: a GPU's rail is the place of its nearest RDMA NIC among the NICs that serve GPUs. In a rail-optimized fabric,
//! one switch joins the NICs that have the same place in all nodes.
//!
//! The rules are those by which NCCL 2.30 chooses the NICs where its rings enter and leave a node:
//! - The NICs are in the order of their PCI addresses (`ncclIbCompareDevs` in src/transport/net_ib/init.cc). NICs of
//!   unknown address follow in the order of their names, in which the verbs library lists them.
//! - The functions of a card count as one NIC (`NCCL_NET_MERGE_LEVEL=PORT`, the default). A card is known by its system
//!   image GUID (`net.asic` in src/graph/topo.cc), or else by the PCI device.
//! - GPUs that are equally near to several NICs are spread over them (`ncclTopoGetLocalNetType`).
//!
//! NICs that serve no GPU (storage, management) have no rail. Of equally near NICs only the fastest count, and those of
//! unknown rate: the rate is unknown while a link is down, and a GPU must keep its rail then.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::address::Guid;
use super::node::{Nic, NodeTopology, nearest};
use super::observation::NicKind;

/// The identity of a card, which its functions have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Card<'a> {
    System(Guid),
    /// Domain, bus and device.
    Pci(u32, u8, u8),
    Name(&'a str),
}

impl<'a> Card<'a> {
    fn of(nic: &'a Nic) -> Self {
        match (nic.system_guid, nic.pci) {
            (Some(guid), _) => Self::System(guid),
            (None, Some(pci)) => Self::Pci(pci.domain(), pci.bus(), pci.device()),
            (None, None) => Self::Name(nic.names.first().map_or("", String::as_str)),
        }
    }
}

/// The RDMA NICs in NCCL's order, each with the place of its card, which is that of the card's first NIC.
fn cards(nics: &[Nic]) -> Vec<(usize, &Nic)> {
    let mut nics: Vec<&Nic> = nics.iter().filter(|nic| nic.kind == NicKind::Rdma).collect();
    nics.sort_by_key(|nic| (nic.pci.is_none(), nic.pci, nic.names.first().map(|name| natural_key(name))));
    let mut places = BTreeMap::new();
    nics.into_iter().enumerate().map(|(place, nic)| (*places.entry(Card::of(nic)).or_insert(place), nic)).collect()
}

/// The rail of each of the `gpus` GPUs; `None` for a GPU without an RDMA NIC as near as PHB.
pub(super) fn rails(gpus: usize, nics: &[Nic]) -> Vec<Option<u32>> {
    let cards = cards(nics);
    // The number of GPUs so far with the same nearest cards.
    let mut sharing: BTreeMap<BTreeSet<usize>, usize> = BTreeMap::new();
    let mut card = |gpu: usize| {
        // At the same distance, cards with InfiniBand ports come before others (Ethernet).
        let near = nearest(cards.iter().copied(), gpu, |nic| nic.port_guids.is_empty());
        let near: BTreeSet<usize> = near.into_iter().collect();
        let before = sharing.entry(near.clone()).or_default();
        let card = near.iter().nth(spread(*before, near.len())?).copied();
        *before += 1;
        card
    };
    let own: Vec<Option<usize>> = (0..gpus).map(&mut card).collect();
    let used: BTreeSet<usize> = own.iter().flatten().copied().collect();
    let rail = |card: Option<usize>| u32::try_from(used.iter().position(|used| Some(*used) == card)?).ok();
    own.into_iter().map(rail).collect()
}

/// Chooses one of `nics` equally near NICs for a GPU by its number among the GPUs that share them: the number modulo
/// `nics`. If `nics` is a power of two, this remainder's bits are mirrored, so that a few GPUs get NICs far apart.
fn spread(gpu: usize, nics: usize) -> Option<usize> {
    let place = gpu.checked_rem(nics)?;
    if !nics.is_power_of_two() {
        return Some(place);
    }
    let bits = nics.trailing_zeros();
    Some((0..bits).filter(|bit| place >> bit & 1 == 1).fold(0, |mirrored, bit| mirrored | 1 << (bits - 1 - bit)))
}

/// The key that sorts `mlx5_9` before `mlx5_10`: the text before the number at the end, the number, the whole name.
fn natural_key(name: &str) -> (&str, Option<u64>, &str) {
    let text = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (text, name.get(text.len()..).and_then(|number| number.parse().ok()), name)
}

impl NodeTopology {
    /// The GPUs on each rail, by place. GPUs without a rail are left out.
    pub fn rails(&self) -> BTreeMap<u32, Vec<usize>> {
        let mut rails: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (place, gpu) in self.gpus().iter().enumerate() {
            if let Some(rail) = gpu.rail {
                rails.entry(rail).or_default().push(place);
            }
        }
        rails
    }

    /// The number of GPUs on each rail; 0 if the rails have different numbers, if a GPU has no rail, and without rails.
    pub fn gpus_per_rail(&self) -> usize {
        let rails = self.rails();
        let first = rails.values().next().map_or(0, Vec::len);
        let is_even = rails.values().all(|gpus| gpus.len() == first) && rails.len() * first == self.gpus().len();
        if is_even { first } else { 0 }
    }
}
