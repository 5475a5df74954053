//! Observes every RPC once, when it has ended: method, code, duration.
//!
//! The server's owner puts the layer around a service. A streaming answer ends with its trailers; an answer that the
//! caller dropped is CANCELLED, never OK.

use std::convert::Infallible;
use std::time::Instant;

use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use tonic::Code;
use tonic::body::Body;
use tonic::service::Routes;
use tower::ServiceExt;

use super::{Report, Rpc};

/// Answers one RPC, and reports it.
pub async fn observed(
    service: Routes,
    request: Request<Body>,
    report: Report<Rpc>,
) -> Result<Response<Body>, Infallible> {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let mut rpc = OpenRpc { report, method, start: Instant::now(), code: Code::Cancelled };
    let answer = service.oneshot(request).await?;
    // An RPC that fails before its answer has its code in the headers.
    rpc.read(answer.headers());
    Ok(answer.map(|body| {
        Body::new(body.map_frame(move |frame| {
            frame.trailers_ref().into_iter().for_each(|trailers| rpc.read(trailers));
            frame
        }))
    }))
}

/// One RPC; reports itself when dropped: when its answer has been sent or abandoned.
struct OpenRpc {
    report: Report<Rpc>,
    method: String,
    start: Instant,
    code: Code,
}

impl OpenRpc {
    fn read(&mut self, headers: &HeaderMap) {
        if let Some(code) = headers.get("grpc-status") {
            self.code = Code::from_bytes(code.as_bytes());
        }
    }
}

impl Drop for OpenRpc {
    fn drop(&mut self) {
        let method = std::mem::take(&mut self.method);
        (self.report)(Rpc { method, code: name(self.code), elapsed: self.start.elapsed() });
    }
}

/// gRPC's name of a code: `INVALID_ARGUMENT` for tonic's `InvalidArgument`.
fn name(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_uppercase());
    }
    name
}
