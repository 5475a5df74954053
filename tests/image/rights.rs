//! The rights of containers, as far as this machine has them. A check that needs a missing right is skipped by name.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::OnceLock;

/// Linux' capabilities, by their numbers (linux/capability.h).
const CAPABILITIES: &str = "\
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE \
    NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT \
    SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP \
    MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE";

/// The capabilities that containerd gives to a container by default (its `defaultUnixCaps`).
const DEFAULT: &str = "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE \
    SYS_CHROOT KILL AUDIT_WRITE";

pub struct Asked<'a> {
    pub privileged: bool,
    pub add: BTreeSet<&'a str>,
    pub drop: BTreeSet<&'a str>,
}

/// The capabilities that a container gets, with the prefix `CAP_`.
pub fn capabilities(asked: &Asked<'_>) -> Vec<String> {
    let wanted = |name: &&str| {
        let is_default = DEFAULT.split_whitespace().any(|it| it == *name) && !asked.drop.contains("ALL");
        asked.privileged || asked.add.contains(name) || (is_default && !asked.drop.contains(name))
    };
    let available = available();
    let (given, missing): (Vec<&str>, Vec<&str>) =
        CAPABILITIES.split_whitespace().filter(wanted).partition(|it| available.contains(it));
    for name in missing {
        report_skipped(&format!("the capability {name}, which this machine does not give to its root"));
    }
    given.into_iter().map(|name| format!("CAP_{name}")).collect()
}

/// The capabilities that this process may pass on.
fn available() -> &'static BTreeSet<&'static str> {
    static AVAILABLE: OnceLock<BTreeSet<&'static str>> = OnceLock::new();
    AVAILABLE.get_or_init(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line =
            status.lines().find_map(|line| line.strip_prefix("CapBnd:")).expect("the kernel names the bounding set");
        let bits = u64::from_str_radix(line.trim(), 16).unwrap();
        let numbered = CAPABILITIES.split_whitespace().enumerate();
        numbered.filter(|(bit, _)| bits >> bit & 1 == 1).map(|(_, name)| name).collect()
    })
}

/// Reports a skipped check once. It avoids eprintln, whose output the test harness captures.
pub fn report_skipped(what: &str) {
    static REPORTED: std::sync::Mutex<BTreeSet<String>> = std::sync::Mutex::new(BTreeSet::new());
    if REPORTED.lock().unwrap().insert(what.to_owned()) {
        let _ = writeln!(std::io::stderr(), "skipped: {what}");
    }
}
