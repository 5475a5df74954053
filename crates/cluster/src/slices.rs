//! [`SliceWriter`]: the ResourceSlices by which the scheduler finds this node's GPUs.
//!
//! The only writer of slices. It follows a channel with the pool that is wanted and the slices that are stored, and
//! makes the ones like the other: at once after a change, and then at most one request a second. A kubelet that starts
//! deletes all slices of its node; they are created again. The slices stay when the writer ends: kubelets delete those
//! of a driver that has been away for 30 s.

mod follow;
mod plan;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, DynamicObject, PostParams, Preconditions};
use linkwise::backoff::Backoff;
use linkwise::dra::StoredPool;
use linkwise::publish::dra::slice::Pool;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::attempts::Attempts;
use crate::error::ApiError;
use crate::server::ApiServer;

use follow::{OBJECT, SliceFollower, Stored, list, listed, resource, value};
use plan::{Memory, Plan, Write, generation, plan};

/// How many changes by others in a row are repaired at that pace; then ever more slowly, so that two drivers of one
/// name do not keep the API server busy.
const PATIENCE: u32 = 3;

/// The name by which the API server knows our writes.
const MANAGER: &str = "linkwise";

/// Which slices are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceSettings {
    /// The node.
    pub node: String,
    /// The DRA driver.
    pub driver: String,
}

/// Writes the slices of one node.
pub struct SliceWriter {
    server: ApiServer,
    settings: SliceSettings,
    attempts: Attempts,
    memory: Memory,
    /// The Node's UID; the outer `None` before it was read, the inner one where the server does not show it.
    owner: Option<Option<String>>,
    /// Whether any slice was written, or found to be as it should.
    had_slices: bool,
    drops_taints: bool,
    trouble: Option<String>,
    /// Before this moment nothing is written.
    rest: Instant,
    repairs: Repairs,
}

/// Paces repairs of what somebody else changes.
struct Repairs {
    backoff: Backoff,
    /// Disturbances that have been repaired.
    repaired: u64,
    in_a_row: u32,
}

impl Repairs {
    /// The pause before a write, by the number of disturbances so far, and whether they are too many from now on.
    fn pause(&mut self, disturbances: u64) -> (Duration, bool) {
        if disturbances == self.repaired {
            self.in_a_row = 0;
            self.backoff.reset();
            return (Duration::ZERO, false);
        }
        self.repaired = disturbances;
        self.in_a_row = self.in_a_row.saturating_add(1);
        match self.in_a_row.checked_sub(PATIENCE) {
            None | Some(0) => (Duration::ZERO, false),
            Some(beyond) => (self.backoff.failed(), beyond == 1),
        }
    }
}

impl SliceWriter {
    /// Asks nothing yet.
    pub fn new(server: ApiServer, settings: SliceSettings) -> Self {
        let pace = *server.pace();
        let attempts = Attempts::of("write the ResourceSlices", &pace);
        Self {
            server,
            settings,
            attempts,
            memory: Memory::default(),
            owner: None,
            had_slices: false,
            drops_taints: false,
            trouble: None,
            rest: Instant::now(),
            repairs: Repairs { backoff: Backoff::new(pace.write, pace.longest), repaired: 0, in_a_row: 0 },
        }
    }

    /// Keeps the slices as the pool is until `shutdown`, or until the channel is closed. Nothing is written while there is
    /// no pool. Errors are logged and tried again. `follow`: another way to ask, for the watch.
    pub async fn run(
        mut self,
        follow: ApiServer,
        mut pool: watch::Receiver<Option<Arc<Pool>>>,
        report: watch::Sender<StoredPool>,
        shutdown: CancellationToken,
    ) {
        let stored = watch::Sender::new(Stored::default());
        let follower = SliceFollower::new(follow, self.selector());
        let both = async {
            tokio::select! {
                () = follower.run(&stored) => {}
                () = self.keep(&stored, &mut pool, &report) => {}
            }
        };
        shutdown.run_until_cancelled(both).await;
    }

