//! The node: the one loop that writes the state, its duties, and what shows the state to people and scrapers.
//!
//! `node` has the loop and the plugins; `takeover` decides which of several linkwise serves a node; `readiness` gathers
//! what is ready; `state_loop` is for programs without a kubelet; `views` makes what people see of the node, which
//! `page` and `metrics` print; `admin` answers over the port and the operators' socket. Nothing here reads options.

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
