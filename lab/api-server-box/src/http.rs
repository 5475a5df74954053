//! Connections and routes: each request becomes a call of the store, whose result is the answer.

use std::convert::Infallible;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http_body_util::channel::{Channel, Sender};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Response, header};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::admission::validating::{self, AdmissionRequest};
use crate::refusal::Refusal;
use crate::store::{Change, Key, ResourceType, Selector};
use crate::{Answer, Request, Shared, lock};

type Body = BoxBody<Bytes, Infallible>;

const MERGE_PATCH: &str = "application/merge-patch+json";

/// The kind or the object that a path names.
struct Target {
    resource: ResourceType,
    namespace: Option<String>,
    name: Option<String>,
    /// Set if the path names the status of a cluster-scoped object.
    is_status: bool,
}

impl Target {
    /// The resource as roles and policies name it, such as `nodes/status`.
    fn plural(&self) -> String {
        format!("{}{}", self.resource.plural, if self.is_status { "/status" } else { "" })
    }

    fn key(&self, name: &str) -> Key {
        Key { resource: self.resource.clone(), namespace: self.namespace.clone(), name: name.to_owned() }
    }
}

/// Accepts connections until `end` is cancelled, and then cuts all of them.
pub(super) async fn serve(listener: TcpListener, tls: TlsAcceptor, shared: Arc<Shared>, end: CancellationToken) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(connection(stream, tls.clone(), Arc::clone(&shared)));
                }
            }
            () = end.cancelled() => break,
        }
    }
    connections.shutdown().await;
}

async fn connection(stream: TcpStream, tls: TlsAcceptor, shared: Arc<Shared>) {
    // A client may disconnect at any time, so errors of the connection are ignored.
    let Ok(stream) = tls.accept(stream).await else { return };
    let answer = service_fn(|request| {
        let shared = Arc::clone(&shared);
        async move { Ok::<_, Infallible>(answer(request, &shared).await) }
    });
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
}

async fn answer(request: hyper::Request<Incoming>, shared: &Arc<Shared>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let token = text(&head.headers, header::AUTHORIZATION).strip_prefix("Bearer ").map(str::to_owned);
    let (method, uri) = (head.method.to_string(), head.uri.to_string());
    let fault = lock(&shared.faults).take(&method, &uri);
    shared.requests.send_modify(|requests| requests.push(Request { method, uri, token: token.clone() }));
    let is_lost = matches!(fault, Some(Answer::Lost));
    if let Some(fault) = fault
        && let Some(response) = faulty(fault).await
    {
        return response;
    }
    let accepted = lock(&shared.tokens).clone();
    if accepted.is_some_and(|accepted| !token.as_ref().is_some_and(|token| accepted.contains(token))) {
        return status(&Refusal::new(401, "Unauthorized", "Unauthorized"));
    }
    let version = lock(&shared.version).clone();
    if head.uri.path() == "/version" && !version.is_empty() {
        return respond(200, release(&version).to_string());
    }
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
    if head.method == Method::POST && head.uri.path() == ACCESS_REVIEWS {
        return respond(201, reviewed(shared, sent).to_string());
    }
    let call = match Call::read(shared, &head, token, &sent) {
        Ok(call) => call,
        Err(refusal) => return status(&refusal),
    };
    if call.is_watch() {
        return watch(Arc::clone(shared), call);
    }
    let result = call.carry_out(shared, sent);
    shared.changed();
    if is_lost {
        std::future::pending::<()>().await;
    }
    match result {
        Ok(object) => respond(if head.method == Method::POST { 201 } else { 200 }, object.to_string()),
        Err(refusal) => status(&refusal),
    }
}

