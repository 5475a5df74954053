//! Compiles `proto/` into Rust with protox, so that no machine needs `protoc`.
//!
//! One output folder per API: several kubelet APIs are `package v1`, and a second file of one package name would
//! silently overwrite the first. APIs that share messages have one folder.

use std::path::{Path, PathBuf};
use std::{env, error::Error, fs};

/// The folder of the definitions, from this crate.
const PROTO: &str = "../../proto";

#[expect(clippy::disallowed_methods, reason = "a build script gets its settings from the environment")]
fn main() -> Result<(), Box<dyn Error>> {
    for (apis, folder) in [
        (["deviceplugin/v1beta1/api.proto"].as_slice(), "deviceplugin"),
        (&["podresources/v1/api.proto"], "podresources"),
        (&["pluginregistration/v1/api.proto"], "pluginregistration"),
        (&["dra/v1/api.proto"], "dra"),
        (&["dra-health/v1alpha1/api.proto", "dra-health/v1/api.proto"], "dra-health"),
    ] {
        let apis: Vec<PathBuf> = apis.iter().map(|api| Path::new(PROTO).join(api)).collect();
        apis.iter().for_each(|api| println!("cargo:rerun-if-changed={}", api.display()));
        let out = PathBuf::from(env::var("OUT_DIR")?).join(folder);
        fs::create_dir_all(&out)?;
        let descriptors = protox::compile(apis, [PROTO])?;
        tonic_prost_build::configure().out_dir(out).compile_fds(descriptors)?;
    }
    Ok(())
}
