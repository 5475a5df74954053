//! Plans the writes that make the API server's slices equal to the wanted pool. Pure.
//!
//! The rules are those of Kubernetes' own helper for DRA drivers (resourceslicecontroller.go). The pool keeps its
//! generation if at most one slice changes, none is new, and all agree on generation and number of slices; otherwise
//! all slices get the next generation. Obsolete slices are deleted first, then slices are updated, then created. In a
//! pool with counters, the slices that hold counters are written before the others; in both groups new ones come first.

use std::collections::BTreeMap;

use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::state::DRA_DRIVER;
use serde_json::{Value, json};

/// The lowest absurd generation. No pool reaches it in normal use, only by another program or a wrong answer. The next
/// ones could exceed the API's integers, so the pool is deleted and continues from its last lower generation.
const ABSURD_GENERATION: u64 = 1 << 53;

/// The longest name of an object.
const MAX_NAME: usize = 253;

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Write {
    /// Deletes the object of this name, and of this UID if one is given.
    Delete(String, Option<String>),
    /// Replaces an object, if it has not changed since it was read.
    Update(Value),
    Create(Value),
}

impl Write {
    /// The object's name.
    pub fn name(&self) -> &str {
        match self {
            Self::Delete(name, _) => name,
            Self::Update(object) | Self::Create(object) => object["metadata"]["name"].as_str().unwrap_or_default(),
        }
    }

    /// Returns true if a slice with counters is written.
    fn has_counters(&self) -> bool {
        match self {
            Self::Delete(..) => false,
            Self::Update(object) | Self::Create(object) => counters(object) > 0,
        }
    }
}

/// A written slice: its wanted content, and the content that the server stored, which may lack fields.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Accepted {
    wanted: Value,
    stored: Value,
}

/// The writer's knowledge that the stored slices do not show.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    accepted: BTreeMap<String, Accepted>,
    /// The highest generation so far.
    generation: u64,
}

impl Memory {
    /// Records a written slice and the server's answer. Returns true if the server dropped taints of the slice; `None`
    /// if the slice has no taints.
    pub fn written(&mut self, sent: &Value, stored: &Value) -> Option<bool> {
        let name = stored["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if generation(stored) < ABSURD_GENERATION {
            self.generation = self.generation.max(generation(stored));
        }
        self.accepted.insert(name, Accepted { wanted: content(sent), stored: content(stored) });
        let taints = |slice: &Value| -> usize {
            let of = |device: &Value| device["taints"].as_array().map_or(0, Vec::len);
            devices(slice).iter().map(of).sum()
        };
        let wanted = taints(sent);
        (wanted > 0).then(|| taints(stored) < wanted)
    }

    /// Returns true if a slice has the wanted content, except fields that the server dropped when the slice was
    /// written.
    fn is_wanted(&self, stored: &Value, wanted: &Value) -> bool {
        let now = Accepted { wanted: content(wanted), stored: content(stored) };
        let name = stored["metadata"]["name"].as_str().unwrap_or_default();
        now.stored == now.wanted || self.accepted.get(name) == Some(&now)
    }
}

/// Returns true if the server dropped `allowMultipleAllocations` from devices of a slice.
pub(super) fn drops_sharing(sent: &Value, stored: &Value) -> bool {
    let shared =
        |slice: &Value| devices(slice).iter().filter(|device| device["allowMultipleAllocations"] == true).count();
    shared(stored) < shared(sent)
}

/// The writes to make; empty if all slices have the wanted content.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    pub writes: Vec<Write>,
    pub generation: u64,
    /// The number of slices that the pool has after the writes.
    pub slices: usize,
}

