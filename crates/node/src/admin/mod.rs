//! HTTP endpoints: the page of the node, /metrics, /livez and /readyz on a port, gRPC's health service on another
//! (`health`), and an operator's orders on a Unix socket (`local`).
//!
//! Owns the listeners and the routes; the node passes in the functions that answer and owns the tasks. The ports
//! are read-only: only the Unix socket takes orders.

mod connections;
pub mod health;
mod hosts;
mod local;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State as StateOf};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::Mutex;

use super::metrics::CONTENT_TYPE;
use super::views::Views;
use connections::Protocol;
use linkwise_core::backoff::Backoff;
use linkwise_core::quote::quoted;

pub use hosts::Hosts;
pub use local::{Answer, Local, LocalError, Order, Orders, Outcome};

/// The pauses between attempts to take a port that another process has.
pub(crate) const PORT_PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// The longest time for one connection: as long as Prometheus waits for a scrape.
const DEADLINE: Duration = Duration::from_secs(10);

/// The sources of the endpoints' answers.
#[derive(Clone)]
pub struct Answers {
    /// The metrics as OpenMetrics text; `None` if encoding failed. One call at a time, on a thread of its own.
    pub metrics: Arc<dyn Fn() -> Option<String> + Send + Sync>,
    /// `Ok` with a short text while the node serves, or has no GPU to serve; otherwise the unready parts, one line
    /// each.
    pub ready: Arc<dyn Fn() -> Result<String, Vec<String>> + Send + Sync>,
    /// The names by which the port may be called.
    pub hosts: Hosts,
    /// The views that render the node's page, if this process has one.
    pub page: Option<Views>,
}

/// A bound listener.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
    address: SocketAddr,
}

impl Admin {
    /// Binds the address; port 0 takes a free one, `[::]` serves IPv4 too and stands for 0.0.0.0 if IPv6 is off. Must
    /// be called within a tokio runtime. Fails with `AddrInUse` if the address is in use.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = connections::listen(address)?;
        Ok(Self { address: listener.local_addr()?, listener })
    }

    /// The address that was bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves for ever.
    pub async fn serve(self, answers: Answers) {
        let routes = Router::new()
            .route("/", get(page))
            .route("/metrics", get(metrics))
            .route("/livez", get(|| async { "alive\n" }))
            .route("/readyz", get(ready))
            .layer(from_fn_with_state(answers.hosts.clone(), check_host))
            .with_state(Served { answers, encoding: Arc::default() });
        let accept = || async { Ok((self.listener.accept().await?.0, routes.clone())) };
        connections::serve(Protocol::Http1, DEADLINE, accept).await;
    }
}

/// Answers only requests with a known name in the Host header. A request without that header does not come from a
/// browser, and is answered.
async fn check_host(StateOf(hosts): StateOf<Hosts>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).map(|host| host.to_str().unwrap_or_default());
    match host.filter(|host| !hosts.has(host)) {
        None => next.run(request).await,
        Some(host) => {
            let what = format!("this port does not answer to the name {}; add it with --metrics-hosts\n", quoted(host));
            (StatusCode::MISDIRECTED_REQUEST, what).into_response()
        }
    }
}

/// The answers, and the lock by which one scrape is encoded at a time.
#[derive(Clone)]
struct Served {
    answers: Answers,
    encoding: Arc<Mutex<()>>,
}

