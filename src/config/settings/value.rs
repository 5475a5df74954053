//! Single values: [`Value`], as a source has it, and the functions that make a setting's value of it.
//!
//! Each function returns the value, or a problem in words: the expected value and the found one.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::file::{Entry, Node};
use crate::config::dra::dns_subdomain;
use linkwise_core::allocation::AllocationPolicy;
use linkwise_core::quote::{excerpt, quoted};
use linkwise_core::state::{DeviceSelector, Door, GpuSelector, ResourceName, ResourceNameError, SharedDevices};
use linkwise_core::words;
use linkwise_core::words::Words;
use linkwise_host::machines;

/// The largest count of devices that a file may ask for; no node has as many.
const MAX_DEVICES: u32 = 1024;

/// A value as it was written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// A text of a flag or variable, which may stand for a number or a boolean.
    Word(String),
    Null,
    Bool(bool),
    Whole(i128),
    Fraction(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// Reads a value, or returns the problem.
pub(super) type Read<T> = fn(&Value) -> Result<T, String>;

impl Value {
    /// The value in words, for a message.
    pub fn describe(&self) -> String {
        match self {
            Self::Null => "nothing".to_owned(),
            Self::Bool(value) => value.to_string(),
            Self::Whole(value) => value.to_string(),
            Self::Fraction(value) => value.to_string(),
            Self::Word(text) | Self::Text(text) => quoted(text),
            Self::List(items) if items.is_empty() => "an empty list".to_owned(),
            Self::List(_) => "a list".to_owned(),
            Self::Map(_) => "a mapping".to_owned(),
        }
    }

    /// The problem: the expected value and the found one.
    pub fn refused(&self, expected: impl Display) -> String {
        format!("expected {expected}, found {}", self.describe())
    }

    /// The text, if the value is one.
    pub fn text(&self) -> Option<&str> {
        if let Self::Word(text) | Self::Text(text) = self { Some(text) } else { None }
    }

    /// The items of a list, those between the commas of a text, or a single number.
    pub(super) fn items<T>(&self, expected: &str, read: impl Fn(&Self) -> Result<T, String>) -> Result<Vec<T>, String> {
        match (self, self.text()) {
            (Self::List(items), _) => items.iter().map(|item| read(&item.value)).collect(),
            (Self::Whole(_), _) => Ok(vec![read(self)?]),
            (_, Some(text)) if text.trim().is_empty() => Ok(Vec::new()),
            (_, Some(text)) => text.split(',').map(|item| read(&Self::Word(item.trim().to_owned()))).collect(),
            (_, None) => Err(self.refused(expected)),
        }
    }

    /// The result of a reader, or the problem.
    fn or_refused<T>(&self, read: Option<T>, expected: impl Display) -> Result<T, String> {
        read.ok_or_else(|| self.refused(expected))
    }
}

/// True or false; a [`Value::Word`] is read by [`go_boolean`].
pub(super) fn boolean(value: &Value) -> Result<bool, String> {
    let read = match value {
        Value::Bool(value) => Some(*value),
        Value::Word(word) => go_boolean(word),
        _ => None,
    };
    value.or_refused(read, "true or false")
}

/// Reads a word as Go's strconv.ParseBool does, by which NVIDIA's programs read booleans.
pub fn go_boolean(word: &str) -> Option<bool> {
    match word {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// One of an enum's words.
pub(super) fn choice<T: Words>(value: &Value) -> Result<T, String> {
    let read = match value {
        // YAML reads `off` without quotes as false.
        Value::Bool(value) => {
            let words = if *value { ["on", "yes", "true"] } else { ["off", "no", "false"] };
            words.into_iter().find_map(T::from_word)
        }
        _ => value.text().and_then(T::from_word),
    };
    value.or_refused(read, expected::<T>())
}

/// At least one of an enum's words.
pub(super) fn choices<T: Words>(value: &Value) -> Result<Vec<T>, String> {
    let chosen = value.items(&expected::<T>(), choice::<T>)?;
    if chosen.is_empty() { Err(value.refused(format!("at least one of {}", expected::<T>()))) } else { Ok(chosen) }
}

/// The words as a person lists them: `a, b or c`.
fn expected<T: Words>() -> String {
    let words: Vec<&str> = T::WORDS.iter().map(|(word, _)| *word).collect();
    words.split_last().map(|(last, rest)| format!("{} or {last}", rest.join(", "))).unwrap_or_default()
}

/// A list of texts that are not empty.
pub(super) fn texts(value: &Value) -> Result<Vec<String>, String> {
    let name = |item: &Value| item.or_refused(item.text().filter(|text| !text.is_empty()).map(str::to_owned), "a name");
    value.items("a list of texts", name)
}

/// A text that is not empty.
pub(super) fn text(value: &Value) -> Result<String, String> {
    value.or_refused(value.text().map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned), "a text")
}

/// A qualified name: letters, digits, dashes, dots and underscores, after a DNS name and a slash or alone.
pub(super) fn qualified(value: &Value) -> Result<String, String> {
    let is_part = |part: &str, max| {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
        part.len() <= max && part.bytes().all(inner) && is_end(part.bytes().next()) && is_end(part.bytes().last())
    };
    let is_qualified = |text: &&str| match text.split_once('/') {
        Some((domain, name)) => dns_subdomain(domain).is_ok() && is_part(name, 63),
        None => is_part(text, 63),
    };
    value.or_refused(
        value.text().map(str::trim).filter(is_qualified).map(str::to_owned),
        "a name such as linkwise.dev/GPUsReady",
    )
}

/// The type of a condition. It needs a domain, because types without one are Kubernetes' own.
pub(super) fn condition_type(value: &Value) -> Result<String, String> {
    let name = qualified(value)?;
    value
        .or_refused(Some(name).filter(|name| name.contains('/')), "a domain and a name, such as linkwise.dev/GPUsReady")
}

/// The name of a built-in machine.
pub(super) fn machine(value: &Value) -> Result<String, String> {
    let names: Vec<&str> = machines::built_in_names().collect();
    value.or_refused(
        value.text().filter(|name| names.contains(name)).map(str::to_owned),
        format!("one of {}", names.join(", ")),
    )
}

/// The prefix of an annotation's key: a DNS subdomain and a slash.
pub(super) fn annotation_prefix(value: &Value) -> Result<String, String> {
    let is_prefix = |text: &&str| text.strip_suffix('/').is_some_and(|domain| dns_subdomain(domain).is_ok());
    value.or_refused(value.text().filter(is_prefix).map(str::to_owned), "a DNS name and a slash, such as cdi.k8s.io/")
}

pub(super) fn path(value: &Value) -> Result<PathBuf, String> {
    let text = value.text().filter(|path| !path.is_empty() && !path.contains('\0'));
    value.or_refused(text.map(PathBuf::from), "a path")
}

/// A path, or an empty text.
pub(super) fn path_or_empty(value: &Value) -> Result<PathBuf, String> {
    if value.text() == Some("") { Ok(PathBuf::new()) } else { path(value) }
}

/// An absolute path, because CDI specs and other programs use it too.
pub(super) fn absolute(value: &Value) -> Result<PathBuf, String> {
    value.or_refused(path(value).ok().filter(|path| path.is_absolute()), "an absolute path")
}

/// An address to listen on.
pub(super) fn address(value: &Value) -> Result<SocketAddr, String> {
    let address = value.text().and_then(|text| text.parse().ok());
    value.or_refused(address, "an address and a port, such as 0.0.0.0:9400")
}

/// A whole number within bounds, both included.
pub(super) fn whole<T: TryFrom<i128> + PartialOrd + Display>(value: &Value, min: T, max: T) -> Result<T, String> {
    let number = match value {
        Value::Word(word) => word.trim().parse().ok(),
        Value::Whole(number) => Some(*number),
        _ => None,
    };
    let number = number.and_then(|number| T::try_from(number).ok());
    let number = number.filter(|number| (&min..=&max).contains(&number));
    value.or_refused(number, format!("a whole number from {min} to {max}"))
}

/// One GPU, or all of a model, as `linkwise.filter.exclude` names them.
pub(super) fn gpu_selector(value: &Value) -> Result<GpuSelector, String> {
    let selector = match value {
        Value::Whole(number) => u32::try_from(*number).ok().map(GpuSelector::Index),
        _ => value.text().filter(|text| !text.trim().is_empty()).map(|text| GpuSelector::from(text.trim())),
    };
    value.or_refused(selector, "an index, a UUID, a PCI address or a model")
}

/// `none` (or an empty text) or `all`. Earlier versions took lists of GPUs too.
pub(super) fn dra_gpus(value: &Value) -> Result<Door, String> {
    match value.text().map(str::trim) {
        Some("none" | "") => Ok(Door::Plugin),
        Some("all") => Ok(Door::Dra),
        _ => Err(format!(
            "{}; lists of GPUs are no longer accepted, because a node's GPUs all go through one API: give the nodes \
             that are to use DRA a configuration with all (docs/migrating-to-dra.md)",
            value.refused("none or all")
        )),
    }
}

/// IMEX channels: none, or channel 0, the only one that the NVIDIA plugin allows.
pub(super) fn imex_channels(value: &Value) -> Result<Vec<u32>, String> {
    let channels = value.items("a list of channels", |item| whole(item, 0, u32::MAX))?;
    match channels.as_slice() {
        [] | [0] => Ok(channels),
        _ => Err(format!("expected [] or [0], found {}", excerpt(&format!("{channels:?}")))),
    }
}

/// A resource's name; a name without a domain gets nvidia.com, as in the NVIDIA plugin.
pub(super) fn resource_name(value: &Value) -> Result<ResourceName, String> {
    const EXPECTED: &str = "a resource name such as nvidia.com/gpu";
    let text = value.or_refused(value.text(), EXPECTED)?;
    let name = if text.contains('/') { text.parse() } else { format!("nvidia.com/{text}").parse() };
    name.map_err(|error: ResourceNameError| format!("{}: {}", value.refused(EXPECTED), error.why()))
}

/// The shared devices: `all`, a count, or a list.
pub(super) fn devices(value: &Value) -> Result<SharedDevices, String> {
    let device = |item: &Node| {
        let device = match &item.value {
            Value::Whole(number) => u32::try_from(*number).ok().map(DeviceSelector::Index),
            Value::Text(text) => text.parse().ok(),
            _ => None,
        };
        item.value.or_refused(device, "an index, a MIG index (0:1) or a UUID")
    };
    match value {
        Value::Text(text) if text == "all" => Ok(SharedDevices::All),
        Value::Whole(_) => whole(value, 1, MAX_DEVICES).map(SharedDevices::Count),
        Value::List(items) if !items.is_empty() => {
            items.iter().map(device).collect::<Result<_, _>>().map(SharedDevices::List)
        }
        _ => Err(value.refused("'all', a number of devices, or a list of indices, MIG indices (0:1) or UUIDs")),
    }
}

/// The interval at which something is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interval {
    /// After each span of this length.
    Every(Duration),
    /// Never.
    Infinite,
}

impl Interval {
    /// The time from one repetition to the next, at least `shortest`: 0 and single nanoseconds are valid, and would
    /// keep a core or a server busy.
    pub fn at_least(self, shortest: Duration) -> Duration {
        match self {
            Self::Every(time) => time.max(shortest),
            Self::Infinite => Duration::MAX,
        }
    }
}

impl Serialize for Interval {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            // Rust's debug form of a duration (`90s`, `1.5ms`) is one that Go reads.
            Self::Every(time) => serializer.serialize_str(&format!("{time:?}")),
            Self::Infinite => serializer.serialize_str(INFINITE),
        }
    }
}

