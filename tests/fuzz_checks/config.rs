//! Configuration files: for any text, each finding is one line, any line that it names exists, and the settings keep
//! their bounds. Called by the target `config`.

use linkwise::config::{Environment, Flags, Settings};
use linkwise_core::state::{MAX_SLOTS, SharedDevices};

use super::machine::assert_one_line;

pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (settings, findings) = Settings::build(&Flags::default(), &Environment::default(), text);
    // YAML has more line ends than `lines()` knows. A finding about a missing end names the line after the last.
    let lines =
        u64::try_from(text.split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']).count()).expect("a number of lines");
    for finding in &findings {
        assert_one_line(&finding.to_string());
        if let Some(line) = finding.line {
            assert!((1..=lines + 1).contains(&line), "line {line} of {lines}: {finding}");
        }
    }
    for resource in settings.sharing.value.iter().flat_map(|sharing| &sharing.resources) {
        assert!((2..=MAX_SLOTS).contains(&resource.replicas), "{resource:?}");
        let renamed =
            resource.rename.as_ref().is_some_and(|name| *name.as_str() != format!("{}.shared", resource.name));
        let needs_naming = renamed || resource.devices != SharedDevices::All;
        assert!(settings.naming.value || !needs_naming, "names or devices without naming: {resource:?}");
    }
    let resources = &settings.resources.value;
    assert!(settings.naming.value || resources.gpus.is_empty() && resources.mig.is_empty(), "patterns without naming");
    assert_eq!(settings.changed(&settings.clone()), []);
}
