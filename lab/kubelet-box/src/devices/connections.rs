//! The part of the books about connections to plugins: those of a resource, and the one whose end stops the resource.
//!
//! Each method is a step that a kubelet's registration server or device manager makes under one lock. So anything that
//! can happen between two steps in a kubelet can happen between two methods here. The source is
//! pkg/kubelet/cm/devicemanager (`manager.go`, `plugin/v1beta1/handler.go`, `client.go`) of 1.36.2 and of the
//! development branch after it.

use std::collections::BTreeMap;

use super::{Book, ClientId, Endpoint, Resource, StopStamp};
use crate::Connections;
use linkwise_kubelet_api::v1beta1 as wire;

/// A connection that the registration server knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Client {
    pub(crate) id: ClientId,
    /// The file name of the plugin's socket.
    pub(crate) socket: String,
}

/// The error for a socket that is already connected for the resource; used from 1.37.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AlreadyConnected;

/// The registration server's connections by resource, in the order of their registrations.
#[derive(Debug, Default)]
pub(super) struct Clients {
    connections: Connections,
    by_resource: BTreeMap<String, Vec<Client>>,
}

impl Clients {
    pub(super) fn new(connections: Connections) -> Self {
        Self { connections, by_resource: BTreeMap::new() }
    }

    pub(super) fn clear(&mut self) {
        self.by_resource.clear();
    }

    /// Returns true if a lookup with this socket finds this connection.
    fn is_found_by(&self, client: &Client, socket: &str) -> bool {
        self.connections == Connections::ByResource || client.socket == socket
    }
}

impl Book {
    /// `registerClient`: begins a registration, before the plugin is dialled. Up to 1.36 the new connection replaces
    /// the one before it.
    pub(crate) fn register_client(&mut self, resource: &str, socket: &str) -> ClientId {
        let id = self.next();
        let clients = self.clients.by_resource.entry(resource.to_owned()).or_default();
        if self.clients.connections == Connections::ByResource {
            clients.clear();
        }
        clients.push(Client { id, socket: socket.to_owned() });
        id
    }

    /// `deregisterClient`: up to 1.36 forgets the current connection of the resource, even if it is not the caller's.
    /// From 1.37 forgets every connection with this socket.
    pub(crate) fn deregister_client(&mut self, resource: &str, socket: &str) {
        let mut clients = self.clients.by_resource.remove(resource).unwrap_or_default();
        clients.retain(|client| !self.clients.is_found_by(client, socket));
        if !clients.is_empty() {
            self.clients.by_resource.insert(resource.to_owned(), clients);
        }
    }

    /// `getClient`: up to 1.36 the current connection of the resource, from 1.37 the first with this socket.
    pub(crate) fn client(&self, resource: &str, socket: &str) -> Option<Client> {
        let mut clients = self.clients.by_resource.get(resource)?.iter();
        clients.find(|client| self.clients.is_found_by(client, socket)).cloned()
    }

    /// The connection of the resource that was registered last.
    pub(crate) fn last_client(&self, resource: &str) -> Option<Client> {
        self.clients.by_resource.get(resource)?.last().cloned()
    }

    /// `PluginConnected`: the plugin was dialled and returned its options, so that calls go to it from now on. The
    /// devices stay as they are until its first list. From 1.37 a socket that is already connected is refused.
    pub(crate) fn plugin_connected(
        &mut self,
        resource: &str,
        client: &Client,
        options: wire::DevicePluginOptions,
    ) -> Result<(), AlreadyConnected> {
        let by_socket = self.clients.connections == Connections::BySocket;
        let endpoint = Endpoint { client: Some(client.id), options, stopped: None };
        let entry = self.resource(resource);
        if by_socket {
            if entry.by_socket.contains_key(&client.socket) {
                return Err(AlreadyConnected);
            }
            entry.by_socket.insert(client.socket.clone(), endpoint);
        }
        entry.endpoint = Some(endpoint);
        entry.seen.registrations += 1;
        entry.seen.removed = false;
        Ok(())
    }

    pub(crate) fn stream_ended(&mut self, client: ClientId) {
        self.streams.remove(&client);
    }

    /// `PluginDisconnected`. Up to 1.36 this stops the endpoint of the resource, even if a newer plugin owns it. From
    /// 1.37 this stops the endpoint of this socket. If another socket is connected, the devices stay, and `pick`
    /// chooses the connected socket that gets the calls. If the devices became unhealthy, returns the stamp of the
    /// stop, for [`Book::expire`].
    pub(crate) fn plugin_disconnected(
        &mut self,
        resource: &str,
        socket: &str,
        pick: impl FnOnce(usize) -> usize,
    ) -> Option<StopStamp> {
        let by_socket = self.clients.connections == Connections::BySocket;
        let stamp = self.next();
        let Resource { endpoint, by_socket: connected, seen, .. } = self.resources.get_mut(resource)?;
        if by_socket {
            connected.remove(socket)?;
            if !connected.is_empty() {
                *endpoint = connected.values().nth(pick(connected.len())).copied().or(*endpoint);
                return None;
            }
        }
        endpoint.as_mut()?.stopped = Some(stamp);
        seen.unhealthy.append(&mut seen.healthy);
        Some(stamp)
    }
}
