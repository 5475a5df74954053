//! Runs a rendered pod or DaemonSet's pod as kubelet and container runtime do, with its volumes, variables and rights.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::helm::{POD, list};
use crate::node::Node;
use crate::rights::{Asked, capabilities, report_skipped};
use crate::rootfs::{below, unpacked};
use crate::runc::{Container, is_folder, tail};

/// The time within which a pod has to be ready, and an init container has to end.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// The search path of debian:bookworm-slim.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The paths of /proc and /sys that containerd hides from containers, and those that it makes read-only.
const MASKED: &str = "/proc/acpi /proc/kcore /proc/keys /proc/latency_stats /proc/timer_list /proc/timer_stats \
                      /proc/sched_debug /sys/firmware";
const READ_ONLY: &str = "/proc/bus /proc/fs /proc/irq /proc/sys /proc/sysrq-trigger";

pub struct Pod {
    /// The containers of the template, in its order, without init containers.
    pub containers: Vec<Container>,
    probed: Vec<u16>,
    grace: Duration,
    /// Holds the process namespace that the containers share. It is dropped last.
    _sandbox: Option<Container>,
}

impl Pod {
    /// Runs the init containers of a pod, or of a DaemonSet's pod on the node, and starts its containers. It panics
    /// with the log of an init container that fails.
    pub async fn start(node: &Node, objects: &[Value], set: &Value) -> Self {
        let (spec, name) = (set.pointer(POD).unwrap_or(&set["spec"]), set["metadata"]["name"].as_str().unwrap());
        let folder = node.folder_for(name);
        let volumes = volumes(node, objects, &folder.join("volumes"), &list(spec, "/volumes"));
        let maker = Maker { node, set, spec, volumes };
        let shares = spec["shareProcessNamespace"] == true;
        let sandbox = if shares { Some(sandbox(&folder).await) } else { None };
        let joined = sandbox.as_ref().map(|sandbox| format!("/proc/{}/ns/pid", sandbox.pid().unwrap()));
        let start = |container: &Value| {
            let name = container["name"].as_str().unwrap();
            Container::start(name, folder.join(name), maker.configuration(container, joined.as_deref()))
        };
        for container in list(spec, "/initContainers") {
            let mut container = start(container);
            let ended = tokio::time::timeout(READY_TIMEOUT, container.wait_end()).await;
            let status =
                ended.unwrap_or_else(|_| panic!("{} does not end\n{}", container.name, tail(&container.log())));
            assert!(status.success(), "{} ended with {status}\n{}", container.name, tail(&container.log()));
        }
        let templates = list(spec, "/containers");
        let probed = templates.iter().filter_map(|container| probe(container)).collect();
        let grace = Duration::from_secs(spec["terminationGracePeriodSeconds"].as_u64().unwrap_or(30));
        Self { containers: templates.into_iter().map(start).collect(), probed, grace, _sandbox: sandbox }
    }

