//! The values of a device in CEL: its fields, and its attributes and capacities by domain. Versions and quantities are
//! empty maps, so that an expression can only test that they exist.

use std::any::Any;
use std::collections::HashMap;

use cel::ExecutionError;
use cel::common::traits::{Container, Indexer};
use cel::common::types::{CelBool, CelInt, CelMap, CelMapKey, CelString, MAP_TYPE, Type};
use cel::common::value::{CowVal, StaticVal, Val};

use crate::api::{Attribute, Device};

type Boxed = Box<dyn Val>;

/// The variable `device`.
pub(super) fn device(driver: &str, device: &Device) -> Boxed {
    let attributes = device.attributes.iter().map(|(name, value)| (name.as_str(), attribute(value)));
    let capacity = device.capacity.keys().map(|name| (name.as_str(), Box::new(CelMap::default()) as Boxed));
    let fields: [(&str, Boxed); 4] = [
        ("driver", text(driver)),
        ("attributes", Box::new(Domains::of(driver, attributes))),
        ("capacity", Box::new(Domains::of(driver, capacity))),
        ("allowMultipleAllocations", Box::new(CelBool::from(device.allow_multiple_allocations))),
    ];
    Box::new(map(fields.into_iter()))
}

fn text(text: &str) -> Boxed {
    Box::new(CelString::from(text.to_owned()))
}

fn map<'a>(entries: impl Iterator<Item = (&'a str, Boxed)>) -> CelMap<'static> {
    let entry = |(key, value): (&str, Boxed)| (CelMapKey::String(CelString::from(key.to_owned())), value);
    CelMap::from(entries.map(entry).collect::<HashMap<_, _>>())
}

fn attribute(value: &Attribute) -> Boxed {
    match value {
        Attribute::Int(value) => Box::new(CelInt::from(*value)),
        Attribute::Bool(value) => Box::new(CelBool::from(*value)),
        Attribute::String(value) => text(value),
        Attribute::Version(_) => Box::new(CelMap::default()),
    }
}

/// The attributes or capacities by domain. A missing domain is an empty map (`newStringInterfaceMapWithDefault`).
#[derive(Debug, Default)]
struct Domains {
    maps: HashMap<String, CelMap<'static>>,
    empty: CelMap<'static>,
}

impl Domains {
    /// Groups entries by domain. A name without a domain belongs to the driver's domain.
    fn of<'a>(driver: &str, entries: impl Iterator<Item = (&'a str, Boxed)>) -> Self {
        let mut domains: HashMap<String, Vec<(&str, Boxed)>> = HashMap::new();
        for (name, value) in entries {
            let (domain, id) = name.split_once('/').unwrap_or((driver, name));
            domains.entry(domain.to_owned()).or_default().push((id, value));
        }
        let maps = domains.into_iter().map(|(domain, entries)| (domain, map(entries.into_iter()))).collect();
        Self { maps, empty: CelMap::default() }
    }
}

impl Val for Domains {
    fn get_type(&self) -> &Type {
        &MAP_TYPE
    }

    fn cel_type() -> &'static Type {
        &MAP_TYPE
    }

    fn as_container(&self) -> Option<&dyn Container> {
        Some(self)
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(Self { maps: self.maps.clone(), empty: CelMap::default() })
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl StaticVal for Domains {}

impl Container for Domains {
    fn contains(&self, domain: &dyn Val) -> Result<bool, ExecutionError> {
        Ok(domain.downcast_ref::<CelString>().is_some_and(|domain| self.maps.contains_key(domain.inner())))
    }
}

impl Indexer for Domains {
    fn get<'b, 'v>(&'b self, domain: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        match domain.downcast_ref::<CelString>() {
            Some(domain) => Ok(CowVal::Borrowed(self.maps.get(domain.inner()).unwrap_or(&self.empty))),
            None => Err(ExecutionError::UnexpectedType {
                got: domain.get_type().name().to_owned(),
                want: "a domain".to_owned(),
            }),
        }
    }

    fn steal<'v>(self: Box<Self>, domain: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        self.get(domain).map(CowVal::into_owned)
    }
}
