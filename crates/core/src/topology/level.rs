//! Levels and ranks: the distance between two devices on the PCIe side; and [`LinkMatrix`], one value for each pair of
//! GPUs.

use crate::prelude::*;

use serde::{Deserialize, Serialize};

/// NVML's levels (`nvmlGpuTopologyLevel_t`), nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyLevel {
    /// The devices are on one board (NVML 0).
    Internal,
    /// One PCIe switch is above both (NVML 10), PIX.
    Single,
    /// Several PCIe switches and no host bridge are on the path (NVML 20), PXB.
    Multiple,
    /// One PCI host bridge is above both (NVML 30), PHB.
    HostBridge,
    /// Host bridges of one NUMA node are above them (NVML 40), NODE.
    Node,
    /// The path crosses NUMA nodes (NVML 50), SYS.
    System,
}

impl TopologyLevel {
    /// The symbol that nvidia-smi prints.
    pub fn symbol(self) -> &'static str {
        Rank::new(self, false).symbol()
    }

    /// Reads NVML's number of a level; `None` for a number that NVML does not define.
    pub fn from_nvml(number: u32) -> Option<Self> {
        let levels = [Self::Internal, Self::Single, Self::Multiple, Self::HostBridge, Self::Node, Self::System];
        levels.get(usize::try_from(number / 10).ok()?).copied().filter(|_| number.is_multiple_of(10))
    }
}

/// A level as linkwise compares it: 0 is PIX, 1 PXB, 2 PHB, 3 NODE, 4 SYS inside one package, 5 SYS between packages
/// (or if the package is unknown).
///
/// NVML calls both 4 and 5 SYS, so on a machine with several NUMA nodes in a package its levels do not show whether a
/// path stays inside the package.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Rank(u8);

impl Rank {
    /// The farthest rank, which a pair also has if nothing is known about it.
    pub const FARTHEST: Self = Self(5);
    /// The farthest rank of two GPUs below one PCIe switch, or a cascade of them.
    pub const PCIE_SWITCHES: Self = Self(1);
    /// PHB: the farthest rank at which a NIC counts as near a GPU, and the nearest of paths through a host bridge.
    pub const HOST_BRIDGE: Self = Self(2);

    /// The rank of a level; `is_same_package` splits SYS.
    pub fn new(level: TopologyLevel, is_same_package: bool) -> Self {
        Self(match level {
            TopologyLevel::Internal | TopologyLevel::Single => 0,
            TopologyLevel::Multiple => 1,
            TopologyLevel::HostBridge => 2,
            TopologyLevel::Node => 3,
            TopologyLevel::System if is_same_package => 4,
            TopologyLevel::System => 5,
        })
    }

    /// The rank as a number, 0 to 5.
    pub fn number(self) -> u8 {
        self.0
    }

    /// The symbol that nvidia-smi prints for it.
    pub fn symbol(self) -> &'static str {
        ["PIX", "PXB", "PHB", "NODE", "SYS", "SYS"].get(usize::from(self.0)).copied().unwrap_or("SYS")
    }
}

/// A symmetric square matrix over the GPUs of a node. Outside of it every cell is the default, such as 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LinkMatrix<T> {
    size: usize,
    cells: Vec<T>,
}

impl<T: Copy + Default> LinkMatrix<T> {
    /// A matrix of zeros for `size` GPUs.
    pub fn zeros(size: usize) -> Self {
        Self { size, cells: vec![T::default(); size.saturating_mul(size)] }
    }

    /// The index of the cell in row `a` and column `b`; `None` outside of the matrix.
    fn cell(&self, a: usize, b: usize) -> Option<usize> {
        (a < self.size && b < self.size).then(|| a * self.size + b)
    }

    /// The value between `a` and `b`; the default outside of the matrix.
    pub fn get(&self, a: usize, b: usize) -> T {
        self.cell(a, b).and_then(|cell| self.cells.get(cell)).copied().unwrap_or_default()
    }

    /// Sets both cells of a pair; nothing happens outside of the matrix.
    pub fn set(&mut self, a: usize, b: usize, value: T) {
        for cell in [self.cell(a, b), self.cell(b, a)].into_iter().flatten() {
            if let Some(cell) = self.cells.get_mut(cell) {
                *cell = value;
            }
        }
    }

    /// The matrix of some of the GPUs, in the order given.
    pub fn restricted(&self, places: &[usize]) -> Self {
        let cells = places.iter().flat_map(|&a| places.iter().map(move |&b| self.get(a, b)));
        Self { size: places.len(), cells: cells.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvml_numbers_name_their_levels() {
        let symbols = [0, 10, 20, 30, 40, 50].map(|number| TopologyLevel::from_nvml(number).map(TopologyLevel::symbol));
        assert_eq!(symbols, ["PIX", "PIX", "PXB", "PHB", "NODE", "SYS"].map(Some));
        assert_eq!([5, 11, 60, u32::MAX].map(TopologyLevel::from_nvml), [None; 4]);
    }

    #[test]
    fn matrix_is_symmetric_and_zero_outside() {
        let mut matrix = LinkMatrix::zeros(3);
        matrix.set(0, 2, 7);
        matrix.set(0, 3, 9);
        matrix.set(5, 0, 9);
        matrix.set(usize::MAX, 0, 9);
        assert_eq!((matrix.get(2, 0), matrix.get(0, 2), matrix.get(1, 0)), (7, 7, 0));
        assert_eq!((matrix.get(3, 0), matrix.get(0, 3), matrix.get(9, 9)), (0, 0, 0));
        assert_eq!(matrix.cells, [0, 0, 7, 0, 0, 0, 7, 0, 0]);
    }
}
