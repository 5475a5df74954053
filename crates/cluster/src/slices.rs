//! [`SliceWriter`]: the ResourceSlices by which the scheduler finds this node's GPUs.
//!
//! The only writer of slices. It follows the wanted pool and the stored slices, and makes the slices equal to the pool.
//! It writes at once after a change, but at most one request a second on average: `k` slices are `k` requests, and `k`
//! seconds of rest after them. A kubelet that starts deletes all slices of its node; the writer creates them again. The
//! writer leaves the slices when it ends: the kubelet deletes those of a driver that has been away for 30 s.
//!
//! Nothing is written while the kubelet has not registered the DRA plugin: slices that the kubelet deleted because the
//! plugin is away stay deleted, so that a node which cannot prepare claims attracts no pods. Slices that exist stay as
//! they are, so that a restart of linkwise does not withdraw the GPUs.
//!
//! In a pool with counters, the slices that hold counters are written first. If the server drops the counters, the rest
//! of the pool is not written.
//!
//! [`Repairs`] paces repairs of slices that another program changed. Two DRA drivers of one name would otherwise keep
//! the API server busy, because each writes its slices and deletes the other's. Deletions alone are repaired at once,
//! unless changes came before: after a start of the kubelet, the slices have to be back soon.

mod plan;
pub(crate) mod stored;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, DynamicObject, PostParams, Preconditions};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::{ApiError, Attempts};
use crate::follower::Follower;
use crate::server::{ApiServer, typed};
use linkwise_core::backoff::Backoff;
use linkwise_core::publish::dra::ServerVersion;
use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::state::DRA_DRIVER;
use linkwise_system::send_if_new;
use plan::{Memory, Plan, Write, drops_counters, drops_sharing, generation, plan};
use stored::{OBJECT, Slices, Stored, list, resource, value};

/// The name of linkwise as a field manager at the API server.
const MANAGER: &str = "linkwise";

const TAINTS_DROPPED: &str = "the API server drops taints of devices (feature gate DRADeviceTaints)";

/// The ResourceSlices that a writer would create for a new pool, for a Node with a UID.
pub fn published(pool: &Pool) -> Vec<Value> {
    let plan = plan(pool, &BTreeMap::new(), Some("00000000-0000-0000-0000-000000000000"), &Memory::default());
    let created = |write| if let Write::Create(slice) = write { Some(slice) } else { None };
    plan.writes.into_iter().filter_map(created).collect()
}

/// The field selector of the slices on a node.
fn selector(node: &str) -> String {
    format!("spec.nodeName={node},spec.driver={DRA_DRIVER}")
}

/// Returns true if a slice is this driver's and on the node. A server that ignores the selector also sends slices of
/// other nodes, which the writer must not delete.
fn is_on(node: &str, slice: &Value) -> bool {
    slice["spec"]["nodeName"] == *node && slice["spec"]["driver"] == DRA_DRIVER
}

/// The channel of the wanted pool; `None` before the first pool.
type Wanted = watch::Receiver<Option<Arc<Pool>>>;

/// Writes the slices of one node.
pub struct SliceWriter {
    server: ApiServer,
    node: String,
    /// True while the kubelet has the DRA plugin registered.
    registered: watch::Receiver<bool>,
    /// The slices at the API server, as last seen.
    stored: watch::Sender<Stored>,
    report: watch::Sender<StoredPool>,
    attempts: Attempts,
    memory: Memory,
    /// The Node's UID; the outer `None` means that it was not read yet, the inner one that the server does not show it.
    owner: Option<Option<String>>,
    /// Set once the whole pool was written, or was found to be correct.
    had_slices: bool,
    /// The part of the report that this writer finds out: the release, the trouble, and each kind of field that the
    /// server dropped since this writer began.
    known: StoredPool,
    /// The number of lists of slices when the release was read.
    version_read: Option<u64>,
    /// The pool that was written or found stored last.
    last: Option<Arc<Pool>>,
    /// The moment before which nothing is written.
    next_write: Instant,
    repairs: Repairs,
}

