//! The listening TCP socket, for IPv4 and IPv6 regardless of the host's defaults; and the HTTP connections of any
//! listener: their greatest number, and their deadlines.
//!
//! Called by `mod` (the port), `local` (the Unix socket) and `health` (gRPC). A connection of HTTP/1 carries one
//! request. No client can keep others out, or stay beyond its deadline.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use futures_util::future::{AbortHandle, Either, FutureExt, abortable};
use futures_util::stream::{FuturesUnordered, StreamExt};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tower::ServiceExt;

/// The most connections that may wait to be accepted, as tokio sets it.
const BACKLOG: i32 = 1024;
/// The most connections at once. One more closes the oldest connection without a request, or else the oldest, which has
/// had the most time to get its answer. With HTTP/2, whose connections stay open, one more always closes the oldest.
const MAX_CONNECTIONS: usize = 64;
/// The size of a connection's buffers for request and answer, in bytes; with HTTP/2, of each request's buffers.
const MAX_BUFFER: u32 = 16 << 10;
/// The pause after a failed accept: file descriptors may be exhausted for a while.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The most requests at once on a connection of HTTP/2.
const MAX_STREAMS: u32 = 8;

/// Listens on an address. `[::]` accepts IPv4 as well, even if the host's default is otherwise (net.ipv6.bindv6only),
/// and stands for 0.0.0.0 on a host without IPv6.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    listen_with(address, bind)
}

fn listen_with(address: SocketAddr, bind: impl Fn(SocketAddr) -> io::Result<Socket>) -> io::Result<TcpListener> {
    let any = address.is_ipv6() && address.ip().is_unspecified();
    let socket = match bind(address) {
        // A port in use or forbidden is an error; any other error means that the host has no IPv6.
        Err(error) if any && !matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied) => {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into())?
        }
        socket => socket?,
    };
    TcpListener::from_std(socket.into())
}

fn bind(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    // A restart does not wait for connections of the previous process in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// The protocol of a listener's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// HTTP/1.
    Http1,
    /// HTTP/2 from the first byte, as gRPC speaks it.
    Http2,
}

/// A connection that is being served.
struct OpenConnection {
    /// Ends the connection.
    end: AbortHandle,
    /// True once the head of a request has arrived.
    has_request: Arc<AtomicBool>,
}

