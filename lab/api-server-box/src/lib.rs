//! A Kubernetes API server inside the caller's process: it serves HTTPS, keeps objects in memory, and injects faults.
//!
//! Tests, benchmarks, the GPU kit and `linkwise-lab demo --dra` run linkwise's clients of the API server against it.
//! The server stores JSON objects of any group, version and resource. It implements the mechanisms that a client relies
//! on: resource versions, watches that continue or expire, server-side apply with owners of fields, conflicts, bearer
//! tokens. It enforces the rules of `resource.k8s.io/v1` (limits, names, immutable fields, gates that drop fields). Its
//! MutatingAdmissionPolicies change the pods that a client creates, and its ValidatingAdmissionPolicies refuse
//! requests. Of other objects it validates only policies, pods and events, in part. It shares no code with linkwise.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "production does not run it")]

mod admission;
mod apply;
mod faults;
mod http;
mod refusal;
mod resource;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

pub use faults::{Answer, Fault};
pub use resource::Gates;
pub use store::{Key, ResourceType};

use admission::validating::{self, AdmissionRequest};
use faults::Faults;
use refusal::Refusal;
use store::{Selector, Store};

/// A request that arrived, regardless of its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// GET, POST, PUT, PATCH or DELETE.
    pub method: String,
    /// The path, with the query if there is one.
    pub uri: String,
    /// The bearer token.
    pub token: Option<String>,
}

/// Returns the object that the server would store if a client created this one.
///
/// # Errors
///
/// The `Status` with which the server would refuse the object.
pub fn stored(resource: &ResourceType, namespace: Option<&str>, gates: Gates, object: &Value) -> Result<Value, Value> {
    let mut store = Store::new(std::slice::from_ref(resource));
    store.gates = gates;
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let created = store.create("client", &resource.key(namespace, name), object.clone());
    created.map_err(|refusal| refusal.status())
}

/// A verb of RBAC and a resource: `("create", "events")`.
type Right = (&'static str, &'static str);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it holds the lock")
}

/// The state that all connections share.
#[derive(Default)]
struct Shared {
    store: Mutex<Store>,
    faults: Mutex<Faults>,
    /// The accepted tokens; `None` while every request is accepted.
    tokens: Mutex<Option<BTreeSet<String>>>,
    /// The `userInfo` of clients, by their tokens, for policies.
    users: Mutex<BTreeMap<String, Value>>,
    requests: watch::Sender<Vec<Request>>,
    /// The release that `/version` names.
    version: Mutex<String>,
    /// The rights that no client has.
    forbidden: Mutex<Vec<Right>>,
    /// Set while lists and watches ignore their field selectors and return every object of the kind.
    ignores_selectors: AtomicBool,
    /// Grows after each change of the store, and after requests without one; watches then look for changes.
    changes: watch::Sender<u64>,
    /// The number of open watches.
    watches: watch::Sender<usize>,
}

impl Shared {
    fn store(&self) -> MutexGuard<'_, Store> {
        lock(&self.store)
    }

    /// The `userInfo` of the client with this token.
    fn user(&self, token: Option<&str>) -> Value {
        let users = lock(&self.users);
        token.and_then(|token| users.get(token)).cloned().unwrap_or_default()
    }

    fn forbids(&self, verb: &str, plural: &str) -> bool {
        lock(&self.forbidden).contains(&(verb, plural))
    }

    /// Applies a merge patch as [`Store::merged`] does, if the validating policies allow the request of the client with
    /// this token.
    fn patch(
        &self,
        token: Option<&str>,
        manager: &str,
        key: &Key,
        is_status: bool,
        patch: &Value,
    ) -> Result<Value, Refusal> {
        let object = self.store().merged(key, patch, is_status)?;
        let (user, plural) =
            (self.user(token), format!("{}{}", key.resource.plural, if is_status { "/status" } else { "" }));
        let request = AdmissionRequest { operation: "UPDATE", user: &user, key, plural: &plural, object: &object };
        validating::admit(&self.store(), &request)?;
        self.store().replace(manager, key, object)
    }

    /// Changes the store, and lets watches see the change.
    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let result = change(&mut self.store());
        self.changed();
        result
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }
}

/// The server. It stops when this value is dropped.
pub struct ApiServerBox {
    shared: Arc<Shared>,
    acceptor: TlsAcceptor,
    address: SocketAddr,
    ca: String,
    serving: Mutex<Option<Serving>>,
}

/// The task that accepts connections, and the token that ends it.
type Serving = (CancellationToken, tokio::task::JoinHandle<()>);

/// The most retries of [`ApiServerBox::come_back`] to bind the port, and the delay before each.
const MAX_RETRIES: u32 = 1_000;
const RETRY_DELAY: std::time::Duration = std::time::Duration::from_millis(10);

