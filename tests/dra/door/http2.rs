//! The `:authority` of the kubelet's registration calls, as bytes on the socket: h2 accepts a socket's name with an `@`
//! and resets calls for one without. If this test fails without a change of ours, h2 or http has changed.

use std::path::Path;

use linkwise_kubelet::dra::Phase;
use linkwise_kubelet_box::dra::authority;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::node::{Node, TEST_TIMEOUT, file_names};

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GO_AWAY: u8 = 7;
const PROTOCOL_ERROR: u32 = 1;

/// A frame of RFC 9113, section 4.1.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A literal header field without indexing (RFC 7541, section 6.2.2), both strings without Huffman coding. A length
/// below 127 takes one byte, a longer one two.
fn field(name: &str, value: &str) -> Vec<u8> {
    let string = |text: &str| {
        let mut bytes = match u8::try_from(text.len()).unwrap() {
            length @ 0..127 => vec![length],
            length => vec![127, length - 127],
        };
        bytes.extend(text.as_bytes());
        bytes
    };
    [vec![0], string(name), string(value)].concat()
}

/// Calls GetInfo as grpc-go does. Returns the type of the frame that answers, and the first four bytes of its payload.
async fn get_info(socket: &Path, authority: &str) -> (u8, u32) {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/pluginregistration.Registration/GetInfo"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let headers: Vec<u8> = fields.iter().flat_map(|(name, value)| field(name, value)).collect();
    let request = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(SETTINGS, 0, 0, &[]),
        // Flag 4 is END_HEADERS. The DATA frame has an empty message and flag 1, END_STREAM.
        frame(HEADERS, 4, 1, &headers),
        frame(0, 1, 1, &[0; 5]),
    ];
    stream.write_all(&request.concat()).await.unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        let length = usize::try_from(u32::from_be_bytes([0, head[0], head[1], head[2]])).unwrap();
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).await.unwrap();
        if matches!(head[3], HEADERS | RST_STREAM | GO_AWAY) {
            return (head[3], u32::from_be_bytes(payload[..4].try_into().unwrap()));
        }
    }
}

#[tokio::test]
async fn authority_of_grpc_go_needs_an_at_sign() {
    let mut node = Node::new();
    node.start();
    node.wait_phase(Phase::Offered).await;
    let [name] = file_names(&node.settings.registry).try_into().unwrap();
    let socket = node.settings.registry.join(&name);
    let encoded = authority(socket.to_str().unwrap());
    assert!(encoded.starts_with("%2F") && encoded.ends_with("@gpu.nvidia.com-reg.sock"), "{encoded}");
    let in_kubelets_folder = authority(&format!("/var/lib/kubelet/plugins_registry/{name}"));
    for good in [&encoded, &in_kubelets_folder] {
        assert_eq!(timeout(TEST_TIMEOUT, get_info(&socket, good)).await.unwrap().0, HEADERS, "{good}");
    }
    let without = in_kubelets_folder.replace('@', "-");
    let answer = timeout(TEST_TIMEOUT, get_info(&socket, &without)).await.unwrap();
    assert_eq!(answer, (RST_STREAM, PROTOCOL_ERROR), "{without}");
}
