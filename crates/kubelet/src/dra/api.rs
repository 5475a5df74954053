//! What DRA needs of others: of the node's loop claims entered into the ledger, of the API server slices written and
//! claims read, of the driver MIG devices made, of another process MPS control daemons run.
//!
//! Each need is a channel, whose other end the program gives to what serves it, or a function.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde_json::{Map, Value};
use tokio::sync::{mpsc, oneshot, watch};

use super::turn::ClaimsLock;
use linkwise_core::claims::{Claim, ClaimError, ClaimName, MpsOrder, Prepared, ReadClaimError};
use linkwise_core::publish::MpsShm;
use linkwise_core::state::{Event, NodeState, ResourceName};
use linkwise_core::topology::GpuUuid;

/// The CDI devices of this node: what claims get copies of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CdiDevices {
    /// The edits that every container with a GPU gets, as a spec's `containerEdits` in JSON; empty if there are none.
    pub common: String,
    /// The edits of each device by its full name, as its `containerEdits`.
    pub devices: BTreeMap<String, Map<String, Value>>,
}

/// Follows the CDI devices; `None` before the first scan of a host with GPUs.
pub type CdiLink = watch::Receiver<Option<Arc<CdiDevices>>>;

/// The way to the process that runs MPS control daemons.
#[derive(Clone, Debug)]
pub struct MpsLink {
    /// What is wanted; `None` before the checkpoints were read.
    pub orders: watch::Sender<Option<MpsOrders>>,
    /// What serves; `None` before the first look.
    pub served: watch::Receiver<Option<MpsServed>>,
}

/// The control daemons that prepared claims call for.
#[derive(Clone, Debug, Default)]
pub struct MpsOrders {
    /// How many changes there were, and requests to look again.
    pub revision: u64,
    /// The daemons.
    pub daemons: BTreeMap<ResourceName, MpsOrder>,
    /// The UIDs of the claims of each daemon: claims that share none of it share no memory.
    pub claims: BTreeMap<ResourceName, BTreeSet<String>>,
    /// True if daemons that were ordered before stay, because it cannot be seen who needs them.
    pub keeps_others: bool,
    /// The lock on claims, kept until the orders are written.
    pub lock: Option<ClaimsLock>,
}

/// What became of [`MpsOrders`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsServed {
    /// Of which revision.
    pub revision: u64,
    /// Why orders reach no control daemon.
    pub trouble: Option<String>,
    /// The shared memory of each daemon that serves with its limits, or why it does not yet.
    pub daemons: BTreeMap<ResourceName, Result<MpsShm, String>>,
    /// GPUs of DRA that are in the compute mode EXCLUSIVE_PROCESS for a control daemon, whosever.
    pub exclusive: BTreeSet<GpuUuid>,
}

/// The entries into a ledger that may wait: a node starts few pods at once.
const ENTRIES: usize = 16;

/// A plan by the state as it is: the event that enters the claim, and the hardware that the claim gets.
type Plan = Box<dyn FnOnce(&NodeState) -> Result<(Event, Prepared), ClaimError> + Send>;

/// An entry into the node's ledger, the book of claims. The state's one writer makes the plan, applies its event before
/// anything else and then answers: so no hardware is given twice.
pub struct BookEntry {
    /// True if the plan waits until the state is open: it gives hardware, and needs to know the holders.
    pub gives: bool,
    /// Called with the state.
    pub plan: Plan,
    /// The receiver of what the claim gets, or why it gets nothing.
    pub answer: oneshot::Sender<Result<Prepared, ClaimError>>,
}

/// The way to the state's writer.
#[derive(Clone, Debug)]
pub struct Book(mpsc::Sender<BookEntry>);

impl Book {
    /// The way, and its end at the writer.
    pub fn new() -> (Self, mpsc::Receiver<BookEntry>) {
        let (entries, written) = mpsc::channel(ENTRIES);
        (Self(entries), written)
    }

    /// Waits until hardware is given by the state that is open, or refused; `None` if the node is ending. The entry may be
    /// made though its caller gives up the wait.
    pub async fn give(
        &self,
        plan: impl FnOnce(&NodeState) -> Result<(Event, Prepared), ClaimError> + Send + 'static,
    ) -> Option<Result<Prepared, ClaimError>> {
        self.enter(true, Box::new(plan)).await
    }

    /// Applies an event, made by the state as it is.
    pub async fn change(&self, event: impl FnOnce(&NodeState) -> Event + Send + 'static) {
        self.enter(false, Box::new(|state| Ok((event(state), Prepared::default())))).await;
    }

    async fn enter(&self, gives: bool, plan: Plan) -> Option<Result<Prepared, ClaimError>> {
        let (answer, answered) = oneshot::channel();
        self.0.send(BookEntry { gives, plan, answer }).await.ok()?;
        answered.await.ok()
    }
}

/// Reads a claim from the API server, by its namespace and name.
pub type ReadClaim = Arc<dyn Fn(ClaimName) -> BoxFuture<'static, Result<Claim, ReadClaimError>> + Send + Sync>;