impl SliceWriter {
    /// Makes no request yet. `registered` is true while the kubelet has the DRA plugin registered: otherwise it deletes
    /// the slices. `report` gets the state of the pool.
    pub fn new(
        server: ApiServer,
        node: String,
        registered: watch::Receiver<bool>,
        report: watch::Sender<StoredPool>,
    ) -> Self {
        let pace = *server.pace();
        let attempts = Attempts::of("write the ResourceSlices", &pace);
        Self {
            server,
            node,
            registered,
            stored: watch::Sender::default(),
            report,
            attempts,
            memory: Memory::default(),
            owner: None,
            had_slices: false,
            known: StoredPool::default(),
            version_read: None,
            last: None,
            next_write: Instant::now(),
            repairs: Repairs::new(pace.repair, pace.longest),
        }
    }

    /// Keeps the slices equal to the pool until `shutdown`, or until the channel is closed. Nothing is written while
    /// there is no pool. Errors are logged and tried again. `follow` is another client, for the watch.
    pub async fn run(mut self, follow: ApiServer, mut pool: Wanted, shutdown: CancellationToken) {
        let followed = Slices { node: self.node.clone(), stored: self.stored.clone() };
        let follower = Follower::new(follow, "follow the ResourceSlices", followed);
        let both = async {
            tokio::select! {
                () = follower.run() => {}
                () = self.keep(&mut pool) => {}
            }
        };
        shutdown.run_until_cancelled(both).await;
    }

    async fn keep(&mut self, pool: &mut Wanted) {
        let (mut changes, mut registered) = (self.stored.subscribe(), self.registered.clone());
        loop {
            changes.borrow_and_update();
            registered.borrow_and_update();
            if let Err(error) = self.write(pool).await {
                let pause = self.attempts.failed(&error);
                self.known.trouble = Some(error.to_string());
                self.report(pool.borrow().as_deref());
                // The pause is kept even if the pool changes meanwhile: the server may have asked for it.
                tokio::time::sleep(pause).await;
                continue;
            }
            tokio::select! {
                changed = pool.changed() => if changed.is_err() { return },
                // The channel lives as long as this task.
                _ = changes.changed() => {}
                // The channel is closed once the plugin has ended, and then has no more changes.
                Ok(()) = registered.changed() => {}
            }
        }
    }

    /// Writes the differences. The next call sees any change that happens meanwhile.
    async fn write(&mut self, pool: &mut Wanted) -> Result<(), ApiError> {
        self.read_version().await?;
        let wanted = pool.borrow_and_update().clone();
        // Without its counters, a pool would give out memory slices twice. The writer waits for a pool without
        // counters.
        let wanted = wanted.filter(|pool| !self.known.drops_counters || pool.counters.is_empty());
        let Some(wanted) = wanted.filter(|_| self.stored.borrow().is_known) else {
            self.report(pool.borrow().as_deref());
            return Ok(());
        };
        if self.owner.is_none() {
            self.owner = Some(self.node_uid().await?);
        }
        let planned = self.plan(&wanted);
        if planned.writes.is_empty() {
            self.record_success(wanted);
            return Ok(());
        }
        self.report(Some(&wanted));
        if !self.is_registered() {
            return Ok(());
        }
        if self.last.as_ref().is_some_and(|last| Arc::ptr_eq(last, &wanted)) {
            self.pause(pool).await;
        }
        tokio::time::sleep_until(self.next_write).await;
        // A missing slice may have been deleted with the Node, which then has another UID.
        if self.had_slices && planned.writes.iter().any(|write| matches!(write, Write::Create(_))) {
            self.owner = Some(self.node_uid().await?);
        }
        // Changes during this wait count too.
        let Some(wanted) = pool.borrow_and_update().clone().filter(|_| self.is_registered()) else { return Ok(()) };
        let planned = self.plan(&wanted);
        let requests = planned.writes.len();
        if let Some(generation) = Some(planned.generation).filter(|_| requests > 0) {
            tracing::info!(requests, generation, slices = planned.slices, "writing ResourceSlices");
        }
        for write in planned.writes {
            // Each request is counted before its result is known: a server in trouble must not get more requests.
            self.next_write = self.next_write.max(Instant::now()) + self.server.pace().write;
            self.request(write).await?;
            if self.known.drops_counters && !wanted.counters.is_empty() {
                self.report(Some(&wanted));
                return Ok(());
            }
        }
        self.record_success(wanted);
        Ok(())
    }

