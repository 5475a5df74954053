//! A right that several tasks have at a time, such as the one to write a node's files: it ends when the last of them has
//! dropped it. A write that a disk has already keeps the right, also if nothing waits for the write any more.

use std::sync::Arc;

use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};

/// A clone of a right, with the value that has to live as long as the right.
#[derive(Debug)]
pub struct Right<T = ()>(Arc<Inner<T>>);

/// The value is dropped before the end is told: fields are dropped in this order.
#[derive(Debug)]
struct Inner<T> {
    _value: T,
    end: DropGuard,
}

impl<T> Clone for Right<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Right<T> {
    /// A right that has one clone.
    pub fn new(value: T) -> Self {
        Self(Arc::new(Inner { _value: value, end: CancellationToken::new().drop_guard() }))
    }

    /// Completes when every clone is dropped. The future itself does not keep the right.
    pub fn ended(&self) -> WaitForCancellationFutureOwned {
        self.0.end.token().clone().cancelled_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn right_ends_with_its_last_clone_and_after_its_value() {
        let value = Arc::new(());
        let right = Right::new(Arc::clone(&value));
        let (other, mut ended) = (right.clone(), Box::pin(right.ended()));
        drop(right);
        assert!((&mut ended).now_or_never().is_none());
        drop(other);
        assert_eq!(Arc::strong_count(&value), 1);
        ended.await;
    }
}
