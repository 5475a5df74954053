//! The client of one plugin: dials its socket, and makes all calls but PreStartContainer.
//!
//! Made by `life` for each registration, called by `life` (options, ListAndWatch) and `admission`. The client converts
//! wire types and keeps no books. Every call ends: with its answer, at its deadline, or because the kubelet closed the
//! connection.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Channel;
use tonic::{Response, Status, Streaming};

use super::Options;
use super::errors::{CallError, DialError};
use super::pod::Allocation;
use super::socket::{Counter, dial, localhost};
use linkwise_kubelet_api::v1beta1 as wire;

/// One connection to a plugin. Clones share it. It closes when the last clone is dropped.
#[derive(Clone, Debug)]
pub(super) struct Plugin {
    client: wire::device_plugin_client::DevicePluginClient<Channel>,
    /// Cancelled when the kubelet closes the connection.
    closed: CancellationToken,
    call_timeout: Duration,
}

impl Plugin {
    /// Dials until a connection is made or the time is up, as gRPC's blocking dial does. `connections` tracks its
    /// tasks.
    pub(super) async fn dial(
        path: &Path,
        options: &Options,
        connections: TaskTracker,
        closed: CancellationToken,
    ) -> Result<Self, DialError> {
        let (after, mut retry) = (options.dial_timeout, options.dial_retry);
        let deadline = Instant::now() + after;
        let mut source = None;
        while Instant::now() < deadline {
            match timeout_at(deadline, dial(path, localhost(), &connections, Counter::default())).await {
                Ok(Ok(channel)) => {
                    let client = wire::device_plugin_client::DevicePluginClient::new(channel);
                    return Ok(Self { client, closed, call_timeout: options.call_timeout });
                }
                Ok(Err(error)) => source = Some(error),
                Err(_) => break,
            }
            sleep(retry.min(deadline.saturating_duration_since(Instant::now()))).await;
            retry = retry.mul_f64(1.6);
        }
        Err(DialError::Connect { path: path.to_owned(), after, source })
    }

    /// Closes the connection, which ends the stream and the calls that have no answer yet.
    pub(super) fn close(&self) {
        self.closed.cancel();
    }

    /// Completes once the connection is closed.
    pub(super) async fn closed(&self) {
        self.closed.cancelled().await;
    }

    async fn bounded<T>(
        &self,
        method: &'static str,
        after: Duration,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CallError> {
        tokio::select! {
            biased;
            () = self.closed.cancelled() => Err(CallError::Stopped(method)),
            answer = timeout(after, call) => match answer {
                Ok(Ok(answer)) => Ok(answer.into_inner()),
                Ok(Err(status)) => Err(CallError::Status(method, Box::new(status))),
                Err(_) => Err(CallError::Timeout(method, after)),
            },
        }
    }

    /// Calls GetDevicePluginOptions, which must answer within `after`, because the call is a part of the dial.
    pub(super) async fn options(&self, after: Duration) -> Result<wire::DevicePluginOptions, CallError> {
        let call = async { self.client.clone().get_device_plugin_options(wire::Empty {}).await };
        self.bounded("GetDevicePluginOptions", after, call).await
    }

    /// Opens the ListAndWatch stream. The stream has no deadline, as a kubelet's has none.
    pub(super) async fn list_and_watch(&self) -> Result<Streaming<wire::ListAndWatchResponse>, Status> {
        Ok(self.client.clone().list_and_watch(wire::Empty {}).await?.into_inner())
    }

    /// Calls GetPreferredAllocation for one container. Returns the ids of the first response.
    pub(super) async fn preferred(
        &self,
        available: Vec<String>,
        must_include: Vec<String>,
        size: u32,
    ) -> Result<Vec<String>, CallError> {
        let request = wire::ContainerPreferredAllocationRequest {
            available_device_i_ds: available,
            must_include_device_i_ds: must_include,
            allocation_size: i32::try_from(size).unwrap_or(i32::MAX),
        };
        let request = wire::PreferredAllocationRequest { container_requests: vec![request] };
        let call = async { self.client.clone().get_preferred_allocation(request).await };
        let answer = self.bounded("GetPreferredAllocation", self.call_timeout, call).await?;
        Ok(answer.container_responses.into_iter().next().unwrap_or_default().device_i_ds)
    }

    /// Calls Allocate for one container. Returns `None` if the answer has no container.
    pub(super) async fn allocate(&self, devices_ids: Vec<String>) -> Result<Option<Allocation>, CallError> {
        let mut devices = devices_ids.clone();
        devices.sort_unstable();
        let container_requests = vec![wire::ContainerAllocateRequest { devices_ids }];
        let call = async { self.client.clone().allocate(wire::AllocateRequest { container_requests }).await };
        let answer = self.bounded("Allocate", self.call_timeout, call).await?;
        let allocation = |response: wire::ContainerAllocateResponse| Allocation {
            devices,
            envs: response.envs.into_iter().collect(),
            device_specs: response.devices,
            mounts: response.mounts,
            annotations: response.annotations.into_iter().collect(),
            cdi_names: response.cdi_devices.into_iter().map(|device| device.name).collect(),
        };
        Ok(answer.container_responses.into_iter().next().map(allocation))
    }
}