/// Compares a pool with the slices of this driver on this node, by name. `owner` is the Node's UID, if it is known.
pub(super) fn plan(pool: &Pool, stored: &BTreeMap<String, Value>, owner: Option<&str>, memory: &Memory) -> Plan {
    let count = pool.slices(0).len();
    let names: Vec<String> = (0..count).map(|index| name(pool, index)).collect();
    let is_ours = |slice: &Value| slice["spec"]["pool"]["name"] == *pool.name;
    let highest = stored.values().filter(|slice| is_ours(slice)).map(generation).max().unwrap_or(0);
    let is_absurd = highest >= ABSURD_GENERATION;
    let found = |name: &String| stored.get(name).filter(|slice| is_ours(slice) && !is_absurd);
    let obsolete = stored.iter().filter(|(name, _)| !names.contains(name) || found(name).is_none());
    let uid = |slice: &Value| slice["metadata"]["uid"].as_str().map(str::to_owned);
    let mut writes: Vec<Write> = obsolete.map(|(name, slice)| Write::Delete(name.clone(), uid(slice))).collect();
    // The generation does not matter here: the content of a slice does not include it.
    let wanted: Vec<Value> = pool.slices(0).iter().map(|spec| json!({ "spec": spec })).collect();
    let pairs = || names.iter().zip(&wanted).map(|(name, wanted)| (name, found(name), wanted));
    let missing = pairs().filter(|(_, found, _)| found.is_none()).count();
    let differing = pairs().filter(|(_, found, wanted)| found.is_some_and(|it| !memory.is_wanted(it, wanted))).count();
    let is_uneven = |slice: &Value| {
        generation(slice) != highest
            || slice["spec"]["pool"]["resourceSliceCount"].as_u64() != u64::try_from(count).ok()
    };
    let has_uneven = pairs().filter_map(|(_, found, _)| found).any(is_uneven);
    let is_kept = missing == 0 && differing <= 1 && !has_uneven;
    let known = memory.generation.max(if is_absurd { 0 } else { highest });
    let next = if is_kept { highest } else { known.saturating_add(1) };
    let (mut updates, mut creates) = (Vec::new(), Vec::new());
    for (index, spec) in pool.slices(next).iter().enumerate() {
        let Some(name) = names.get(index) else { continue };
        let mut object = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": { "name": name },
            "spec": spec,
        });
        match found(name) {
            None => {
                set_owner(&mut object, &pool.node, owner);
                creates.push(Write::Create(object));
            }
            Some(stored) => {
                let lacks_owner = owner.is_some_and(|uid| !is_owned(stored, uid));
                if generation(stored) == next && memory.is_wanted(stored, &object) && !lacks_owner {
                    continue;
                }
                keep_times(&mut object, stored);
                object["metadata"] = json!({
                    "name": name,
                    "uid": stored["metadata"]["uid"],
                    "resourceVersion": stored["metadata"]["resourceVersion"],
                    "ownerReferences": stored["metadata"]["ownerReferences"],
                });
                set_owner(&mut object, &pool.node, owner);
                updates.push(Write::Update(object));
            }
        }
    }
    if pool.counters.is_empty() {
        writes.extend(updates.into_iter().chain(creates));
    } else {
        // A server that drops counters keeps those that a slice already has, so only a new slice shows that it drops
        // them. Written first, the new slice shows it before the pool is complete.
        let (counters, others): (Vec<_>, Vec<_>) = creates.into_iter().chain(updates).partition(Write::has_counters);
        writes.extend(counters.into_iter().chain(others));
    }
    Plan { writes, generation: next, slices: count }
}

/// The name of a slice: names sort as the slices do, and another pool of the same driver and node has other names.
fn name(pool: &Pool, index: usize) -> String {
    // FNV-1a, so that the hash is the same in each release of linkwise.
    let text = [DRA_DRIVER, &pool.node, &pool.name].map(str::as_bytes).join(&b' ');
    let hash = text.iter().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    let end = format!("-{hash:08x}");
    let mut name = format!("{index:05x}-{DRA_DRIVER}-{}", pool.node);
    // Names of nodes and drivers are ASCII.
    name.truncate(MAX_NAME.saturating_sub(end.len()));
    name.truncate(name.trim_end_matches(['.', '-']).len());
    name + &end
}

/// Makes the Node the owner, if its UID is known.
fn set_owner(object: &mut Value, node: &str, owner: Option<&str>) {
    if let Some(uid) = owner {
        let reference = json!([{ "apiVersion": "v1", "kind": "Node", "name": node, "uid": uid, "controller": true }]);
        object["metadata"]["ownerReferences"] = reference;
    } else if object["metadata"]["ownerReferences"].is_null() {
        object["metadata"].as_object_mut().map(|metadata| metadata.remove("ownerReferences"));
    }
}

fn is_owned(object: &Value, uid: &str) -> bool {
    let owners = object["metadata"]["ownerReferences"].as_array();
    owners.is_some_and(|owners| owners.iter().any(|owner| owner["kind"] == "Node" && owner["uid"] == uid))
}

/// Keeps the times at which remaining taints were added.
fn keep_times(object: &mut Value, stored: &Value) {
    let time_added = |device: &Value, taint: &Value| {
        let stored = devices(stored).iter().find(|stored| stored["name"] == device["name"])?;
        let is_same = |stored: &&Value| ["key", "value", "effect"].iter().all(|field| stored[*field] == taint[*field]);
        let found = stored["taints"].as_array()?.iter().find(is_same)?;
        Some(found["timeAdded"].clone()).filter(|time| !time.is_null())
    };
    let Some(wanted) = object["spec"]["devices"].as_array_mut() else { return };
    for device in wanted {
        let shown = device.clone();
        for taint in device["taints"].as_array_mut().into_iter().flatten() {
            if let Some(time) = time_added(&shown, taint) {
                taint["timeAdded"] = time;
            }
        }
    }
}

