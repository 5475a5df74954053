//! A real Prometheus (`make tools` installs Debian's) scrapes a node that goes from DRA to the device plugin and
//! then gets load, while a claim keeps its GPUs. Prometheus has the series of docs/metrics.md as documented (without
//! [`NOT_HERE`]), all rules evaluate, and every recording rule and every query of the dashboards has an answer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use fake_nvml::Control;
use linkwise_kubelet_box::Pod;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::cluster::support::{until, within};
use crate::dra::cluster::node::Node;
use crate::run::node::Process;

const GPU: &str = "nvidia.com/gpu";

/// Metrics that docs/metrics.md documents and this node does not have, with the reason.
const NOT_HERE: [(&str, &str); 7] = [
    ("linkwise_preferred_allocation_fallbacks", "no request names an unknown device"),
    ("linkwise_label_writes", "no labels are written"),
    ("linkwise_gpu_odd", "the GPUs are alike"),
    ("linkwise_gpu_cordoned_since_seconds", "no operator cordons a GPU"),
    ("linkwise_hardware_lacking_since_seconds", "no hardware is missing"),
    ("linkwise_plan_problems", "the node offers all that is asked"),
    ("linkwise_allocation_nvls_megabytes_per_second", "the machine has no NVSwitches"),
];

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn text(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

fn program() -> PathBuf {
    let installed = repository("target/tools/prometheus");
    if installed.exists() { installed } else { "prometheus".into() }
}

type Samples = Vec<(BTreeMap<String, String>, f64)>;

struct Prometheus {
    address: SocketAddr,
    _process: Process,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    /// Starts a Prometheus with our rules, which scrapes linkwise as the PodMonitor says.
    async fn start(program: &Path, linkwise: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        // The PrometheusRule's spec is a file of rules.
        let rules = text("manifests/monitoring/rules.yaml");
        let spec = rules.split_once("\nspec:\n").unwrap().1;
        let rules: String = spec.lines().map(|line| format!("{}\n", line.strip_prefix("  ").unwrap())).collect();
        std::fs::write(at("rules.yaml"), rules).unwrap();
        let configuration = format!(
            "global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}\n\
             rule_files: [rules.yaml]\n\
             scrape_configs:\n\
             - job_name: linkwise\n  honor_labels: true\n  static_configs:\n  - targets: [\"{linkwise}\"]\n    \
             labels: {{node: n, namespace: kube-system, pod: linkwise-x7k2p, container: linkwise}}\n"
        );
        std::fs::write(at("prometheus.yaml"), configuration).unwrap();
        let mut command = Command::new(program);
        command.arg("--config.file").arg(at("prometheus.yaml")).arg("--storage.tsdb.path").arg(at("data"));
        command.args(["--web.listen-address=127.0.0.1:0", "--log.format=json"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        let process = Process::of(command);
        let listens = process.logged(|line| line["msg"] == "Listening on").await;
        let address = listens["address"].as_str().unwrap().parse().unwrap();
        Self { address, _process: process, _folder: folder }
    }

    /// The field `data` of an answer, or null if there is none yet.
    async fn get(&self, path: &str) -> Value {
        let exchange = async {
            let mut stream = TcpStream::connect(self.address).await?;
            // An answer to HTTP/1.0 is not chunked.
            stream.write_all(format!("GET /api/v1/{path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await?;
            std::io::Result::Ok(text)
        };
        let text = within(exchange).await.unwrap();
        let body = text.split_once("\r\n\r\n").unwrap().1;
        let answer: Value = serde_json::from_str(body).unwrap_or_default();
        assert_ne!(answer["status"], "error", "{path}: {}", answer["error"]);
        answer["data"].clone()
    }

    /// The present samples of a query, without those that are not a number.
    async fn query(&self, expr: &str) -> Samples {
        let encoded: String = expr.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let data = self.get(&format!("query?query={encoded}")).await;
        let sample = |sample: &Value| {
            let labels = serde_json::from_value(sample["metric"].clone()).unwrap();
            let value: f64 = sample["value"][1].as_str().unwrap().parse().unwrap();
            (!value.is_nan()).then_some((labels, value))
        };
        list(&data, "result").filter_map(sample).collect()
    }

    /// Waits until each query has an answer.
    async fn wait_all(&self, queries: impl IntoIterator<Item = String>) {
        let mut without: Vec<String> = queries.into_iter().collect();
        let waiting = async {
            while let Some(expr) = without.last() {
                if self.query(expr).await.is_empty() {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    without.rotate_right(1);
                } else {
                    without.pop();
                }
            }
        };
        let ended = tokio::time::timeout(std::time::Duration::from_secs(60), waiting).await;
        assert!(ended.is_ok(), "no answer in time: {without:#?}");
    }

    /// Waits until a query has an answer, and returns it.
    async fn wait(&self, expr: &str) -> Samples {
        self.wait_all([expr.to_owned()]).await;
        self.query(expr).await
    }
}

/// The metrics of docs/metrics.md: documented name, name of the series in Prometheus, and labels.
fn documented() -> Vec<(String, String, BTreeSet<String>)> {
    let text = text("docs/metrics.md");
    let quoted = |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let (mut found, mut last) = (Vec::new(), BTreeSet::new());
    for line in text.lines().filter(|line| line.starts_with("| `linkwise_")) {
        let cells: Vec<&str> = line.split('|').skip(1).map(str::trim).collect();
        let mut labels: BTreeSet<String> = quoted(cells[2]).into_iter().collect();
        if cells[2].starts_with("the same") {
            labels.extend(BTreeSet::clone(&last));
        } else {
            last = labels.clone();
        }
        for name in quoted(cells[0]) {
            let suffix = match cells[1] {
                "gauge" => "",
                "counter" => "_total",
                "histogram" => "_bucket",
                "info" => "_info",
                other => panic!("{name}: {other}"),
            };
            found.push((name.clone(), format!("{name}{suffix}"), labels.clone()));
        }
    }
    assert!(found.len() > 40, "{found:?}");
    found
}

/// The titles and queries of a dashboard's panels, with variables replaced.
fn panels(dashboard: &str) -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(&text(dashboard)).unwrap();
    let of = |panel: &Value| -> Vec<(String, String)> {
        let expr =
            |target: &Value| target["expr"].as_str().unwrap().replace("$node", "n").replace("$__rate_interval", "30s");
        list(panel, "targets").map(|target| (panel["title"].as_str().unwrap().to_owned(), expr(target))).collect()
    };
    list(&dashboard, "panels").flat_map(of).collect()
}

fn queries(panels: &[(String, String)], title: &str) -> Vec<String> {
    panels.iter().filter(|(of, _)| of == title).map(|(_, expr)| expr.clone()).collect()
}

/// Rows as text, columns aligned.
fn drawn(header: &[&str], mut rows: Vec<Vec<String>>) -> String {
    rows.sort();
    rows.insert(0, header.iter().map(ToString::to_string).collect());
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap();
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("    {}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// Returns true for series that this node has only while DRA gives out its GPUs: of DRA, CDI specs and free GPUs.
fn is_of_dra(text: &str) -> bool {
    ["linkwise_dra_", "linkwise_cdi_", "linkwise_free_collective"].iter().any(|name| text.contains(name))
}

/// Starts `linkwise run`, and a Prometheus that scrapes it.
async fn scraped(node: &Node, program: &Path) -> (Process, Prometheus) {
    let mut command = node.program();
    command.args(["--log-format", "json", "--nvml-poll-ms=50"]).env("FAKE_NVML_CONTROL", node.at("nvml"));
    let process = Process::of(command);
    let up = process.logged(|line| line["message"] == "linkwise is up").await;
    let prometheus = Prometheus::start(program, up["metrics"].as_str().unwrap()).await;
    (process, prometheus)
}

/// Checks that Prometheus has each series with the labels that docs/metrics.md gives it.
async fn check_documented(prometheus: &Prometheus, documented: &[(String, String, BTreeSet<String>)]) {
    prometheus.wait_all(documented.iter().map(|(_, series, _)| series.clone())).await;
    for (_, series, labels) in documented {
        let there: BTreeSet<String> =
            prometheus.query(series).await.into_iter().flat_map(|(of, _)| of.into_keys()).collect();
        assert!(labels.is_subset(&there), "{series}: {labels:?} are documented, {there:?} are there");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_prometheus), ignore = "no prometheus here: make tools brings it")]
async fn every_documented_series_and_panel_has_data() {
    let program = program();
    let node = Node::start().await;
    let is_here = |name: &str| NOT_HERE.iter().all(|(metric, _)| *metric != name);
    let (here, not_here): (Vec<_>, Vec<_>) = documented().into_iter().partition(|(name, ..)| is_here(name));
    let (of_dra, here): (Vec<_>, Vec<_>) = here.into_iter().partition(|(name, ..)| is_of_dra(name));
    let [fleet, of_node] = ["fleet", "node"].map(|name| panels(&format!("manifests/monitoring/grafana/{name}.json")));
    let (panels_of_dra, panels): (Vec<_>, Vec<_>) =
        fleet.iter().chain(&of_node).map(|(_, expr)| expr.clone()).partition(|expr| is_of_dra(expr));

    let (mut before, prometheus) = scraped(&node, &program).await;
    node.wait_serving(8).await;
    // The claim leaves GPUs 0, 1, 6 and 7. Without 7, which fails below, no two of them share two NVLinks.
    let claim = node.claim("trained", &["gpu-2", "gpu-3", "gpu-4", "gpu-5"]);
    node.start_pod("trained", &claim).await;
    check_documented(&prometheus, &of_dra).await;
    prometheus.wait_all(panels_of_dra).await;
    before.child.kill().await.unwrap();

    node.configure("none");
    let (_process, prometheus) = scraped(&node, &program).await;
    until(|| node.healthy(GPU).len() == 4).await;

    // The load: a GPU fails, NVML crashes, jobs come and go, and one job stays.
    prometheus.wait("linkwise_gpu_healthy == 1").await;
    Control::new(node.at("nvml")).send("xid 7 79").unwrap();
    prometheus.wait("linkwise_unhealthy_devices{reason=\"xid\"} == 1").await;
    Control::new(node.at("nvml")).send("crash").unwrap();
    prometheus.wait("linkwise_nvml_agent_ends_total{cause=\"crashed\"}").await;
    let busy = "histogram_quantile(0.5, sum by (le) (rate(linkwise_choice_duration_seconds_bucket[30s])))";
    within(async {
        for job in 0.. {
            let name = format!("job-{job}");
            node.kubelet.admit(&Pod::single(&name, GPU, 1), None).await.unwrap();
            node.kubelet.remove_pod(&name);
            if !prometheus.query(busy).await.is_empty() {
                return;
            }
        }
    })
    .await;
    node.kubelet.admit(&Pod::single("pair", GPU, 2), None).await.unwrap();

    prometheus.wait("linkwise_allocation_quality == 0.5").await;
    prometheus.wait("linkwise:allocation_below_best:since_seconds").await;
    check_documented(&prometheus, &here).await;
    for (name, series, _) in not_here {
        assert!(prometheus.query(&series).await.is_empty(), "{name} is here: take it out of NOT_HERE");
    }

    let rules = prometheus.get("rules").await;
    for rule in list(&rules, "groups").flat_map(|group| list(group, "rules")) {
        assert_eq!((&rule["health"], &rule["lastError"]), (&"ok".into(), &Value::Null), "{}", rule["name"]);
    }
    let recorded =
        list(&rules, "groups").flat_map(|group| list(group, "rules")).filter(|rule| rule["type"] == "recording");
    prometheus.wait_all(recorded.map(|rule| rule["name"].as_str().unwrap().to_owned())).await;

    prometheus.wait_all(panels).await;
    let below = queries(&fleet, "Jobs that got less than they could");
    let rows = prometheus.wait(&below[0]).await.into_iter().map(|(labels, quality)| {
        let of = |label: &str| labels.get(label).cloned().unwrap_or_default();
        vec![of("namespace"), of("pod"), of("node"), of("resource"), format!("{:.0} %", quality * 100.0), of("why")]
    });
    let jobs = drawn(&["Namespace", "Pod", "Node", "Resource", "Quality", "Why"], rows.collect());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    let since = prometheus.wait(&below[1]).await;
    assert!(since.iter().all(|(_, since)| (now - 300.0..=now).contains(&(since / 1000.0))), "{since:?} at {now}");

    let rows = prometheus.wait(&queries(&of_node, "Who holds what")[0]).await.into_iter().map(|(labels, _)| {
        let of = |label: &str| labels.get(label).cloned().unwrap_or_default();
        ["index", "pci", "numa", "namespace", "pod", "container", "resource", "door"].map(of).join(" ")
    });
    let holders = rows.collect::<BTreeSet<_>>();
    let [pair, trained] = ["default pair main nvidia.com/gpu plugin", "default trained main gpu.nvidia.com dra"];
    let expected = [("0 0000:06:00.0 0", pair), ("1 0000:07:00.0 0", pair), ("2 0000:0a:00.0 0", trained)];
    let others = [("3 0000:0b:00.0 0", trained), ("4 0000:85:00.0 1", trained), ("5 0000:86:00.0 1", trained)];
    assert_eq!(holders, expected.into_iter().chain(others).map(|(gpu, pod)| format!("{gpu} {pod}")).collect());
    let is_shown = text("docs/monitoring.md").contains(&jobs);
    assert!(is_shown, "docs/monitoring.md does not show the present answer of the query:\n{jobs}");
}
