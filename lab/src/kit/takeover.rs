//! A second linkwise takes over from the first, as in an upgrade, while an application faults on a GPU again and again.

use std::cell::{Cell, OnceCell};
use std::time::Duration;

use anyhow::{Context, Result};
use linkwise_kubelet_box::{KubeletBox, State};
use tokio::time::{sleep, timeout};

use super::fault::{self, Fault};
use super::plugin::is_as_before;
use super::program::{Linkwise, Metrics};
use super::{KitArgs, Report};

/// The time by which one process may count an XID later than the other.
const APART: Duration = Duration::from_millis(500);

/// `successor` starts the second process, which is returned after the first one's end. `before` is the kubelet's state,
/// as it must be afterwards.
pub(super) async fn play(
    args: &KitArgs,
    report: &Report,
    (kubelet, before): (&KubeletBox, &State),
    first: Linkwise,
    successor: impl Future<Output = Result<Linkwise>>,
) -> Result<Linkwise> {
    let (second, is_over) = (OnceCell::new(), Cell::new(false));
    let faults = async {
        match args.fault.first() {
            Some(fault) => cause(report, fault, first.metrics(), &second, &is_over).await,
            None => Ok(()),
        }
    };
    let takeover = async {
        let successor = async {
            let successor = successor.await?;
            // This cell is set here only.
            let _ = second.set(successor.metrics());
            successor.wait_for_log("took over this node", 1).await?;
            anyhow::Ok(successor)
        };
        let successor = successor.await;
        is_over.set(true);
        successor
    };
    let (faults, successor) = tokio::join!(faults, takeover);
    let successor = successor.context("the takeover")?;
    faults?;
    first.stop(report).await?;
    let is_kept = kubelet.wait(|now| is_as_before(before, now)).await.is_ok();
    report.promise(is_kept, "after the takeover the kubelet has the same healthy devices, and the pod its own")?;
    if let Some(fault) = args.fault.first() {
        let is_counted = fault::is_counted(fault, successor.metrics()).await?;
        report.promise(is_counted, "an XID after the end of the first process is counted by the second")?;
    }
    Ok(successor)
}

/// Causes the fault until the takeover is over, at least once. Each XID must be counted by one of the processes.
async fn cause(
    report: &Report,
    fault: &Fault,
    first: Metrics,
    second: &OnceCell<Metrics>,
    is_over: &Cell<bool>,
) -> Result<()> {
    // A process that starts or ends may not answer: what it said last counts.
    let counted = async |last: [u64; 2]| {
        let of_first = first.count(fault.xid, None).await.unwrap_or(last[0]);
        let of_second = match second.get() {
            Some(metrics) => metrics.count(fault.xid, None).await.unwrap_or(last[1]),
            None => 0,
        };
        [of_first, of_second]
    };
    let begin = first.count(fault.xid, None).await?;
    let (mut known, mut caused, mut unseen) = ([begin, 0], 0, 0);
    while caused == 0 || !is_over.get() {
        known = counted(known).await;
        caused += 1;
        fault.cause().await?;
        let seen = timeout(fault::NOTICED, async {
            while counted(known).await == known {
                sleep(Duration::from_millis(20)).await;
            }
        });
        unseen += usize::from(seen.await.is_err());
        sleep(APART).await;
    }
    let [of_first, of_second] = counted(known).await;
    let by = format!("{} by the first process, {of_second} by the second", of_first - begin);
    report.promise(unseen == 0, &format!("XIDs during a takeover: {caused}, unseen: {unseen}; counted {by}"))
}
