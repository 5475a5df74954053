//! The progress line on a terminal, for a step that takes longer than a second.

use std::os::unix::net::UnixListener;

use crate::cli::{OnTerminal, linkwise};

#[test]
fn doctor_names_the_check_it_waits_for() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // A linkwise that accepts the connection and does not answer.
    let silent = UnixListener::bind(at("admin.sock")).unwrap();
    let mut doctor = linkwise(&["doctor", "--timeout", "3600", "--admin-socket"]);
    doctor.arg(at("admin.sock")).arg("--root").arg(folder.path()).arg("--sysfs").arg(at("sys"));
    doctor.arg("--nvml-library").arg(at("none.so")).arg("--kubelet-socket").arg(at("kubelet.sock"));
    let mut terminal = OnTerminal::start(&mut doctor);
    terminal.wait(|written| written.contains("\rchecking the GPUs' health, "));
    drop(silent);
    // The line is cleared before the report.
    terminal.wait(|written| written.split("\r\x1b[K").nth(1).is_some_and(|report| report.contains("failed")));
    terminal.child.wait().unwrap();
}
