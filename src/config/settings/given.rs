//! Reads single values from the command line, the environment or the file.
//!
//! Each function returns the value, or a problem in words: the expected value and the found one.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::config::file::{Node, Value};
use linkwise_core::quote::{excerpt, quoted};
use linkwise_core::state::{DraGpus, GpuSelector, ResourceName, ResourceNameError};
use linkwise_core::words::Words;

/// A value as it was written.
#[derive(Clone, Copy)]
pub enum Given<'a> {
    /// A text of the command line or of a variable.
    Text(&'a str),
    /// A value of the file.
    Node(&'a Node),
}

/// Reads a value, or returns the problem in words.
pub type Read<T> = fn(Given<'_>) -> Result<T, String>;

impl<'a> Given<'a> {
    /// The problem that another value was expected.
    pub fn refused(self, expected: impl Display) -> String {
        let found = match self {
            Self::Text(text) => quoted(text),
            Self::Node(Node { value: Value::List(items), .. }) if items.is_empty() => "an empty list".to_owned(),
            Self::Node(node) => node.value.describe(),
        };
        format!("expected {expected}, found {found}")
    }

    /// The text, if the value is one.
    pub fn text(self) -> Option<&'a str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Node(Node { value: Value::Text(text), .. }) => Some(text),
            Self::Node(_) => None,
        }
    }

    fn whole(self) -> Option<i128> {
        match self {
            Self::Text(text) => text.trim().parse().ok(),
            Self::Node(Node { value: Value::Whole(number), .. }) => Some(*number),
            Self::Node(_) => None,
        }
    }

    /// The items of a list, or those between the commas of a text.
    fn items<T>(self, expected: &str, read: impl Fn(Given<'_>) -> Result<T, String>) -> Result<Vec<T>, String> {
        if let Self::Node(Node { value: Value::List(items), .. }) = self {
            return items.iter().map(|item| read(Given::Node(item))).collect();
        }
        if let Self::Node(Node { value: Value::Whole(_), .. }) = self {
            return Ok(vec![read(self)?]);
        }
        let text = self.text().ok_or_else(|| self.refused(expected))?;
        if text.trim().is_empty() {
            return Ok(Vec::new());
        }
        text.split(',').map(|item| read(Given::Text(item.trim()))).collect()
    }
}

/// True or false; as a text, the words of Go's strconv.ParseBool, by which the NVIDIA plugin reads the same variables.
pub fn boolean(given: Given<'_>) -> Result<bool, String> {
    match given {
        Given::Node(Node { value: Value::Bool(value), .. }) => Ok(*value),
        Given::Text("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
        Given::Text("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
        _ => Err(given.refused("true or false")),
    }
}

/// One of an enum's words.
pub fn choice<T: Words>(given: Given<'_>) -> Result<T, String> {
    let found = match given {
        // YAML reads `off` without quotes as false.
        Given::Node(Node { value: Value::Bool(value), .. }) => {
            let words = if *value { ["on", "yes", "true"] } else { ["off", "no", "false"] };
            words.into_iter().find_map(T::from_word)
        }
        _ => given.text().and_then(T::from_word),
    };
    found.ok_or_else(|| given.refused(words::<T>()))
}

/// At least one of an enum's words.
pub fn choices<T: Words>(given: Given<'_>) -> Result<Vec<T>, String> {
    let chosen = given.items(&words::<T>(), choice::<T>)?;
    if chosen.is_empty() { Err(given.refused(format!("at least one of {}", words::<T>()))) } else { Ok(chosen) }
}

/// The words as a person lists them: `a, b or c`.
fn words<T: Words>() -> String {
    let words: Vec<&str> = T::WORDS.iter().map(|(word, _)| *word).collect();
    match words.split_last() {
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}

/// Any text.
pub fn text(given: Given<'_>) -> Result<String, String> {
    given.text().map(str::to_owned).ok_or_else(|| given.refused("a text"))
}

/// A list of texts that are not empty.
pub fn texts(given: Given<'_>) -> Result<Vec<String>, String> {
    let item = |item: Given<'_>| text(item).ok().filter(|text| !text.is_empty()).ok_or_else(|| item.refused("a name"));
    given.items("a list of texts", item)
}

/// A path.
pub fn path(given: Given<'_>) -> Result<PathBuf, String> {
    let text = given.text().filter(|path| !path.is_empty() && !path.contains('\0'));
    text.map(PathBuf::from).ok_or_else(|| given.refused("a path"))
}

/// A path, or nothing.
pub fn path_or_empty(given: Given<'_>) -> Result<PathBuf, String> {
    if given.text() == Some("") { Ok(PathBuf::new()) } else { path(given) }
}

/// An absolute path: the host, CDI specs and the container runtime read it too.
pub fn absolute(given: Given<'_>) -> Result<PathBuf, String> {
    path(given).ok().filter(|path| path.is_absolute()).ok_or_else(|| given.refused("an absolute path"))
}

/// An address to listen on.
pub fn address(given: Given<'_>) -> Result<SocketAddr, String> {
    let address = given.text().and_then(|text| text.parse().ok());
    address.ok_or_else(|| given.refused("an address and a port, such as 0.0.0.0:9400"))
}

/// A whole number within bounds, both included.
pub fn whole<T>(given: Given<'_>, least: T, most: T) -> Result<T, String>
where
    T: TryFrom<i128> + PartialOrd + Display,
{
    let number = given.whole().and_then(|number| T::try_from(number).ok());
    let number = number.filter(|number| (&least..=&most).contains(&number));
    number.ok_or_else(|| given.refused(format!("a whole number from {least} to {most}")))
}

/// One GPU, or all of a model, as `linkwise.filter.exclude` names them.
pub fn gpu_selector(given: Given<'_>) -> Result<GpuSelector, String> {
    let selector = match given {
        Given::Node(Node { value: Value::Whole(number), .. }) => u32::try_from(*number).ok().map(GpuSelector::Index),
        _ => given.text().filter(|text| !text.trim().is_empty()).map(|text| GpuSelector::from(text.trim())),
    };
    selector.ok_or_else(|| given.refused("an index, a UUID, a PCI address or a model"))
}

/// `none`, `all`, or GPUs.
pub fn dra_gpus(given: Given<'_>) -> Result<DraGpus, String> {
    match given.text().map(str::trim) {
        Some("none") => return Ok(DraGpus::None),
        Some("all") => return Ok(DraGpus::All),
        _ => {}
    }
    let expected = "none, all, or a list of indices, UUIDs, PCI addresses and models";
    let gpus = given.items(expected, |item| match item.text().map(str::trim) {
        Some(word @ ("none" | "all")) => Err(format!("{word} cannot be one of several: expected {expected}")),
        _ => gpu_selector(item),
    })?;
    Ok(if gpus.is_empty() { DraGpus::None } else { DraGpus::Some(gpus) })
}

/// IMEX channels: none, or channel 0, the only one that the NVIDIA plugin allows.
pub fn imex_channels(given: Given<'_>) -> Result<Vec<u32>, String> {
    let channels = given.items("a list of channels", |item| whole(item, 0, u32::MAX))?;
    match channels.as_slice() {
        [] | [0] => Ok(channels),
        _ => Err(format!("expected [] or [0], found {}", excerpt(&format!("{channels:?}")))),
    }
}

/// A resource's name; a name without a domain gets nvidia.com, as in the NVIDIA plugin.
pub fn resource_name(given: Given<'_>) -> Result<ResourceName, String> {
    const EXPECTED: &str = "a resource name such as nvidia.com/gpu";
    let text = given.text().ok_or_else(|| given.refused(EXPECTED))?;
    let name = if text.contains('/') { text.parse() } else { format!("nvidia.com/{text}").parse() };
    name.map_err(|error: ResourceNameError| format!("{}: {}", given.refused(EXPECTED), error.why()))
}

/// The interval at which something is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interval {
    /// After each span of this length.
    Every(Duration),
    /// Never.
    Infinite,
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
pub fn interval(given: Given<'_>) -> Result<Interval, String> {
    let time = match given {
        Given::Node(Node { value: Value::Whole(number), .. }) => u64::try_from(*number).ok().map(Duration::from_nanos),
        _ if given.text() == Some(INFINITE) => return Ok(Interval::Infinite),
        _ => given.text().and_then(go_duration),
    };
    // Go's durations are 64-bit nanoseconds with a sign.
    let time = time.filter(|time| i64::try_from(time.as_nanos()).is_ok());
    time.map(Interval::Every).ok_or_else(|| given.refused("a duration such as 60s or 1m30s, or infinite"))
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

#[cfg(test)]
mod tests {
    use super::super::choices::DeviceListStrategy;
    use super::*;
    use linkwise_core::state::{MigStrategy, NumaHints, Pattern};

    fn node(value: Value) -> Node {
        Node { line: 1, value }
    }

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let read = |text| match interval(Given::Text(text)) {
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
        let sixty = node(Value::Whole(60));
        assert_eq!(interval(Given::Node(&sixty)), Ok(Interval::Every(Duration::from_nanos(60))));
        assert_eq!(interval(Given::Text("infinite")), Ok(Interval::Infinite));
        assert_eq!(interval(Given::Node(&node(Value::Text("infinite".into())))), Ok(Interval::Infinite));
    }

    #[test]
    fn unquoted_off_is_read_as_a_word() {
        let off = node(Value::Bool(false));
        assert_eq!(choice::<NumaHints>(Given::Node(&off)).unwrap(), NumaHints::Off);
        let problem = choice::<MigStrategy>(Given::Node(&off)).unwrap_err();
        assert_eq!(problem, "expected none, single or mixed, found false");
    }

    #[test]
    fn strategies_are_a_list_or_text_with_commas() {
        use DeviceListStrategy::{CdiCri, Envvar};
        let list = node(Value::List(vec![node(Value::Text("envvar".into())), node(Value::Text("cdi-cri".into()))]));
        for given in [Given::Text("envvar, cdi-cri"), Given::Node(&list)] {
            assert_eq!(choices::<DeviceListStrategy>(given).unwrap(), [Envvar, CdiCri]);
        }
        assert!(choices::<DeviceListStrategy>(Given::Text(",")).is_err());
        assert!(choices::<DeviceListStrategy>(Given::Text("envvars")).is_err());
    }

    #[test]
    fn gpus_of_dra_are_none_all_or_a_list() {
        let read = |text| dra_gpus(Given::Text(text));
        assert_eq!((read("none"), read(" all "), read("")), (Ok(DraGpus::None), Ok(DraGpus::All), Ok(DraGpus::None)));
        let mixed = vec![GpuSelector::Index(0), GpuSelector::Model(Pattern::new("*H100*"))];
        assert_eq!(read("0, *H100*"), Ok(DraGpus::Some(mixed.clone())));
        let list = node(Value::List(vec![node(Value::Whole(0)), node(Value::Text("*H100*".into()))]));
        assert_eq!(dra_gpus(Given::Node(&list)), Ok(DraGpus::Some(mixed)));
        assert_eq!(dra_gpus(Given::Node(&node(Value::Whole(3)))), Ok(DraGpus::Some(vec![GpuSelector::Index(3)])));
        for wrong in ["0,,1", "all,0", "0,none"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert!(dra_gpus(Given::Node(&node(Value::Bool(true)))).is_err());
        assert!(dra_gpus(Given::Node(&node(Value::List(vec![node(Value::Whole(-1))])))).is_err());
    }

    #[test]
    fn name_without_domain_is_in_nvidia_com() {
        assert_eq!(resource_name(Given::Text("gpu")).unwrap().as_str(), "nvidia.com/gpu");
        assert_eq!(resource_name(Given::Text("acme.org/a100")).unwrap().as_str(), "acme.org/a100");
        for bad in ["", "nvidia.com/", "nvidia.com/g pu", "a/b/c"] {
            assert!(resource_name(Given::Text(bad)).is_err(), "{bad}");
        }
    }
}
