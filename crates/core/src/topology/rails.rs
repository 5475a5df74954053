//! Rails: for each GPU the place of its nearest RDMA NIC among those of the machine. A fabric with rails joins the NICs
//! of one place of all nodes by one switch.
//!
//! The rule is that of NCCL 2.30, by which its rings enter and leave a node:
//! - The NICs are in the order of their PCI addresses (`ncclIbCompareDevs` in src/transport/net_ib/init.cc), and behind
//!   them those of unknown address in the order of their names, in which the verbs library lists them.
//! - The functions of a card are one NIC (`NCCL_NET_MERGE_LEVEL=PORT`, the default). A card is known by its system
//!   image GUID (`net.asic` in src/graph/topo.cc), or else by the PCI device.
//! - GPUs that are equally near to several NICs are spread over them (`ncclTopoGetLocalNetType`).
//!
//! NICs that serve no GPU (storage, management) have no rail. Of equally near NICs the fastest count. The rate of a NIC
//! whose link is down is unknown, and it counts too: a rail stays while a link is down.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::address::Guid;
use super::node::{Nic, NodeTopology, nearest};
use super::observation::NicKind;

/// A card's identity: its functions have one.
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

/// The RDMA NICs in the order of the machine, each with the place of its card: that of the card's first NIC.
fn cards(nics: &[Nic]) -> Vec<(usize, &Nic)> {
    let mut nics: Vec<&Nic> = nics.iter().filter(|nic| nic.kind == NicKind::Rdma).collect();
    nics.sort_by_key(|nic| (nic.pci.is_none(), nic.pci, nic.names.first().map(|name| numbered(name))));
    let mut places = BTreeMap::new();
    nics.into_iter().enumerate().map(|(place, nic)| (*places.entry(Card::of(nic)).or_insert(place), nic)).collect()
}

/// The rail of each of the first `gpus` GPUs; `None` for a GPU without an RDMA NIC as near as PHB.
pub(super) fn rails(gpus: usize, nics: &[Nic]) -> Vec<Option<u32>> {
    let cards = cards(nics);
    // The number of GPUs so far with the same nearest cards.
    let mut sharing: BTreeMap<BTreeSet<usize>, usize> = BTreeMap::new();
    let mut card = |gpu: usize| {
        // Of a fabric's cards and others (Ethernet) at one distance, those of the fabric.
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

/// The NIC, of `nics` equally near ones, of the GPU with this number among those that share them: its bits are mirrored
/// where the number of NICs is a power of two, so that few GPUs are far apart.
fn spread(gpu: usize, nics: usize) -> Option<usize> {
    let place = gpu.checked_rem(nics)?;
    if !nics.is_power_of_two() {
        return Some(place);
    }
    let bits = nics.trailing_zeros();
    Some((0..bits).filter(|bit| place >> bit & 1 == 1).fold(0, |mirrored, bit| mirrored | 1 << (bits - 1 - bit)))
}

/// A name such that `mlx5_9` comes before `mlx5_10`: the text before the number at its end, the number, the whole.
fn numbered(name: &str) -> (&str, Option<u64>, &str) {
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

    /// The number of GPUs on each rail; 0 where rails differ in it, where a GPU has none, and without rails.
    pub fn gpus_per_rail(&self) -> usize {
        let rails = self.rails();
        let first = rails.values().next().map_or(0, Vec::len);
        let is_even = rails.values().all(|gpus| gpus.len() == first) && rails.len() * first == self.gpus().len();
        if is_even { first } else { 0 }
    }
}
