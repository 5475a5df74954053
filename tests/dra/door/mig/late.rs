//! The waits of claims for MIG devices: Unprepare waits for a scan that is newer than its order, Prepare for a claim
//! that is being unprepared.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};

use linkwise_core::claims::{MigOrder, MigTask};

use super::super::node::{KIND, end, start, until, wait_connected, yield_times};
use super::{Behaviour, DEVICE, Prepared, SLOT, instance, prepared, set_behaviour};

#[tokio::test]
async fn scan_older_than_an_order_does_not_end_the_wait() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    node.stop().await;
    // The next process finds a scan from before the device was made.
    {
        let mut driver = driver.lock().unwrap();
        driver.done = 0;
        let instances = mem::take(&mut driver.instances);
        driver.scan();
        driver.instances = instances;
    }
    set_behaviour(&driver, Behaviour::Late);
    node.start();
    wait_connected(&kubelet).await;
    let is_seen = AtomicBool::new(false);
    let scans = async {
        let is_destroy = |order: &MigOrder| matches!(order.task, MigTask::Destroy(..));
        until(|| driver.lock().unwrap().orders.iter().any(is_destroy)).await;
        yield_times(1000).await;
        // The first scan is older than the order, and the second newer.
        for (instances, done) in [(vec![instance("MIG-made-1", SLOT)], 0), (Vec::new(), u64::MAX)] {
            is_seen.store(done > 0, Ordering::Relaxed);
            {
                let mut driver = driver.lock().unwrap();
                (driver.instances, driver.done) = (instances, done);
                driver.scan();
            }
            yield_times(1000).await;
        }
    };
    let ending = async {
        end(&kubelet, &claim).await;
        assert!(is_seen.load(Ordering::Relaxed), "the claim ended before a scan showed that its device is gone");
    };
    tokio::join!(ending, scans);
}

#[tokio::test]
async fn claim_waits_for_another_being_unprepared() {
    let Prepared { node, driver, kubelet, claim: first } = prepared().await;
    let second = node.claim("b", &[("gpus", DEVICE)]);
    set_behaviour(&driver, Behaviour::HangsBefore);
    let next = async {
        until(|| !driver.lock().unwrap().held.is_empty()).await;
        set_behaviour(&driver, Behaviour::Obeys);
        let destroyed = async {
            until(|| node.reads("b") > 0).await;
            // A Prepare that does not wait would refuse during these yields.
            yield_times(100).await;
            let mut driver = driver.lock().unwrap();
            let request = driver.held.pop().unwrap();
            let _ = request.answer.send(driver.carry_out(&request.order));
            driver.scan();
        };
        tokio::join!(start(&kubelet, &second), destroyed).0.unwrap()
    };
    assert_eq!(tokio::join!(end(&kubelet, &first), next).1, [format!("{KIND}=MIG-made-2")]);
}
