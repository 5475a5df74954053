//! Observes every RPC once, when it has ended: method, code, duration.
//!
//! Laid around the service by `session`. A streaming answer ends with its trailers; one that the caller dropped is
//! CANCELLED, never OK.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame, SizeHint};
use tonic::Code;
use tower::{Layer, Service};

use super::{Observer, Occurrence};
use crate::state::ResourceName;

/// Observes the RPCs of a server.
#[derive(Clone)]
pub(super) struct Observe {
    pub resource: ResourceName,
    pub observer: Observer,
}

/// A service with [`Observe`] around it.
#[derive(Clone)]
pub(super) struct Observed<S> {
    inner: S,
    layer: Observe,
}

impl<S> Layer<S> for Observe {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Observed { inner, layer: self.clone() }
    }
}

impl<S, Q, B> Service<Request<Q>> for Observed<S>
where
    S: Service<Request<Q>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = Response<ObservedBody<B>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let mut rpc = Rpc { layer: self.layer.clone(), method, start: Instant::now(), code: Code::Cancelled };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let (parts, inner) = answer.await?.into_parts();
            // An RPC that fails before its answer has its code in the headers.
            rpc.read(&parts.headers);
            Ok(Response::from_parts(parts, ObservedBody { inner, rpc }))
        })
    }
}

/// One RPC; reports itself when dropped: when its answer has been sent or abandoned.
struct Rpc {
    layer: Observe,
    method: String,
    start: Instant,
    code: Code,
}

impl Rpc {
    fn read(&mut self, headers: &HeaderMap) {
        if let Some(code) = headers.get("grpc-status") {
            self.code = Code::from_bytes(code.as_bytes());
        }
    }
}

impl Drop for Rpc {
    fn drop(&mut self) {
        let method = std::mem::take(&mut self.method);
        let occurrence = Occurrence::Rpc { method, code: name(self.code), elapsed: self.start.elapsed() };
        (self.layer.observer)(&self.layer.resource, occurrence);
    }
}

/// A response body whose trailers are read.
pub(super) struct ObservedBody<B> {
    inner: B,
    rpc: Rpc,
}

impl<B: Body + Unpin> Body for ObservedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            self.rpc.read(trailers);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// gRPC's name of a code.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