async fn metrics(StateOf(Served { answers, encoding }): StateOf<Served>) -> Response {
    let guard = encoding.lock_owned().await;
    // The lock moves into the task, so that no second encoding begins when the client of this one leaves.
    let encoded = tokio::task::spawn_blocking(move || {
        let _guard = guard;
        (answers.metrics)()
    });
    match encoded.await.ok().flatten() {
        Some(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        None => (StatusCode::INTERNAL_SERVER_ERROR, "cannot encode the metrics\n").into_response(),
    }
}

async fn page(StateOf(Served { answers, .. }): StateOf<Served>, request: HeaderMap) -> Response {
    let Some(views) = answers.page else {
        return (StatusCode::NOT_FOUND, "this process serves no node and has no page\n").into_response();
    };
    match views.page().await {
        Some(page) => page.answer(&request),
        None => (StatusCode::INTERNAL_SERVER_ERROR, "cannot render the page\n").into_response(),
    }
}

async fn ready(StateOf(Served { answers, .. }): StateOf<Served>) -> Response {
    match (answers.ready)() {
        Ok(text) => (text + "\n").into_response(),
        Err(reasons) => (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    /// The number of clients of each kind that hold connections open.
    const STRANGERS: usize = 200;

    /// Serves these metrics while `asking` runs.
    async fn serve(
        metrics: impl Fn() -> Option<String> + Send + Sync + 'static,
        hosts: Hosts,
        asking: impl AsyncFnOnce(SocketAddr),
    ) {
        let admin = Admin::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = admin.address();
        let answers =
            Answers { metrics: Arc::new(metrics), ready: Arc::new(|| Ok("ready".to_owned())), hosts, page: None };
        tokio::select! {
            () = admin.serve(answers) => {}
            () = asking(address) => {}
        }
    }

    /// Returns the text that the kubelet's HTTP probe reads, and the time that this took.
    async fn probe(address: SocketAddr, path: &str, host: &str) -> (String, Duration) {
        let start = Instant::now();
        let ask = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        (timeout(DEADLINE / 2, ask).await.expect("no answer before any stranger's deadline"), start.elapsed())
    }

    #[tokio::test]
    async fn probes_answer_under_silent_and_pipelining_clients() {
        let asking = async |address: SocketAddr| {
            let mut strangers = Vec::new();
            for _ in 0..STRANGERS {
                let mut silent = TcpStream::connect(address).await.unwrap();
                silent.write_all(b"GET /livez HTTP/1.1\r\nHost: ").await.unwrap();
                let mut pipelining = TcpStream::connect(address).await.unwrap();
                let many = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(100);
                // The server may close the connection meanwhile: it answers one request on each.
                let _ = pipelining.write_all(&many).await;
                strangers.extend([silent, pipelining]);
            }
            for (path, body) in [("/livez", "alive\n"), ("/readyz", "ready\n"), ("/metrics", "xxx")] {
                let (answer, took) = probe(address, path, "localhost").await;
                assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with(body), "{path}: {answer:.200}");
                println!("{path} answered in {took:?} beside {} connections", strangers.len());
            }
            let mut times = Vec::new();
            for _ in 0..9 {
                times.push(probe(address, "/livez", "localhost").await.1);
            }
            times.sort_unstable();
            assert!(times[4] < Duration::from_millis(100), "{times:?}");
        };
        serve(|| Some("x".repeat(100_000)), Hosts::default(), asking).await;
    }

    #[tokio::test]
    async fn probe_is_answered_while_a_scrape_is_encoded() {
        let (begun, mut begins) = tokio::sync::mpsc::channel(1);
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = std::sync::Mutex::new(released);
        let encode = move || {
            begun.try_send(()).unwrap();
            // Without a release the thread goes on after the deadline, and the scrape fails: the probe came too late.
            released.lock().unwrap().recv_timeout(DEADLINE).ok().map(|()| "x".to_owned())
        };
        let asking = async |address: SocketAddr| {
            let scrape = probe(address, "/metrics", "localhost");
            let probes = async {
                begins.recv().await.unwrap();
                let (answer, _) = probe(address, "/livez", "localhost").await;
                assert!(answer.ends_with("alive\n"), "{answer}");
                release.send(()).unwrap();
            };
            let ((answer, _), ()) = tokio::join!(scrape, probes);
            assert!(answer.ends_with('x'), "{answer}");
        };
        serve(encode, Hosts::default(), asking).await;
    }

    #[tokio::test]
    async fn strange_host_is_misdirected_on_every_path() {
        let hosts = Hosts::default();
        hosts.add("node-1");
        let asking = async |address: SocketAddr| {
            for path in ["/", "/metrics", "/livez", "/readyz"] {
                for (host, is_known) in [("evil.example:9400", false), ("node-1:9400", true), ("127.0.0.1", true)] {
                    let (answer, _) = probe(address, path, host).await;
                    assert_eq!(!answer.starts_with("HTTP/1.1 421"), is_known, "{path} {host}: {answer}");
                }
            }
        };
        serve(|| Some("x".to_owned()), hosts, asking).await;
    }
}