const INFINITE: &str = "infinite";

/// `infinite`, or a span of time that is not negative: Go's durations, or a number of nanoseconds.
pub(super) fn interval(value: &Value) -> Result<Interval, String> {
    let time = match value {
        Value::Whole(number) => u64::try_from(*number).ok().map(Duration::from_nanos),
        _ if value.text() == Some(INFINITE) => return Ok(Interval::Infinite),
        _ => value.text().and_then(go_duration),
    };
    // Go's durations are 64-bit nanoseconds with a sign.
    let time = time.filter(|time| i64::try_from(time.as_nanos()).is_ok());
    value.or_refused(time.map(Interval::Every), "a duration such as 60s or 1m30s, or infinite")
}

/// The durations that Go's time.ParseDuration reads, without a minus sign: numbers with units one after the other, or
/// 0.
fn go_duration(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = Duration::ZERO;
    loop {
        let (number, after) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit() && c != '.')?);
        let (unit, next) = after.split_at(after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len()));
        let seconds = match unit {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        let part = Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds).ok()?;
        total = total.checked_add(part)?;
        if next.is_empty() {
            return Some(total);
        }
        rest = next;
    }
}

words! {
    /// The way in which the container runtime gets the list of a container's GPUs.
    pub enum DeviceListStrategy {
        /// `NVIDIA_VISIBLE_DEVICES`.
        Envvar = "envvar",
        /// Mounts below /var/run/nvidia-container-devices.
        VolumeMounts = "volume-mounts",
        /// CDI names in annotations.
        CdiAnnotations = "cdi-annotations",
        /// CDI names in the CRI's own field.
        CdiCri = "cdi-cri",
    }
}

