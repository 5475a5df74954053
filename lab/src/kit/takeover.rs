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

/// The delay before the next fault, because one process may count an XID later than the other.
const FAULT_DELAY: Duration = Duration::from_millis(500);

/// Runs the takeover: `starting` starts the second process, which is returned after the end of the first. `before` is
/// the kubelet's state that must come back.
pub(super) async fn play(
    args: &KitArgs,
    report: &Report,
    (kubelet, before): (&KubeletBox, &State),
    first: Linkwise,
    starting: impl Future<Output = Result<Linkwise>>,
) -> Result<Linkwise> {
    let (second_metrics, is_over) = (OnceCell::new(), Cell::new(false));
    let faults = async {
        match args.fault.first() {
            Some(fault) => cause_faults(report, fault, first.metrics(), &second_metrics, &is_over).await,
            None => Ok(()),
        }
    };
    let takeover = async {
        let taking_over = async {
            let second = starting.await?;
            // Setting cannot fail, because nothing else sets this cell.
            let _ = second_metrics.set(second.metrics());
            second.wait_for_log("took over this node", 1).await?;
            anyhow::Ok(second)
        };
        let second = taking_over.await;
        is_over.set(true);
        second
    };
    let (faults, second) = tokio::join!(faults, takeover);
    let second = second.context("the takeover")?;
    faults?;
    first.stop(report).await?;
    let is_kept = kubelet.wait(|now| is_as_before(before, now)).await.is_ok();
    report.promise(is_kept, "after the takeover the kubelet has the same healthy devices, and the pod its own")?;
    if let Some(fault) = args.fault.first() {
        let is_counted = fault::cause_and_check(fault, second.metrics()).await?;
        report.promise(is_counted, "an XID after the end of the first process is counted by the second")?;
    }
    Ok(second)
}

/// Causes the fault at least once and until the takeover is over. One of the processes must count each XID.
async fn cause_faults(
    report: &Report,
    fault: &Fault,
    first: Metrics,
    second: &OnceCell<Metrics>,
    is_over: &Cell<bool>,
) -> Result<()> {
    // A process that starts or ends may not answer. Then its last count stands.
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
        let seen = timeout(fault::XID_TIMEOUT, async {
            while counted(known).await == known {
                sleep(Duration::from_millis(20)).await;
            }
        });
        unseen += usize::from(seen.await.is_err());
        sleep(FAULT_DELAY).await;
    }
    let [of_first, of_second] = counted(known).await;
    let counts = format!("{} by the first process, {of_second} by the second", of_first - begin);
    report.promise(unseen == 0, &format!("XIDs during a takeover: {caused}, unseen: {unseen}; counted {counts}"))
}
