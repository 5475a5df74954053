//! What is in the image, and what is not.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::rootfs::{below, unpacked};

#[test]
fn image_has_no_certificates_of_its_own() {
    let root = &unpacked().folder;
    assert!(!below(root, "/etc/ssl/certs").exists(), "the cluster's CA must do");
    assert!(!below(root, "/usr/share/ca-certificates").exists());
}

#[test]
fn image_has_every_program_and_their_libraries() {
    let root = &unpacked().folder;
    for name in ["linkwise", "nvidia-device-plugin", "gpu-feature-discovery", "config-manager", "mps-control-daemon"] {
        let program = below(root, "/usr/bin").join(name);
        let mode = std::fs::metadata(&program).unwrap_or_else(|error| panic!("{name}: {error}")).permissions().mode();
        assert_eq!(mode & 0o111, 0o111, "{name}");
        let linked = Command::new("chroot").arg(root).args(["ldd", &format!("/usr/bin/{name}")]).output().unwrap();
        let words = String::from_utf8_lossy(&linked.stdout);
        assert!(linked.status.success() && !words.contains("not found"), "{name}: {words}");
    }
    let entrypoint = &unpacked().image.entrypoint;
    assert!(below(root, &entrypoint[0]).exists(), "{entrypoint:?}");
}