/// Serves the connections that `accept` gives, each with its routes, for ever. `deadline` is for a whole connection:
/// the request's head and body, the answer, and the time that the client takes to read it. All connections share one
/// task: none outlives it. The requests of HTTP/2 have tasks of their own, which end when their connection has ended.
pub(super) async fn serve<S, F>(protocol: Protocol, deadline: Duration, accept: impl Fn() -> F)
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
    F: Future<Output = io::Result<(S, Router)>>,
{
    let mut http = http1::Builder::new();
    http.keep_alive(false).max_buf_size(MAX_BUFFER as usize);
    let mut http_2 = http2::Builder::new(TokioExecutor::new());
    http_2.max_concurrent_streams(MAX_STREAMS).max_send_buf_size(MAX_BUFFER as usize);
    http_2.max_header_list_size(MAX_BUFFER).initial_stream_window_size(MAX_BUFFER);
    http_2.initial_connection_window_size(MAX_STREAMS * MAX_BUFFER);
    let mut connections = FuturesUnordered::new();
    // The connections, oldest first.
    let mut open = BTreeMap::<u64, OpenConnection>::new();
    let mut next: u64 = 0;
    loop {
        tokio::select! {
            // Requests that have arrived are read first, so that their connections do not count as silent.
            biased;
            Some(number) = connections.next() => drop(open.remove(&number)),
            accepted = accept() => match accepted {
                Ok((stream, routes)) => {
                    if open.len() >= MAX_CONNECTIONS {
                        let is_silent = |client: &OpenConnection| !client.has_request.load(Ordering::Relaxed);
                        let silent = open.iter().find(|(_, client)| protocol == Protocol::Http1 && is_silent(client));
                        let closed = silent.or_else(|| open.first_key_value()).map(|(number, _)| *number);
                        closed.and_then(|number| open.remove(&number)).iter().for_each(|client| client.end.abort());
                    }
                    let number = next;
                    next = next.wrapping_add(1);
                    let has_request = Arc::new(AtomicBool::new(false));
                    let is_read = Arc::clone(&has_request);
                    let routes = routes.map_request(move |request: Request<Incoming>| {
                        is_read.store(true, Ordering::Relaxed);
                        request
                    });
                    let (stream, routes) = (TokioIo::new(stream), TowerToHyperService::new(routes));
                    let connection = match protocol {
                        Protocol::Http1 => Either::Left(http.serve_connection(stream, routes)),
                        Protocol::Http2 => Either::Right(http_2.serve_connection(stream, routes)),
                    };
                    // A client's protocol errors concern only that client.
                    let (connection, end) = abortable(timeout(deadline, connection));
                    open.insert(number, OpenConnection { end, has_request });
                    connections.push(connection.map(move |_| number));
                }
                Err(_) => sleep(ACCEPT_PAUSE).await,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::net::{Ipv6Addr, TcpStream};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::sync::Mutex;
    use tokio::sync::mpsc;

    /// A time far longer than any answer takes: it stands for "never".
    const PATIENCE: Duration = Duration::from_secs(20);

    /// A server with this deadline, and the sender of its connections.
    fn server(protocol: Protocol, deadline: Duration) -> (mpsc::Sender<DuplexStream>, impl Future<Output = ()>) {
        let (connect, incoming) = mpsc::channel::<DuplexStream>(MAX_CONNECTIONS);
        let incoming = Arc::new(Mutex::new(incoming));
        let routes = Router::new().route("/", get(|| async { "x".repeat(1 << 20) }));
        let serving = serve(protocol, deadline, move || {
            let (incoming, routes) = (Arc::clone(&incoming), routes.clone());
            async move {
                let stream = incoming.lock().await.recv().await;
                Ok((stream.ok_or(io::ErrorKind::NotConnected)?, routes))
            }
        });
        (connect, serving)
    }

    #[tokio::test]
    async fn silent_or_deaf_client_ends_with_the_deadline() {
        let (connect, serving) = server(Protocol::Http1, Duration::from_millis(20));
        let client = async {
            let (mut silent, ours) = duplex(64);
            connect.send(ours).await.unwrap();
            assert_eq!(silent.read(&mut [0; 8]).await.unwrap(), 0, "a silent client got bytes");
            let (mut deaf, ours) = duplex(64);
            connect.send(ours).await.unwrap();
            deaf.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
            // The answer does not fit the pipe and is not read: writing fails once the server has dropped its end.
            while deaf.write_all(b"GET / HTTP/1.1\r\n\r\n").await.is_ok() {}
        };
        tokio::select! {
            () = serving => {}
            ended = timeout(PATIENCE, client) => ended.expect("a connection did not end"),
        }
    }

    #[tokio::test]
    async fn http2_connection_ends_with_the_deadline() {
        let (connect, serving) = server(Protocol::Http2, Duration::from_millis(20));
        let client = async {
            let (mut idle, ours) = duplex(1024);
            connect.send(ours).await.unwrap();
            // The preface, and an empty SETTINGS frame (RFC 9113, 3.4 and 6.5).
            idle.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
            let mut answer = Vec::new();
            idle.read_to_end(&mut answer).await.unwrap();
            assert_eq!(answer.get(3), Some(&4), "the server's settings did not come first: {answer:?}");
        };
        tokio::select! {
            () = serving => {}
            ended = timeout(PATIENCE, client) => ended.expect("the connection did not end"),
        }
    }

    #[tokio::test]
    async fn full_server_closes_oldest_silent_connection() {
        let (connect, serving) = server(Protocol::Http1, PATIENCE);
        let client = async {
            let mut open = Vec::new();
            for at in 0..=MAX_CONNECTIONS {
                let (mut theirs, ours) = duplex(64);
                connect.send(ours).await.unwrap();
                if at == 0 {
                    theirs.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
                    assert_eq!(theirs.read_u8().await.unwrap(), b'H');
                }
                open.push(theirs);
            }
            assert_eq!(open[1].read(&mut [0; 8]).await.unwrap(), 0, "the oldest silent client got bytes");
            assert_eq!(open[0].read_u8().await.unwrap(), b'T', "the client that had asked got another byte");
            open[2].write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
            assert_eq!(open[2].read_u8().await.unwrap(), b'H', "the second oldest silent client got another byte");
        };
        tokio::select! {
            () = serving => {}
            ended = timeout(PATIENCE, client) => ended.expect("a connection did not end, or was not served"),
        }
    }

    const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

    #[tokio::test]
    async fn any_address_serves_ipv4_and_ipv6() {
        let listener = listen(ANY).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
    }

    #[tokio::test]
    async fn any_address_without_ipv6_is_ipv4() {
        // This is the kernel's answer without IPv6: EAFNOSUPPORT.
        let without = |address: SocketAddr| match address {
            SocketAddr::V6(_) => Err(io::Error::from_raw_os_error(97)),
            SocketAddr::V4(_) => bind(address),
        };
        let listener = listen_with(ANY, without).unwrap();
        assert!(listener.local_addr().unwrap().is_ipv4());
        // A single IPv6 address is not replaced, and neither is a port in use.
        assert!(listen_with((Ipv6Addr::LOCALHOST, 0).into(), without).is_err());
        let taken = |_| Err(io::Error::from(ErrorKind::AddrInUse));
        assert_eq!(listen_with(ANY, taken).unwrap_err().kind(), ErrorKind::AddrInUse);
    }
}
