//! `linkwise config-manager`: this program becomes `linkwise-cluster`, the one with a client of the API server.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

/// The binary in a folder of its own, as in an image.
fn installed() -> (tempfile::TempDir, std::path::PathBuf) {
    let built = Path::new(env!("CARGO_BIN_EXE_linkwise"));
    // Beside the built one: a hard link does not leave a file system.
    let folder = tempfile::tempdir_in(built.parent().unwrap()).unwrap();
    let program = folder.path().join("linkwise");
    fs::hard_link(built, &program).unwrap();
    (folder, program)
}

#[test]
fn config_manager_becomes_the_program_beside_linkwise() {
    let (folder, program) = installed();
    let other = folder.path().join("linkwise-cluster");
    fs::write(&other, "#!/bin/sh\necho \"$@\"\n").unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755)).unwrap();
    let link = folder.path().join("config-manager");
    symlink("linkwise", &link).unwrap();
    for (program, args) in [(&program, &["config-manager", "--oneshot"][..]), (&link, &["--oneshot"])] {
        let output = Command::new(program).args(args).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "config-manager --oneshot\n", "{output:?}");
    }
}

#[test]
fn missing_program_for_the_api_server_is_named() {
    let (folder, program) = installed();
    let output = Command::new(program).arg("config-manager").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    let named = folder.path().canonicalize().unwrap().join("linkwise-cluster");
    assert!(!output.status.success());
    assert!(error.contains(&format!("cannot start {}", named.display())) && error.contains("API server"), "{error}");
}