    fn is_registered(&self) -> bool {
        *self.registered.borrow()
    }

    /// Records that the pool is stored.
    fn record_success(&mut self, pool: Arc<Pool>) {
        self.attempts.succeeded();
        self.had_slices = true;
        self.known.trouble = None;
        self.report(Some(&pool));
        self.last = Some(pool);
    }

    fn plan(&self, wanted: &Pool) -> Plan {
        plan(wanted, &self.stored.borrow().slices, self.owner.as_ref().and_then(Option::as_deref), &self.memory)
    }

    /// Waits before a repair of slices that another program changes again and again. A change of the pool ends the
    /// wait: a taint of a lost GPU must not wait for a fight with another driver.
    async fn pause(&mut self, pool: &mut Wanted) {
        let (pause, is_news) = self.repairs.pause(self.stored.borrow().disturbances, Instant::now());
        if is_news {
            let why = "another program keeps changing our ResourceSlices; look for another DRA driver of this name";
            tracing::warn!(node = %self.node, driver = %DRA_DRIVER, "{why}");
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = pool.changed() => {}
        }
    }

    async fn request(&mut self, write: Write) -> Result<(), ApiError> {
        let name = write.name().to_owned();
        let result = match write {
            Write::Delete(name, uid) => {
                let preconditions = uid.map(|uid| Preconditions { uid: Some(uid), resource_version: None });
                let params = DeleteParams { preconditions, ..DeleteParams::default() };
                let delete = |client| async move { api(client).delete(&name, &params).await };
                self.server.call(OBJECT, "delete", delete).await.map(|_| None)
            }
            Write::Update(object) => {
                let (name, sent) = (name.clone(), typed(object.clone())?);
                let update = |client| async move { api(client).replace(&name, &params(), &sent).await };
                self.server.call(OBJECT, "update", update).await.map(|stored| Some((object, stored)))
            }
            Write::Create(object) => {
                let sent = typed(object.clone())?;
                let create = |client| async move { api(client).create(&params(), &sent).await };
                self.server.call(OBJECT, "create", create).await.map(|stored| Some((object, stored)))
            }
        };
        match result {
            Ok(Some((sent, answer))) => {
                let answer = value(&answer)?;
                if answer["metadata"]["name"] != *name || !is_on(&self.node, &answer) {
                    return Err(ApiError::Malformed("another object than our ResourceSlice came back".to_owned()));
                }
                if let Some(drops) = self.memory.written(&sent, &answer) {
                    if drops && self.keeps_taints() {
                        tracing::warn!("{TAINTS_DROPPED}");
                    }
                    // The flag stays set: a slice that had taints before the gate was switched off keeps them, while
                    // another loses its own.
                    self.known.drops_taints |= drops;
                }
                if drops_counters(&sent, &answer) && !std::mem::replace(&mut self.known.drops_counters, true) {
                    tracing::warn!("the API server drops counters (feature gate DRAPartitionableDevices)");
                }
                if drops_sharing(&sent, &answer) && !std::mem::replace(&mut self.known.drops_sharing, true) {
                    tracing::warn!(
                        "the API server drops allowMultipleAllocations of devices (feature gate \
                         DRAConsumableCapacity): one claim has all of a shared GPU"
                    );
                }
                self.stored.send_modify(|stored| stored.written(answer));
                Ok(())
            }
            Ok(None) => {
                self.stored.send_modify(|stored| stored.removed(&name));
                Ok(())
            }
            Err(error) => {
                // Another program changed the slices first: the stored slices are listed again. If that fails, the
                // follower brings the changes.
                if matches!(error.code(), Some(404 | 409 | 410))
                    && let Ok((slices, _)) = list(&mut self.server, &self.node).await
                {
                    self.stored.send_modify(|stored| _ = stored.listed(slices));
                }
                Err(error)
            }
        }
    }