    /// Waits until every readiness probe succeeds; every container has to run meanwhile.
    pub async fn wait_ready(&mut self) {
        let deadline = tokio::time::Instant::now() + READY_TIMEOUT;
        for port in self.probed.clone() {
            while probe_answer(port).await != Some(200) {
                self.assert_running();
                assert!(tokio::time::Instant::now() < deadline, "not ready on port {port}\n{}", self.logs());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        self.assert_running();
    }

    pub fn assert_running(&mut self) {
        for container in &mut self.containers {
            if let Some(status) = container.ended() {
                panic!("{} ended with {status}\n{}", container.name, tail(&container.log()));
            }
        }
    }

    pub fn container(&self, name: &str) -> &Container {
        self.containers.iter().find(|it| it.name == name).unwrap_or_else(|| panic!("no container {name}"))
    }

    /// The ends of all logs.
    pub fn logs(&self) -> String {
        self.containers.iter().map(|it| format!("-- {}\n{}\n", it.name, tail(&it.log()))).collect()
    }

    /// Ends the pod by SIGTERM, as the kubelet does; panics if a container outlasts the grace period.
    pub async fn stop(mut self) {
        for container in &self.containers {
            container.signal("TERM");
        }
        let grace = self.grace;
        for container in &mut self.containers {
            if tokio::time::timeout(grace, container.wait_end()).await.is_err() {
                panic!("{} did not end within its grace period\n{}", container.name, tail(&container.log()));
            }
        }
    }
}

fn probe(container: &Value) -> Option<u16> {
    let port = container.pointer("/readinessProbe/httpGet/port")?;
    let number = match port.as_str() {
        None => port.as_u64(),
        Some(name) => list(container, "/ports").iter().find(|it| it["name"] == name)?["containerPort"].as_u64(),
    };
    number.and_then(|number| u16::try_from(number).ok())
}

/// The status of `GET /readyz`; `None` without an answer.
async fn probe_answer(port: u16) -> Option<u16> {
    crate::node::get(port, "/readyz").await.map(|(status, _)| status)
}

/// A process that only holds the pod's process namespace, as Kubernetes' pause container does.
async fn sandbox(folder: &Path) -> Container {
    let configuration = json!({
        "process": {"user": {"uid": 65535, "gid": 65535}, "args": ["sleep", "infinity"], "env": [PATH], "cwd": "/"},
        "root": {"readonly": true},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]},
    });
    let mut sandbox = Container::start("sandbox", folder.join("sandbox"), configuration);
    while sandbox.pid().is_none() {
        assert!(sandbox.ended().is_none(), "the sandbox ended: {}", sandbox.log());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sandbox
}

/// Makes the pod's volumes; returns their paths on this machine by name.
fn volumes(node: &Node, objects: &[Value], folder: &Path, volumes: &[&Value]) -> BTreeMap<String, PathBuf> {
    let made = volumes.iter().map(|volume| {
        let name = volume["name"].as_str().unwrap();
        let own = folder.join(name);
        let place = if volume["emptyDir"].is_object() {
            fs::create_dir_all(&own).unwrap();
            own
        } else if let Some(path) = volume["hostPath"]["path"].as_str() {
            host_path(&below(&node.host(), path), volume["hostPath"]["type"].as_str().unwrap_or_default())
        } else if let Some(name) = volume["configMap"]["name"].as_str() {
            let is = |object: &&Value| object["kind"] == "ConfigMap" && object["metadata"]["name"] == name;
            let map = objects.iter().find(is).unwrap_or_else(|| panic!("no ConfigMap {name}"));
            let files = map["data"].as_object().unwrap().iter();
            project(&own, files.map(|(name, text)| (name.clone(), text.as_str().unwrap().to_owned())));
            if let Some(mode) = volume["configMap"]["defaultMode"].as_u64() {
                for file in map["data"].as_object().unwrap().keys() {
                    let mode = u32::try_from(mode).unwrap();
                    fs::set_permissions(own.join(file), fs::Permissions::from_mode(mode)).unwrap();
                }
            }
            own
        } else {
            let sources = list(volume, "/projected/sources");
            assert!(!sources.is_empty(), "tests/image does not know the volume {volume}");
            project(&own, sources.into_iter().flat_map(|source| projected(node, source)))
        };
        (name.to_owned(), place)
    });
    made.collect()
}

/// Makes or checks a hostPath of this type, as the kubelet does.
fn host_path(path: &Path, kind: &str) -> PathBuf {
    match kind {
        "DirectoryOrCreate" => fs::create_dir_all(path).unwrap(),
        "Directory" => assert!(is_folder(path), "hostPath type check failed: {} is not a directory", path.display()),
        // The kubelet does not check such a path, which an init container may make.
        "" => {}
        other => panic!("tests/image does not know hostPath type {other}"),
    }
    path.to_owned()
}

/// Writes files as the kubelet does: behind two links, so that it can replace all at once.
fn project(folder: &Path, files: impl Iterator<Item = (String, String)>) -> PathBuf {
    let data = folder.join("..2026_11_23");
    fs::create_dir_all(&data).unwrap();
    symlink("..2026_11_23", folder.join("..data")).unwrap();
    for (name, text) in files {
        fs::write(data.join(&name), text).unwrap();
        symlink(format!("..data/{name}"), folder.join(&name)).unwrap();
    }
    folder.to_owned()
}

fn projected(node: &Node, source: &Value) -> Vec<(String, String)> {
    let path = |item: &Value| item["path"].as_str().unwrap().to_owned();
    if source["serviceAccountToken"].is_object() {
        return vec![(path(&source["serviceAccountToken"]), node.token().to_owned())];
    }
    if source["configMap"]["name"] == "kube-root-ca.crt" {
        let items = list(source, "/configMap/items");
        return items.into_iter().map(|item| (path(item), node.ca().to_owned())).collect();
    }
    let items = list(source, "/downwardAPI/items");
    assert!(!items.is_empty(), "tests/image does not know the source {source}");
    items.into_iter().map(|item| (path(item), node.field(item["fieldRef"]["fieldPath"].as_str().unwrap()))).collect()
}

/// Makes the configurations of a pod's containers.
struct Maker<'a> {
    node: &'a Node,
    set: &'a Value,
    spec: &'a Value,
    volumes: BTreeMap<String, PathBuf>,
}

