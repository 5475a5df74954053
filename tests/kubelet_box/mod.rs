//! The kubelet in the box against a plugin of our own, over real sockets. Every wait is for a
//! state; the short durations below are deadlines that a test wants to run out.

mod admission;
mod connection;
pub mod plugin;
mod topology;

use std::collections::BTreeSet;
use std::time::Duration;

use linkwise_kubelet_box::{KubeletBox, Options};
use plugin::{GPU, Plugin};
use tempfile::TempDir;

/// A deadline that a test wants to run out.
pub const SOON: Duration = Duration::from_millis(50);

/// A kubelet in a folder of its own, with options of the test's.
pub fn kubelet(change: impl FnOnce(&mut Options)) -> (TempDir, KubeletBox) {
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new(dir.path());
    options.dial_retry = Duration::from_millis(1);
    change(&mut options);
    (dir, KubeletBox::start(options).unwrap())
}

/// Options do not matter to most tests.
pub fn usual(_: &mut Options) {}

/// A kubelet and a plugin that is registered, its first list seen; `prepare` may teach the plugin
/// before it registers.
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

/// A set of ids from words.
pub fn ids(list: &str) -> BTreeSet<String> {
    list.split_whitespace().map(String::from).collect()
}
