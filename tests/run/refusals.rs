//! Settings with which linkwise does not start, and WSL: the message names the cause. `unavailable.rs` has the cases in
//! which NVML cannot be initialised.

use crate::run::node::{Process, Setup};

/// Waits until linkwise ends with code 1 and one line for people, and returns that line.
pub async fn refused(mut process: Process) -> String {
    let (status, lines) = process.ended().await;
    assert_eq!(status.code(), Some(1), "{lines:?}");
    let lines: Vec<String> = lines.into_iter().filter(|line| !line.starts_with("fake-nvml:")).collect();
    assert!(lines.len() == 1 && lines[0].starts_with("linkwise: "), "{lines:#?}");
    lines[0].clone()
}

#[tokio::test]
async fn wsl_is_refused_by_name() {
    let mut setup = Setup::on("dgx1-v100");
    let root = setup.at("wsl");
    std::fs::create_dir_all(root.join("usr/lib/wsl/lib")).unwrap();
    std::fs::copy(&setup.library, root.join("usr/lib/wsl/lib/libnvidia-ml.so.1")).unwrap();
    setup.library = root;
    let words = refused(setup.spawn()).await;
    assert!(words.contains("this is WSL2 (") && words.contains("whose GPUs linkwise does not serve"), "{words}");
}

#[tokio::test]
async fn invalid_option_is_named() {
    for (arg, code, expected) in [
        ("--device-list-strategy=envvar,cdi", 2, "cdi-annotations or cdi-cri, found 'cdi'"),
        ("--device-id-strategy=name", 2, "invalid value 'name' for '--device-id-strategy"),
        ("--nvidia-driver-root=run/driver", 2, "expected an absolute path"),
        ("--nvidia-cdi-hook-path=nvidia-cdi-hook", 2, "expected an absolute path"),
        ("--cdi-annotation-prefix=cdi.k8s.io", 2, "expected a DNS name and a slash, such as cdi.k8s.io/"),
        ("--mig-stratgey=mixed", 2, "a similar argument exists: '--mig-strategy'"),
        ("--log=linkwise=loud", 1, "'linkwise=loud' is not a level (off, error, warn, info, debug, trace)"),
    ] {
        let (status, lines) = Setup::on("dgx1-v100").arg(arg).spawn().ended().await;
        assert!(status.code() == Some(code) && lines.join("\n").contains(expected), "{arg}: {status}: {lines:#?}");
    }
}

#[tokio::test]
async fn foreign_metrics_address_is_named() {
    let mut setup = Setup::on("dgx1-v100");
    // An address from a block for documentation (RFC 5737): no host has it.
    setup.metrics_address = ([192, 0, 2, 1], 9400).into();
    let words = refused(setup.spawn()).await;
    let expected = format!("linkwise: cannot listen on {} for metrics and probes: ", setup.metrics_address);
    assert!(words.starts_with(&expected), "{words}");
}

#[tokio::test]
async fn kubelet_socket_without_folder_is_refused() {
    for path in ["kubelet.sock", "/"] {
        let mut setup = Setup::on("dgx1-v100");
        setup.kubelet_socket = path.into();
        let words = refused(setup.spawn()).await;
        assert!(words.contains(&format!("'{path}' is not the path of a kubelet socket")), "{words}");
    }
}
