//! What of linkwise speaks to the API server: the ResourceSlices and claims of DRA, NodeFeature objects, events about
//! pods, config-manager.
//!
//! It is in a program of its own, `linkwise-cluster`, which `linkwise` becomes for what needs the API server. Without
//! DRA and events that is never `linkwise run`, and nothing on a pod's way waits for the API server. With them it is:
//! the slices and events are written in the background, and preparing a claim waits until the claim is read.
//!
//! One adapter, `server`, makes every request; each kind of object has one writer. An API server that is away or
//! refuses is logged once, counted, and asked again after a pause; what was written stays.

mod access;
mod attempts;
mod claims;
pub mod config_manager;
pub mod demo;
pub mod doctor;
pub mod documents;
mod dra;
mod error;
mod events;
mod follower;
pub mod labels;
mod metrics;
mod node;
mod node_feature;
pub mod run;
mod server;
pub mod simulate;
mod slices;

pub use access::{Access, AccessError};
pub use claims::ClaimReader;
pub use error::ApiError;
pub use events::EventWriter;
pub use metrics::ApiMetrics;
pub use node::{NodeFollower, NodeLabels};
pub use node_feature::{NodeFeatureMetrics, NodeFeatureSettings, NodeFeatureWriter};
pub use server::{ApiServer, Pace};
pub use slices::{SliceSettings, SliceWriter};
