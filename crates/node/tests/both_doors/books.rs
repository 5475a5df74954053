//! The test's own record of which part of the machine each running container has. It judges by ids and names, and uses
//! no type of linkwise.

use std::collections::BTreeMap;

/// The MIG devices of the machine while their GPU is in MIG mode: GPU, index, GPU instance, compute instance.
const MIG: [(u8, u8, u8, u8); 6] = [(2, 0, 1, 0), (2, 1, 2, 0), (2, 2, 2, 1), (3, 0, 7, 0), (3, 1, 8, 0), (3, 4, 3, 0)];

/// The number of GPUs of the machine; the last two have MIG devices.
pub const GPUS: u8 = 4;

/// A GPU, or one MIG device of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part {
    pub gpu: u8,
    pub mig: Option<u8>,
}

impl Part {
    /// The part that an id of the device plugin names (`GPU-...3`, `MIG-00000031-...`, `GPU-...3::1`), and true if the
    /// id is a slot.
    pub fn of_id(id: &str) -> (Self, bool) {
        let (uuid, slot) = id.split_once("::").map_or((id, None), |(uuid, slot)| (uuid, Some(slot)));
        let digit = |at: usize| uuid.as_bytes()[at] - b'0';
        let part = match uuid.strip_prefix("MIG-") {
            Some(_) => Self { gpu: digit(10), mig: Some(digit(11)) },
            None => Self { gpu: digit(uuid.len() - 1), mig: None },
        };
        (part, slot.is_some())
    }

    /// The part that the name of a DRA device denotes: `gpu-1`, `gpu-2-mig-3g40gb-gi1-ci0`.
    pub fn of_device(name: &str) -> Self {
        let gpu = name.as_bytes()[4] - b'0';
        let Some((_, instance)) = name.split_once("-gi") else { return Self { gpu, mig: None } };
        let (gi, ci) = instance.split_once("-ci").unwrap();
        let found = MIG.iter().find(|mig| (mig.0, mig.2, mig.3) == (gpu, gi.parse().unwrap(), ci.parse().unwrap()));
        Self { gpu, mig: Some(found.unwrap().1) }
    }

    /// The parts as which a GPU is offered: itself, or its MIG devices.
    pub fn all_of(gpu: u8, in_mig: bool) -> impl Iterator<Item = Self> {
        let parts = MIG.iter().filter(move |mig| in_mig && mig.0 == gpu).map(move |mig| Self { gpu, mig: Some(mig.1) });
        parts.chain((!in_mig).then_some(Self { gpu, mig: None }))
    }

    /// Returns true if both have hardware in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.gpu == other.gpu && (self.mig.is_none() || other.mig.is_none() || self.mig == other.mig)
    }

    /// The UUID of the GPU or MIG device.
    pub fn uuid(self) -> String {
        match self.mig {
            Some(mig) => format!("MIG-000000{}{mig}-0000-0000-0000-000000000000", self.gpu),
            None => format!("GPU-00000000-0000-0000-0000-00000000000{}", self.gpu),
        }
    }
}

/// The parts that containers have, by pod.
#[derive(Debug, Default)]
pub struct Books {
    held: BTreeMap<String, Vec<(Part, bool)>>,
}

impl Books {
    /// Gives parts to a pod's container; the flag of a part is true for a slot. Fails if one overlaps a part of
    /// another pod, unless both are slots.
    pub fn take(&mut self, pod: &str, parts: Vec<(Part, bool)>) -> Result<(), String> {
        for (part, slot) in &parts {
            for (other, held) in self.held.iter().filter(|(other, _)| *other != pod) {
                if let Some((of, _)) = held.iter().find(|(of, by_slot)| of.overlaps(*part) && !(*slot && *by_slot)) {
                    return Err(format!("{pod} gets {part:?}, and {other} has {of:?}"));
                }
            }
        }
        self.held.insert(pod.to_owned(), parts);
        Ok(())
    }

    pub fn release(&mut self, pod: &str) {
        self.held.remove(pod);
    }

    pub fn is_held(&self, gpu: u8) -> bool {
        self.held.values().flatten().any(|(part, _)| part.gpu == gpu)
    }
}
