//! Scans of MIG devices by the real agent, compared with the machine of the fake library.

use linkwise_core::topology::{GpuObservation, HostObservation, NodeObservation, ProbeFailure};
use linkwise_nvml::child::AgentCommand;
use linkwise_nvml::supervisor::scan;
use tempfile::TempDir;

use crate::resources::{MIXED, mixed};

/// A simulated driver with four GPUs in different MIG layouts.
pub struct Driver {
    _folder: TempDir,
    control: fake_nvml::Control,
    command: AgentCommand,
}

impl Driver {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let mut command = AgentCommand::new(env!("CARGO_BIN_EXE_linkwise"));
        command.library = Some(fake_nvml::library_path());
        command.environment =
            vec![("FAKE_NVML_MACHINE".into(), MIXED.into()), ("FAKE_NVML_CONTROL".into(), socket.clone().into())];
        Self { _folder: folder, control: fake_nvml::Control::new(socket), command }
    }

    /// Sends a command to the fake library that the agent of the next scan will load.
    pub fn tell(&self, command: &str) {
        self.control.send(command).unwrap();
    }

    /// Scans the GPUs by a new agent.
    pub async fn scan(&self) -> (Vec<GpuObservation>, Vec<ProbeFailure>) {
        let NodeObservation { mut gpus, failures, .. } =
            scan(&self.command).await.unwrap().node(HostObservation::default(), Vec::new());
        for gpu in &mut gpus {
            gpu.common_ancestors.clear();
            gpu.pcie_width_now = None;
        }
        (comparable(gpus), failures)
    }
}

/// Removes capabilities, which come from the kernel of the machine that runs the test, and profile ids and placements,
/// which the library invents if the machine's file has none.
fn comparable(mut gpus: Vec<GpuObservation>) -> Vec<GpuObservation> {
    for device in gpus.iter_mut().flat_map(|gpu| &mut gpu.mig).flat_map(|mig| &mut mig.devices) {
        (device.capabilities, device.profile_id, device.placement) = (None, None, None);
    }
    gpus
}

#[tokio::test]
async fn mig_devices_are_observed_as_the_driver_has_them() {
    let (gpus, failures) = Driver::new().scan().await;
    assert_eq!((gpus, failures), (comparable(mixed().gpus), vec![]));
}

#[tokio::test]
async fn failed_mig_calls_cost_facts_or_devices() {
    let driver = Driver::new();
    driver.tell("fail 1 nvmlDeviceGetGpuInstanceById 4");
    driver.tell("fail 2 nvmlDeviceGetAttributes_v2 999");
    driver.tell("fail 3 nvmlDeviceGetMigMode 999");
    let (gpus, failures) = driver.scan().await;
    let mig = |gpu: usize| gpus[gpu].mig.as_ref();
    // A device whose profile is unknown is observed; one whose slices are unknown is not.
    assert!(mig(1).unwrap().devices.len() == 7 && mig(1).unwrap().devices.iter().all(|it| it.extension.is_none()));
    assert!(mig(2).unwrap().enabled && mig(2).unwrap().devices.is_empty() && mig(3).is_none());
    let failed: Vec<(&str, &str)> =
        failures.iter().map(|failure| (failure.subject.as_str(), failure.call.as_str())).collect();
    let expected = [
        ("0000:0f:00.0", "nvmlDeviceGetGpuInstanceById"),
        ("0000:47:00.0", "nvmlDeviceGetAttributes_v2"),
        ("0000:4e:00.0", "nvmlDeviceGetMigMode"),
    ];
    assert_eq!(failed, expected);
    // Equal failures of several devices are joined.
    assert_eq!(failures[0].error, "MIG device 0, 1, 2, 3, 4, 5, 6: NVML_ERROR_NO_PERMISSION (4)");
}
