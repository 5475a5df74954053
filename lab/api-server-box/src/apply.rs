//! Owners of fields: server-side apply and updates change an object, and record the owner of each field that they set.
//!
//! A field is a path of keys to a leaf: a scalar, a list (owned as a whole) or an empty map. The owners are recorded in
//! `metadata.managedFields`.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// Paths to leaves.
type Fields = BTreeSet<Vec<String>>;

/// Paths that nobody owns: the identity of the object, and values that the server writes.
const UNOWNED: [&[&str]; 10] = [
    &["apiVersion"],
    &["kind"],
    &["metadata", "name"],
    &["metadata", "namespace"],
    &["metadata", "uid"],
    &["metadata", "resourceVersion"],
    &["metadata", "generation"],
    &["metadata", "creationTimestamp"],
    &["metadata", "managedFields"],
    &["metadata", "selfLink"],
];

/// The fields that a manager owns by one operation.
struct Owner {
    manager: String,
    operation: String,
    fields: Fields,
}

/// The object after `manager` applied `config` to `live`. Unless `force` is set, fails if other owners have fields of
/// `config` with other values; the error names these fields.
pub(super) fn apply(live: Option<&Value>, config: &Value, manager: &str, force: bool) -> Result<Value, Vec<String>> {
    let empty = json!({"metadata": {}});
    let live = live.unwrap_or(&empty);
    let mut owners = owners(live);
    let wanted = fields(config);
    let is_mine = |owner: &Owner| owner.manager == manager && owner.operation == "Apply";
    let differs = |field: &Vec<String>| at(live, field) != at(config, field);
    let conflicts: Vec<String> = owners
        .iter()
        .filter(|owner| !is_mine(owner))
        .flat_map(|owner| wanted.intersection(&owner.fields).filter(|field| differs(field)))
        .map(|field| format!(".{}", field.join(".")))
        .collect();
    if !conflicts.is_empty() && !force {
        return Err(conflicts);
    }
    let mut object = live.clone();
    let mine: Fields = owners.iter().filter(|owner| is_mine(owner)).flat_map(|owner| owner.fields.clone()).collect();
    for dropped in mine.difference(&wanted) {
        if !owners.iter().any(|owner| !is_mine(owner) && owner.fields.contains(dropped)) {
            remove_at(&mut object, dropped);
        }
    }
    for field in &wanted {
        // An empty map in the configuration is satisfied by a map with any keys.
        let is_satisfied = |value: &Value| value.is_object() && at(&object, field).is_some_and(Value::is_object);
        if let Some(value) = at(config, field).filter(|value| !is_satisfied(value)) {
            set_at(&mut object, field, value.clone());
        }
    }
    for owner in owners.iter_mut().filter(|owner| !is_mine(owner)) {
        owner.fields.retain(|field| !wanted.contains(field) || !differs(field));
    }
    owners.retain(|owner| !is_mine(owner));
    owners.push(Owner { manager: manager.to_owned(), operation: "Apply".to_owned(), fields: wanted });
    identify(&mut object, config);
    write_owners(&mut object, owners);
    Ok(object)
}

/// The object after `manager` replaced `live` by `new`.
pub(super) fn update(live: Option<&Value>, new: &Value, manager: &str) -> Value {
    let empty = json!({});
    let live = live.unwrap_or(&empty);
    let (before, after) = (fields(live), fields(new));
    let changed: Fields = after.into_iter().filter(|field| at(live, field) != at(new, field)).collect();
    let mut owners = owners(live);
    for owner in &mut owners {
        owner.fields.retain(|field| at(new, field).is_some() && !changed.contains(field));
    }
    if !changed.is_empty() || before.is_empty() {
        let is_mine = |owner: &&mut Owner| owner.manager == manager && owner.operation == "Update";
        match owners.iter_mut().find(is_mine) {
            Some(mine) => mine.fields.extend(changed),
            None => {
                owners.push(Owner { manager: manager.to_owned(), operation: "Update".to_owned(), fields: changed });
            }
        }
    }
    let mut object = new.clone();
    write_owners(&mut object, owners);
    object
}

/// Copies API version, kind, name and namespace from the applied configuration.
fn identify(object: &mut Value, config: &Value) {
    for path in [&["apiVersion"][..], &["kind"], &["metadata", "name"], &["metadata", "namespace"]] {
        let path: Vec<String> = path.iter().map(|key| (*key).to_owned()).collect();
        if let Some(value) = at(config, &path) {
            set_at(object, &path, value.clone());
        }
    }
}

fn fields(object: &Value) -> Fields {
    fn walk(value: &Value, path: &mut Vec<String>, found: &mut Fields) {
        if UNOWNED.iter().any(|unowned| path.iter().map(String::as_str).eq(unowned.iter().copied())) {
            return;
        }
        match value {
            Value::Object(map) if !map.is_empty() => {
                for (key, value) in map {
                    path.push(key.clone());
                    walk(value, path, found);
                    path.pop();
                }
            }
            _ if path.is_empty() => {}
            _ => {
                found.insert(path.clone());
            }
        }
    }
    let mut found = Fields::new();
    walk(object, &mut Vec::new(), &mut found);
    found
}

