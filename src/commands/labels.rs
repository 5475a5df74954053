//! `linkwise labels --node X`: prints the labels that a machine would get, one `key=value` a line.

use anyhow::Result;

use super::machine;
use crate::config::LabelsArgs;
use crate::config::settings::load;
use crate::run::labels_of;
use linkwise_core::publish::labels::{HostFacts, LabelSettings};
use linkwise_host::labels::{own_fabric, text};
use linkwise_system::output::{complain, print};

/// Prints the labels, without a timestamp. Problems with the labels go to standard error. If `--node-name` is not set,
/// the node has the machine's name.
pub async fn labels(args: &LabelsArgs) -> Result<()> {
    let settings = load(&args.flags)?.settings;
    let machine = machine(&args.node).await?;
    let own_fabric = Some(own_fabric(args.node_name.as_deref().unwrap_or(&machine.name)));
    let label_settings = LabelSettings { timestamp: None, clique: settings.gpu_clique_label.value, own_fabric };
    let (labels, problems) = labels_of(&machine.observed, &settings, &HostFacts::default(), &label_settings);
    complain("linkwise", problems);
    Ok(print(&text(&labels))?)
}
