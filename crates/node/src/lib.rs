//! The node: the loop that alone writes the state, the takeover, and the views of the state for people and scrapers.
//!
//! `node` has the loop and starts the device plugins. `takeover` decides which of several linkwise processes serves a
//! node. `state_loop` has the state's writer, also for programs without a kubelet; `keeper` stores the health record.
//! `views` makes the view of the node, which `page` and `metrics` print. `admin` answers on the metrics port and on the
//! operators' socket; `operator` carries out the orders. `readiness` has the phase and trouble of each part, and
//! `observe` shows the state there and in the log. Nothing here reads options.

pub mod admin;
pub mod keeper;
pub mod metrics;
pub mod node;
pub mod observe;
pub mod operator;
pub mod page;
pub mod state_loop;
pub mod takeover;
pub mod views;

pub use linkwise_kubelet::readiness;
