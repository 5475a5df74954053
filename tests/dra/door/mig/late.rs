//! What claims wait for: a scan that knows of their order, as one that waits for the host's may not; another claim that is
//! being undone.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};

use linkwise_core::claims::{MigOrder, MigTask};

use super::super::node::{KIND, connected, end, start, turns, until};
use super::{DEVICE, Mood, Prepared, SLOT, instance, prepared, set};

#[tokio::test]
async fn scan_older_than_an_order_does_not_end_the_wait() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    node.stop().await;
    // The next process has seen the GPU before the device was made.
    {
        let mut driver = driver.lock().unwrap();
        driver.done = 0;
        let there = mem::take(&mut driver.instances);
        driver.scan();
        driver.instances = there;
    }
    set(&driver, Mood::Late);
    node.start();
    connected(&kubelet).await;
    let is_seen = AtomicBool::new(false);
    let scans = async {
        let is_destroy = |order: &MigOrder| matches!(order.task, MigTask::Destroy(..));
        until(|| driver.lock().unwrap().orders.iter().any(is_destroy)).await;
        turns(1000).await;
        // One from before the order, and one from after it.
        for (instances, done) in [(vec![instance("MIG-made-1", SLOT)], 0), (Vec::new(), u64::MAX)] {
            is_seen.store(done > 0, Ordering::Relaxed);
            {
                let mut driver = driver.lock().unwrap();
                (driver.instances, driver.done) = (instances, done);
                driver.scan();
            }
            turns(1000).await;
        }
    };
    let ending = async {
        end(&kubelet, &claim).await;
        assert!(is_seen.load(Ordering::Relaxed), "the claim ended before a scan knew of its device's end");
    };
    tokio::join!(ending, scans);
}

#[tokio::test]
async fn claim_waits_for_another_being_unprepared() {
    let Prepared { node, driver, kubelet, claim: first } = prepared().await;
    let second = node.claim("b", &[("gpus", DEVICE)]);
    set(&driver, Mood::HangsBefore);
    let next = async {
        until(|| !driver.lock().unwrap().held.is_empty()).await;
        set(&driver, Mood::Obeys);
        let destroyed = async {
            until(|| node.reads("b") > 0).await;
            // A refusal would be on its way by now.
            turns(100).await;
            let mut driver = driver.lock().unwrap();
            let request = driver.held.pop().unwrap();
            let _ = request.answer.send(driver.carry_out(&request.order));
            driver.scan();
        };
        tokio::join!(start(&kubelet, &second), destroyed).0.unwrap()
    };
    assert_eq!(tokio::join!(end(&kubelet, &first), next).1, [format!("{KIND}=MIG-made-2")]);
}
