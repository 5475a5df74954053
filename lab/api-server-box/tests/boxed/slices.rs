//! Slices over HTTPS, as a client sees them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use linkwise_api_server_box::{Answer, ApiServerBox, Fault, ResourceType};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const PATH: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// Opens a connection and sends a request on it.
async fn send(server: &ApiServerBox, method: &str, uri: &str, body: &Value) -> BufReader<TlsStream<TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(server.ca().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let tls = TlsConnector::from(Arc::new(tls.with_root_certificates(roots).with_no_client_auth()));
    let stream = TcpStream::connect(server.address()).await.unwrap();
    let mut stream = tls.connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let head =
        format!("{method} {uri} HTTP/1.0\r\nHost: a\r\nUser-Agent: test\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    BufReader::new(stream)
}

async fn call(server: &ApiServerBox, method: &str, uri: &str, body: Value) -> (u16, Value) {
    let mut answer = String::new();
    // The server ends the connection without TLS's close message.
    let _ = send(server, method, uri, &body).await.read_to_string(&mut answer).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, serde_json::from_str(body).unwrap())
}

fn slice(node: &str, driver: &str) -> Value {
    let pool = json!({"name": node, "generation": 1, "resourceSliceCount": 1});
    json!({
        "metadata": {"generateName": format!("00000-{driver}-{node}-")},
        "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": [{"name": "gpu-0"}]},
    })
}

#[tokio::test]
async fn slice_lives_from_post_to_wipe() {
    let server = ApiServerBox::start(&[ResourceType::RESOURCE_SLICES]).await;
    let (code, made) = call(&server, "POST", PATH, slice("n", "gpu.nvidia.com")).await;
    assert_eq!((code, &made["kind"]), (201, &json!("ResourceSlice")));
    call(&server, "POST", PATH, slice("n", "dra.net")).await;
    call(&server, "POST", PATH, slice("m", "gpu.nvidia.com")).await;
    let query = format!("{PATH}?fieldSelector=spec.nodeName%3Dn%2Cspec.driver%3Dgpu.nvidia.com");
    let (_, list) = call(&server, "GET", &query, Value::Null).await;
    assert_eq!((&list["kind"], &list["items"]), (&json!("ResourceSliceList"), &json!([made])));

    let version = list["metadata"]["resourceVersion"].as_str().unwrap();
    let watch = format!("{query}&watch=true&resourceVersion={version}");
    let mut events = send(&server, "GET", &watch, &Value::Null).await.lines();
    while !events.next_line().await.unwrap().unwrap().is_empty() {}
    let uri = format!("{PATH}/{}", made["metadata"]["name"].as_str().unwrap());
    let mut changed = made.clone();
    changed["spec"]["devices"] = json!([]);
    let (code, stored) = call(&server, "PUT", &uri, changed.clone()).await;
    assert_eq!((code, &stored["metadata"]["generation"]), (200, &json!(2)));
    let (code, refusal) = call(&server, "PUT", &uri, changed).await;
    assert_eq!((code, &refusal["reason"]), (409, &json!("Conflict")));
    let stale = json!({"preconditions": {"resourceVersion": made["metadata"]["resourceVersion"]}});
    assert_eq!(call(&server, "DELETE", &uri, stale).await.0, 409);
    server.wipe_slices("n", Some("dra.net"));
    server.wipe_slices("n", None);
    for kind in ["MODIFIED", "DELETED"] {
        let event: Value = serde_json::from_str(&events.next_line().await.unwrap().unwrap()).unwrap();
        assert_eq!((&event["type"], &event["object"]["metadata"]["name"]), (&json!(kind), &made["metadata"]["name"]));
    }
    assert_eq!(server.objects(&ResourceType::RESOURCE_SLICES).len(), 1);
    let (code, _) = call(&server, "DELETE", &format!("{PATH}?fieldSelector=spec.nodeName=m"), Value::Null).await;
    assert_eq!((code, server.objects(&ResourceType::RESOURCE_SLICES).len()), (200, 0));
}

#[tokio::test]
async fn refused_slice_is_named_with_its_field() {
    let server = ApiServerBox::start(&[ResourceType::RESOURCE_SLICES]).await;
    let mut wrong = slice("n", "gpu.nvidia.com");
    wrong["spec"]["devices"][0]["attributes"] = json!({"driverVersion": {"version": "12.8"}});
    let (code, status) = call(&server, "POST", PATH, wrong).await;
    assert_eq!(
        (code, &status["reason"], &status["details"]["kind"]),
        (422, &json!("Invalid"), &json!("ResourceSlice"))
    );
    let field = &status["details"]["causes"][0]["field"];
    assert_eq!(field, "spec.devices[0].attributes[driverVersion].version");
    server.fail(Fault::of("POST", "resourceslices", 1, Answer::Refusal(403, "not this node", None)));
    assert_eq!(call(&server, "POST", PATH, slice("n", "a")).await.0, 403);
    assert_eq!(call(&server, "POST", PATH, slice("n", "a")).await.0, 201);
    assert_eq!(call(&server, "GET", &format!("{PATH}?fieldSelector=spec.pool=a"), Value::Null).await.0, 400);
}