impl Maker<'_> {
    fn configuration(&self, container: &Value, joined: Option<&str>) -> Value {
        let rights = &container["securityContext"];
        let privileged = rights["privileged"] == true;
        let names =
            |pointer: &str| list(rights, pointer).into_iter().filter_map(Value::as_str).collect::<BTreeSet<_>>();
        let asked = Asked { privileged, add: names("/capabilities/add"), drop: names("/capabilities/drop") };
        let capabilities = capabilities(&asked);
        let (uid, gid) = unpacked().image.user;
        let id = |field: &str, image: u32| {
            let given = rights[field].as_u64().or_else(|| self.spec["securityContext"][field].as_u64());
            given.unwrap_or(u64::from(image))
        };
        let env = self.environment(container);
        let mounts = self.mounts(container, env.iter().any(|it| it == "NVIDIA_VISIBLE_DEVICES=all"), privileged);
        let is_shared = |mount: &Value| mount["options"].as_array().is_some_and(|it| it.contains(&json!("rshared")));
        let propagation = if mounts.iter().any(is_shared) { "rshared" } else { "rslave" };
        let pid = match joined {
            Some(path) => Some(json!({"type": "pid", "path": path})),
            None if self.spec["hostPID"] == true => None,
            None => Some(json!({"type": "pid"})),
        };
        let namespaces = ["ipc", "uts", "mount"].iter().map(|kind| json!({"type": kind}));
        let namespaces: Vec<Value> = namespaces.chain(pid).collect();
        let unless_privileged =
            |paths: &str| if privileged { json!([]) } else { json!(paths.split(' ').collect::<Vec<_>>()) };
        json!({
            "process": {
                "user": {"uid": id("runAsUser", uid), "gid": id("runAsGroup", gid)},
                "args": arguments(container),
                "env": env,
                "cwd": "/",
                "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
                "noNewPrivileges": rights["allowPrivilegeEscalation"] == false,
            },
            "root": {"readonly": rights["readOnlyRootFilesystem"] == true},
            "hostname": self.set["metadata"]["name"],
            "mounts": mounts,
            "linux": {
                "namespaces": namespaces,
                "rootfsPropagation": propagation,
                "maskedPaths": unless_privileged(MASKED),
                "readonlyPaths": unless_privileged(READ_ONLY),
                "resources": resources(container),
            },
        })
    }

    /// The variables of the image, of the node and of the container; a later one overrides an earlier one.
    fn environment(&self, container: &Value) -> Vec<String> {
        let mut all: BTreeMap<String, String> = BTreeMap::new();
        let mut set = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap();
            all.insert(name.to_owned(), value.to_owned());
        };
        set(PATH);
        unpacked().image.env.iter().for_each(|pair| set(pair));
        self.node.variables().iter().for_each(|pair| set(pair));
        for variable in list(container, "/env") {
            let name = variable["name"].as_str().unwrap();
            let value = match variable.pointer("/valueFrom/fieldRef/fieldPath").and_then(Value::as_str) {
                Some(field) => self.node.field(field),
                None => variable["value"].as_str().unwrap_or_default().to_owned(),
            };
            set(&format!("{name}={value}"));
        }
        all.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
    }

    fn mounts(&self, container: &Value, gets_driver: bool, privileged: bool) -> Vec<Value> {
        let of_kernel = |destination: &str, kind: &str, options: &[&str]| {
            let source = kind;
            json!({"destination": destination, "type": kind, "source": source, "options": options})
        };
        let system = if privileged { "rw" } else { "ro" };
        let mut mounts = vec![
            of_kernel("/proc", "proc", &["nosuid", "noexec", "nodev"]),
            of_kernel("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            of_kernel(
                "/dev/pts",
                "devpts",
                &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
            ),
            of_kernel("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
            of_kernel("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
            of_kernel("/sys", "sysfs", &["nosuid", "noexec", "nodev", system]),
        ];
        let bind = |destination: &str, source: &Path, options: &[&str]| {
            let kind = "bind";
            json!({"destination": destination, "type": kind, "source": source, "options": options})
        };
        if gets_driver {
            let nvidias = self.node.nvidia_mounts();
            mounts.extend(nvidias.iter().map(|(source, to, access)| bind(to, source, &["rbind", access])));
        }
        for mount in list(container, "/volumeMounts") {
            let name = mount["name"].as_str().unwrap();
            let source = self.volumes.get(name).unwrap_or_else(|| panic!("no volume {name}"));
            let source = match mount["subPath"].as_str() {
                // A file of a ConfigMap is behind two links. The kubelet makes a missing subPath as a folder.
                Some(path) => fs::canonicalize(source.join(path)).unwrap_or_else(|_| {
                    fs::create_dir_all(source.join(path)).unwrap();
                    source.join(path)
                }),
                None => {
                    // containerd makes a missing source as a folder.
                    fs::create_dir_all(source).unwrap();
                    source.clone()
                }
            };
            let access = if mount["readOnly"] == true { "ro" } else { "rw" };
            let propagation = match mount["mountPropagation"].as_str() {
                Some("HostToContainer") => "rslave",
                Some("Bidirectional") if self.node.shares_mounts() => "rshared",
                Some("Bidirectional") => {
                    report_skipped("Bidirectional mounts: this machine does not share a mount");
                    "rprivate"
                }
                _ => "rprivate",
            };
            let destination = mount["mountPath"].as_str().unwrap();
            mounts.retain(|other| other["destination"] != destination);
            mounts.push(bind(destination, &source, &["rbind", access, propagation]));
        }
        mounts
    }
}

/// The command line: the container's command replaces the image's entrypoint, its arguments the image's command.
fn arguments(container: &Value) -> Vec<String> {
    let image = &unpacked().image;
    let words = |field: &str| -> Option<Vec<String>> {
        container[field].as_array().map(|words| words.iter().map(|word| word.as_str().unwrap().to_owned()).collect())
    };
    match (words("command"), words("args")) {
        (Some(command), args) => [command, args.unwrap_or_default()].concat(),
        (None, Some(args)) => [image.entrypoint.clone(), args].concat(),
        (None, None) => [image.entrypoint.clone(), image.command.clone()].concat(),
    }
}

/// The memory limit, and the devices that NVIDIA's runtime allows, or all if privileged.
fn resources(container: &Value) -> Value {
    let mut resources = json!({"devices": [
        {"allow": false, "access": "rwm"},
        {"allow": true, "type": "c", "major": 195, "access": "rwm"},
    ]});
    if container["securityContext"]["privileged"] == true {
        resources = json!({"devices": [{"allow": true, "access": "rwm"}]});
    }
    if let Some(limit) = container.pointer("/resources/limits/memory").and_then(Value::as_str) {
        let mib: u64 = limit.strip_suffix("Mi").and_then(|mib| mib.parse().ok()).expect("a limit in Mi");
        resources["memory"] = json!({"limit": mib << 20, "swap": mib << 20});
    }
    resources
}
