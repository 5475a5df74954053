//! The configuration file: the NVIDIA plugin's format, version v1, with linkwise's own keys under `linkwise:`.
//!
//! Reads the text and checks its keys; `settings`, which calls this, reads the values. Touches no file system.

mod finding;
mod schema;
mod tree;

pub use finding::{Finding, Severity};
pub(super) use tree::{Node, Value};

const VERSION: &str = "v1";

/// A configuration file: a tree of values with their lines.
#[derive(Clone, Debug, PartialEq)]
pub struct File {
    root: Node,
}

impl File {
    /// Reads a text, with findings about its YAML, its keys and its version. Broken YAML gives an empty tree.
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
            let problem = format!("this build reads version {VERSION}, found {}", node.value.describe());
            findings.push(Finding::error(node.line, "version", problem));
        }
        (Self { root }, findings)
    }

    /// The value at a path of keys such as `flags.plugin.passDeviceSpecs`; null counts as missing.
    pub(super) fn at(&self, path: &str) -> Option<&Node> {
        path.split('.').try_fold(&self.root, |node, key| node.value.get(key))
    }
}
