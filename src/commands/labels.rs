//! `linkwise labels --node X`: prints the labels that a machine would get, a `key=value` a line.

use std::io::Write;

use anyhow::Result;

use super::machine::machine;
use super::output::print;
use crate::config::settings::load;
use crate::config::{Environment, Labels as Options, LabelsArgs};
use crate::labels::{own_fabric, text};
use crate::publish::labels::{HostFacts, LabelFacts, LabelSettings, labels as labels_of};
use crate::state::DriverVersions;
use crate::topology::NodeTopology;

/// Prints them. What is odd about them goes to standard error. A machine has no timestamp, and its name is the node's
/// where `--node-name` gives no other.
pub async fn labels(args: &LabelsArgs) -> Result<()> {
    let settings = load(&args.flags, &Environment::read())?.settings;
    let machine = machine(&args.node).await?;
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let node = args.api.node_name.as_deref().unwrap_or(&machine.name);
    let facts = LabelFacts {
        topology: &topology,
        versions: &DriverVersions::of(&machine.observed),
        plan: &settings.plan(),
        host: &HostFacts::default(),
        settings: &LabelSettings {
            timestamp: None,
            clique: Options::of(&settings).clique,
            own_fabric: Some(own_fabric(node)),
        },
    };
    let (labels, problems) = labels_of(facts);
    let mut errors = std::io::stderr().lock();
    for problem in problems {
        // Nobody is left to tell where standard error is closed.
        let _ = writeln!(errors, "linkwise: {problem}");
    }
    Ok(print(&text(&labels))?)
}
