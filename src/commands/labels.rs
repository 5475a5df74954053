//! `linkwise labels --node X`: prints the labels that a machine would get, a `key=value` a line.

use anyhow::Result;

use super::machine;
use crate::config::settings::load;
use crate::config::{Environment, LabelsArgs};
use linkwise_core::publish::labels::{HostFacts, LabelFacts, LabelSettings, labels as labels_of};
use linkwise_core::state::DriverVersions;
use linkwise_core::topology::NodeTopology;
use linkwise_host::labels::{own_fabric, text};
use linkwise_system::output::{complain, print};

/// Prints the labels. Problems with them go to standard error. A machine has no timestamp, and its name is the node's
/// if `--node-name` gives no other.
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
            clique: settings.gpu_clique_label.value,
            own_fabric: Some(own_fabric(node)),
        },
    };
    let (labels, problems) = labels_of(facts);
    complain("linkwise", problems);
    Ok(print(&text(&labels))?)
}