    fn selector(&self) -> String {
        format!("spec.nodeName={},spec.driver={}", self.settings.node, self.settings.driver)
    }

    async fn keep(
        &mut self,
        stored: &watch::Sender<Stored>,
        pool: &mut watch::Receiver<Option<Arc<Pool>>>,
        report: &watch::Sender<StoredPool>,
    ) {
        let mut changes = stored.subscribe();
        loop {
            let wanted = pool.borrow_and_update().clone();
            changes.borrow_and_update();
            if let Some(wanted) = wanted {
                match self.write(&wanted, stored, report).await {
                    Ok(()) => {}
                    Err(error) => {
                        let pause = self.attempts.failed(&error);
                        self.trouble = Some(error.to_string());
                        self.report(&wanted, stored, report);
                        // Also where the pool changes meanwhile: the server may have asked for the pause.
                        tokio::time::sleep(pause).await;
                        continue;
                    }
                }
            }
            tokio::select! {
                changed = pool.changed() => if changed.is_err() { return },
                // It lives as long as this does.
                _ = changes.changed() => {}
            }
        }
    }

    /// Writes what differs. Whatever changes meanwhile is seen by the next call.
    async fn write(
        &mut self,
        wanted: &Arc<Pool>,
        stored: &watch::Sender<Stored>,
        report: &watch::Sender<StoredPool>,
    ) -> Result<(), ApiError> {
        if !stored.borrow().is_known {
            self.report(wanted, stored, report);
            return Ok(());
        }
        if self.owner.is_none() {
            self.owner = Some(self.node_uid().await?);
        }
        let planned = self.plan(wanted, stored);
        self.report(wanted, stored, report);
        if planned.writes.is_empty() {
            self.had_slices = true;
            self.works();
            return Ok(());
        }
        self.wait(stored).await;
        // What is missing was deleted by somebody: by the node's kubelet, or with the Node, which then has another UID.
        if self.had_slices && planned.writes.iter().any(|write| matches!(write, Write::Create(_))) {
            self.owner = Some(self.node_uid().await?);
        }
        // What has changed while this waited counts too.
        let planned = self.plan(wanted, stored);
        let requests = planned.writes.len();
        if let Some(generation) = Some(planned.generation).filter(|_| requests > 0) {
            tracing::info!(requests, generation, slices = planned.slices, "writing ResourceSlices");
        }
        for write in planned.writes {
            // Counted before it is known to have failed: a server in trouble is not to get more.
            self.rest = self.rest.max(Instant::now()) + self.server.pace().write;
            self.request(write, stored).await?;
        }
        self.had_slices = true;
        self.works();
        self.report(wanted, stored, report);
        Ok(())
    }

    fn works(&mut self) {
        self.attempts.succeeded();
        self.trouble = None;
    }

    fn plan(&self, wanted: &Pool, stored: &watch::Sender<Stored>) -> Plan {
        plan(wanted, &stored.borrow().slices, self.owner.as_ref().and_then(Option::as_deref), &self.memory)
    }

    /// Waits until it is time for the next write.
    async fn wait(&mut self, stored: &watch::Sender<Stored>) {
        let (pause, is_news) = self.repairs.pause(stored.borrow().disturbances);
        if is_news {
            let (node, driver) = (&self.settings.node, &self.settings.driver);
            let why = "somebody else changes our ResourceSlices again and again: another DRA driver of this name?";
            tracing::warn!(%node, %driver, "{why}");
        }
        tokio::time::sleep_until(self.rest.max(Instant::now() + pause)).await;
    }

