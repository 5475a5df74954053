//! A DaemonSet's rolling update with a surge and `maxUnavailable: 0`, as its controller counts it.
//!
//! Read in pkg/controller/daemon of 1.36.2: `podsShouldBeOnNode` (`daemon_controller.go`) and `rollingUpdate`
//! (`update.go`), which `updateDaemonSet` calls in this order. Pure: the caller starts and ends the pods, and asks again
//! when one of them has changed.

use std::collections::BTreeMap;

/// A pod of the DaemonSet, as the API server shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonPod {
    /// The name of the pod.
    pub name: String,
    /// True if it was made from the current template.
    pub is_new: bool,
    /// True if all of its containers are ready. With `minReadySeconds: 0` it is available then too.
    pub is_ready: bool,
    /// True if it was deleted, and has not ended yet.
    pub is_ending: bool,
}

/// The orders of one look of the controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DaemonOrders {
    /// The pods to delete.
    pub delete: Vec<String>,
    /// The nodes that get a new pod.
    pub create_on: Vec<String>,
}

/// The next orders for these nodes, each with its pods, the oldest first.
pub fn rolling_update(nodes: &BTreeMap<String, Vec<DaemonPod>>, max_surge: usize) -> DaemonOrders {
    let managed = manage(nodes);
    // Until its orders are carried out, the controller does not go on (`SatisfiedExpectations`).
    if managed == DaemonOrders::default() { surge(nodes, max_surge) } else { managed }
}

/// The oldest pod of a kind, and all others of that kind.
fn of_kind(pods: &[DaemonPod], is_new: bool) -> (Option<&DaemonPod>, impl Iterator<Item = &DaemonPod>) {
    let mut pods = pods.iter().filter(move |pod| pod.is_new == is_new && !pod.is_ending);
    (pods.next(), pods)
}

/// `podsShouldBeOnNode`: two pods stay on a node only while the old one is ready and the new one is not.
fn manage(nodes: &BTreeMap<String, Vec<DaemonPod>>) -> DaemonOrders {
    let mut orders = DaemonOrders::default();
    for (node, pods) in nodes {
        let ((old, more_old), (new, more_new)) = (of_kind(pods, false), of_kind(pods, true));
        orders.delete.extend(more_old.chain(more_new).map(|pod| pod.name.clone()));
        match (old, new) {
            (None, None) => orders.create_on.push(node.clone()),
            (Some(old), Some(new)) if !old.is_ready || new.is_ready => orders.delete.push(old.name.clone()),
            _ => {}
        }
    }
    orders
}

/// `rollingUpdate` where it surges: a new pod that is not ready takes a place of the surge while the old one is there.
fn surge(nodes: &BTreeMap<String, Vec<DaemonPod>>, max_surge: usize) -> DaemonOrders {
    let mut orders = DaemonOrders::default();
    let (mut surging, mut candidates) = (0, Vec::new());
    for (node, pods) in nodes {
        match (of_kind(pods, false).0, of_kind(pods, true).0) {
            (Some(old), None) if !old.is_ready => orders.create_on.push(node.clone()),
            (Some(_), None) => candidates.push(node.clone()),
            (Some(old), Some(new)) if new.is_ready => orders.delete.push(old.name.clone()),
            (Some(_), Some(_)) => surging += 1,
            (None, _) => {}
        }
    }
    candidates.truncate(max_surge.saturating_sub(surging));
    orders.create_on.append(&mut candidates);
    orders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(pods: &[(&str, &[(bool, bool)])]) -> BTreeMap<String, Vec<DaemonPod>> {
        let pod = |node: &str, (is_new, is_ready): (bool, bool)| DaemonPod {
            name: format!("{node} {}", if is_new { "new" } else { "old" }),
            is_new,
            is_ready,
            is_ending: false,
        };
        pods.iter().map(|(node, pods)| ((*node).to_owned(), pods.iter().map(|it| pod(node, *it)).collect())).collect()
    }

    const OLD: (bool, bool) = (false, true);
    const UNREADY: (bool, bool) = (true, false);

    /// Among them the cases of `TestDaemonSetUpdatesPodsWithMaxSurge` and
    /// `TestDaemonSetUpdatesAllOldPodsNotReadyMaxSurge` (`update_test.go`), `TestSurgePreservesReadyOldPods` and
    /// `TestSurgeDeletesUnreadyOldPods` (`daemon_controller_test.go`).
    #[test]
    fn surge_is_counted_as_the_controller_does() {
        let orders = |delete: &[&str], create_on: &[&str]| DaemonOrders {
            delete: delete.iter().map(|name| (*name).to_owned()).collect(),
            create_on: create_on.iter().map(|name| (*name).to_owned()).collect(),
        };
        let begins = nodes(&[("a", &[OLD]), ("b", &[OLD]), ("c", &[OLD])]);
        assert_eq!(rolling_update(&begins, 1), orders(&[], &["a"]));
        assert_eq!(rolling_update(&begins, 2), orders(&[], &["a", "b"]));
        let waits = nodes(&[("a", &[OLD, UNREADY]), ("b", &[OLD]), ("c", &[OLD])]);
        assert_eq!(rolling_update(&waits, 1), orders(&[], &[]), "one node stops all");
        assert_eq!(rolling_update(&waits, 2), orders(&[], &["b"]));
        let ready = nodes(&[("a", &[OLD, (true, true)]), ("b", &[OLD])]);
        assert_eq!(rolling_update(&ready, 1), orders(&["a old"], &[]));
        let neither = nodes(&[("a", &[(false, false), UNREADY]), ("b", &[OLD])]);
        assert_eq!(rolling_update(&neither, 1), orders(&["a old"], &[]), "an old pod that is not ready stops nothing");
        let unready = nodes(&[("a", &[(false, false)]), ("b", &[OLD, UNREADY])]);
        assert_eq!(rolling_update(&unready, 1), orders(&[], &["a"]), "beyond the surge");
        let alone = nodes(&[("a", &[UNREADY]), ("b", &[OLD]), ("c", &[])]);
        assert_eq!(rolling_update(&alone, 1), orders(&[], &["c"]));
        let done = nodes(&[("a", &[UNREADY]), ("b", &[(true, true)])]);
        assert_eq!(rolling_update(&done, 1), orders(&[], &[]));
    }
}
