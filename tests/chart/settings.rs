//! The plugin's rights and variables in the chart, for each of the settings between which other tests switch a node.

use serde_json::Value;

use crate::chart::helm::{Helm, POD, containers, list, object, set};
use crate::node_settings::{SETTINGS, VARIABLES, rights};

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn chart_gives_plugin_the_rights_and_env_of_tests() {
    for setting in SETTINGS {
        let objects =
            Helm::found().template(&set(setting.values)).unwrap_or_else(|error| panic!("{}: {error}", setting.name));
        let pods = object(&objects, "DaemonSet", "nvdp-nvidia-device-plugin");
        let all = containers(pods);
        let plugin = all.into_iter().find(|container| container["name"] == "nvidia-device-plugin-ctr").unwrap();
        assert_eq!(rights(plugin, &list(pods, &format!("{POD}/volumes")), false), setting.rights(), "{}", setting.name);
        let env = list(plugin, "/env");
        let value = |name: &str| env.iter().find(|env| env["name"] == name).map(|env| env["value"].clone());
        for name in VARIABLES {
            let expected = setting.env.iter().find(|(own, _)| *own == name).map(|(_, value)| Value::from(*value));
            assert_eq!(value(name), expected, "{}: {name}", setting.name);
        }
        assert_eq!(value("CONFIG_FILE").is_some(), setting.file.is_some(), "{}", setting.name);
    }
}