/// The generation of a slice's pool.
pub(super) fn generation(slice: &Value) -> u64 {
    slice["spec"]["pool"]["generation"].as_u64().unwrap_or(0)
}

fn devices(slice: &Value) -> &[Value] {
    slice["spec"]["devices"].as_array().map_or(&[], Vec::as_slice)
}

/// The number of counters in a slice.
fn counters(slice: &Value) -> usize {
    let sets = slice["spec"]["sharedCounters"].as_array().map_or(&[][..], Vec::as_slice);
    sets.iter().filter_map(|set| set["counters"].as_object()).map(serde_json::Map::len).sum()
}

/// The number of counters that the devices of a slice consume.
fn consumed(slice: &Value) -> usize {
    let sets = devices(slice).iter().filter_map(|device| device["consumesCounters"].as_array()).flatten();
    sets.filter_map(|set| set["counters"].as_object()).map(serde_json::Map::len).sum()
}

/// Returns true if the server dropped counters of a slice.
pub(super) fn drops_counters(sent: &Value, stored: &Value) -> bool {
    counters(stored) < counters(sent) || consumed(stored) < consumed(sent)
}

/// The counters and devices of a slice, in a form that is equal if the API sees no difference: without empty fields,
/// and without the times at which taints were added.
fn content(slice: &Value) -> Value {
    let of = |key: &str| -> Value { slice["spec"][key].as_array().into_iter().flatten().map(normalized).collect() };
    json!([of("sharedCounters"), of("devices")])
}

