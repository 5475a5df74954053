//! The parts that talk with the kubelet: the device plugin, the DRA plugin with its claims, and the readiness of the
//! node's parts.
//!
//! Wire types of `linkwise_kubelet_api` stop here. Other crates call the API server, through the channels of `dra`.

pub mod device_plugin;
pub mod dra;
pub mod readiness;
mod registration;

/// The answer to an RPC of the kubelet.
type Answer<T> = Result<tonic::Response<T>, tonic::Status>;
