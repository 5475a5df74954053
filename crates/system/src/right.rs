//! A right that several tasks hold at a time, such as the right to write a node's files: it ends when the last of them
//! has dropped it. A write that has begun keeps the right, even if no task waits for the write any more.

use std::sync::Arc;

use tokio_util::sync::{CancellationToken, DropGuard};

/// One holder's clone of a right.
#[derive(Clone, Debug)]
pub struct Right(Arc<DropGuard>);

impl Default for Right {
    /// A right that has one clone.
    fn default() -> Self {
        Self(Arc::new(CancellationToken::new().drop_guard()))
    }
}

impl Right {
    /// The token that is cancelled when every clone is dropped. The token itself does not keep the right.
    pub fn end(&self) -> CancellationToken {
        self.0.token().clone()
    }

    /// Returns true if these are clones of one right.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn right_ends_with_its_last_clone() {
        let right = Right::default();
        let (other, end) = (right.clone(), right.end());
        assert!(other.is(&right) && !other.is(&Right::default()));
        drop(right);
        assert!(!end.is_cancelled());
        drop(other);
        assert!(end.is_cancelled());
    }
}