/// The answer that a fault gives; `None` if the server carries the request out.
async fn faulty(fault: Answer) -> Option<Response<Body>> {
    Some(match fault {
        Answer::Refusal(code, message, after) => {
            let mut response = status(&Refusal::new(code, "", message));
            if let Some(after) = after {
                response.headers_mut().insert(header::RETRY_AFTER, after.into());
            }
            response
        }
        Answer::Text(text) => respond(200, text),
        Answer::Page(code, text) => respond(code, text),
        Answer::Endless => endless(),
        Answer::Silence => std::future::pending().await,
        Answer::Lost => return None,
    })
}

/// A request about objects, after the checks of [`Call::read`].
struct Call {
    method: String,
    path: String,
    query: Query,
    content_type: String,
    token: Option<String>,
    /// The manager of fields.
    manager: String,
    target: Target,
    selector: Selector,
    /// Set if the client wants the metadata of objects only.
    is_metadata_only: bool,
}

impl Call {
    /// Reads a request. Refuses an unknown path, a missing right, and a request that a validating policy denies;
    /// [`Shared::patch`] checks merge patches.
    fn read(shared: &Shared, head: &Parts, token: Option<String>, sent: &Value) -> Result<Self, Refusal> {
        let (method, path) = (head.method.to_string(), head.uri.path().to_owned());
        let query = Query::read(head.uri.query().unwrap_or_default());
        let unknown = || Refusal::new(404, "NotFound", "the server could not find the requested resource");
        let target = target(&path, shared).ok_or_else(unknown)?;
        let verb = verb(&method, target.name.is_some(), query.is_true("watch"));
        if shared.forbids(verb, &target.plural()) {
            return Err(Refusal::forbidden(&target.resource, verb));
        }
        let mut selector = Selector::parse(&target.resource, query.text("fieldSelector").unwrap_or_default())?;
        if method == "GET" && shared.ignores_selectors.load(Ordering::Relaxed) {
            selector = Selector::default();
        }
        let content_type = text(&head.headers, header::CONTENT_TYPE).to_owned();
        if content_type != MERGE_PATCH {
            check_policies(shared, &target, &method, token.as_deref(), sent)?;
        }
        let agent = text(&head.headers, header::USER_AGENT).split('/').next().unwrap_or_default();
        let manager = query.text("fieldManager").unwrap_or(agent).to_owned();
        let is_metadata_only = text(&head.headers, header::ACCEPT).contains("as=PartialObjectMetadata");
        Ok(Self { method, path, query, content_type, token, manager, target, selector, is_metadata_only })
    }

    fn is_watch(&self) -> bool {
        self.method == "GET" && self.target.name.is_none() && self.query.is_true("watch")
    }

    fn carry_out(&self, shared: &Shared, sent: Value) -> Result<Value, Refusal> {
        let (target, manager) = (&self.target, &self.manager);
        match (self.method.as_str(), &target.name) {
            ("GET", None) => Ok(list(shared, self)),
            ("GET", Some(name)) => {
                let key = target.key(name);
                shared.store().get(&key).map(|object| self.shown(object)).ok_or_else(|| Refusal::not_found(&key))
            }
            ("POST", None) => {
                let name = sent["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                shared.store().create(manager, &target.key(&name), sent)
            }
            ("PATCH", Some(name)) if self.content_type == MERGE_PATCH => {
                shared.patch(self.token.as_deref(), manager, &target.key(name), target.is_status, &sent)
            }
            ("PUT", Some(name)) => shared.store().replace(manager, &target.key(name), sent),
            ("PATCH", Some(name)) if self.content_type == "application/apply-patch+yaml" => {
                shared.store().apply(manager, &target.key(name), &sent, self.query.is_true("force"))
            }
            ("DELETE", Some(name)) => shared.store().delete(&target.key(name), &sent),
            _ => Err(Refusal::new(405, "MethodNotAllowed", format!("no {} of {}", self.method, self.path))),
        }
    }

    /// The object as the client wants it: whole, or its metadata only.
    fn shown(&self, object: &Value) -> Value {
        if !self.is_metadata_only {
            return object.clone();
        }
        json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": object["metadata"]})
    }
}

/// Checks a request that creates, changes or deletes an object against the validating policies.
fn check_policies(
    shared: &Shared,
    target: &Target,
    method: &str,
    token: Option<&str>,
    sent: &Value,
) -> Result<(), Refusal> {
    let operation = match method {
        "POST" => "CREATE",
        "PUT" => "UPDATE",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        _ => return Ok(()),
    };
    let name = target.name.as_deref().or_else(|| sent["metadata"]["name"].as_str()).unwrap_or_default();
    let (key, user) = (target.key(name), shared.user(token));
    let object = if operation == "DELETE" { &Value::Null } else { sent };
    let request = AdmissionRequest { operation, user: &user, key: &key, plural: key.resource.plural, object };
    validating::admit(&shared.store(), &request)
}

/// The verb of RBAC for a method.
fn verb(method: &str, names_one: bool, watches: bool) -> &'static str {
    match (method, names_one) {
        ("GET", true) => "get",
        ("GET", false) if watches => "watch",
        ("GET", false) => "list",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        _ => "delete",
    }
}

