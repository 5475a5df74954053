//! The program's name: under the name of one of the NVIDIA plugin's commands, which have no subcommands, linkwise runs
//! the matching subcommand.

use std::ffi::OsString;
use std::path::Path;

use clap::{Arg, Args, Subcommand};

use super::{Command, LabelsArgs};

/// The programs of NVIDIA's image, each with the subcommand that replaces it.
const PROGRAMS: [(&str, &str); 4] = [
    ("nvidia-device-plugin", "run"),
    ("gpu-feature-discovery", "labels"),
    ("mps-control-daemon", "mps-control-daemon"),
    ("config-manager", "config-manager"),
];

/// The command line with its missing subcommand: that of the program's name, or `run` if the first word is a flag other
/// than help and version. `linkwise` alone shows its help.
pub(super) fn words(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.into_iter().collect();
    double_dashes(words.get_mut(1..).unwrap_or_default());
    let name = words.first().and_then(|name| Path::new(name).file_name());
    let program = PROGRAMS.iter().find(|(program, _)| name.is_some_and(|name| name == *program));
    let program = program.map(|(_, subcommand)| *subcommand);
    let first = words.get(1).map(|word| word.to_string_lossy().into_owned());
    let subcommand = match first.as_deref() {
        Some("-V" | "--version") => None,
        Some("-h" | "--help") | None => program,
        Some(word) if word.starts_with('-') => Some(program.unwrap_or("run")),
        // Any other word is a subcommand, or one of the program's own words, such as `mount-shm`.
        Some(word) => program.filter(|_| !Command::has_subcommand(word)),
    };
    if let Some(subcommand) = subcommand.filter(|_| !words.is_empty()) {
        words.insert(1, subcommand.into());
    }
    words
}

/// Gives flags two dashes if they have one, as Go's programs accept them: `-mig-strategy=mixed`.
fn double_dashes(words: &mut [OsString]) {
    fn flag(word: &OsString) -> Option<&str> {
        word.to_str()?.strip_prefix('-').filter(|flag| flag.len() > 1 && !flag.starts_with('-'))
    }
    // The flags are built at each start of the subcommand; they are not built more often than that.
    if !words.iter().any(|word| flag(word).is_some()) {
        return;
    }
    let command = LabelsArgs::augment_args(clap::Command::new("labels"));
    let known = command.get_arguments().filter_map(Arg::get_long_and_visible_aliases).flatten();
    let known: Vec<&str> = known.chain(["help", "version"]).collect();
    // Words after `--` are not flags.
    for word in words.iter_mut().take_while(|word| *word != "--") {
        let flag = flag(word).filter(|flag| flag.split('=').next().is_some_and(|name| known.contains(&name)));
        if let Some(double) = flag.map(|flag| format!("--{flag}")) {
            *word = double.into();
        }
    }
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
            ("gpu-feature-discovery", "gpu-feature-discovery labels"),
            ("/usr/bin/gpu-feature-discovery -o x", "/usr/bin/gpu-feature-discovery labels -o x"),
            ("gpu-feature-discovery labels", "gpu-feature-discovery labels"),
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
            ("nvidia-device-plugin -mig-strategy=mixed", "nvidia-device-plugin run --mig-strategy=mixed"),
            ("nvidia-device-plugin -help", "nvidia-device-plugin run --help"),
            ("linkwise run -pass-device-specs -config-file x", "linkwise run --pass-device-specs --config-file x"),
            ("gpu-feature-discovery -oneshot -o x", "gpu-feature-discovery labels --oneshot -o x"),
            ("gpu-feature-discovery -node-name n", "gpu-feature-discovery labels --node-name n"),
            ("mps-control-daemon -mps-root=/m", "mps-control-daemon mps-control-daemon --mps-root=/m"),
            ("linkwise run -oh -- -oneshot", "linkwise run -oh -- -oneshot"),
        ] {
            assert_eq!(words(line), read, "{line}");
        }
    }
}
