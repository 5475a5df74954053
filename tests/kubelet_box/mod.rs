//! The kubelet in the box with a plugin of the tests, over real sockets. Tests wait for states, never for a time.

mod admission;
mod connection;
pub mod plugin;
mod topology;

use std::collections::BTreeSet;
use std::time::Duration;

use linkwise_kubelet_box::{KubeletBox, Options};
use plugin::{GPU, Plugin};
use tempfile::TempDir;

/// A timeout for tests in which it has to expire.
pub const SHORT_TIMEOUT: Duration = Duration::from_millis(50);

/// Starts a kubelet in a temporary folder; `change` sets its options.
pub fn kubelet(change: impl FnOnce(&mut Options)) -> (TempDir, KubeletBox) {
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new(dir.path());
    options.dial_retry = Duration::from_millis(1);
    change(&mut options);
    (dir, KubeletBox::start(options).unwrap())
}

pub fn unchanged(_: &mut Options) {}

/// Starts a kubelet and a plugin; waits until the kubelet has the plugin's first list. `prepare` runs before the plugin
/// registers.
pub async fn node(
    list: &str,
    change: impl FnOnce(&mut Options),
    prepare: impl FnOnce(&Plugin),
) -> (TempDir, KubeletBox, Plugin) {
    let (dir, kubelet) = kubelet(change);
    let plugin = Plugin::serve(dir.path(), "gpu.sock", list);
    prepare(&plugin);
    plugin.register().await.unwrap();
    let all = plugin::devices(list).len();
    let listed = kubelet.wait(|s| s.resources[GPU].connected && s.resources[GPU].numa.len() == all).await;
    listed.unwrap();
    (dir, kubelet, plugin)
}

/// Splits a text into a set of ids.
pub fn ids(list: &str) -> BTreeSet<String> {
    list.split_whitespace().map(String::from).collect()
}
