//! How values are read, wherever they are written: on the command line, in the environment, in the file.
//!
//! Each function takes what was given and gives the value, or says what was expected and what was found.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Serialize, Serializer};

use crate::config::file::{Node, Problem, Value, quote};
use crate::config::list;
use crate::state::ResourceName;

/// A value as somebody wrote it.
#[derive(Clone, Copy)]
pub enum Given<'a> {
    /// As text, on the command line or in a variable.
    Text(&'a str),
    /// In the file.
    Node(&'a Node),
}

/// How to read a value.
pub type Read<T> = fn(Given<'_>) -> Result<T, Problem>;

impl<'a> Given<'a> {
    /// Something else was expected.
    pub fn refused(self, expected: impl Into<String>) -> Problem {
        let found = match self {
            Self::Text(text) => quote(text),
            Self::Node(Node { value: Value::List(items), .. }) if items.is_empty() => "an empty list".to_owned(),
            Self::Node(node) => node.value.describe(),
        };
        Problem::Value { expected: expected.into(), found }
    }

    fn written(self) -> Option<&'a str> {
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

    /// Items: of a text, what stands between commas; of a list, its items.
    fn items<T>(self, expected: &str, read: impl Fn(Given<'_>) -> Result<T, Problem>) -> Result<Vec<T>, Problem> {
        if let Self::Node(Node { value: Value::List(items), .. }) = self {
            return items.iter().map(|item| read(Given::Node(item))).collect();
        }
        if let Self::Node(Node { value: Value::Whole(_), .. }) = self {
            return Ok(vec![read(self)?]);
        }
        let text = self.written().ok_or_else(|| self.refused(expected))?;
        if text.trim().is_empty() {
            return Ok(Vec::new());
        }
        text.split(',').map(|item| read(Given::Text(item.trim()))).collect()
    }
}

/// True or false; as text in the words of Go's strconv.ParseBool.
pub fn boolean(given: Given<'_>) -> Result<bool, Problem> {
    match given {
        Given::Node(Node { value: Value::Bool(value), .. }) => Ok(*value),
        Given::Text(text) => list::boolean(text).map_err(|_| given.refused("true or false")),
        Given::Node(_) => Err(given.refused("true or false")),
    }
}

/// [`boolean`], for a setting whose default is neither.
pub fn maybe_boolean(given: Given<'_>) -> Result<Option<bool>, Problem> {
    boolean(given).map(Some)
}

/// One of a few words.
pub fn choice<T: ValueEnum>(given: Given<'_>) -> Result<T, Problem> {
    let named = |word: &str| T::from_str(word, false).ok();
    let found = match given {
        // `off` without quotes is false in YAML.
        Given::Node(Node { value: Value::Bool(value), .. }) => {
            let words = if *value { ["on", "yes", "true"] } else { ["off", "no", "false"] };
            words.into_iter().find_map(named)
        }
        _ => given.written().and_then(named),
    };
    found.ok_or_else(|| given.refused(words::<T>()))
}

/// Some of a few words, at least one.
pub fn choices<T: ValueEnum>(given: Given<'_>) -> Result<Vec<T>, Problem> {
    let chosen = given.items(&words::<T>(), choice::<T>)?;
    if chosen.is_empty() { Err(given.refused(format!("at least one of {}", words::<T>()))) } else { Ok(chosen) }
}

/// The words as a person lists them: `a, b or c`.
fn words<T: ValueEnum>() -> String {
    let values = T::value_variants().iter().filter_map(T::to_possible_value);
    let names: Vec<String> = values.map(|value| value.get_name().to_owned()).collect();
    match names.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}

/// Any text.
pub fn text(given: Given<'_>) -> Result<String, Problem> {
    given.written().map(str::to_owned).ok_or_else(|| given.refused("a text"))
}

/// Texts.
pub fn texts(given: Given<'_>) -> Result<Vec<String>, Problem> {
    let item = |item: Given<'_>| text(item).ok().filter(|text| !text.is_empty()).ok_or_else(|| item.refused("a name"));
    given.items("a list of texts", item)
}

/// A path.
pub fn path(given: Given<'_>) -> Result<PathBuf, Problem> {
    let written = given.written().filter(|path| !path.is_empty() && !path.contains('\0'));
    written.map(PathBuf::from).ok_or_else(|| given.refused("a path"))
}

/// [`path`], for a setting that has none by default.
pub fn maybe_path(given: Given<'_>) -> Result<Option<PathBuf>, Problem> {
    path(given).map(Some)
}

/// A path that means the same to whoever reads it: the host, a CDI spec, a container runtime.
pub fn absolute(given: Given<'_>) -> Result<PathBuf, Problem> {
    path(given).ok().filter(|path| path.is_absolute()).ok_or_else(|| given.refused("an absolute path"))
}

/// [`absolute`], for a setting that has none by default.
pub fn maybe_absolute(given: Given<'_>) -> Result<Option<PathBuf>, Problem> {
    absolute(given).map(Some)
}

/// Where to listen.
pub fn address(given: Given<'_>) -> Result<SocketAddr, Problem> {
    let address = given.written().and_then(|text| text.parse().ok());
    address.ok_or_else(|| given.refused("an address and a port, such as 0.0.0.0:9400"))
}

/// A whole number within bounds, both included.
pub fn whole<T>(given: Given<'_>, least: T, most: T) -> Result<T, Problem>
where
    T: TryFrom<i128> + PartialOrd + Display,
{
    let number = given.whole().and_then(|number| T::try_from(number).ok());
    let number = number.filter(|number| (&least..=&most).contains(&number));
    number.ok_or_else(|| given.refused(format!("a whole number from {least} to {most}")))
}

/// User ids.
pub fn uids(given: Given<'_>) -> Result<Vec<u32>, Problem> {
    given.items("a list of user ids", |item| whole(item, 0, u32::MAX))
}

/// IMEX channels: none, or channel 0, which is all that the NVIDIA plugin allows.
pub fn imex_channels(given: Given<'_>) -> Result<Vec<u32>, Problem> {
    let channels = given.items("a list of channels", |item| whole(item, 0, u32::MAX))?;
    match channels.as_slice() {
        [] | [0] => Ok(channels),
        _ => {
            let found = format!("{channels:?}");
            Err(Problem::Value { expected: "[] or [0]".to_owned(), found })
        }
    }
}

/// A resource's name; one without a domain is in nvidia.com, as the NVIDIA plugin completes it.
pub fn resource_name(given: Given<'_>) -> Result<ResourceName, Problem> {
    let whole = |text: &str| if text.contains('/') { text.to_owned() } else { format!("nvidia.com/{text}") };
    let name = given.written().and_then(|text| ResourceName::from_str(&whole(text)).ok());
    name.ok_or_else(|| given.refused("a resource name such as nvidia.com/gpu"))
}

/// A span of time that Go reads as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval(pub Duration);

impl Serialize for Interval {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // What Rust shows of a duration (`90s`, `1.5ms`) is what Go reads.
        serializer.serialize_str(&format!("{:?}", self.0))
    }
}

/// A span of time as Go's time.ParseDuration reads it, or a number of nanoseconds. Not negative: nothing here waits
/// backwards.
pub fn interval(given: Given<'_>) -> Result<Option<Interval>, Problem> {
    let refused = || given.refused("a duration such as 60s or 1m30s");
    let nanoseconds = match given {
        Given::Node(Node { value: Value::Whole(number), .. }) => Some(*number),
        _ => given.written().and_then(go_duration),
    };
    let nanoseconds = nanoseconds.and_then(|number| u64::try_from(number).ok()).ok_or_else(refused)?;
    Ok(Some(Interval(Duration::from_nanos(nanoseconds))))
}

/// Units of Go's durations, in nanoseconds.
const UNITS: [(&str, i128); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Nanoseconds: numbers with units, one after the other, fractions allowed.
fn go_duration(text: &str) -> Option<i128> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(0);
    }
    let mut total: i128 = 0;
    while !rest.is_empty() || text.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').filter(|end| *end > 0)?;
        let (number, after) = rest.split_at(end);
        let unit_end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_end);
        let scale = UNITS.iter().find(|(name, _)| *name == unit)?.1;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || whole.len() > 18 || fraction.contains('.') {
            return None;
        }
        // More digits than a nanosecond has room for change nothing.
        let fraction = fraction.get(..fraction.len().min(15))?;
        let number = |digits: &str| if digits.is_empty() { Some(0) } else { digits.parse::<i128>().ok() };
        let part = number(fraction)? * scale / 10_i128.pow(u32::try_from(fraction.len()).ok()?);
        total = total.checked_add(number(whole)?.checked_mul(scale)?)?.checked_add(part)?;
        rest = after;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::super::choices::{DeviceListStrategy, MigStrategy};
    use super::*;
    use crate::config::NumaHintsArg;

    fn node(value: Value) -> Node {
        Node { line: 1, value }
    }

    #[test]
    fn durations_are_those_of_go() {
        let read = |text| interval(Given::Text(text)).ok().flatten().map(|interval| interval.0);
        for (text, nanoseconds) in
            [("60s", 60_000_000_000), ("1m30s", 90_000_000_000), ("1.5h", 5_400_000_000_000), (".5us", 500), ("0", 0)]
        {
            assert_eq!(read(text), Some(Duration::from_nanos(nanoseconds)), "{text}");
        }
        for text in ["", "60", "s", "1d", "-1s", "1.2.3s", "1s 2s", ".s", "99999999999999999999h", "1m-1s"] {
            assert_eq!(read(text), None, "{text}");
        }
        let sixty = node(Value::Whole(60));
        assert_eq!(interval(Given::Node(&sixty)).unwrap(), Some(Interval(Duration::from_nanos(60))));
    }

    #[test]
    fn an_unquoted_off_is_a_word_where_a_word_is_expected() {
        let off = node(Value::Bool(false));
        assert_eq!(choice::<NumaHintsArg>(Given::Node(&off)).unwrap(), NumaHintsArg::Off);
        let problem = choice::<MigStrategy>(Given::Node(&off)).unwrap_err().to_string();
        assert_eq!(problem, "expected none, single or mixed, found false");
    }

    #[test]
    fn strategies_are_a_list_or_a_text_with_commas() {
        use DeviceListStrategy::{CdiCri, Envvar};
        let list = node(Value::List(vec![node(Value::Text("envvar".into())), node(Value::Text("cdi-cri".into()))]));
        for given in [Given::Text("envvar, cdi-cri"), Given::Node(&list)] {
            assert_eq!(choices::<DeviceListStrategy>(given).unwrap(), [Envvar, CdiCri]);
        }
        assert!(choices::<DeviceListStrategy>(Given::Text(",")).is_err());
        assert!(choices::<DeviceListStrategy>(Given::Text("envvars")).is_err());
    }

    #[test]
    fn a_name_without_a_domain_is_nvidias() {
        assert_eq!(resource_name(Given::Text("gpu")).unwrap().as_str(), "nvidia.com/gpu");
        assert_eq!(resource_name(Given::Text("acme.org/a100")).unwrap().as_str(), "acme.org/a100");
        for bad in ["", "nvidia.com/", "nvidia.com/g pu", "a/b/c"] {
            assert!(resource_name(Given::Text(bad)).is_err(), "{bad}");
        }
    }
}
