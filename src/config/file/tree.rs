//! A configuration file's text as a tree of values with their lines.
//!
//! Reads YAML (and JSON, which is YAML) with any keys. Called by [`super::File::parse`].

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Spanned, UserMessageFormatter};

use super::finding::{Finding, Severity};
use linkwise_core::quote::{one_line, quoted};

/// A value and its line, from 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub line: u64,
    pub value: Value,
}

/// A value, read by YAML's rules (for booleans those of version 1.1, as the NVIDIA plugin's reader: `yes` is true).
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Null,
    Bool(bool),
    Whole(i128),
    Fraction(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A key of a mapping, its line, and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub key: String,
    pub line: u64,
    pub node: Node,
}

/// Reads a whole text, with serde-saphyr's limits on depth, size and aliases. An empty text is an empty mapping, as it
/// is for the NVIDIA plugin.
pub fn parse(text: &str) -> Result<Node, Finding> {
    let written = text.lines().map(str::trim).any(|line| !line.is_empty() && !line.starts_with('#') && line != "---");
    if !written {
        return Ok(Node { line: 1, value: Value::Null });
    }
    let options = serde_saphyr::options! { with_snippet: false };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let line = error.location().map(|location| location.line());
        let problem = one_line(&error.render_with_formatter(&UserMessageFormatter));
        Finding { line, key: String::new(), severity: Severity::Error, problem }
    })
}

impl Value {
    /// The value in words, for a message.
    pub fn describe(&self) -> String {
        match self {
            Self::Null => "nothing".to_owned(),
            Self::Bool(value) => value.to_string(),
            Self::Whole(value) => value.to_string(),
            Self::Fraction(value) => value.to_string(),
            Self::Text(text) => quoted(text),
            Self::List(_) => "a list".to_owned(),
            Self::Map(_) => "a mapping".to_owned(),
        }
    }

    /// The value of a key of this mapping; null counts as missing.
    pub fn get(&self, key: &str) -> Option<&Node> {
        let Self::Map(entries) = self else { return None };
        // Of two spellings of one key the last counts, as in Go.
        let entry = entries.iter().rev().find(|entry| entry.key == key)?;
        (entry.node.value != Value::Null).then_some(&entry.node)
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Self { line: spanned.referenced.line(), value: spanned.value })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Any)
    }
}

struct Any;

impl<'de> Visitor<'de> for Any {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Whole(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Whole(value.into()))
    }

    fn visit_i128<E: de::Error>(self, value: i128) -> Result<Value, E> {
        Ok(Value::Whole(value))
    }

    fn visit_u128<E: de::Error>(self, value: u128) -> Result<Value, E> {
        // The value is out of every key's range in any case.
        Ok(Value::Whole(i128::try_from(value).unwrap_or(i128::MAX)))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Fraction(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, node)) = items.next_entry::<Spanned<String>, Node>()? {
            entries.push(Entry { line: key.referenced.line(), key: key.value, node });
        }
        Ok(Value::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_have_their_lines() {
        let tree = parse("a:\n  b: 1\n\n  c:\n    - x\n    - true\nd: ~\n5: 'no'\n").unwrap();
        let Value::Map(entries) = &tree.value else { panic!("{tree:?}") };
        let shape: Vec<_> = entries.iter().map(|entry| (entry.key.as_str(), entry.line)).collect();
        assert_eq!(shape, [("a", 1), ("d", 7), ("5", 8)]);
        let c = entries[0].node.value.get("c").unwrap();
        let Value::List(items) = &c.value else { panic!("{c:?}") };
        assert_eq!((items[0].line, items[1].line), (5, 6));
        assert_eq!(items[1].value, Value::Bool(true));
        assert_eq!(tree.value.get("d"), None);
        assert_eq!(tree.value.get("5").unwrap().value, Value::Text("no".to_owned()));
    }

    #[test]
    fn empty_text_is_null_and_broken_text_has_a_line() {
        for text in ["", "\n# nothing\n", "---\n"] {
            assert_eq!(parse(text).unwrap().value, Value::Null, "{text:?}");
        }
        for (text, line) in [("a: [1\n", 0), ("a: 1\na: 2\n", 2), ("a: 1\n b: 2\n", 2), ("{\"a\": \"\n", 1)] {
            let finding = parse(text).unwrap_err();
            assert!(finding.line.unwrap() >= line && !finding.to_string().contains('\n'), "{finding}");
        }
    }
}
