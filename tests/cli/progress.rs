//! The line about what takes longer than a second, on a terminal.

use std::os::unix::net::UnixListener;

use crate::cli::linkwise;
use crate::cli::pty::Terminal;

#[test]
fn doctor_says_what_it_waits_for() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // A linkwise that takes the question and does not answer.
    let silent = UnixListener::bind(at("admin.sock")).unwrap();
    let mut doctor = linkwise(&["doctor", "--timeout", "3600", "--admin-socket"]);
    doctor.arg(at("admin.sock")).arg("--root").arg(folder.path()).arg("--sysfs").arg(at("sys"));
    doctor.arg("--nvml-library").arg(at("none.so")).arg("--kubelet-socket").arg(at("kubelet.sock"));
    // Wide and tall: the report neither wraps nor scrolls.
    let mut terminal = Terminal::start(&doctor, 400, 200);
    terminal.wait_for("checking the GPUs' health, ");
    drop(silent);
    terminal.wait("report", |screen| !screen.text().contains("checking") && screen.text().contains("failed"));
    terminal.child.wait().unwrap();
}
