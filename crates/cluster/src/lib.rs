//! The API server: the ResourceSlices and claims of DRA, NodeFeature objects, events about pods, a node's labels
//! and its condition.
//!
//! One adapter, `server`, makes every request; each kind of object has one writer. No Allocate waits for the API
//! server: slices and events are written in the background. A claim is read when it is prepared. A writer's request
//! that fails is counted, logged once, and repeated after a pause; a writer that ends leaves its objects.

mod claims;
pub mod doctor;
mod error;
mod events;
mod follower;
mod node_condition;
mod node_feature;
mod server;
mod slices;

pub use crate::error::ApiMetrics;
pub use crate::follower::{NodeLabels, follow_node};
pub use crate::server::{Access, AccessError};
pub use crate::slices::StoredPool;
pub use crate::slices::stored::all_slices;
pub use claims::ClaimReader;
pub use error::ApiError;
pub use events::EventWriter;
pub use node_condition::{NodeConditionSettings, NodeConditionWriter, clear as clear_condition};
pub use node_feature::{NodeFeatureSettings, NodeFeatureWriter};
pub use server::{ApiServer, Pace};
pub use slices::{SliceWriter, published};
