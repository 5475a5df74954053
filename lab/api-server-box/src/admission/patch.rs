//! JSON patches (RFC 6902), with the operations `add`, `remove` and `replace`.

use serde_json::Value;

/// Returns the object after all operations, or the reason why one of them failed.
pub(super) fn apply(object: &Value, patch: &Value) -> Result<Value, String> {
    let mut patched = object.clone();
    for operation in patch.as_array().ok_or("the patch is not a list")? {
        let (op, path) = (text(operation, "op")?, text(operation, "path")?);
        let value = || operation.get("value").cloned().ok_or_else(|| format!("{op} operation without a value: {path}"));
        match op {
            "add" => add(&mut patched, path, value()?)?,
            "remove" => {
                remove(&mut patched, path)?;
            }
            "replace" => {
                let value = value()?;
                remove(&mut patched, path)?;
                add(&mut patched, path, value)?;
            }
            other => return Err(format!("Unexpected kind: {other}")),
        }
    }
    Ok(patched)
}

fn text<'a>(operation: &'a Value, field: &str) -> Result<&'a str, String> {
    operation[field].as_str().ok_or_else(|| format!("an operation without {field}"))
}

/// The parent of a path, and its last key.
fn parent<'a>(object: &'a mut Value, path: &str) -> Result<(&'a mut Value, String), String> {
    let (parent, key) = path.rsplit_once('/').ok_or_else(|| format!("not a path: {path:?}"))?;
    let parent = object.pointer_mut(parent).ok_or_else(|| format!("doc is missing path: {path:?}: missing value"))?;
    Ok((parent, key.replace("~1", "/").replace("~0", "~")))
}

fn add(object: &mut Value, path: &str, value: Value) -> Result<(), String> {
    let (parent, key) = parent(object, path)?;
    match parent {
        Value::Object(map) => {
            map.insert(key, value);
            Ok(())
        }
        Value::Array(list) => {
            let place = if key == "-" { Some(list.len()) } else { key.parse().ok() };
            let place = place.filter(|place| *place <= list.len());
            list.insert(place.ok_or_else(|| format!("no such place: {path}"))?, value);
            Ok(())
        }
        _ => Err(format!("neither map nor list above {path}")),
    }
}

fn remove(object: &mut Value, path: &str) -> Result<Value, String> {
    let (parent, key) = parent(object, path)?;
    let removed = match parent {
        Value::Object(map) => map.remove(&key),
        Value::Array(list) => {
            let place = key.parse().ok().filter(|place| *place < list.len());
            place.map(|place| list.remove(place))
        }
        _ => None,
    };
    removed.ok_or_else(|| format!("Unable to remove nonexistent key: {path}: missing value"))
}

#[cfg(test)]
mod tests {
    use super::apply;
    use serde_json::json;

    #[test]
    fn operations_change_maps_and_lists() {
        let object = json!({"a": {"b/c": 1, "d~e": 2}, "list": [1, 2]});
        let patch = json!([
            {"op": "remove", "path": "/a/b~1c"},
            {"op": "replace", "path": "/a/d~0e", "value": 3},
            {"op": "add", "path": "/list/-", "value": 4},
            {"op": "add", "path": "/list/0", "value": 0},
            {"op": "remove", "path": "/list/1"},
            {"op": "add", "path": "/new", "value": []},
        ]);
        assert_eq!(apply(&object, &patch), Ok(json!({"a": {"d~e": 3}, "list": [0, 2, 4], "new": []})));
    }
}
