//! By which name we are called: the image answers to the NVIDIA plugin's commands too, which have no subcommands.

use std::ffi::OsString;
use std::path::Path;

/// The NVIDIA plugin's command, for which `run` stands.
const DEVICE_PLUGIN: &str = "nvidia-device-plugin";

/// The words of the command line with the subcommand that they leave out: `run`, where we are called by the NVIDIA
/// plugin's name, or where the first word is a flag that is not for help or version. `linkwise` alone shows its help.
pub(super) fn words(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.into_iter().collect();
    let name = words.first().and_then(|name| Path::new(name).file_name());
    let plugin = name.is_some_and(|name| name == DEVICE_PLUGIN);
    let first = words.get(1).map(|word| word.to_string_lossy().into_owned());
    let run = match first.as_deref() {
        Some("-V" | "--version") => false,
        Some("-h" | "--help") | None => plugin,
        Some(word) => word.starts_with('-'),
    };
    if run && !words.is_empty() {
        words.insert(1, "run".into());
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
    fn no_subcommand_means_run() {
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
            ("", ""),
        ] {
            assert_eq!(words(line), read, "{line}");
        }
    }
}
