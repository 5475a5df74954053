//! The supervisor of the NVML agent, with the options' values.

use std::path::Path;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::config::settings::{OnNvmlLoss, load_text};
use crate::config::{Environment, Flags, HostArgs, NvmlArgs, Settings};
use linkwise_core::state::Event;
use linkwise_nvml::Limits;
use linkwise_nvml::child::AgentCommand;
use linkwise_nvml::gate::Gate;
use linkwise_nvml::supervisor::{self, Driver, DriverMetrics, Idle, Release};

/// The task that follows the driver. It sets `idle` to the reason why the node is idle, and follows the operator's
/// order to release the driver.
pub(super) fn driver_of(
    nvml: &NvmlArgs,
    host: &HostArgs,
    settings: &Settings,
    events: mpsc::Sender<Event>,
    metrics: DriverMetrics,
    (idle, release): (watch::Sender<Idle>, Release),
) -> Driver {
    let milliseconds = Duration::from_millis;
    Driver {
        command: AgentCommand {
            poll: milliseconds(nvml.nvml_poll_ms),
            limits: limits_of(nvml),
            gate: release.gate().cloned(),
            ..agent_of(host, Some(settings))
        },
        settings: supervisor::Settings {
            unhealthy_when_away: settings.on_nvml_loss.value == OnNvmlLoss::Unhealthy,
            pause: milliseconds(nvml.nvml_pause_ms),
            grace: milliseconds(nvml.nvml_grace_ms),
            trial: milliseconds(nvml.nvml_trial_ms),
            bus_look: milliseconds(nvml.bus_look_ms),
            fail_on_init_error: settings.fail_on_init_error.value,
            poll: milliseconds(nvml.nvml_poll_ms),
            call: milliseconds(nvml.nvml_call_ms),
        },
        release,
        sysfs: host.sysfs.clone(),
        events,
        metrics,
        idle,
        mig: None,
        others: watch::channel(supervisor::Others::None).1,
        away: watch::Sender::default(),
    }
}

pub(super) fn limits_of(nvml: &NvmlArgs) -> Limits {
    let [start, call] = [nvml.nvml_start_ms, nvml.nvml_call_ms].map(Duration::from_millis);
    Limits { start, call }
}

/// The settings for starting the NVML agent, for a command that only reads. The driver's root is that of the
/// environment variables, or the default.
pub fn agent_command(host: &HostArgs) -> AgentCommand {
    // The configuration file is not read, because its file system may hang.
    let loaded = load_text(&Flags::default(), &Environment::read(), "");
    let settings = loaded.ok().map(|loaded| loaded.settings);
    let gate = settings.as_ref().and_then(|settings| gate(settings, "linkwise-command"));
    AgentCommand { gate, ..agent_of(host, settings.as_ref()) }
}

/// The node's gate to the driver, for the program with this name.
pub(super) fn gate(settings: &Settings, program: &str) -> Option<Gate> {
    Gate::of_kubelet(&settings.kubelet_socket.value, program)
}

/// The settings for starting the NVML agent, which is this binary.
pub(super) fn agent_of(host: &HostArgs, settings: Option<&Settings>) -> AgentCommand {
    // The link leads to the running binary even after its file was replaced; current_exe names the removed file.
    let program = Path::new("/proc/self/exe");
    AgentCommand {
        library: host.nvml_library.clone(),
        driver_root: settings.map(|settings| settings.driver_root_ctr_path.value.clone()),
        procfs: host.procfs.clone(),
        memory_mib: host.nvml_memory_mib,
        calls: host.nvml_calls.clone(),
        ..AgentCommand::new(program)
    }
}
