//! From a name or a path to a machine: what a file is, by its content.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::{BUILT_IN, MAX_FILE_BYTES, Machine, MachineError, nccl, xml};
use crate::quote::excerpt;

/// What a name or a path led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// A built-in machine, a node file or an NCCL topology dump.
    Machine(Box<Machine>),
    /// A hwloc XML, which an adapter that knows hwloc has to read.
    Host(HostXml),
}

/// A hwloc XML: well-formed, its nesting bounded, its root `<topology>`; no more is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostXml {
    /// The file's path.
    pub path: String,
    /// The file's name without folder and extension.
    pub name: String,
    /// The text.
    pub text: String,
}

/// Reads a built-in machine by its name, else the file at that path, whatever it is.
pub fn read(name_or_path: &str) -> Result<Loaded, MachineError> {
    let path = || name_or_path.to_owned();
    let content = |error| MachineError::Content { path: path(), error };
    if let Some((_, text)) = BUILT_IN.iter().find(|(name, _)| *name == name_or_path) {
        return Machine::parse(text).map(|machine| Loaded::Machine(Box::new(machine))).map_err(content);
    }
    of_bytes(name_or_path, bytes_of(name_or_path)?)
}

/// Takes the bytes of a file for what their content says. `path` is where they come from: messages name it, and a
/// dump, which has no name of its own, is called after its last part. Reads no file.
pub fn of_bytes(path: &str, bytes: Vec<u8>) -> Result<Loaded, MachineError> {
    let from = path;
    let path = || from.to_owned();
    let content = |error| MachineError::Content { path: path(), error };
    let text = String::from_utf8(bytes)
        .map_err(|error| MachineError::NotText { path: path(), offset: error.utf8_error().valid_up_to() })?;
    if !text.trim_start_matches('\u{feff}').trim_start().starts_with('<') {
        return Machine::parse(&text).map(|machine| Loaded::Machine(Box::new(machine))).map_err(content);
    }
    let broken = |error| MachineError::Xml { path: path(), error };
    let name = Path::new(from).file_stem().map_or_else(path, |stem| stem.to_string_lossy().into_owned());
    match xml::root(&text).map_err(broken)?.as_str() {
        "system" => nccl::parse(&name, &text)
            .map(|machine| Loaded::Machine(Box::new(machine)))
            .map_err(|error| MachineError::Nccl { path: path(), error }),
        "topology" => {
            xml::check(&text).map_err(broken)?;
            Ok(Loaded::Host(HostXml { path: path(), name, text }))
        }
        "graphs" => Err(MachineError::NcclGraph { path: path() }),
        root => Err(MachineError::UnknownXml { path: path(), root: excerpt(root) }),
    }
}

/// Loads a built-in machine by its name, else the node file or NCCL topology dump at that path.
pub fn load(name_or_path: &str) -> Result<Machine, MachineError> {
    match read(name_or_path)? {
        Loaded::Machine(machine) => Ok(*machine),
        Loaded::Host(host) => Err(MachineError::HostOnly { path: host.path }),
    }
}

/// Reads the hwloc XML at a path.
pub fn host_xml(path: &str) -> Result<HostXml, MachineError> {
    match read(path)? {
        Loaded::Host(host) => Ok(host),
        Loaded::Machine(_) => Err(MachineError::NotAHost { path: path.to_owned() }),
    }
}

fn bytes_of(name_or_path: &str) -> Result<Vec<u8>, MachineError> {
    let path = || name_or_path.to_owned();
    let mut bytes = Vec::new();
    // One byte more than allowed is enough to know, whatever the file's size claims to be.
    let outcome = File::open(name_or_path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes));
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound && looks_like_a_name(name_or_path) => {
            Err(MachineError::Unknown { name: path() })
        }
        Err(error) => Err(MachineError::Read { path: path(), error }),
        Ok(length) if u64::try_from(length).is_ok_and(|length| length <= MAX_FILE_BYTES) => Ok(bytes),
        Ok(_) => Err(MachineError::TooLarge { path: path() }),
    }
}

/// A text without a folder and without an extension was hardly meant as a file.
fn looks_like_a_name(text: &str) -> bool {
    !text.contains('/') && Path::new(text).extension().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a file of that content is taken for.
    fn read_text(text: &[u8]) -> Result<Loaded, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("field.xml");
        std::fs::write(&path, text).unwrap();
        read(path.to_str().unwrap()).map_err(|error| {
            let message = error.to_string();
            assert!(!message.contains('\n') && message.contains("field.xml"), "{message}");
            message
        })
    }

    #[test]
    fn a_file_is_what_its_content_says() {
        let Ok(Loaded::Machine(yaml)) = read_text(b"version: 1\nname: x\nobserved: {gpus: []}\n") else { panic!() };
        assert_eq!(yaml.name, "x");
        let Ok(Loaded::Machine(dump)) = read_text(b"\xef\xbb\xbf\n <!-- c -->\n<system version=\"1\"/>") else {
            panic!()
        };
        assert_eq!(dump.name, "field");
        let Ok(Loaded::Host(host)) = read_text(b"<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology/>") else {
            panic!()
        };
        assert_eq!(host.name, "field");
    }

    #[test]
    fn what_is_no_machine_is_refused_with_file_and_cause() {
        for (text, words) in [
            (&b"<graphs version=\"1\"/>"[..], "NCCL_TOPO_DUMP_FILE"),
            (b"<nvidia_smi_log/>", "<nvidia_smi_log>"),
            (b"<system version=\"1\"\n", "line 1"),
            (b"<system version=\"1\">\n<cpu>\n", "line 3"),
            (b"<system version=\"2\"/>", "version '2'"),
            (b"<topology>\n<object>\n", "line 3"),
            (b"<topology>\xff</topology>", "not UTF-8 text (byte 10)"),
            (b"<", "line 1"),
            (b"", "end of file"),
        ] {
            let message = read_text(text).unwrap_err();
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn a_host_is_no_machine_and_a_machine_no_host() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("host.xml");
        std::fs::write(&path, "<topology version=\"2.0\"/>").unwrap();
        let path = path.to_str().unwrap();
        assert!(load(path).unwrap_err().to_string().contains("hwloc XML"));
        assert_eq!(host_xml(path).unwrap().text, "<topology version=\"2.0\"/>");
        assert!(host_xml("dgx-h100").unwrap_err().to_string().contains("'dgx-h100'"));
    }
}
