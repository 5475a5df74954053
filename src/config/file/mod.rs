//! The configuration file: the NVIDIA plugin's format, version v1, with our own keys under `linkwise:`.
//!
//! Owns reading the text and finding what is wrong with its keys; what a key means is `settings`' business. Called by
//! `settings`. Touches no file system.

mod finding;
mod schema;
mod tree;

pub use finding::{Finding, Problem, Weight};
pub(super) use tree::{Node, Value, quote};

/// The one version of the format.
const VERSION: &str = "v1";

/// A configuration file that was read: a tree in which every key is known.
#[derive(Clone, Debug, PartialEq)]
pub struct File {
    root: Node,
}

impl File {
    /// Reads a text: the tree, and everything that is odd about its keys. Broken YAML gives an empty tree.
    pub fn parse(text: &str) -> (Self, Vec<Finding>) {
        let mut findings = Vec::new();
        let mut root = tree::parse(text).unwrap_or_else(|broken| {
            findings.push(broken);
            Node { line: 1, value: Value::Null }
        });
        schema::check(&mut root, &mut findings);
        if let Some(node) = root.value.get("version")
            && !matches!(&node.value, Value::Text(version) if version == VERSION || version.is_empty())
        {
            let problem = Problem::Version(node.value.describe());
            findings.push(Finding { line: Some(node.line), key: "version".to_owned(), problem });
        }
        (Self { root }, findings)
    }

    /// The value at a path of keys such as `flags.plugin.passDeviceSpecs`; null counts as missing.
    pub(super) fn at(&self, path: &str) -> Option<&Node> {
        path.split('.').try_fold(&self.root, |node, key| node.value.get(key))
    }
}
