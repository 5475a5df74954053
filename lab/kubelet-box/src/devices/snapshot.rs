//! The part of the books that is visible from outside. Called after every change. Changes nothing.

use std::collections::BTreeMap;

use super::super::state::{ResourceState, Resources, State};
use super::{Book, Ids, Resource};

impl Book {
    /// The visible state of the books.
    pub(crate) fn snapshot(&self) -> State {
        let resources = self.resources.iter().map(|(name, entry)| (name.clone(), self.state_of(name, entry))).collect();
        State { resources: Resources(resources), ..self.seen.clone() }
    }

    fn state_of(&self, name: &str, entry: &Resource) -> ResourceState {
        let mut allocated: BTreeMap<String, BTreeMap<String, Ids>> = BTreeMap::new();
        for (place, held) in self.held.iter().filter(|(place, _)| place.resource == name) {
            let containers = allocated.entry(place.pod.clone()).or_default();
            containers.entry(place.container.clone()).or_default().extend(held.devices.iter().cloned());
        }
        let working = entry.endpoint.filter(|endpoint| endpoint.stopped.is_none()).and_then(|endpoint| endpoint.client);
        ResourceState {
            connected: working.is_some_and(|client| self.streams.contains_key(&client)),
            open_streams: self.streams.values().filter(|resource| *resource == name).count(),
            allocated,
            ..entry.seen.clone()
        }
    }
}
