//! Connections and routes: turn a request into a call of the store, and its result into an answer.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http_body_util::channel::{Channel, Sender};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Response, header};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::admission::validating::{self, Asked};
use crate::refusal::Refusal;
use crate::store::{Change, Key, ResourceType, Selector};
use crate::{Answer, Request, Shared};

/// The body of an answer.
type Body = BoxBody<Bytes, Infallible>;

/// The target of a path.
struct Target {
    resource: ResourceType,
    namespace: Option<String>,
    name: Option<String>,
    /// Set for the status of an object of the cluster.
    is_status: bool,
}

impl Target {
    /// The name of the resource in roles and policies.
    fn plural(&self) -> String {
        format!("{}{}", self.resource.plural, if self.is_status { "/status" } else { "" })
    }

    fn key(&self, name: &str) -> Key {
        Key { resource: self.resource.clone(), namespace: self.namespace.clone(), name: name.to_owned() }
    }
}

/// Accepts connections until `end`, and then cuts all of them.
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
    // This server does not care about a client that leaves during the handshake or later.
    let Ok(stream) = tls.accept(stream).await else { return };
    let answer = service_fn(|request| {
        let shared = Arc::clone(&shared);
        async move { Ok::<_, Infallible>(answer(request, &shared).await) }
    });
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
}