    /// Reads the server's release after each list of the slices, the first time before anything is written.
    async fn read_version(&mut self) -> Result<(), ApiError> {
        let lists = self.stored.borrow().lists;
        let is_read = self.version_read == Some(lists);
        if is_read || lists == 0 {
            return Ok(());
        }
        let version = |client: kube::Client| async move { client.apiserver_version().await };
        let had_taints = self.keeps_taints();
        self.known.version = match self.server.call("version", "get", version).await {
            Ok(info) => ServerVersion::parse(&info.git_version),
            // A token that has just changed, or a busy server, says nothing about the release.
            Err(error)
                if error.code().is_some_and(|code| (400..500).contains(&code) && ![401, 408, 429].contains(&code)) =>
            {
                None
            }
            Err(error) => return Err(error),
        };
        self.version_read = Some(lists);
        if had_taints && !self.keeps_taints() {
            tracing::warn!("{TAINTS_DROPPED}");
        }
        Ok(())
    }

    /// Reads the Node's UID. `None` if the server does not show it; then the slices get no owner.
    async fn node_uid(&mut self) -> Result<Option<String>, ApiError> {
        let get = |client| async { Api::<Node>::all(client).get_metadata(&self.node).await };
        match self.server.call("nodes", "get", get).await {
            Ok(node) => Ok(node.metadata.uid),
            Err(error) if error.code() == Some(403) => {
                let error = error.to_string();
                tracing::warn!(
                    error,
                    "own Node unreadable, the ResourceSlices get no owner and stay when the Node is deleted"
                );
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns false if the server dropped a taint, or has a release that drops taints. Ignoring the
    /// release would offer unhealthy GPUs after each start, until the first answer that lacks taints.
    fn keeps_taints(&self) -> bool {
        !self.known.drops_taints && self.known.version.is_none_or(ServerVersion::has_taints_and_counters)
    }

    /// Reports the current slices.
    fn report(&self, wanted: Option<&Pool>) {
        // This comes before the next borrow: with two borrows at once, a change between them would deadlock both.
        let is_wanted = wanted.is_some_and(|wanted| self.plan(wanted).writes.is_empty());
        let found = self.stored.borrow();
        let now = StoredPool {
            is_current: found.is_known && is_wanted,
            slices: found.slices.len(),
            generation: found.slices.values().map(generation).max().unwrap_or(0),
            is_read: found.is_known && self.version_read.is_some(),
            drops_taints: !self.keeps_taints(),
            awaits_kubelet: !self.is_registered(),
            ..self.known.clone()
        };
        drop(found);
        send_if_new(&self.report, now);
    }
}

fn api(client: kube::Client) -> Api<DynamicObject> {
    Api::all_with(client, &resource())
}

fn params() -> PostParams {
    PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() }
}

/// The state of our pool at the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredPool {
    /// Set if the slices have the last wanted content, except fields that the server dropped.
    pub is_current: bool,
    /// The number of slices.
    pub slices: usize,
    /// Their generation.
    pub generation: u64,
    /// Set if the server drops taints (its release is too old, or its gate DRADeviceTaints is off): then unhealthy
    /// devices have to be left out.
    pub drops_taints: bool,
    /// Set if the server drops counters (its gate DRAPartitionableDevices is off): then the rest of a pool with
    /// counters is not written.
    pub drops_counters: bool,
    /// Set once the slices were listed and the release was read.
    pub is_read: bool,
    /// The server's release; `None` if the server does not report it.
    pub version: Option<ServerVersion>,
    /// Set if the server drops `allowMultipleAllocations` (its gate DRAConsumableCapacity is off): then one claim has
    /// the whole device.
    pub drops_sharing: bool,
    /// Set while nothing is written because the kubelet has not registered the DRA plugin.
    pub awaits_kubelet: bool,
    /// The reason why the slices are not current, if it is known.
    pub trouble: Option<String>,
}

/// The most changes by other programs in a row that are repaired at once; further repairs come more and more slowly.
const MAX_QUICK_REPAIRS: u32 = 3;

/// The time without a repair after which the next one counts as the first. It is longer than any pause between two.
const QUIET_INTERVAL: Duration = Duration::from_secs(600);

/// Counts what other programs did to the slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Disturbances {
    /// Creations and changes of slices.
    pub changes: u64,
    /// Deletions of slices.
    pub deletions: u64,
}

