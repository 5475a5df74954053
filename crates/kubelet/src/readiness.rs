//! The parts of the node that are ready, and the reasons why others are not.
//!
//! Written by each part, such as the plugins and CDI sync. Read by /readyz, the node's views and condition, and the
//! takeover. This module only sums them up.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use linkwise_core::publish::view::PartState;
use linkwise_core::state::ResourceName;
use linkwise_nvml::supervisor::{Idle, NOT_SEEN};
use linkwise_system::lock;

/// The phase of a device plugin while another plugin of its resource exists that might still end.
pub(crate) const OVERLAPPING: &str = "serving beside the plugin before us";
/// The phase of a DRA plugin that the kubelet calls.
pub(crate) const REGISTERED: &str = "registered";

/// A part that can be ready or not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The port for metrics and probes, while another process has it.
    Endpoints,
    /// Another process of linkwise that serves this node.
    Owner,
    /// The other process of linkwise, while this one takes over from it.
    Predecessor,
    /// The files that containers with GPUs need.
    CdiSync,
    /// DRA, if GPUs are to go through it and this process lacks the rights.
    Dra,
    /// The driver, while an operator has released it.
    Driver,
    /// GPUs that are held through the other door.
    Held,
    /// The parts of the configuration that this node cannot offer.
    Plan,
    /// The DRA plugin.
    DraPlugin,
    /// The slices published through DRA.
    DraSlices,
    /// The device plugin of a resource.
    Plugin(ResourceName),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Endpoints => f.write_str("metrics and probes"),
            Self::Owner => f.write_str("takeover"),
            Self::Predecessor => f.write_str("linkwise before this one"),
            Self::CdiSync => f.write_str("CDI sync"),
            Self::Driver => f.write_str("driver"),
            Self::Dra => f.write_str("DRA"),
            Self::Held => f.write_str("held through the other door"),
            Self::Plan => f.write_str("configuration"),
            Self::DraPlugin => f.write_str("DRA plugin"),
            Self::DraSlices => f.write_str("DRA slices"),
            Self::Plugin(resource) => resource.fmt(f),
        }
    }
}

/// All parts, and the reason why the node is idle.
#[derive(Clone, Debug)]
pub struct Readiness {
    parts: watch::Sender<BTreeMap<Part, PartState>>,
    idle: watch::Sender<Idle>,
    driver_is_away: Arc<AtomicBool>,
    /// The failure of the last takeover.
    takeover_failure: Arc<Mutex<Option<String>>>,
}

impl Readiness {
    /// Starts without parts.
    pub fn new(idle: Idle) -> Self {
        let (parts, driver_is_away, takeover_failure) = Default::default();
        Self { parts, idle: watch::Sender::new(idle), driver_is_away, takeover_failure }
    }

    /// Records whether NVML has been unavailable for the grace period.
    pub fn set_driver_away(&self, is_away: bool) {
        self.driver_is_away.store(is_away, Ordering::Relaxed);
    }

    /// Returns true if NVML has been unavailable for the grace period.
    pub fn is_driver_away(&self) -> bool {
        self.driver_is_away.load(Ordering::Relaxed)
    }

    /// Shows, while another process serves this node, why this one could not take over; `None` removes the reason.
    pub fn set_takeover_failure(&self, why: Option<String>) {
        *lock(&self.takeover_failure) = why;
    }

    /// The reason why the node is idle. It is shown only while there is no device plugin.
    pub fn idle(&self) -> &watch::Sender<Idle> {
        &self.idle
    }

    /// Adds a part in this phase, not ready.
    pub fn add(&self, part: Part, phase: &'static str) {
        self.insert(part, phase, false, None);
    }

    /// Adds a part that is ready, with a note that is shown.
    pub fn note(&self, part: Part, phase: &'static str, words: String) {
        self.insert(part, phase, true, Some(words));
    }

    /// Adds a part that is not ready, with the reason.
    pub fn refuse(&self, part: Part, phase: &'static str, why: String) {
        self.insert(part, phase, false, Some(why));
    }

    fn insert(&self, part: Part, phase: &'static str, ready: bool, trouble: Option<String>) {
        let state = PartState { phase: phase.into(), ready, trouble };
        self.parts.send_modify(|parts| _ = parts.insert(part, state));
    }

    /// The reason why this node offers nothing although it has GPUs, if its configuration is the reason.
    pub fn offers_nothing(&self) -> Option<String> {
        self.parts.borrow().get(&Part::Plan).filter(|state| !state.ready).map(ToString::to_string)
    }

    /// Removes a part; later reports from it change nothing.
    pub fn remove(&self, part: &Part) {
        self.parts.send_modify(|parts| _ = parts.remove(part));
    }

    /// Changes the phase of a part. If the part becomes ready, its trouble is removed.
    pub fn enter(&self, part: &Part, phase: &'static str, ready: bool) {
        self.parts.send_modify(|parts| {
            if let Some(state) = parts.get_mut(part) {
                (state.phase, state.ready) = (phase.into(), ready);
                state.trouble.take_if(|_| ready);
            }
        });
    }

