//! [`fnv1a`]: a hash that is the same in every version of linkwise, for names that outlive the process.

/// FNV-1a, 64 bits (draft-eastlake-fnv). Not for keys that an attacker chooses.
pub fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vectors of the draft's appendix C.
    #[test]
    fn fnv1a_matches_published_vectors() {
        assert_eq!(fnv1a(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a("foobar"), 0x8594_4171_f739_67e8);
    }
}
