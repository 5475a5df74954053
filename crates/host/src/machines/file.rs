//! The text of a node file: its keys, its reader and its writer.

use serde::Deserialize;
use serde_saphyr::UserMessageFormatter;

use super::Machine;
use linkwise_core::quote::one_line;

/// The version of the format that this build reads and writes.
pub const VERSION: u32 = 1;

/// The fault of a node file's text, in one line, with the line of the text if it has one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MachineFileError {
    /// A later linkwise wrote it.
    #[error("format version {0} is newer than this build reads (version {VERSION})")]
    Newer(u32),
    /// A version that never existed.
    #[error("format version {0} does not exist (this build reads version {VERSION})")]
    NoSuchVersion(u32),
    /// Broken YAML, an unknown key, an invalid value.
    #[error("{0}")]
    Yaml(String),
}

/// The one key that is read first, so that a newer file is not refused for its new keys.
#[derive(Deserialize)]
struct Header {
    version: u32,
}

pub(super) fn parse(text: &str) -> Result<Machine, MachineFileError> {
    match yaml::<Header>(text)?.version {
        VERSION => yaml(text),
        0 => Err(MachineFileError::NoSuchVersion(0)),
        later => Err(MachineFileError::Newer(later)),
    }
}

pub(super) fn to_yaml(machine: &Machine) -> Result<String, MachineFileError> {
    serde_saphyr::to_string(machine).map_err(|error| MachineFileError::Yaml(one_line(&error.to_string())))
}

/// Reads YAML with serde-saphyr's limits on nodes, depth and the multiplication of aliases, so that a small hostile
/// file stays small.
fn yaml<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, MachineFileError> {
    let options = serde_saphyr::options! { with_snippet: false };
    serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| MachineFileError::Yaml(one_line(&error.render_with_formatter(&UserMessageFormatter))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::topology::NodeObservation;

    fn refusal(text: &str) -> String {
        let message = parse(text).unwrap_err().to_string();
        assert!(!message.contains('\n'), "more than one line: {message}");
        eprintln!("{message}");
        message
    }

    #[test]
    fn machine_without_gpus_parses() {
        let machine = parse("version: 1\nname: bare\nobserved: {gpus: []}\n").unwrap();
        assert_eq!(machine.name, "bare");
        assert_eq!(machine.observed, NodeObservation::default());
    }

    #[test]
    fn other_versions_are_refused_by_number() {
        let newer = refusal("version: 2\nname: x\nnovelty: 1\n");
        assert!(newer.contains("version 2 is newer"), "{newer}");
        let none = refusal("version: 0\nname: x\n");
        assert!(none.contains("version 0 does not exist"), "{none}");
        let missing = refusal("name: x\nobserved: {gpus: []}\n");
        assert!(missing.contains("version"), "{missing}");
    }

    #[test]
    fn unknown_key_is_named_with_line() {
        let outer = refusal("version: 1\nname: x\ncolour: red\nobserved: {gpus: []}\n");
        assert!(outer.contains("colour") && outer.contains("line 3"), "{outer}");
        let inner = refusal("version: 1\nname: x\nobserved:\n  gpus: []\n  host:\n    numa: 1\n");
        assert!(inner.contains("numa") && inner.contains("line 6"), "{inner}");
    }

    #[test]
    fn broken_text_is_refused_with_line() {
        for (text, line) in [
            ("version: 1\nname: \"x\n", "line "),
            ("version: 1\nname: x\nobserved:\n  gpus: 3\n", "line 4"),
            ("version: 1\nname: x\nname: y\nobserved: {gpus: []}\n", "line 3"),
            ("version: one\nname: x\n", "line 1"),
        ] {
            let message = refusal(text);
            assert!(message.contains(line), "{text}\n{message}");
        }
        refusal("");
        refusal("- 1\n");
        refusal("<system version=\"1\"></system>\n");
    }

    #[test]
    fn invalid_value_is_quoted() {
        let gpu = "version: 1\nname: x\nobserved:\n  gpus:\n    - {index: 0, uuid: GPU-0, pci: \"3b\"}\n";
        let message = refusal(gpu);
        assert!(message.contains("'3b' is not a PCI address") && message.contains("line 5"), "{message}");
    }

    #[test]
    fn alias_bombs_and_deep_nesting_are_refused() {
        let mut bomb = "version: 1\nname: x\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
        for level in 1..12 {
            let before = format!("*a{}", level - 1);
            bomb.push_str(&format!("a{level}: &a{level} [{}]\n", [before.as_str(); 10].join(",")));
        }
        refusal(&bomb);
        refusal(&format!("version: 1\nname: {}\n", "[".repeat(100_000)));
        let nest = "{kind: switch, devices: [".repeat(5_000);
        refusal(&format!("version: 1\nname: x\nobserved: {{gpus: [], host: {{host_bridges: [{{devices: [{nest}"));
    }
}