/// Paces repairs.
struct Repairs {
    backoff: Backoff,
    /// The disturbances that have been repaired.
    repaired: Disturbances,
    in_a_row: u32,
    last: Option<Instant>,
}

impl Repairs {
    /// No repair was made yet. Pauses double from `first` to `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { backoff: Backoff::new(first, longest), repaired: Disturbances::default(), in_a_row: 0, last: None }
    }

    /// Returns the pause before a repair, from the disturbances so far, and true if they have just become too many.
    pub fn pause(&mut self, disturbances: Disturbances, now: Instant) -> (Duration, bool) {
        let before = std::mem::replace(&mut self.repaired, disturbances);
        if disturbances == before || self.last.is_some_and(|last| now.duration_since(last) >= QUIET_INTERVAL) {
            self.in_a_row = 0;
            self.backoff.reset();
        }
        // If slices were only deleted, the kubelet did it: another driver writes as well.
        if disturbances.changes == before.changes && self.in_a_row == 0 {
            return (Duration::ZERO, false);
        }
        self.last = Some(now);
        self.in_a_row = self.in_a_row.saturating_add(1);
        match self.in_a_row.checked_sub(MAX_QUICK_REPAIRS) {
            None | Some(0) => (Duration::ZERO, false),
            Some(beyond) => (self.backoff.failed(), beyond == 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(changes: u64) -> Disturbances {
        Disturbances { changes, deletions: 0 }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn repairs_slow_down_while_somebody_else_writes() {
        let (mut repairs, now) = (Repairs::new(seconds(1), seconds(4)), Instant::now());
        let mut pauses = (0..8).map(|changes| repairs.pause(changed(changes), now));
        let (quick, slow): (Vec<_>, Vec<_>) = pauses.by_ref().partition(|(pause, _)| pause.is_zero());
        assert_eq!((quick.len(), quick.iter().any(|(_, is_news)| *is_news)), (4, false));
        assert_eq!(slow, [(1, true), (2, false), (4, false), (4, false)].map(|(s, news)| (seconds(s), news)));
        assert_eq!(repairs.pause(changed(7), now), (Duration::ZERO, false), "a write of our own");
        assert_eq!(repairs.pause(changed(8), now), (Duration::ZERO, false), "the first again");
    }

    #[test]
    fn repairs_are_forgotten_after_a_quiet_time() {
        let (mut repairs, now) = (Repairs::new(seconds(1), seconds(120)), Instant::now());
        for day in 1..9 {
            let now = now + seconds(86_400 * day);
            assert_eq!(repairs.pause(changed(day), now), (Duration::ZERO, false), "{day}");
        }
    }

    #[test]
    fn deletions_continue_a_fight_and_begin_none() {
        let (mut repairs, now) = (Repairs::new(seconds(1), seconds(4)), Instant::now());
        let mut pause = |changes, deletions| repairs.pause(Disturbances { changes, deletions }, now).0;
        for wipe in 1..9 {
            assert_eq!(pause(0, wipe), Duration::ZERO, "{wipe}");
        }
        assert_eq!([9, 10, 11, 12, 13].map(|deletions| pause(1, deletions).as_secs()), [0, 0, 0, 1, 2]);
    }
}
