//! Sets `has_chromium` if this machine has a browser. Without one, the lab ignores tests of the page, with a reason.
//!
//! `make tools` installs a browser and touches this file, so that cargo runs this script again.

use std::path::Path;

#[expect(clippy::disallowed_methods, reason = "a build script has no configuration")]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(has_chromium)");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = |name: &str| std::env::split_paths(&path).any(|folder| folder.join(name).exists());
    let names = ["chromium", "chromium-headless-shell", "google-chrome"];
    if Path::new("../target/tools/chromium").exists() || names.into_iter().any(installed) {
        println!("cargo::rustc-cfg=has_chromium");
    }
}