/// The path at which a client asks for its rights.
const ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// A SelfSubjectAccessReview with its answer in the status.
fn reviewed(shared: &Shared, mut review: Value) -> Value {
    let attributes = &review["spec"]["resourceAttributes"];
    let text = |field: &str| attributes[field].as_str().unwrap_or_default();
    let allowed = !shared.forbids(text("verb"), text("resource"));
    review["status"] = json!({ "allowed": allowed });
    review
}

/// The answer for `/version`, from which clients read the server's release.
fn release(version: &str) -> Value {
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    json!({
        "major": major, "minor": minor, "gitVersion": version, "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "linux/amd64",
    })
}

/// The target of a path; `None` if the server does not serve the path.
fn target(path: &str, shared: &Shared) -> Option<Target> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (api, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] => ((*version).to_owned(), rest),
        ["apis", group, version, rest @ ..] => (format!("{group}/{version}"), rest),
        _ => return None,
    };
    let (namespace, plural, name) = match rest {
        ["namespaces", namespace, plural] => (Some(*namespace), plural, None),
        ["namespaces", namespace, plural, name] => (Some(*namespace), plural, Some(*name)),
        [plural] => (None, plural, None),
        [plural, name] | [plural, name, "status"] => (None, plural, Some(*name)),
        _ => return None,
    };
    let resource = shared.store().resource(&api, plural)?.clone();
    let fits = resource.namespaced == namespace.is_some() || (resource.namespaced && name.is_none());
    let is_status = rest.len() == 3 && namespace.is_none();
    let (namespace, name) = (namespace.map(str::to_owned), name.map(str::to_owned));
    fits.then_some(Target { resource, namespace, name, is_status })
}

fn list(shared: &Shared, call: &Call) -> Value {
    let (target, from) = (&call.target, call.query.number::<usize>("continue").unwrap_or_default());
    let most = call.query.number::<usize>("limit").filter(|most| *most > 0);
    let store = shared.store();
    let objects = store.list(&target.resource, target.namespace.as_deref()).into_iter();
    let selected = objects.filter(|object| call.selector.selects(object));
    let mut items: Vec<Value> = selected.skip(from).map(|object| call.shown(object)).collect();
    let cut = most.filter(|most| items.len() > *most);
    items.truncate(cut.unwrap_or(items.len()));
    let (api, kind) = match call.is_metadata_only {
        true => ("meta.k8s.io/v1", "PartialObjectMetadataList".to_owned()),
        false => (target.resource.api, format!("{}List", target.resource.kind)),
    };
    let mut metadata = json!({"resourceVersion": store.version().to_string()});
    if let Some(most) = cut {
        metadata["continue"] = json!((from + most).to_string());
    }
    json!({"apiVersion": api, "kind": kind, "metadata": metadata, "items": items})
}

