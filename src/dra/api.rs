//! The channels between DRA and the rest of the program: the client of the API server writes slices and reads claims,
//! the driver makes MIG devices, another process runs MPS control daemons, another task writes CDI specs.
//!
//! This program has no client of the API server; `linkwise-cluster` has, and is given one end of these channels.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::Result;
use futures_util::future::BoxFuture;
use prometheus_client::registry::Registry;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::claims::{Claim, MigOrder, MigOrderError, MpsOrder};
use crate::publish::dra::slice::Pool;
use crate::publish::dra::{ServerVersion, StoredSets};
use crate::state::ResourceName;
use crate::topology::{GpuUuid, MigUuid};

/// The client of the API server: registers its metrics, and works at its end of the channels until the token is
/// cancelled.
pub type Client = dyn Fn(ApiSide, &mut Registry, CancellationToken) -> BoxFuture<'static, Result<()>> + Send + Sync;

/// The end of the channels that the client of the API server has.
#[derive(Debug)]
pub struct ApiSide {
    /// The node's name: its slices of the driver are the client's.
    pub node: String,
    /// The DRA driver's name.
    pub driver: String,
    /// True if the server's release is to be read.
    pub asks_version: bool,
    /// The pool to be stored; `None` while it is unknown which GPUs there are: then nothing is written.
    pub pool: watch::Receiver<Option<Arc<Pool>>>,
    /// The pool that is stored.
    pub stored: watch::Sender<StoredPool>,
    /// Claims to be read.
    pub claims: mpsc::Receiver<ClaimQuery>,
}

/// The part of our pool that the API server has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredPool {
    /// True if the slices are as they were wanted last, but for fields that the server dropped.
    pub is_current: bool,
    /// The number of slices.
    pub slices: usize,
    /// The generation of the slices.
    pub generation: u64,
    /// True if the server drops taints (its gate DRADeviceTaints is off): then sick devices have to be left out.
    pub drops_taints: bool,
    /// True if the server drops counters (its gate DRAPartitionableDevices is off): then a pool with counters is not
    /// written any further.
    pub drops_counters: bool,
    /// The sets that were found in our pool; `None` before it was read, and before the release was, where it is to be.
    pub found: Option<StoredSets>,
    /// The server's release, where it is to be read and can be.
    pub version: Option<ServerVersion>,
    /// True if the server drops what makes a device several claims' (its gate DRAConsumableCapacity is off): then one
    /// claim has all of it.
    pub drops_sharing: bool,
    /// The cause of slices that are not current, where it is known.
    pub trouble: Option<String>,
}

/// A MIG device to be made or destroyed for a claim, which the agent orders of the driver.
#[derive(Debug)]
pub struct MigRequest {
    /// The order.
    pub order: MigOrder,
    /// The receiver of the outcome.
    pub answer: MigAnswer,
}

/// The receiver of the outcome of a [`MigRequest`]: the MIG device that was made, or none after a destruction.
pub type MigAnswer = oneshot::Sender<Result<Option<MigUuid>, MigOrderError>>;

/// The way to the task that writes the CDI specs of GPUs and MIG devices.
#[derive(Clone, Debug)]
pub struct SpecsLink {
    /// The specs' generation: it changes each time that the task has written them, and is 0 before the first time.
    pub generation: watch::Receiver<u64>,
    /// Has them written at once where one is missing: the task repairs them every 10 s otherwise.
    pub repair: Arc<Notify>,
}

impl Default for SpecsLink {
    /// Specs that were written once, and never will be again.
    fn default() -> Self {
        Self { generation: watch::channel(1).1, repair: Arc::default() }
    }
}

/// The way to the process that runs MPS control daemons.
#[derive(Clone, Debug)]
pub struct MpsLink {
    /// The daemons that are wanted; `None` before the checkpoints were read.
    pub orders: watch::Sender<Option<MpsOrders>>,
    /// The daemons that serve; `None` before the first look.
    pub served: watch::Receiver<Option<MpsServed>>,
}

/// The control daemons that prepared claims call for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsOrders {
    /// The number of changes and of requests to look again.
    pub revision: u64,
    /// The daemons.
    pub daemons: BTreeMap<ResourceName, MpsOrder>,
}

/// The outcome of [`MpsOrders`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsServed {
    /// The revision of these orders.
    pub revision: u64,
    /// The cause where orders reach no control daemon.
    pub trouble: Option<String>,
    /// The daemons: `Ok` for one that serves with its limits, or why it does not yet.
    pub daemons: BTreeMap<ResourceName, Result<(), String>>,
    /// GPUs of DRA that are in the compute mode EXCLUSIVE_PROCESS for any control daemon.
    pub exclusive: BTreeSet<GpuUuid>,
}

/// A claim to be read.
#[derive(Debug)]
pub struct ClaimQuery {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The receiver of the answer.
    pub answer: oneshot::Sender<Result<Claim, ClaimQueryError>>,
}

/// The cause of a claim that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimQueryError {
    /// There is no such claim.
    #[error("there is no such claim")]
    NotFound,
    /// The API server could not be asked, or refused.
    #[error("{0}")]
    Failed(String),
}