    /// Records a fault of a part. Its readiness does not change, and followers are not notified.
    pub fn trouble(&self, part: &Part, why: String) {
        self.parts.send_if_modified(|parts| {
            if let Some(state) = parts.get_mut(part) {
                state.trouble = Some(why);
            }
            false
        });
    }

    /// Follows the parts and their phases.
    pub fn news(&self) -> watch::Receiver<BTreeMap<Part, PartState>> {
        self.parts.subscribe()
    }

    /// Returns true if no other process serves this node, all device plugins of this one are registered, and it has one
    /// if the node needs one. With `alone`, no other plugin of a resource may exist that might still end.
    pub fn has_plugins(&self, alone: bool) -> bool {
        let parts = self.parts.borrow();
        let plugins = || parts.iter().filter(|(part, _)| matches!(part, Part::Plugin(_))).map(|(_, state)| state);
        let serves = |state: &PartState| state.ready && !(alone && state.phase == OVERLAPPING);
        let has_dra = parts.contains_key(&Part::DraPlugin) || parts.contains_key(&Part::Held);
        // While the driver is released, only a device plugin shows that this process has seen the GPUs.
        let has_dra = has_dra && !parts.contains_key(&Part::Driver);
        let needs_none = matches!(&*self.idle.borrow(), Idle::NoGpu(_)) || has_dra;
        !parts.contains_key(&Part::Owner) && plugins().all(serves) && (needs_none || plugins().next().is_some())
    }