fn normalized(value: &Value) -> Value {
    match value {
        Value::Object(entries) => {
            let entries = entries.iter().filter(|(key, value)| *key != "timeAdded" && !is_empty(value));
            entries.map(|(key, value)| (key.clone(), normalized(value))).collect()
        }
        Value::Array(items) => items.iter().map(normalized).collect(),
        other => other.clone(),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use linkwise_core::publish::dra::{Attribute, SliceDevice, Taint, TaintEffect};

    use super::*;

    fn device(name: &str, taint: Option<&str>) -> SliceDevice {
        let taint = taint.map(|key| Taint { key: key.into(), value: String::new(), effect: TaintEffect::NoSchedule });
        SliceDevice {
            name: name.into(),
            attributes: [("type".to_owned(), Attribute::String("gpu".into()))].into(),
            taints: taint.into_iter().collect(),
            ..SliceDevice::default()
        }
    }

    fn pool(devices: usize) -> Pool {
        let devices = (0..devices).map(|index| device(&format!("gpu-{index}"), None)).collect();
        Pool::new("n", devices)
    }

    type Stored = BTreeMap<String, Value>;

    /// Carries out a plan as an API server with all gates on would.
    fn carry_out(plan: &Plan, stored: &mut Stored, memory: &mut Memory) {
        for write in &plan.writes {
            match write {
                Write::Delete(name, _) => drop(stored.remove(name)),
                Write::Update(object) | Write::Create(object) => {
                    memory.written(object, object);
                    stored.insert(write.name().to_owned(), object.clone());
                }
            }
        }
    }

    /// Returns the writes, one letter each, and the generation.
    fn writes(pool: &Pool, stored: &mut Stored, memory: &mut Memory) -> (String, u64) {
        let plan = plan(pool, stored, Some("uid"), memory);
        let letters = plan.writes.iter().map(|write| match write {
            Write::Delete(..) => 'd',
            Write::Update(_) => 'u',
            Write::Create(_) => 'c',
        });
        let letters = letters.collect();
        carry_out(&plan, stored, memory);
        (letters, plan.generation)
    }

    #[test]
    fn generation_stays_for_one_changed_slice_only() {
        let (mut stored, mut memory) = (Stored::new(), Memory::default());
        let mut write = |pool: &Pool| writes(pool, &mut stored, &mut memory);
        let mut wanted = pool(200);
        assert_eq!(write(&wanted), ("cccc".to_owned(), 1));
        assert_eq!(write(&wanted), (String::new(), 1));
        wanted.devices[150] = device("gpu-150", None);
        wanted.devices[150].attributes.insert("index".into(), Attribute::Int(150));
        assert_eq!(write(&wanted), ("u".to_owned(), 1), "one slice");
        wanted.devices.swap(0, 199);
        assert_eq!(write(&wanted), ("uuuu".to_owned(), 2), "two slices, and all are of one generation");
        wanted.devices[0] = device("gpu-0", Some("gpu.nvidia.com/xid"));
        assert_eq!(write(&wanted), ("u".to_owned(), 2), "a taint moves no device to another slice");
        wanted.devices.truncate(100);
        assert_eq!(write(&wanted), ("dduu".to_owned(), 3));
        wanted.devices.clear();
        assert_eq!(write(&wanted), ("du".to_owned(), 4), "an empty slice stays");
    }

    #[test]
    fn slices_sort_by_name_and_belong_to_the_node() {
        let mut wanted = pool(2000);
        wanted.node = "n".repeat(250);
        let plan = plan(&wanted, &Stored::new(), Some("uid-1"), &Memory::default());
        let names: Vec<&str> = plan.writes.iter().map(Write::name).collect();
        assert!(names.is_sorted() && names.len() == 32, "{names:?}");
        assert!(names.iter().all(|name| name.len() <= MAX_NAME), "{names:?}");
        let Write::Create(first) = &plan.writes[0] else { panic!("{plan:?}") };
        let owner = &first["metadata"]["ownerReferences"][0];
        assert_eq!(
            (&owner["kind"], &owner["uid"], &owner["controller"]),
            (&json!("Node"), &json!("uid-1"), &json!(true))
        );
    }

    #[test]
    fn slices_of_nvidias_driver_are_deleted() {
        let (mut stored, mut memory) = (Stored::new(), Memory::default());
        writes(&pool(2), &mut stored, &mut memory);
        // NVIDIA's driver has the name of ours, and had the pool `n`.
        let theirs = json!({"metadata": {"name": "n-gpu.nvidia.com-x", "uid": "1"},
            "spec": {"pool": {"name": "n", "generation": 7, "resourceSliceCount": 1}}});
        stored.insert("n-gpu.nvidia.com-x".into(), theirs);
        assert_eq!(writes(&pool(2), &mut stored, &mut memory), ("d".to_owned(), 1));
    }

    #[test]
    fn foreign_edits_are_repaired_with_right_generation() {
        let (mut stored, mut memory) = (Stored::new(), Memory::default());
        writes(&pool(200), &mut stored, &mut memory);
        let first = stored.keys().next().unwrap().clone();
        let mut edited = |edit: &dyn Fn(&mut Value)| {
            edit(stored.get_mut(&first).unwrap());
            writes(&pool(200), &mut stored, &mut memory)
        };
        assert_eq!(edited(&|slice| slice["spec"]["devices"][3]["name"] = json!("mine")), ("u".to_owned(), 1));
        assert_eq!(edited(&|slice| slice["metadata"]["ownerReferences"] = Value::Null), ("u".to_owned(), 1));
        assert_eq!(edited(&|slice| slice["spec"]["pool"]["generation"] = json!(9)), ("uuuu".to_owned(), 10));
        assert_eq!(edited(&|slice| slice["spec"]["pool"]["resourceSliceCount"] = json!(1)), ("uuuu".to_owned(), 11));
        assert_eq!(edited(&|slice| slice["spec"]["pool"]["generation"] = json!(u64::MAX)), ("ddddcccc".to_owned(), 12));
        stored.clear();
        assert_eq!(writes(&pool(200), &mut stored, &mut memory), ("cccc".to_owned(), 13), "wiped");
    }

    #[test]
    fn absurd_generation_of_an_answer_is_not_remembered() {
        for absurd in [ABSURD_GENERATION, u64::MAX] {
            let (mut stored, mut memory) = (Stored::new(), Memory::default());
            writes(&pool(2), &mut stored, &mut memory);
            let slice = stored.values_mut().next().unwrap();
            slice["spec"]["pool"]["generation"] = json!(absurd);
            memory.written(slice, slice);
            assert_eq!(writes(&pool(2), &mut stored, &mut memory), ("dc".to_owned(), 2));
        }
    }

    #[test]
    fn taint_that_stays_keeps_its_time() {
        let mut wanted = pool(1);
        wanted.devices[0] = device("gpu-0", Some("gpu.nvidia.com/xid"));
        let (mut stored, mut memory) = (Stored::new(), Memory::default());
        writes(&wanted, &mut stored, &mut memory);
        let slice = stored.values_mut().next().unwrap();
        slice["spec"]["devices"][0]["taints"][0]["timeAdded"] = json!("2026-01-01T00:00:00Z");
        assert_eq!(writes(&wanted, &mut stored, &mut memory).0, "", "the time alone is no difference");
        let other =
            Taint { key: "gpu.nvidia.com/gpu-lost".into(), value: String::new(), effect: TaintEffect::NoExecute };
        wanted.devices[0].taints.push(other);
        assert_eq!(writes(&wanted, &mut stored, &mut memory).0, "u");
        let taints = &stored.values().next().unwrap()["spec"]["devices"][0]["taints"];
        assert_eq!((&taints[0]["timeAdded"], &taints[1]["timeAdded"]), (&json!("2026-01-01T00:00:00Z"), &Value::Null));
    }
}
