//! Holds the kubelet's calls for a moment, while another plugin of the same resources ends.
//!
//! A kubelet admits one pod at a time: while one of its calls waits for an answer, the kubelet makes no other. When a
//! plugin ends, kubelets from 1.37 turn to any other plugin of the resource, for a moment also to another socket of the
//! plugin that is ending. A call to that socket would be cut, and the kubelet would reject the pod. The node holds
//! the calls, and `service` waits here.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use linkwise_system::Counted;

/// The switch that holds calls. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct HeldCalls {
    until: watch::Sender<Option<Instant>>,
    waiting: watch::Sender<usize>,
}

impl HeldCalls {
    /// Holds the calls that come from now on, until [`Self::release`] or for `longest`.
    pub fn hold(&self, longest: Duration) {
        self.until.send_replace(Some(Instant::now() + longest));
    }

    /// Releases held calls after this time at the latest.
    pub fn release(&self, after: Duration) {
        let end = Instant::now() + after;
        self.until.send_if_modified(|until| until.is_some_and(|until| until > end) && until.replace(end).is_some());
    }

    /// Waits until at least one call is held.
    pub async fn await_held(&self) {
        // This cannot fail: the sender is ours.
        let _ = self.waiting.subscribe().wait_for(|waiting| *waiting > 0).await;
    }

    /// Waits while calls are held.
    pub(super) async fn pass(&self) {
        let mut held = self.until.subscribe();
        if held.borrow().is_none_or(|until| until <= Instant::now()) {
            return;
        }
        let _waiting = Counted::new(&self.waiting);
        loop {
            let Some(until) = *held.borrow_and_update() else { return };
            tokio::select! {
                () = sleep_until(until) => return,
                changed = held.changed() => if changed.is_err() { return },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn call_waits_until_release_or_the_limit() {
        let (calls, long) = (HeldCalls::default(), Duration::from_secs(3600));
        assert!(calls.pass().now_or_never().is_some(), "nothing is held");
        calls.hold(long);
        assert!(calls.pass().now_or_never().is_none());
        assert!(calls.await_held().now_or_never().is_none(), "a dropped call is not held");
        let release = async {
            calls.await_held().await;
            calls.release(Duration::ZERO);
            // A later release does not hold calls longer.
            calls.release(long);
        };
        tokio::join!(calls.pass(), release);
        assert!(calls.pass().now_or_never().is_some());
        calls.hold(Duration::from_millis(1));
        // The limit ends this hold.
        calls.pass().await;
    }
}