async fn answer(request: hyper::Request<Incoming>, shared: &Arc<Shared>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let text = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let token = text(header::AUTHORIZATION).strip_prefix("Bearer ").map(str::to_owned);
    let (method, uri) = (head.method.to_string(), head.uri.to_string());
    let seen = Request { method: method.clone(), uri: uri.clone(), token: token.clone() };
    let fault = shared.faults.lock().expect("no thread panics in here").take(&method, &uri);
    shared.requests.send_modify(|requests| requests.push(seen));
    let is_lost = matches!(fault, Some(Answer::Lost));
    match fault {
        Some(Answer::Refusal(code, message, after)) => {
            let mut response = status(&Refusal::new(code, "", message));
            if let Some(after) = after {
                response.headers_mut().insert(header::RETRY_AFTER, after.into());
            }
            return response;
        }
        Some(Answer::Text(text)) => return respond(200, text),
        Some(Answer::Page(code, text)) => return respond(code, text),
        Some(Answer::Endless) => return endless(),
        Some(Answer::Silence) => std::future::pending().await,
        Some(Answer::Lost) | None => {}
    }
    let known = shared.tokens.lock().expect("no thread panics in here").clone();
    if known.is_some_and(|known| !token.as_ref().is_some_and(|token| known.contains(token))) {
        return status(&Refusal::new(401, "Unauthorized", "Unauthorized"));
    }
    let version = shared.version.lock().expect("no thread panics in here").clone();
    if head.uri.path() == "/version" && !version.is_empty() {
        return respond(200, release(&version).to_string());
    }
    let query: Vec<(String, String)> = head.uri.query().map(pairs).unwrap_or_default();
    let parameter = |name: &str| query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
    if method == "POST" && head.uri.path() == ACCESS_REVIEWS {
        return respond(201, reviewed(shared, sent).to_string());
    }
    let Some(target) = target(head.uri.path(), shared) else {
        let message = "the server could not find the requested resource";
        return status(&Refusal::new(404, "NotFound", message));
    };
    let watches = parameter("watch") == Some("true");
    let verb = verb(&method, target.name.is_some(), watches);
    if shared.forbids(verb, &target.plural()) {
        return status(&Refusal::forbidden(&target.resource, verb));
    }
    let selected = match Selector::of(&target.resource, parameter("fieldSelector").unwrap_or_default()) {
        Ok(_) if method == "GET" && shared.ignores_selectors.load(Ordering::Relaxed) => Selector::default(),
        Ok(selected) => selected,
        Err(refusal) => return status(&refusal),
    };
    let metadata_only = text(header::ACCEPT).contains("as=PartialObjectMetadata");
    let show = move |object: &Value| if metadata_only { partial(object) } else { object.clone() };
    let by_default = text(header::USER_AGENT).split('/').next().unwrap_or_default().to_owned();
    let manager = parameter("fieldManager").map_or(by_default, str::to_owned);
    let kind_of_body = text(header::CONTENT_TYPE).to_owned();
    let merges = kind_of_body == "application/merge-patch+json";
    if !merges && let Err(refusal) = allowed(shared, &target, &method, token.as_deref(), &sent) {
        return status(&refusal);
    }
    let result = match (method.as_str(), &target.name) {
        ("GET", None) if watches => {
            let from = parameter("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or_default();
            let seconds = parameter("timeoutSeconds").and_then(|seconds| seconds.parse().ok()).unwrap_or(600);
            return watch(Arc::clone(shared), target, selected, from, Duration::from_secs(seconds), show);
        }
        ("GET", None) => {
            let number = |name| parameter(name).and_then(|number| number.parse().ok());
            let page = (number("continue").unwrap_or_default(), number("limit").filter(|most| *most > 0));
            Ok(list(shared, &target, &selected, metadata_only, page, show))
        }
        ("GET", Some(name)) => {
            let key = target.key(name);
            shared.store().get(&key).map(show).ok_or_else(|| Refusal::not_found(&key))
        }
        ("POST", None) => {
            let name = sent["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            shared.store().create(&manager, &target.key(&name), sent)
        }
        ("PATCH", Some(name)) if merges => {
            shared.patch(token.as_deref(), &manager, &target.key(name), target.is_status, &sent)
        }
        ("PUT", Some(name)) => shared.store().replace(&manager, &target.key(name), sent),
        ("PATCH", Some(name)) if kind_of_body == "application/apply-patch+yaml" => {
            let force = parameter("force") == Some("true");
            shared.store().apply(&manager, &target.key(name), &sent, force)
        }
        ("DELETE", Some(name)) => shared.store().delete(&target.key(name), &sent),
        _ => Err(Refusal::new(405, "MethodNotAllowed", format!("no {method} of {}", head.uri.path()))),
    };
    shared.changed();
    if is_lost {
        std::future::pending::<()>().await;
    }
    match result {
        Ok(object) => respond(if method == "POST" { 201 } else { 200 }, object.to_string()),
        Err(refusal) => status(&refusal),
    }
}

/// Asks the validating policies about a request that names one object.
fn allowed(shared: &Shared, target: &Target, method: &str, token: Option<&str>, sent: &Value) -> Result<(), Refusal> {
    let operation = match method {
        "POST" => "CREATE",
        "PUT" => "UPDATE",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        _ => return Ok(()),
    };
    let name = target.name.as_deref().or_else(|| sent["metadata"]["name"].as_str()).unwrap_or_default();
    let (key, user, none) = (target.key(name), shared.user(token), Value::Null);
    let object = if operation == "DELETE" { &none } else { sent };
    validating::admit(
        &shared.store(),
        &Asked { operation, user: &user, key: &key, plural: key.resource.plural, object },
    )
}

/// The verb of RBAC for a request.
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

/// A SelfSubjectAccessReview with its answer.
fn reviewed(shared: &Shared, mut review: Value) -> Value {
    let attributes = &review["spec"]["resourceAttributes"];
    let text = |field: &str| attributes[field].as_str().unwrap_or_default();
    let allowed = !shared.forbids(text("verb"), text("resource"));
    review["status"] = json!({ "allowed": allowed });
    review
}

/// The answer for `/version`, in which clients read the release.
fn release(version: &str) -> Value {
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    json!({
        "major": major, "minor": minor, "gitVersion": version, "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "linux/amd64",
    })
}

/// The target of a path; `None` if the server has no such kind.
fn target(path: &str, shared: &Shared) -> Option<Target> {
    let words: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (api, rest) = match words.as_slice() {
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
    let own = |text: Option<&str>| text.map(str::to_owned);
    let is_status = rest.len() == 3;
    fits.then(|| Target {
        is_status: is_status && namespace.is_none(),
        resource,
        namespace: own(namespace),
        name: own(name),
    })
}

fn list(
    shared: &Shared,
    target: &Target,
    selected: &Selector,
    metadata_only: bool,
    (from, most): (usize, Option<usize>),
    show: impl Fn(&Value) -> Value,
) -> Value {
    let store = shared.store();
    let objects = store.list(&target.resource, target.namespace.as_deref()).into_iter();
    let meant = objects.filter(|object| selected.selects(object));
    let mut items: Vec<Value> = meant.skip(from).map(show).collect();
    let rest = most.filter(|most| items.len() > *most);
    items.truncate(rest.unwrap_or(items.len()));
    let (api, kind) = match metadata_only {
        true => ("meta.k8s.io/v1", "PartialObjectMetadataList".to_owned()),
        false => (target.resource.api, format!("{}List", target.resource.kind)),
    };
    let mut metadata = json!({"resourceVersion": store.version().to_string()});
    if let Some(rest) = rest {
        // A client hands the token back as it is.
        metadata["continue"] = json!((from + rest).to_string());
    }
    json!({"apiVersion": api, "kind": kind, "metadata": metadata, "items": items})
}

/// A stream of the changes after a version.
fn watch(
    shared: Arc<Shared>,
    target: Target,
    selected: Selector,
    from: u64,
    lasts: Duration,
    show: impl Fn(&Value) -> Value + Send + Sync + 'static,
) -> Response<Body> {
    if shared.store().changes_after(from).is_none() {
        return status(&expired(from));
    }
    let (mut events, body) = Channel::<Bytes, Infallible>::new(16);
    tokio::spawn(async move {
        shared.watches.send_modify(|open| *open += 1);
        let stream = follow(&shared, &target, &selected, from, &show, &mut events);
        let _ = tokio::time::timeout(lasts, stream).await;
        shared.watches.send_modify(|open| *open -= 1);
    });
    let mut response = Response::new(body.boxed());
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

async fn follow(
    shared: &Shared,
    target: &Target,
    selected: &Selector,
    mut from: u64,
    show: &impl Fn(&Value) -> Value,
    events: &mut Sender<Bytes, Infallible>,
) {
    let mut changes = shared.changes.subscribe();
    let meant = |change: &Change| {
        change.key.resource == target.resource
            && (target.namespace.is_none() || change.key.namespace == target.namespace)
            && selected.selects(&change.object)
    };
    loop {
        let news = shared.store().changes_after(from);
        let Some(news) = news else {
            let _ = events.send_data(line(&json!({"type": "ERROR", "object": expired(from).status()}))).await;
            return;
        };
        for change in news {
            from = from.max(change.version);
            if meant(&change) {
                let event = json!({"type": change.kind, "object": show(&change.object)});
                if events.send_data(line(&event)).await.is_err() {
                    return;
                }
            }
        }
        // Sending an empty chunk shows that a client has left.
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

fn partial(object: &Value) -> Value {
    json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": object["metadata"]})
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

/// Text without an end, sent as fast as the client reads.
fn endless() -> Response<Body> {
    let (mut chunks, body) = Channel::<Bytes, Infallible>::new(1);
    tokio::spawn(async move { while chunks.send_data(Bytes::from_static(&[b' '; 1 << 16])).await.is_ok() {} });
    Response::new(body.boxed())
}

/// The parameters of a query; `%2F` and the like are decoded.
fn pairs(query: &str) -> Vec<(String, String)> {
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
    query.split('&').filter_map(pair).collect()
}
