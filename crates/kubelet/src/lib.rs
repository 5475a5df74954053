//! Both doors' lives with the kubelet: the device plugin, and the DRA plugin with its claims; and the answer to its
//! readiness probe.
//!
//! Wire types of `linkwise_kubelet_api` stop here. The API server is asked by others, over the channels of `dra`.

pub mod device_plugin;
pub mod dra;
pub mod readiness;
mod registration;

/// The answer to an RPC of the kubelet.
type Answer<T> = Result<tonic::Response<T>, tonic::Status>;
