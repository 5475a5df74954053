//! [`LinkMatrix`]: a square matrix with one row and one column for each GPU.

use crate::prelude::*;
use serde::{Serialize, Serializer};

/// A symmetric square matrix over the GPUs of a node. Outside of it every cell is the default, such as 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkMatrix<T = u32> {
    size: usize,
    cells: Vec<T>,
}

impl<T: Copy + Default> LinkMatrix<T> {
    /// A matrix of zeros for `size` GPUs.
    pub fn zeros(size: usize) -> Self {
        Self { size, cells: vec![T::default(); size.saturating_mul(size)] }
    }

    /// The number of rows.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The value between `a` and `b`; the default outside of the matrix.
    pub fn get(&self, a: usize, b: usize) -> T {
        self.row(a).get(b).copied().unwrap_or_default()
    }

    /// Sets both cells of a pair; nothing happens outside of the matrix.
    pub fn set(&mut self, a: usize, b: usize, value: T) {
        for (row, column) in [(a, b), (b, a)] {
            if row < self.size
                && column < self.size
                && let Some(cell) = self.cells.get_mut(row * self.size + column)
            {
                *cell = value;
            }
        }
    }

    /// The matrix of some of the GPUs, in the order given.
    pub fn restricted(&self, places: &[usize]) -> Self {
        let cells = places.iter().flat_map(|&a| places.iter().map(move |&b| self.get(a, b)));
        Self { size: places.len(), cells: cells.collect() }
    }

    /// One row; empty outside of the matrix.
    pub fn row(&self, a: usize) -> &[T] {
        let start = a.saturating_mul(self.size);
        self.cells.get(start..start.saturating_add(self.size)).unwrap_or(&[])
    }
}

impl Serialize for LinkMatrix {
    /// Serialises an array of rows.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((0..self.size).map(|a| self.row(a)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrix_is_symmetric_and_zero_outside() {
        let mut matrix = LinkMatrix::zeros(3);
        matrix.set(0, 2, 7);
        matrix.set(0, 3, 9);
        matrix.set(5, 0, 9);
        matrix.set(usize::MAX, 0, 9);
        assert_eq!((matrix.get(2, 0), matrix.get(0, 2), matrix.get(1, 0)), (7, 7, 0));
        assert_eq!((matrix.get(3, 0), matrix.get(0, 3), matrix.row(9).len()), (0, 0, 0));
        assert_eq!(serde_json::to_string(&matrix).unwrap(), "[[0,0,7],[0,0,0],[7,0,0]]");
    }
}
