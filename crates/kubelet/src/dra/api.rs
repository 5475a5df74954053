//! The channels and functions through which the DRA plugin uses the rest of the program: the node's loop enters claims
//! into the ledger, the API server's client reads claims, a scan of the host finds CDI devices, and another process
//! runs MPS control daemons.
//!
//! The program makes the channels and gives each one's other end to the task that serves it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde_json::{Map, Value};
use tokio::sync::{mpsc, oneshot, watch};

use linkwise_core::claims::{Claim, ClaimError, ClaimName, MpsOrder, Prepared, ReadClaimError};
use linkwise_core::publish::MpsShm;
use linkwise_core::state::{Event, NodeState, ResourceName};
use linkwise_core::topology::GpuUuid;
use linkwise_system::right::Right;

/// The CDI devices of this node, as the last scan of the host found them. The CDI specs of claims copy their edits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CdiDevices {
    /// The edits that every container with a GPU gets, as a spec's `containerEdits` in JSON; empty if there are none.
    pub common: String,
    /// The edits of each device by its full name, as its `containerEdits`.
    pub devices: BTreeMap<String, Map<String, Value>>,
}

/// Follows the CDI devices; `None` before the first scan of a host with GPUs.
pub type CdiLink = watch::Receiver<Option<Arc<CdiDevices>>>;

/// The channels to the task that passes orders to the process of the MPS control daemons, and reports which serve.
#[derive(Clone, Debug)]
pub struct MpsLink {
    /// The ordered daemons; `None` while no claim manager has read the checkpoints.
    pub orders: watch::Sender<Option<MpsOrders>>,
    /// The daemons that serve; `None` before the task has checked the first orders.
    pub served: watch::Receiver<Option<MpsServed>>,
}

/// The MPS control daemons that prepared claims need, as the claim manager orders them.
#[derive(Clone, Debug, Default)]
pub struct MpsOrders {
    /// The number of changes so far, plus that of requests to check the daemons again.
    pub revision: u64,
    /// The daemons.
    pub daemons: BTreeMap<ResourceName, MpsOrder>,
    /// The UIDs of the claims of each daemon. Claims that replace all claims of a daemon get new shared memory.
    pub claims: BTreeMap<ResourceName, BTreeSet<String>>,
    /// True if daemons of earlier orders keep running, because checkpoints that cannot be read may need them.
    pub keeps_others: bool,
    /// The right to touch claims, kept until the orders are written.
    pub right: Option<Right>,
}

/// The state of the control daemons that were ordered. The task that passes the orders on writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsServed {
    /// The revision of the [`MpsOrders`] that were carried out.
    pub revision: u64,
    /// The cause if orders reach no control daemon.
    pub trouble: Option<String>,
    /// The shared memory of each daemon that serves with the ordered limits, or why it does not yet.
    pub daemons: BTreeMap<ResourceName, Result<MpsShm, String>>,
    /// The GPUs of DRA that are in the compute mode EXCLUSIVE_PROCESS for a control daemon of any claim or resource.
    pub exclusive: BTreeSet<GpuUuid>,
}

/// The most entries that wait in the channel to the ledger: a node starts few pods at once.
const MAX_WAITING_ENTRIES: usize = 16;

/// A function that plans a claim by the state. It returns the event that enters the claim into the ledger, and the
/// hardware that the claim gets.
type Plan = Box<dyn FnOnce(&NodeState) -> Result<(Event, Prepared), ClaimError> + Send>;

/// A request to enter a claim into the node's ledger. The state's one writer calls the plan, applies its event before
/// any other and then answers, so that no hardware is given to two claims.
pub struct LedgerEntry {
    /// True if the plan gives hardware. Such a plan waits until the state is open, because it has to know the holders.
    pub gives_hardware: bool,
    /// The plan, called with the current state.
    pub plan: Plan,
    /// Receives the claim's hardware, or why it gets none.
    pub answer: oneshot::Sender<Result<Prepared, ClaimError>>,
}

/// The channel to the state's writer, which alone changes the ledger.
#[derive(Clone, Debug)]
pub struct LedgerLink(mpsc::Sender<LedgerEntry>);

impl LedgerLink {
    /// Makes the channel; returns the writer's end too.
    pub fn new() -> (Self, mpsc::Receiver<LedgerEntry>) {
        let (sender, receiver) = mpsc::channel(MAX_WAITING_ENTRIES);
        (Self(sender), receiver)
    }

    /// Asks the writer to plan and enter a claim once the state is open. Returns the claim's hardware, or why it gets
    /// none; `None` if the node is ending. If the caller stops waiting, the entry may still be made.
    pub async fn give(
        &self,
        plan: impl FnOnce(&NodeState) -> Result<(Event, Prepared), ClaimError> + Send + 'static,
    ) -> Option<Result<Prepared, ClaimError>> {
        self.enter(true, Box::new(plan)).await
    }

    /// Asks the writer to make an event from the current state and apply it; returns once it is applied.
    pub async fn change(&self, event: impl FnOnce(&NodeState) -> Event + Send + 'static) {
        self.enter(false, Box::new(|state| Ok((event(state), Prepared::default())))).await;
    }

    async fn enter(&self, gives_hardware: bool, plan: Plan) -> Option<Result<Prepared, ClaimError>> {
        let (answer, answered) = oneshot::channel();
        self.0.send(LedgerEntry { gives_hardware, plan, answer }).await.ok()?;
        answered.await.ok()
    }
}

/// Reads a claim from the API server, by its namespace and name.
pub type ReadClaim = Arc<dyn Fn(ClaimName) -> BoxFuture<'static, Result<Claim, ReadClaimError>> + Send + Sync>;
