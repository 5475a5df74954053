//! The scheduler's choices in their order, as CSV. They can be compared with the choices of a real scheduler.

use linkwise_core::allocation::GpuSet;

use super::replay::Event;
use super::{Cluster, Format};

/// The columns. `job` is the job's place in the order of arrivals, from 0. `score` is the score of the claim's
/// alternative. `collective` is the collective of the GPUs, and `best` the best that any node had free, in MB/s. Both
/// are empty for one GPU, and, like `score`, at a pod's end.
const HEADER: &str = "door,second,event,job,node,machine,devices,score,collective,best\n";

/// The lines so far. There are none if the command prints another format.
pub(super) struct Choices {
    pub text: String,
    wanted: bool,
}

impl Choices {
    pub fn of(format: Format) -> Self {
        let wanted = format == Format::Choices;
        Self { text: if wanted { HEADER.to_owned() } else { String::new() }, wanted }
    }

    pub fn add(&mut self, door: &str, cluster: &Cluster, event: &Event) {
        if !self.wanted {
            return;
        }
        self.text += &match *event {
            Event::Started { at, job, node, set, score, got, best } => {
                let [got, best] = [got, best.filter(|_| set.len() > 1)].map(|mbps| mbps.map(|mbps| mbps.to_string()));
                let [got, best] = [got, best].map(Option::unwrap_or_default);
                format!("{door},{at},start,{job},{},{score},{got},{best}\n", place(cluster, node, set))
            }
            Event::Ended { at, job, node, set } => {
                format!("{door},{at},end,{job},{},,,\n", place(cluster, node, set))
            }
        };
    }
}

/// The columns `node`, `machine` and `devices` of a set of GPUs.
fn place(cluster: &Cluster, node: usize, set: GpuSet) -> String {
    let machine = cluster.kinds.get(node).and_then(|kind| cluster.machines.get(*kind));
    let (name, devices) = match machine {
        Some(machine) => (machine.name.as_str(), machine.devices_of(set).collect::<Vec<_>>().join(" ")),
        None => Default::default(),
    };
    // A machine may be a file, whose name may have any characters.
    let name = if name.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", name.replace('"', "\"\""))
    } else {
        name.to_owned()
    };
    format!("node-{node:05},{name},{devices}")
}
