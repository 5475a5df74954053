//! Tests of the agent's process: its start, the faults for which it is killed, and its end.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use super::*;

/// A script in place of the agent's program.
fn stand_in(name: &str) -> AgentCommand {
    AgentCommand::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvml").join(name))
}

#[tokio::test]
async fn agent_that_sends_nonsense_is_killed() {
    let mut agent = Agent::spawn(&stand_in("babbler.sh")).unwrap();
    assert!(matches!(next(&mut agent).await, Err(AgentEnded::Protocol(_))));
    let ended = next(&mut agent).await.unwrap_err();
    assert!(ended.to_string().contains("SIGKILL"), "{ended}");
}

#[tokio::test]
async fn dropping_the_agent_ends_its_process() {
    // A stopped agent does not see that its parent is gone, and must end too.
    for stopped in [false, true] {
        let (machine, agent) = up().await;
        if stopped {
            signal("STOP", &agent);
        }
        drop(agent);
        // The control socket closes when the process ends.
        timeout(LIMIT, async {
            while machine.control.is_heard() {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn agent_killed_before_it_answers_is_reported() {
    let (_machine, mut agent) = up().await;
    signal("STOP", &agent);
    agent.request(ToAgent::Observe).await.unwrap();
    signal("KILL", &agent);
    let ended = message(&mut agent).await.unwrap_err();
    assert!(ended.to_string().contains("SIGKILL"), "{ended}");
}

#[tokio::test]
async fn agent_that_closes_its_socket_is_killed() {
    let mut agent = Agent::spawn(&stand_in("silent.sh")).unwrap();
    assert!(matches!(next(&mut agent).await, Err(AgentEnded::Silent)));
}

/// An agent started by hand, with the parent's end of its socket.
fn by_hand(control: &Control) -> (UnixStream, Child) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let command = AgentCommand { library: Some(fake_nvml::library_path()), ..AgentCommand::new("") };
    let mut agent = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    agent.args(["nvml-agent", &serde_json::to_string(&command).unwrap()]).stdin(OwnedFd::from(theirs));
    agent.env("FAKE_NVML_MACHINE", machine_file()).env("FAKE_NVML_CONTROL", control.socket());
    (ours, agent.stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap())
}

#[tokio::test]
async fn agent_that_sends_nothing_is_killed() {
    let mut command = stand_in("mute.sh");
    command.limits = SHORT;
    let mut agent = Agent::spawn(&command).unwrap();
    let ended = next(&mut agent).await.unwrap_err();
    assert!(matches!(ended, AgentEnded::Late(_)), "{ended}");
    assert_eq!(ended.to_string(), "the NVML agent sent no message within 3s and was killed");
    let after = next(&mut agent).await.unwrap_err();
    assert!(after.to_string().contains("SIGKILL"), "{after}");
}

#[tokio::test]
async fn agent_without_parent_ends_while_nvml_init_hangs() {
    let machine = machine();
    machine.tell("hang nvmlInit_v2");
    let (ours, child) = by_hand(&machine.control);
    drop(ours);
    let ended = timeout(LIMIT, child.wait_with_output()).await.unwrap().unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

#[tokio::test]
async fn nonsense_from_the_parent_ends_the_agent() {
    let machine = machine();
    let (mut ours, child) = by_hand(&machine.control);
    ours.write_all(b"dance\n").unwrap();
    let ended = timeout(LIMIT, child.wait_with_output()).await.unwrap().unwrap();
    assert_eq!(ended.status.code(), Some(1));
    let log = String::from_utf8_lossy(&ended.stderr);
    assert!(log.contains("cannot read the parent's request: expected value at line 1"), "{log}");
}

/// The path of the agent's status file in a folder that stands in for /proc.
fn status_file(agent: &Agent, folder: &TempDir) -> PathBuf {
    let process = folder.path().join(agent.id().unwrap().to_string());
    std::fs::create_dir(&process).unwrap();
    process.join("status")
}

#[tokio::test]
async fn agent_with_too_much_memory_is_killed() {
    let (mut machine, processes) = (machine(), tempfile::tempdir().unwrap());
    (machine.command.memory_mib, machine.command.processes) = (48, processes.path().to_owned());
    let mut agent = machine.agent();
    let status = status_file(&agent, &processes);
    std::fs::write(&status, "VmRSS:\t 999999 kB\nRssAnon:\t 40000 kB\nRssShmem:\t 9152 kB\n").unwrap();
    // The agent may have 48 MiB, and not 1 KiB more.
    ready(&mut agent).await;
    std::fs::write(&status, "VmRSS:\t 999999 kB\nRssAnon:\t 40000 kB\nRssShmem:\t 9153 kB\n").unwrap();
    let ended = message(&mut agent).await.unwrap_err();
    let expected = "the NVML agent had 49 MiB of memory that the kernel cannot take back, more than 48 MiB \
                    (--nvml-memory-mib, LINKWISE_NVML_MEMORY_MIB), and was killed";
    assert_eq!(ended.to_string(), expected);
    let after = next(&mut agent).await.unwrap_err();
    assert!(after.to_string().contains("SIGKILL"), "{after}");
}

/// Linux' O_NONBLOCK.
const NONBLOCK: i32 = 0o4000;

#[tokio::test]
async fn unreadable_memory_use_delays_no_message() {
    let (mut machine, processes) = (machine(), tempfile::tempdir().unwrap());
    (machine.command.memory_mib, machine.command.processes) = (48, processes.path().to_owned());
    machine.command.limits = SHORT;
    let mut agent = machine.agent();
    let status = status_file(&agent, &processes);
    assert!(std::process::Command::new("mkfifo").arg(&status).status().unwrap().success());
    // The FIFO can be opened once a read of the status blocks on it.
    let open = || OpenOptions::new().write(true).custom_flags(NONBLOCK).open(&status);
    let hung: File = timeout(LIMIT, async {
        loop {
            match open() {
                Ok(file) => return file,
                Err(_) => drop(next(&mut agent).await.unwrap()),
            }
        }
    })
    .await
    .unwrap();
    // Messages still come, and a hung call is noticed in time.
    for _ in 0..3 {
        next(&mut agent).await.unwrap();
    }
    machine.tell("hang nvmlDeviceGetTemperature");
    let ended = message(&mut agent).await.unwrap_err();
    assert!(matches!(ended, AgentEnded::Hung(..)), "{ended}");
    drop(hung);
}

#[tokio::test]
async fn library_is_found_by_its_usual_names() {
    let folder = tempfile::tempdir().unwrap();
    for names in [&["libnvidia-ml.so"][..], &["libnvidia-ml.so", "libnvidia-ml.so.1"], &["libnvidia-ml.so.1"], &[]] {
        for name in names {
            std::os::unix::fs::symlink(fake_nvml::library_path(), folder.path().join(name)).unwrap();
        }
        let mut machine = machine().with("LD_LIBRARY_PATH", folder.path());
        (machine.command.library, machine.command.driver_root) = (None, Some(folder.path().to_owned()));
        let mut agent = machine.agent();
        if names.is_empty() {
            // The error has the name under which drivers install the library.
            let FromAgent::Leaving(error) = next(&mut agent).await.unwrap() else { panic!("a library was found") };
            assert_eq!((error.call.as_ref(), error.fault()), ("dlopen", Fault::Library));
            assert!(error.to_string().contains("cannot load libnvidia-ml.so.1: "), "{error}");
            let searched = format!("searched below the driver's root {}: usr/lib64, ", folder.path().display());
            assert!(error.to_string().contains(&searched), "{error}");
            assert!(matches!(next(&mut agent).await, Err(AgentEnded::Exited(status)) if !status.success()));
        } else {
            assert_eq!(ready(&mut agent).await.0.len(), 4, "{names:?}");
        }
        for name in names {
            std::fs::remove_file(folder.path().join(name)).unwrap();
        }
    }
}

#[tokio::test]
async fn missing_agent_program_is_named() {
    let error = Agent::spawn(&AgentCommand::new("/no/such/linkwise")).unwrap_err();
    assert_eq!(error.to_string(), "cannot start the NVML agent /no/such/linkwise");
}