    /// Returns true if this process has a plugin of each of these resources, registered or not.
    pub fn has_plugin_of_each<'a>(&self, mut resources: impl Iterator<Item = &'a ResourceName>) -> bool {
        let parts = self.parts.borrow();
        resources.all(|resource| parts.contains_key(&Part::Plugin(resource.clone())))
    }

    /// Returns true if this process has no device plugin because its driver fails or is released.
    pub fn sees_nothing(&self) -> bool {
        let parts = self.parts.borrow();
        let fails = matches!(&*self.idle.borrow(), Idle::Waiting(reason) if reason != NOT_SEEN);
        (fails || parts.contains_key(&Part::Driver)) && !parts.keys().any(|part| matches!(part, Part::Plugin(_)))
    }

    /// Returns true if this process offers nothing, or only what its driver showed before it failed or was released.
    pub fn lacks_driver(&self) -> bool {
        let is_released = self.parts.borrow().contains_key(&Part::Driver);
        is_released || self.is_driver_away() || self.sees_nothing()
    }

    /// Returns true if the kubelet calls this process's DRA plugin, or this process has none.
    pub fn is_dra_called(&self) -> bool {
        self.parts.borrow().get(&Part::DraPlugin).is_none_or(|state| state.phase == REGISTERED)
    }

    /// Every part.
    pub fn all(&self) -> BTreeMap<Part, PartState> {
        self.parts.borrow().clone()
    }

    /// The answer of /readyz: `Ok` with a short text, or lines that say why this process is not ready.
    pub fn summary(&self) -> Result<String, Vec<String>> {
        let parts = self.parts.borrow();
        let has_dra = parts.contains_key(&Part::Held) || parts.contains_key(&Part::DraPlugin);
        if let Some(state) = parts.get(&Part::Owner) {
            let failure = lock(&self.takeover_failure).clone();
            return Err([format!("{}: {state}", Part::Owner)].into_iter().chain(failure).collect());
        }
        if !parts.keys().any(|part| matches!(part, Part::Plugin(_))) {
            match &*self.idle.borrow() {
                Idle::NoGpu(reason) => return Ok(reason.clone()),
                Idle::Waiting(reason) if !has_dra && parts.get(&Part::Plan).is_none_or(|plan| plan.ready) => {
                    return Err(vec![reason.clone()]);
                }
                Idle::Waiting(_) => {}
            }
        }
        let unready = parts.iter().filter(|(_, state)| !state.ready);
        let unready: Vec<String> = unready.map(|(part, state)| format!("{part}: {state}")).collect();
        if !unready.is_empty() {
            return Err(unready);
        }
        let notes = [Part::Driver, Part::Held, Part::Plan].into_iter().filter_map(|part| {
            let state = parts.get(&part)?;
            Some(format!("; {part}: {state}"))
        });
        Ok(format!("ready{}", notes.collect::<String>()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standby_shows_that_its_takeover_failed() {
        let readiness = Readiness::new(Idle::Waiting("no scan yet".to_owned()));
        readiness.add(Part::Owner, "standing by");
        readiness.set_takeover_failure(Some("could not take over".to_owned()));
        let lines = ["takeover: standing by", "could not take over"].map(str::to_owned).to_vec();
        assert_eq!(readiness.summary(), Err(lines));
        readiness.remove(&Part::Owner);
        assert_eq!(readiness.summary(), Err(vec!["no scan yet".to_owned()]), "only a standby shows it");
    }

    #[test]
    fn process_without_driver_differs_from_a_starting_one() {
        let readiness = Readiness::new(Idle::Waiting(NOT_SEEN.to_owned()));
        let facts = || (readiness.sees_nothing(), readiness.lacks_driver());
        assert_eq!(facts(), (false, false), "its first scan is still to come");
        readiness.idle().send_replace(Idle::NoGpu("no GPU".to_owned()));
        assert_eq!(facts(), (false, false));
        readiness.idle().send_replace(Idle::Waiting("NVML cannot be initialised".to_owned()));
        assert_eq!(facts(), (true, true));
        readiness.add(Part::Plugin(ResourceName::gpu()), "waiting");
        assert_eq!(facts(), (false, false));
        readiness.set_driver_away(true);
        assert_eq!(facts(), (false, true), "it offers what it has seen");
        readiness.set_driver_away(false);
        readiness.note(Part::Driver, "released", "an operator released it".to_owned());
        assert_eq!(facts(), (false, true));
    }

    #[test]
    fn dra_decides_readiness_without_device_plugin() {
        let readiness = Readiness::new(Idle::Waiting("no scan yet".to_owned()));
        readiness.add(Part::DraPlugin, "waiting");
        readiness.add(Part::DraSlices, "being written");
        readiness.trouble(&Part::DraSlices, "no API server".to_owned());
        let both = ["DRA plugin: waiting", "DRA slices: being written; no API server"].map(str::to_owned).to_vec();
        assert_eq!(readiness.summary(), Err(both));
        readiness.enter(&Part::DraPlugin, "registered", true);
        readiness.enter(&Part::DraSlices, "stored", true);
        assert_eq!(readiness.summary(), Ok("ready".to_owned()));
        readiness.enter(&Part::DraPlugin, "waiting", false);
        readiness.idle().send_replace(Idle::NoGpu("no GPU".to_owned()));
        assert_eq!(readiness.summary(), Ok("no GPU".to_owned()), "such a node has nothing to offer");
    }

    #[test]
    fn released_driver_is_shown_in_readiness() {
        let readiness = Readiness::new(Idle::Waiting("no scan yet".to_owned()));
        let plugin = Part::Plugin(ResourceName::gpu());
        readiness.add(Part::DraPlugin, "waiting");
        readiness.enter(&Part::DraPlugin, "registered", true);
        assert!(readiness.has_plugins(false));
        readiness.note(Part::Driver, "released", "an operator released it".to_owned());
        assert!(!readiness.has_plugins(false), "nobody knows which GPUs there are");
        readiness.add(plugin.clone(), "waiting");
        readiness.enter(&plugin, "serving", true);
        assert!(readiness.has_plugins(false));
        assert_eq!(readiness.summary(), Ok("ready; driver: released; an operator released it".to_owned()));
        readiness.remove(&Part::Driver);
        assert_eq!(readiness.summary(), Ok("ready".to_owned()));
    }

    #[test]
    fn node_with_held_gpus_is_ready() {
        let readiness = Readiness::new(Idle::Waiting("no scan yet".to_owned()));
        assert!(!readiness.has_plugins(true));
        readiness.note(Part::Held, "waiting for their ends", "GPUs: 8, claim default/a".to_owned());
        let words = "ready; held through the other door: waiting for their ends; GPUs: 8, claim default/a";
        assert_eq!(readiness.summary(), Ok(words.to_owned()));
        assert!(readiness.has_plugins(true), "a takeover does not wait for holders");
    }

    #[test]
    fn unready_parts_are_named_with_their_trouble() {
        let readiness = Readiness::new(Idle::Waiting("no scan yet".to_owned()));
        let plugin = Part::Plugin(ResourceName::gpu());
        readiness.add(Part::CdiSync, "writing");
        assert_eq!(readiness.summary(), Err(vec!["no scan yet".to_owned()]));
        readiness.idle().send_replace(Idle::NoGpu("no GPU".to_owned()));
        assert_eq!(readiness.summary(), Ok("no GPU".to_owned()));
        readiness.add(plugin.clone(), "waiting");
        readiness.trouble(&plugin, "no folder".to_owned());
        let both = ["CDI sync: writing", "nvidia.com/gpu: waiting; no folder"].map(str::to_owned).to_vec();
        assert_eq!(readiness.summary(), Err(both));
        readiness.enter(&Part::CdiSync, "written", true);
        readiness.enter(&plugin, "serving", true);
        assert_eq!((readiness.summary(), &readiness.all()[&plugin].trouble), (Ok("ready".to_owned()), &None));
        readiness.trouble(&Part::CdiSync, "disk full".to_owned());
        assert!(readiness.summary().is_ok(), "what was written stays");
        readiness.remove(&plugin);
        readiness.enter(&plugin, "ending", false);
        assert_eq!(readiness.summary(), Ok("no GPU".to_owned()));
    }
}
