//! The host names to which the metrics port answers. It answers to no other name, so that no web page from elsewhere
//! reads it through a browser (DNS rebinding).

use linkwise_system::lock;
use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The file in which the kubelet writes the cluster's domain.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The domain of most clusters.
const CLUSTER_DOMAIN: &str = "cluster.local";

/// The known names. Addresses, `localhost` and Services of the cluster are known without being added. Clones share the
/// names.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    names: Arc<Mutex<BTreeSet<String>>>,
    /// The cluster's domain, by the search list of the resolver.
    domain: Option<String>,
}

impl Hosts {
    /// The names of this pod's cluster.
    pub fn of_this_pod() -> Self {
        Self::of_resolver(&fs::read_to_string(Path::new(RESOLV_CONF)).unwrap_or_default())
    }

    fn of_resolver(text: &str) -> Self {
        let searches = text.lines().filter_map(|line| line.trim_start().strip_prefix("search "));
        let mut domains = searches.flat_map(str::split_whitespace);
        let found = domains.find_map(|domain| domain.trim_end_matches('.').split_once(".svc."));
        Self { names: Arc::default(), domain: found.map(|(_, domain)| domain.to_lowercase()) }
    }

    /// Adds a name: the node's, or one that the operator gives.
    pub fn add(&self, name: &str) {
        let name = name.trim_end_matches('.').to_lowercase();
        lock(&self.names).insert(name);
    }

    /// Returns true if the port answers to this value of a Host header.
    pub fn has(&self, host: &str) -> bool {
        let without_port = match host.rsplit_once(':') {
            Some((name, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        if let Some(address) = without_port.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            return address.parse::<Ipv6Addr>().is_ok();
        }
        let name = without_port.strip_suffix('.').unwrap_or(without_port).to_lowercase();
        name == "localhost"
            || name.parse::<IpAddr>().is_ok()
            || self.is_service(&name)
            || lock(&self.names).contains(&name)
    }

    /// Returns true for NAME.NAMESPACE.svc, alone or before the cluster's domain or `cluster.local`. The short form
    /// NAME.NAMESPACE is not known: a namespace may have the name of a top-level domain, where anybody may own a name.
    fn is_service(&self, name: &str) -> bool {
        let domain = self.domain.as_deref().unwrap_or(CLUSTER_DOMAIN);
        let mut parts = name.splitn(4, '.');
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(_), Some(_), Some("svc"), rest) => rest.is_none_or(|rest| rest == domain || rest == CLUSTER_DOMAIN),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_services_and_given_names_are_known() {
        let hosts = Hosts::of_resolver("nameserver 10.96.0.10\nsearch gpu.svc.k8s.corp svc.k8s.corp k8s.corp\n");
        hosts.add("Node-1.example.com");
        let known = "10.0.0.7:9400 127.0.0.1 [::1]:9400 [fd00::7] localhost:9400 LOCALHOST node-1.example.com:9400 \
                     node-1.example.com. linkwise.any.svc linkwise.gpu.svc.k8s.corp:9400 \
                     linkwise.gpu.svc.cluster.local.";
        for known in known.split_whitespace() {
            assert!(hosts.has(known), "{known}");
        }
        let strange = "evil.example gpu.evil linkwise.gpu:9400 linkwise.gpu.svc.evil.example linkwise.gpu.evil \
                       localhost.evil.example 10.0.0.7.evil.example linkwise [evil]:9400 :9400";
        for strange in strange.split_whitespace().chain([""]) {
            assert!(!hosts.has(strange), "{strange}");
        }
        assert!(!Hosts::default().has("linkwise.gpu"), "the short form is not known");
    }
}
