//! The program's name: called by one of the NVIDIA plugin's commands, which have no subcommands, it runs the matching
//! one.

use std::ffi::OsString;
use std::path::Path;

/// The NVIDIA plugin's command, for which `run` stands.
const DEVICE_PLUGIN: &str = "nvidia-device-plugin";

/// The NVIDIA plugin's other commands, which are subcommands of the same names here.
const OTHERS: [&str; 2] = ["config-manager", "mps-control-daemon"];

/// The command line with its missing subcommand: that of the program's name, or `run` if the first word is a flag other
/// than help and version. `linkwise` alone shows its help.
pub(super) fn words(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.into_iter().collect();
    let name = words.first().and_then(|name| Path::new(name).file_name());
    let plugin = name.is_some_and(|name| name == DEVICE_PLUGIN);
    let other = OTHERS.into_iter().find(|other| name.is_some_and(|name| name == *other));
    let first = words.get(1).map(|word| word.to_string_lossy().into_owned());
    let subcommand = match (first.as_deref(), other) {
        (Some("-V" | "--version"), _) => None,
        // Words may follow, such as the subcommand `mount-shm` of `mps-control-daemon`.
        (first, Some(other)) => (first != Some(other)).then_some(other),
        (Some("-h" | "--help") | None, None) => plugin.then_some("run"),
        (Some(word), None) => word.starts_with('-').then_some("run"),
    };
    if let Some(subcommand) = subcommand.filter(|_| !words.is_empty()) {
        words.insert(1, subcommand.into());
    }
    words
}

#[cfg(test)]
mod tests {
    fn words(line: &str) -> String {
        let words = super::words(line.split_whitespace().map(Into::into));
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        words.join(" ")
    }

    #[test]
    fn missing_subcommand_is_run() {
        for (line, read) in [
            ("linkwise", "linkwise"),
            ("linkwise --help", "linkwise --help"),
            ("linkwise --version", "linkwise --version"),
            ("linkwise --mig-strategy=mixed", "linkwise run --mig-strategy=mixed"),
            ("linkwise run --help", "linkwise run --help"),
            ("linkwise topology", "linkwise topology"),
            ("nvidia-device-plugin", "nvidia-device-plugin run"),
            ("/usr/bin/nvidia-device-plugin --config-file x", "/usr/bin/nvidia-device-plugin run --config-file x"),
            ("nvidia-device-plugin --help", "nvidia-device-plugin run --help"),
            ("nvidia-device-plugin --version", "nvidia-device-plugin --version"),
            ("nvidia-device-plugin run", "nvidia-device-plugin run"),
            ("nvidia-device-plugin topology", "nvidia-device-plugin topology"),
            ("mps-control-daemon", "mps-control-daemon mps-control-daemon"),
            ("/usr/bin/mps-control-daemon mount-shm", "/usr/bin/mps-control-daemon mps-control-daemon mount-shm"),
            ("mps-control-daemon --config-file x", "mps-control-daemon mps-control-daemon --config-file x"),
            ("mps-control-daemon --help", "mps-control-daemon mps-control-daemon --help"),
            ("mps-control-daemon --version", "mps-control-daemon --version"),
            ("mps-control-daemon mps-control-daemon", "mps-control-daemon mps-control-daemon"),
            ("linkwise mps-control-daemon", "linkwise mps-control-daemon"),
            ("config-manager", "config-manager config-manager"),
            ("/usr/bin/config-manager --oneshot", "/usr/bin/config-manager config-manager --oneshot"),
            ("config-manager config-manager", "config-manager config-manager"),
            ("", ""),
        ] {
            assert_eq!(words(line), read, "{line}");
        }
    }
}
