//! The listening TCP socket: serves both IPv4 and IPv6, regardless of the host's defaults.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};

use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;

/// The most connections that may wait to be accepted, as tokio sets it.
const BACKLOG: i32 = 1024;

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
    // A restart does not wait until the last process's connections are forgotten.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv6Addr, TcpStream};

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
