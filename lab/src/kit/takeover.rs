//! A second linkwise takes over from the first, as in an upgrade, while an application faults on a GPU again and again.

use std::cell::{Cell, OnceCell};
use std::time::Duration;

use anyhow::{Context, Result};
use linkwise_kubelet_box::{KubeletBox, ResourceState};
use tokio::time::{sleep, timeout};

use super::fault::NOTICED;
use super::program::{Linkwise, Metrics};
use super::{KitArgs, LIMIT, Report};

/// The time by which one process may count an XID later than the other.
const APART: Duration = Duration::from_millis(500);

/// `successor` starts the second process, which is returned after the first one's end.
pub(super) async fn play(
    args: &KitArgs,
    report: &Report,
    kubelet: &KubeletBox,
    first: Linkwise,
    successor: impl Future<Output = Result<Linkwise>>,
) -> Result<Linkwise> {
    let before = kubelet.state();
    let (second, is_over, started) = (OnceCell::<Metrics>::new(), Cell::new(false), Cell::new(0));
    let counted = async || -> Result<[u64; 2]> {
        let of_second = match second.get() {
            Some(metrics) => metrics.all_xids().await?,
            None => 0,
        };
        Ok([first.metrics().all_xids().await?, of_second])
    };
    let faults = async {
        let (begin, mut unseen) = (counted().await?, 0);
        while let Some(fault) = args.fault.first().filter(|_| !is_over.get()) {
            let known = counted().await?;
            started.set(started.get() + 1);
            fault.cause().await?;
            let seen = timeout(NOTICED, async {
                while counted().await? == known {
                    sleep(Duration::from_millis(20)).await;
                }
                anyhow::Ok(())
            });
            unseen += usize::from(!matches!(seen.await, Ok(Ok(()))));
            sleep(APART).await;
        }
        let (now, started) = (counted().await?, started.get());
        let by = format!("{} by the first process, {} by the second", now[0] - begin[0], now[1]);
        report.promise(unseen == 0, &format!("XIDs during a takeover: {started}, unseen: {unseen}; counted {by}"))
    };
    let takeover = async {
        let begun = async {
            while started.get() == 0 && !args.fault.is_empty() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        // It begins in the middle of a fault; one that cannot start ends the other side, which says so.
        let _ = timeout(LIMIT, begun).await;
        let successor: Result<Linkwise> = async {
            let successor = successor.await?;
            // Set once.
            let _ = second.set(successor.metrics());
            successor.wait_for_log("took over this node", 1).await?;
            Ok(successor)
        }
        .await;
        is_over.set(true);
        successor
    };
    let (faults, successor) = tokio::join!(faults, takeover);
    let successor = successor.context("the takeover")?;
    faults?;
    first.stop(report).await?;
    let now = kubelet.state();
    let is_kept = |(name, before): (&String, &ResourceState)| {
        let now = now.resources.get(name);
        now.is_some_and(|now| now.connected && now.healthy == before.healthy && now.allocated == before.allocated)
    };
    let is_kept = now.violations.is_empty() && before.resources.iter().all(is_kept);
    report.promise(is_kept, "after the takeover the kubelet has the same healthy devices, and the pod its own")?;
    Ok(successor)
}
