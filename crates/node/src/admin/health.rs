//! gRPC's health service (`grpc.health.v1.Health`) on a port of its own, for the kubelet's gRPC probes. The GPU
//! Operator probes a DRA driver by the service `liveness`.
//!
//! It reports SERVING while the process answers on its own sockets, and takes no orders.

use std::io::ErrorKind;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use futures_util::stream::Empty;
use tokio::net::TcpListener;
use tokio::time::sleep;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::connections::{self, Protocol};
use super::{DEADLINE, PORT_PAUSES};

/// The service that NVIDIA's DRA driver has beside the unnamed one (`cmd/gpu-kubelet-plugin/health.go`).
const LIVENESS: &str = "liveness";
/// The longest request, in bytes: the name of a service.
const MAX_REQUEST: usize = 4 << 10;

/// Returns true if the process answers on its own sockets. Called for each probe.
pub type Alive = Arc<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

struct LivenessService(Alive);

#[tonic::async_trait]
impl Health for LivenessService {
    type WatchStream = Empty<Result<HealthCheckResponse, Status>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        if !["", LIVENESS].contains(&request.get_ref().service.as_str()) {
            return Err(Status::not_found("no such service"));
        }
        let status = if (self.0)().await { ServingStatus::Serving } else { ServingStatus::NotServing };
        Ok(Response::new(HealthCheckResponse { status: status as i32 }))
    }

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("only Check is served"))
    }
}

/// All addresses, with this port.
pub fn address(port: u16) -> SocketAddr {
    (Ipv6Addr::UNSPECIFIED, port).into()
}

/// Waits until the port is free, then serves for ever.
pub async fn serve(address: SocketAddr, alive: Alive) -> anyhow::Result<()> {
    let listener = free_port(address).await?;
    tracing::info!(address = %listener.local_addr()?, "serving gRPC health checks");
    let service = HealthServer::new(LivenessService(alive));
    let routes = Routes::new(service.max_decoding_message_size(MAX_REQUEST)).into_axum_router();
    let accept = || async { Ok((listener.accept().await?.0, routes.clone())) };
    connections::serve(Protocol::Http2, DEADLINE, accept).await;
    Ok(())
}

async fn free_port(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let mut backoff = PORT_PAUSES;
    loop {
        match connections::listen(address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                tracing::warn!(%address, "gRPC health port taken, trying again");
                sleep(backoff.failed()).await;
            }
            bound => {
                return bound.map_err(|error| anyhow::anyhow!("cannot listen on {address} for gRPC health: {error}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{FutureExt, poll};
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpStream;
    use tokio::time::timeout;
    use tonic::Code;
    use tonic::transport::Endpoint;
    use tonic_health::pb::health_client::HealthClient;

    /// The number of clients that hold connections open: more than are served at once.
    const STRANGERS: usize = 200;

    /// The answer to a probe of a service. Each probe has a connection of its own, as the kubelet's probes have.
    async fn probe(address: SocketAddr, service: &str) -> Result<i32, Code> {
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap();
        let mut client = HealthClient::new(channel.connect().await.unwrap());
        let request = HealthCheckRequest { service: service.to_owned() };
        client.check(request).await.map(|answer| answer.into_inner().status).map_err(|status| status.code())
    }

    /// An HTTP/2 connection that stays open.
    async fn held(address: SocketAddr) -> impl Sized {
        Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
    }

    #[tokio::test]
    async fn freed_port_answers_probes_despite_strangers() {
        // This test has its own address, because another test may get a port of 127.0.0.1 as soon as it is free.
        let other = connections::listen(([127, 1, 2, 3], 0).into()).unwrap();
        let address = other.local_addr().unwrap();
        let answers = Arc::new(AtomicBool::new(true));
        let shared = Arc::clone(&answers);
        let alive: Alive = Arc::new(move || std::future::ready(shared.load(Ordering::Relaxed)).boxed());
        let mut serves = pin!(serve(address, alive));
        assert!(poll!(&mut serves).is_pending(), "the server did not wait for the port");
        drop(other);
        let client = async {
            while TcpStream::connect(address).await.is_err() {
                tokio::task::yield_now().await;
            }
            let serving = ServingStatus::Serving as i32;
            for service in ["", LIVENESS] {
                assert_eq!(probe(address, service).await, Ok(serving), "{service}");
            }
            answers.store(false, Ordering::Relaxed);
            assert_eq!(probe(address, LIVENESS).await, Ok(ServingStatus::NotServing as i32));
            answers.store(true, Ordering::Relaxed);
            assert_eq!(probe(address, "readiness").await, Err(Code::NotFound));
            // A request longer than the name of a service is not read.
            assert_eq!(probe(address, &"x".repeat(MAX_REQUEST)).await, Err(Code::OutOfRange));
            let (mut strangers, mut speakers) = (Vec::new(), Vec::new());
            for at in 0..STRANGERS {
                // Some say nothing, others speak HTTP/1, or HTTP/2 without a request.
                match at % 3 {
                    0 => speakers.push(held(address).await),
                    kind => {
                        let mut stranger = TcpStream::connect(address).await.unwrap();
                        if kind == 1 {
                            stranger.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
                        }
                        strangers.push(stranger);
                    }
                }
                if at % 20 == 0 {
                    assert_eq!(probe(address, LIVENESS).await, Ok(serving));
                }
            }
        };
        tokio::select! {
            ended = serves => panic!("the server ended: {ended:?}"),
            ended = timeout(DEADLINE * 2, client) => ended.expect("a probe was not answered"),
        }
    }
}