    async fn request(&mut self, write: Write, stored: &watch::Sender<Stored>) -> Result<(), ApiError> {
        let name = write.name().to_owned();
        let result = match write {
            Write::Delete { name, uid } => {
                let params = DeleteParams {
                    preconditions: uid.map(|uid| Preconditions { uid: Some(uid), resource_version: None }),
                    ..DeleteParams::default()
                };
                let delete = |client| async move { api(client).delete(&name, &params).await };
                self.server.call(OBJECT, "delete", delete).await.map(|_| None)
            }
            Write::Update(object) => {
                let (name, sent) = (name.clone(), typed(&object)?);
                let update = |client| async move { api(client).replace(&name, &params(), &sent).await };
                self.server.call(OBJECT, "update", update).await.map(|stored| Some((object, stored)))
            }
            Write::Create(object) => {
                let sent = typed(&object)?;
                let create = |client| async move { api(client).create(&params(), &sent).await };
                self.server.call(OBJECT, "create", create).await.map(|stored| Some((object, stored)))
            }
        };
        match result {
            Ok(Some((sent, answer))) => {
                let answer = value(&answer)?;
                if answer["spec"]["pool"].is_null() {
                    return Err(ApiError::Malformed("no ResourceSlice came back".to_owned()));
                }
                if let Some(drops) = self.memory.written(&sent, &answer) {
                    if drops && !self.drops_taints {
                        tracing::warn!("the API server drops taints of devices (feature gate DRADeviceTaints)");
                    }
                    self.drops_taints = drops;
                }
                stored.send_modify(|stored| stored.written(answer));
                Ok(())
            }
            Ok(None) => {
                stored.send_modify(|stored| stored.removed(&name));
                Ok(())
            }
            Err(error) => {
                // Somebody else was there first: what there is now decides. A list that fails is tried again by the
                // follower.
                let selector = self.selector();
                if matches!(error.code(), Some(404 | 409 | 410))
                    && let Ok((slices, _)) = list(&mut self.server, &selector).await
                {
                    listed(stored, slices);
                }
                Err(error)
            }
        }
    }

    /// The Node's UID; `None` where the server does not show it: then the slices get no owner.
    async fn node_uid(&mut self) -> Result<Option<String>, ApiError> {
        let node = self.settings.node.clone();
        let get = |client| async move { Api::<Node>::all(client).get_metadata(&node).await };
        match self.server.call("nodes", "get", get).await {
            Ok(node) => Ok(node.metadata.uid),
            Err(error) if error.code() == Some(403) => {
                let error = error.to_string();
                tracing::warn!(
                    error,
                    "own Node unreadable, the ResourceSlices get no owner and stay when it is deleted"
                );
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Reports what is stored now.
    fn report(&self, wanted: &Pool, stored: &watch::Sender<Stored>, report: &watch::Sender<StoredPool>) {
        let found = stored.borrow();
        let now = StoredPool {
            is_current: found.is_known && self.plan(wanted, stored).writes.is_empty(),
            slices: found.slices.len(),
            generation: found.slices.values().map(generation).max().unwrap_or(0),
            drops_taints: self.drops_taints,
            trouble: self.trouble.clone(),
        };
        drop(found);
        report.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    }
}

fn api(client: kube::Client) -> Api<DynamicObject> {
    Api::all_with(client, &resource())
}

fn params() -> PostParams {
    PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() }
}

fn typed(object: &Value) -> Result<DynamicObject, ApiError> {
    serde_json::from_value(object.clone()).map_err(|error| ApiError::Malformed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repairs_slow_down_while_somebody_else_writes() {
        let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(4));
        let mut repairs = Repairs { backoff, repaired: 0, in_a_row: 0 };
        let mut pauses = (0..8).map(|disturbances| repairs.pause(disturbances));
        let (quick, slow): (Vec<_>, Vec<_>) = pauses.by_ref().partition(|(pause, _)| pause.is_zero());
        assert_eq!((quick.len(), quick.iter().any(|(_, is_news)| *is_news)), (4, false));
        assert_eq!(
            slow,
            [(1, true), (2, false), (4, false), (4, false)].map(|(s, news)| (Duration::from_secs(s), news))
        );
        assert_eq!(repairs.pause(7), (Duration::ZERO, false), "a write of our own");
        assert_eq!(repairs.pause(8), (Duration::ZERO, false), "the first again");
    }
}