words! {
    /// The NVIDIA plugin's source of devices.
    pub enum DiscoveryStrategy {
        /// The first source that is present.
        Auto = "auto",
        /// NVML.
        Nvml = "nvml",
        /// Tegra's integrated GPUs.
        Tegra = "tegra",
        /// GPUs that are bound to vfio-pci, as gpu-feature-discovery finds them.
        Vfio = "vfio",
    }
}

words! {
    /// The choice of slots and MIG devices, by the NVIDIA plugin's names.
    pub enum SharedPolicy {
        /// The least used GPU first.
        Distributed = "distributed",
        /// The most used GPU first.
        Packed = "packed",
        /// Distinct GPUs for one request: in linkwise the same as `distributed`.
        Spread = "spread",
    }
}

impl From<SharedPolicy> for AllocationPolicy {
    fn from(policy: SharedPolicy) -> Self {
        match policy {
            SharedPolicy::Distributed | SharedPolicy::Spread => Self::Distributed,
            SharedPolicy::Packed => Self::Packed,
        }
    }
}

words! {
    /// The health of the devices while NVML is unavailable.
    pub enum OnNvmlLoss {
        /// Their health stays as it was.
        Keep = "keep",
        /// The devices become unhealthy.
        Unhealthy = "unhealthy",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::state::{MigStrategy, NumaHints};

    fn node(value: Value) -> Node {
        Node { line: 1, value }
    }

    fn word(text: &str) -> Value {
        Value::Word(text.to_owned())
    }

    #[test]
    fn go_durations_without_minus_are_read() {
        let read = |text| match interval(&word(text)) {
            Ok(Interval::Every(time)) => Some(time),
            _ => None,
        };
        for (text, nanoseconds) in [
            ("60s", 60_000_000_000),
            ("1m30s", 90_000_000_000),
            ("1.5h", 5_400_000_000_000),
            (".5us", 500),
            ("1.ms", 1_000_000),
            ("+1h2m3s4ms5µs6ns", 3_723_004_005_006),
            ("0", 0),
        ] {
            assert_eq!(read(text), Some(Duration::from_nanos(nanoseconds)), "{text}");
        }
        for text in ["", "60", "s", "1d", "-1s", "1.2.3s", "1s 2s", ".s", "99999999999999999999h", "2562048h", "1m-1s"]
        {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(interval(&Value::Whole(60)), Ok(Interval::Every(Duration::from_nanos(60))));
        assert_eq!(interval(&word("infinite")), Ok(Interval::Infinite));
        assert_eq!(interval(&Value::Text("infinite".into())), Ok(Interval::Infinite));
    }

    #[test]
    fn unquoted_off_is_read_as_a_word() {
        let off = Value::Bool(false);
        assert_eq!(choice::<NumaHints>(&off).unwrap(), NumaHints::Off);
        let problem = choice::<MigStrategy>(&off).unwrap_err();
        assert_eq!(problem, "expected none, single or mixed, found false");
    }

    #[test]
    fn strategies_are_a_list_or_text_with_commas() {
        use DeviceListStrategy::{CdiCri, Envvar};
        let list = Value::List(vec![node(Value::Text("envvar".into())), node(Value::Text("cdi-cri".into()))]);
        for value in [word("envvar, cdi-cri"), list] {
            assert_eq!(choices::<DeviceListStrategy>(&value).unwrap(), [Envvar, CdiCri]);
        }
        assert!(choices::<DeviceListStrategy>(&word(",")).is_err());
        assert!(choices::<DeviceListStrategy>(&word("envvars")).is_err());
    }

    #[test]
    fn gpus_of_dra_are_none_or_all() {
        let read = |text| dra_gpus(&word(text));
        assert_eq!((read("none"), read(" all "), read("")), (Ok(Door::Plugin), Ok(Door::Dra), Ok(Door::Plugin)));
        let list = Value::List(vec![node(Value::Whole(0)), node(Value::Text("*H100*".into()))]);
        let words = ["0, *H100*", "all,0", "GPU-1"].map(word);
        for value in words.into_iter().chain([list, Value::Whole(3), Value::Bool(true)]) {
            let problem = dra_gpus(&value).unwrap_err();
            assert!(
                problem.starts_with("expected none or all, found ") && problem.contains("configuration with all"),
                "{problem}"
            );
        }
    }
}