fn at<'a>(object: &'a Value, field: &[String]) -> Option<&'a Value> {
    field.iter().try_fold(object, |value, key| value.get(key))
}

fn set_at(object: &mut Value, field: &[String], value: Value) {
    let Some((last, parents)) = field.split_last() else { return };
    let mut parent = object;
    for key in parents {
        parent = map(parent).entry(key.clone()).or_insert_with(|| json!({}));
    }
    map(parent).insert(last.clone(), value);
}

fn remove_at(object: &mut Value, field: &[String]) {
    let Some((last, parents)) = field.split_last() else { return };
    let parent = parents.iter().try_fold(object, |parent, key| parent.get_mut(key));
    if let Some(Value::Object(parent)) = parent {
        parent.remove(last);
    }
}

/// A value as a map; any other value is replaced by an empty map.
fn map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    value.as_object_mut().expect("the value is a map by now")
}

fn owners(object: &Value) -> Vec<Owner> {
    fn walk(node: &Value, path: &mut Vec<String>, found: &mut Fields) {
        let children =
            node.as_object().into_iter().flatten().filter_map(|(key, node)| Some((key.strip_prefix("f:")?, node)));
        let mut is_leaf = true;
        for (key, node) in children {
            is_leaf = false;
            path.push(key.to_owned());
            walk(node, path, found);
            path.pop();
        }
        if is_leaf && !path.is_empty() {
            found.insert(path.clone());
        }
    }
    let text = |entry: &Value, key: &str| entry[key].as_str().unwrap_or_default().to_owned();
    let entries = object["metadata"]["managedFields"].as_array();
    let owner = |entry: &Value| {
        let mut fields = Fields::new();
        walk(&entry["fieldsV1"], &mut Vec::new(), &mut fields);
        Owner { manager: text(entry, "manager"), operation: text(entry, "operation"), fields }
    };
    entries.into_iter().flatten().map(owner).collect()
}

fn write_owners(object: &mut Value, owners: Vec<Owner>) {
    let version = object["apiVersion"].clone();
    let entry = |owner: Owner| {
        let mut fields = json!({});
        for field in &owner.fields {
            let path: Vec<String> = field.iter().map(|key| format!("f:{key}")).collect();
            set_at(&mut fields, &path, json!({}));
        }
        json!({
            "manager": owner.manager, "operation": owner.operation, "apiVersion": version, "fieldsType": "FieldsV1",
            "fieldsV1": fields,
        })
    };
    let entries = owners.into_iter().filter(|owner| !owner.fields.is_empty()).map(entry).collect();
    set_at(object, &["metadata".to_owned(), "managedFields".to_owned()], Value::Array(entries));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thing(labels: Value) -> Value {
        json!({"apiVersion": "v1", "kind": "Thing", "metadata": {"name": "a"}, "spec": {"labels": labels}})
    }

    fn managers(object: &Value) -> Vec<(String, usize)> {
        owners(object).into_iter().map(|owner| (owner.manager, owner.fields.len())).collect()
    }

    #[test]
    fn key_that_is_no_longer_applied_is_removed() {
        let first = apply(None, &thing(json!({"a": "1", "b": "1"})), "me", false).unwrap();
        let second = apply(Some(&first), &thing(json!({"a": "2"})), "me", false).unwrap();
        assert_eq!(second["spec"]["labels"], json!({"a": "2"}));
        assert_eq!(managers(&second), [("me".to_owned(), 1)]);
    }

    #[test]
    fn field_of_another_manager_is_a_conflict_unless_forced() {
        let theirs = update(None, &thing(json!({"a": "1", "b": "1"})), "other");
        let wanted = thing(json!({"a": "2"}));
        assert_eq!(apply(Some(&theirs), &wanted, "me", false).unwrap_err(), [".spec.labels.a"]);
        let forced = apply(Some(&theirs), &wanted, "me", true).unwrap();
        assert_eq!(forced["spec"]["labels"], json!({"a": "2", "b": "1"}), "b still belongs to the other manager");
        assert_eq!(managers(&forced), [("other".to_owned(), 1), ("me".to_owned(), 1)]);
    }

    #[test]
    fn equal_value_is_shared_between_managers() {
        let theirs = update(None, &thing(json!({"a": "1"})), "other");
        let both = apply(Some(&theirs), &thing(json!({"a": "1"})), "me", false).unwrap();
        assert_eq!(managers(&both), [("other".to_owned(), 1), ("me".to_owned(), 1)]);
        let left = apply(Some(&both), &thing(json!({})), "me", false).unwrap();
        assert_eq!(left["spec"]["labels"]["a"], "1", "the other manager still owns the key");
    }

    #[test]
    fn update_owns_changed_and_drops_absent_fields() {
        let mine = apply(None, &thing(json!({"a": "1", "b": "1", "c": "1"})), "me", false).unwrap();
        let updated = update(Some(&mine), &thing(json!({"a": "1", "b": "2"})), "other");
        assert_eq!(managers(&updated), [("me".to_owned(), 1), ("other".to_owned(), 1)]);
        assert_eq!(updated["spec"]["labels"], json!({"a": "1", "b": "2"}));
    }
}
