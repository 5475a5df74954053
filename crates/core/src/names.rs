//! Names that must fit a length limit, such as those of sockets and annotations, and names of restricted characters.

use crate::prelude::*;

/// The length of the suffix of a shortened name: a dash and 16 hexadecimal digits.
const SUFFIX_LENGTH: usize = 17;

/// Returns `name` if it has at most `longest` bytes; otherwise its beginning and a hash of the whole name, so that
/// different names stay different. Every version of linkwise gives the same result, because names outlive the process
/// that made them. If `longest` is below 17, the result is the suffix alone, which is longer than `longest`.
pub fn shortened(name: &str, longest: usize) -> String {
    if name.len() <= longest {
        return name.to_owned();
    }
    let mut kept = longest.saturating_sub(SUFFIX_LENGTH);
    while !name.is_char_boundary(kept) {
        kept = kept.saturating_sub(1);
    }
    let begin = name.get(..kept).unwrap_or_default();
    format!("{begin}-{:016x}", fnv1a(name))
}

/// Returns true for a word of letters, digits and the characters in `others`, with a letter or digit first and last.
pub fn is_word(text: &str, others: &[u8]) -> bool {
    let is_end = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    is_end(bytes.first())
        && is_end(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || others.contains(byte))
}

/// FNV-1a, 64 bits (<http://www.isthe.com/chongo/tech/comp/fnv/>).
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_and_stay_different() {
        assert_eq!(shortened("nvidia.com_gpu", 14), "nvidia.com_gpu");
        // The FNV authors' test vector: "foobar" is 85944171f73967e8.
        assert_eq!(shortened("foobar", 5), "-85944171f73967e8");
        let (one, other) = (format!("{}1", "é".repeat(50)), format!("{}2", "é".repeat(50)));
        assert_eq!(shortened(&one, 40).len(), 39, "a character is not cut in two");
        assert_ne!(shortened(&one, 40), shortened(&other, 40));
    }
}