/// Streams the changes after the version that the client names, until the client's timeout.
fn watch(shared: Arc<Shared>, call: Call) -> Response<Body> {
    let from: u64 = call.query.number("resourceVersion").unwrap_or_default();
    let timeout = Duration::from_secs(call.query.number("timeoutSeconds").unwrap_or(600));
    if shared.store().changes_after(from).is_none() {
        return status(&expired(from));
    }
    let (mut events, body) = Channel::<Bytes, Infallible>::new(16);
    tokio::spawn(async move {
        shared.watches.send_modify(|open| *open += 1);
        let _ = tokio::time::timeout(timeout, follow(&shared, &call, from, &mut events)).await;
        shared.watches.send_modify(|open| *open -= 1);
    });
    let mut response = Response::new(body.boxed());
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

async fn follow(shared: &Shared, call: &Call, mut from: u64, events: &mut Sender<Bytes, Infallible>) {
    let mut changes = shared.changes.subscribe();
    let target = &call.target;
    let is_watched = |change: &Change| {
        change.key.resource == target.resource
            && (target.namespace.is_none() || change.key.namespace == target.namespace)
            && call.selector.selects(&change.object)
    };
    loop {
        let changes_after = shared.store().changes_after(from);
        let Some(later) = changes_after else {
            let _ = events.send_data(line(&json!({"type": "ERROR", "object": expired(from).status()}))).await;
            return;
        };
        for change in later {
            from = from.max(change.version);
            if is_watched(&change) {
                let event = json!({"type": change.kind, "object": call.shown(&change.object)});
                if events.send_data(line(&event)).await.is_err() {
                    return;
                }
            }
        }
        // Sending an empty chunk fails once the client has disconnected.
        tokio::select! {
            _ = changes.changed() => {}
            () = tokio::time::sleep(Duration::from_millis(50)) => {
                if events.send_data(Bytes::new()).await.is_err() {
                    return;
                }
            }
        }
    }
}

fn line(event: &Value) -> Bytes {
    Bytes::from(format!("{event}\n"))
}

fn expired(version: u64) -> Refusal {
    Refusal::new(410, "Expired", format!("too old resource version: {version}"))
}

fn status(why: &Refusal) -> Response<Body> {
    respond(why.code, why.status().to_string())
}

fn respond(code: u16, text: String) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(text)).boxed());
    *response.status_mut() = code.try_into().expect("a status of HTTP");
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

/// An endless text, sent as fast as the client reads.
fn endless() -> Response<Body> {
    let (mut chunks, body) = Channel::<Bytes, Infallible>::new(1);
    tokio::spawn(async move { while chunks.send_data(Bytes::from_static(&[b' '; 1 << 16])).await.is_ok() {} });
    Response::new(body.boxed())
}

/// The text of a header; empty if the request does not have it.
fn text(headers: &HeaderMap, name: header::HeaderName) -> &str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// The parameters of a URI's query.
struct Query(Vec<(String, String)>);

impl Query {
    /// Reads a query, with percent-encoding.
    fn read(query: &str) -> Self {
        let decode = |text: &str| {
            let (mut bytes, mut rest) = (Vec::new(), text.bytes());
            while let Some(byte) = rest.next() {
                let hex = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16)).unwrap_or_default();
                bytes.push(match byte {
                    b'%' => u8::try_from(hex(rest.next()) * 16 + hex(rest.next())).unwrap_or(b'?'),
                    b'+' => b' ',
                    byte => byte,
                });
            }
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let pair = |pair: &str| pair.split_once('=').map(|(key, value)| (decode(key), decode(value)));
        Self(query.split('&').filter_map(pair).collect())
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn number<T: FromStr>(&self, name: &str) -> Option<T> {
        self.text(name).and_then(|number| number.parse().ok())
    }

    fn is_true(&self, name: &str) -> bool {
        self.text(name) == Some("true")
    }
}
