//! Reads fuzz input as numbers, for the checks that make values from numbers.

/// Bytes, taken from the front. After their end come zeros.
pub struct Bytes<'b>(pub &'b [u8]);

impl Bytes<'_> {
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `end`, which is at most 256; 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()).checked_rem(end).unwrap_or(0)
    }

    /// Any number, from four bytes.
    pub fn any(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    /// A value in two of three cases.
    pub fn maybe<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.below(3) > 0).then(|| value(self))
    }
}