impl ApiServerBox {
    /// Starts the server on a free port of 127.0.0.1, with these kinds of objects. Panics if that fails.
    pub async fn start(types: &[ResourceType]) -> Self {
        Self::start_on("127.0.0.1:0", types).await.expect("127.0.0.1 has a free port")
    }

    /// Starts the server on an address, with these kinds of objects.
    ///
    /// # Errors
    ///
    /// The address cannot be bound.
    pub async fn start_on(address: &str, types: &[ResourceType]) -> std::io::Result<Self> {
        let names = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
        let made = rcgen::generate_simple_self_signed(names).expect("a certificate of plain names can be made");
        let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|tls| tls.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key))
            .expect("a certificate with its key makes a server");
        let listener = TcpListener::bind(address).await?;
        let (store, version) = (Mutex::new(Store::new(types)), Mutex::new("v1.36.2".to_owned()));
        let server = Self {
            shared: Arc::new(Shared { store, version, ..Shared::default() }),
            acceptor: TlsAcceptor::from(Arc::new(tls)),
            address: listener.local_addr()?,
            ca: made.cert.pem(),
            serving: Mutex::default(),
        };
        server.serve(listener);
        Ok(server)
    }

    fn serve(&self, listener: TcpListener) {
        let end = CancellationToken::new();
        let serving = http::serve(listener, self.acceptor.clone(), Arc::clone(&self.shared), end.clone());
        lock(&self.serving).replace((end, tokio::spawn(serving)));
    }

    /// The address at which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The server's URL, such as `https://127.0.0.1:6443`.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// The server's self-signed certificate, as PEM.
    pub fn ca(&self) -> &str {
        &self.ca
    }

    /// Accepts only requests with one of these bearer tokens from now on.
    pub fn accept_tokens(&self, tokens: &[&str]) {
        let tokens = tokens.iter().map(|token| (*token).to_owned()).collect();
        *lock(&self.shared.tokens) = Some(tokens);
    }

    /// Sets the `userInfo` that admission policies see for the client with this token.
    pub fn name_user(&self, token: &str, user_info: Value) {
        lock(&self.shared.users).insert(token.to_owned(), user_info);
    }

    /// Denies these rights, and no others, to all clients from now on. The server refuses such requests, and a
    /// SelfSubjectAccessReview reports that they are not allowed.
    pub fn forbid(&self, rights: &[(&'static str, &'static str)]) {
        *lock(&self.shared.forbidden) = rights.to_vec();
    }

    /// Stops listening and cuts every connection.
    pub async fn go_away(&self) {
        let taken = lock(&self.serving).take();
        if let Some((end, serving)) = taken {
            end.cancel();
            serving.await.expect("serving does not panic");
        }
    }

    /// Listens at the same address again, as soon as no earlier connection and no other program holds the port.
    pub async fn come_back(&self) {
        let mut retries = 0;
        let listener = loop {
            match TcpListener::bind(self.address).await {
                Ok(listener) => break listener,
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && retries < MAX_RETRIES => retries += 1,
                Err(error) => panic!("{}: {error}", self.address),
            }
            tokio::time::sleep(RETRY_DELAY).await;
        };
        self.serve(listener);
    }

    /// Injects a fault.
    pub fn fail(&self, fault: Fault) {
        lock(&self.shared.faults).add(fault);
    }

    /// Sets the feature gates. Stored slices stay as they are.
    pub fn set_gates(&self, gates: Gates) {
        self.shared.store().gates = gates;
    }

    /// Marks the server as starting, or as started. While it starts, no mutating policy can patch an object.
    pub fn set_starting(&self, is_starting: bool) {
        self.shared.store().is_starting = is_starting;
    }

    /// The number of patches that the server has evaluated for mutating policies.
    pub fn patches(&self) -> usize {
        self.shared.store().patches.get()
    }

    /// Sets the `gitVersion` of `/version`, such as `v1.37.0`. If it is empty, the server answers that path with 404.
    pub fn set_version(&self, version: &str) {
        version.clone_into(&mut lock(&self.shared.version));
    }

    /// Makes lists and watches ignore their field selectors from now on.
    pub fn ignore_field_selectors(&self) {
        self.shared.ignores_selectors.store(true, Ordering::Relaxed);
    }

    /// Deletes ResourceSlices of a node, as its kubelet does: those of one driver 30 s after the driver has gone, or
    /// those of all drivers when the kubelet starts.
    pub fn wipe_slices(&self, node: &str, driver: Option<&str>) {
        let slices = ResourceType::RESOURCE_SLICES;
        let driver = driver.map_or_else(String::new, |driver| format!(",spec.driver={driver}"));
        let selector =
            Selector::parse(&slices, &format!("spec.nodeName={node}{driver}")).expect("slices have these fields");
        self.shared.change(|store| store.remove_selected(&slices, None, &selector));
    }

    /// The objects of a kind, in the order of namespace and name.
    pub fn objects(&self, resource: &ResourceType) -> Vec<Value> {
        self.shared.store().list(resource, None).into_iter().cloned().collect()
    }

    /// Creates or replaces an object without any checks; `manager` becomes the owner of the changed fields.
    pub fn put(&self, manager: &str, key: &Key, object: Value) {
        self.shared.change(|store| store.put(manager, key, object));
    }

    /// Creates a claim in the namespace `default`, allocated with these results and this configuration. Returns the
    /// claim's UID.
    pub fn put_allocated_claim(&self, name: &str, results: &[Value], config: &[Value]) -> String {
        let key = ResourceType::RESOURCE_CLAIMS.key(Some("default"), name);
        let exactly = json!({"deviceClassName": "gpu.nvidia.com", "count": results.len()});
        let claim = json!({
            "spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}},
            "status": {"allocation": {"devices": {"results": results, "config": config}}},
        });
        self.put("kube-scheduler", &key, claim);
        let stored = self.object(&key).unwrap_or_default();
        stored["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
    }

    /// Creates an object as a client would: the server checks it and fills in defaults.
    ///
    /// # Errors
    ///
    /// The Status of the server's refusal.
    pub fn create(&self, manager: &str, key: &Key, object: Value) -> Result<Value, Value> {
        self.shared.change(|store| store.create(manager, key, object)).map_err(|refusal| refusal.status())
    }

    /// Creates an object as the client with this token would: validating policies may refuse the request. Fails as
    /// [`Self::create`] does.
    pub fn create_as(&self, token: &str, key: &Key, object: Value) -> Result<Value, Value> {
        let user = self.shared.user(Some(token));
        let plural = key.resource.plural;
        let request = AdmissionRequest { operation: "CREATE", user: &user, key, plural, object: &object };
        validating::admit(&self.shared.store(), &request).map_err(|refusal| refusal.status())?;
        self.create(token, key, object)
    }

    /// Sends a merge patch of a cluster-scoped object, or of its status, as the client with this token would. Fails as
    /// [`Self::create`] does.
    pub fn patch_as(&self, token: &str, key: &Key, is_status: bool, patch: &Value) -> Result<Value, Value> {
        let patched = self.shared.patch(Some(token), token, key, is_status, patch);
        self.shared.changed();
        patched.map_err(|refusal| refusal.status())
    }

    /// Replaces an object's status as a client would. Fails as [`Self::create`] does.
    pub fn replace_status(&self, manager: &str, key: &Key, object: &Value) -> Result<Value, Value> {
        self.shared.change(|store| store.replace_status(manager, key, object)).map_err(|refusal| refusal.status())
    }

    /// Changes an object without any checks; `manager` becomes the owner of the changed fields.
    pub fn edit(&self, manager: &str, key: &Key, edit: impl FnOnce(&mut Value)) {
        let mut object = self.object(key).expect("the object is there");
        edit(&mut object);
        self.put(manager, key, object);
    }

    /// Deletes an object.
    pub fn remove(&self, key: &Key) {
        self.shared.change(|store| store.remove(key));
    }

    /// The current state of an object.
    pub fn object(&self, key: &Key) -> Option<Value> {
        self.shared.store().get(key).cloned()
    }

    /// Waits until an object, or its absence, meets a condition.
    pub async fn wait_for_object(&self, key: &Key, condition: impl Fn(Option<&Value>) -> bool) {
        let mut changes = self.shared.changes.subscribe();
        while !condition(self.object(key).as_ref()) {
            changes.changed().await.expect("the sender lives as long as the server");
        }
    }

    /// Waits until the objects of a kind meet a condition.
    pub async fn wait_for_objects(&self, resource: &ResourceType, condition: impl Fn(&[Value]) -> bool) {
        let mut changes = self.shared.changes.subscribe();
        while !condition(&self.objects(resource)) {
            changes.changed().await.expect("the sender lives as long as the server");
        }
    }

    /// Forgets the changes so far. New watches from an earlier version are refused with 410, and open watches get a 410
    /// as an event.
    pub fn expire_watches(&self) {
        self.shared.change(Store::expire);
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.requests.borrow().clone()
    }

    /// Waits until this number of watches is open.
    pub async fn wait_for_watches(&self, count: usize) {
        let mut watches = self.shared.watches.subscribe();
        watches.wait_for(|open| *open == count).await.expect("the sender lives as long as the server");
    }
}

impl Drop for ApiServerBox {
    fn drop(&mut self) {
        if let Some((end, serving)) = lock(&self.serving).take() {
            end.cancel();
            serving.abort();
        }
    }
}
