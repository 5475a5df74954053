//! Decides whether linkwise owns a NodeFeature, and whether the object has the wanted content. Pure.

use std::collections::BTreeSet;

use kube::api::DynamicObject;
use serde_json::Value;

use super::{Labels, quoted_names};

/// Our name among the managers of fields.
pub(super) const MANAGER: &str = "linkwise";

/// GPU Feature Discovery's name among the managers, which is the name of its program.
const GFD: &str = "gpu-feature-discovery";

/// The decision about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ownership {
    /// Do nothing: the object is ours, and has the wanted content.
    Current,
    /// Write: the object is ours, or does not exist.
    Ours,
    /// Replace: the object is GPU Feature Discovery's.
    Replaceable,
    /// Leave alone: another program manages the object. The text names all managers.
    Foreign(String),
}

/// Decides about the found object. `written` holds the labels of the last successful write. `replaced` is true if this
/// process has replaced GPU Feature Discovery's object before. If the object then has other labels again, GPU Feature
/// Discovery is still running.
pub(super) fn ownership(
    found: Option<&DynamicObject>,
    wanted: &Value,
    written: Option<&Labels>,
    replaced: bool,
) -> Ownership {
    let Some(found) = found else { return Ownership::Ours };
    let fields = found.metadata.managed_fields.iter().flatten();
    let managers: BTreeSet<&str> = fields.filter_map(|entry| entry.manager.as_deref()).collect();
    let is_ours = managers.contains(MANAGER);
    if is_ours && is_as_wanted(found, wanted) {
        return Ownership::Current;
    }
    let is_as_written = written.is_some_and(|written| found.data.pointer("/spec/labels") == Some(&labels(written)));
    match managers.contains(GFD) {
        true if !replaced => Ownership::Replaceable,
        true if is_ours && is_as_written => Ownership::Ours,
        false if is_ours => Ownership::Ours,
        _ => Ownership::Foreign(quoted_names(managers.into_iter())),
    }
}

/// Returns true if linkwise wrote the object by an update or a creation, and not only by an apply.
pub(super) fn is_updated(found: &DynamicObject) -> bool {
    let mut fields = found.metadata.managed_fields.iter().flatten();
    fields.any(|entry| entry.manager.as_deref() == Some(MANAGER) && entry.operation.as_deref() == Some("Update"))
}

fn labels(labels: &Labels) -> Value {
    labels.iter().map(|(key, value)| (key.clone(), Value::from(value.clone()))).collect()
}

/// Returns true if the node's labels, the object's own labels and its owners are the wanted ones.
fn is_as_wanted(found: &DynamicObject, wanted: &Value) -> bool {
    let metadata = serde_json::to_value(&found.metadata).unwrap_or_default();
    let part = |path: &str| wanted.pointer(path);
    found.data.pointer("/spec/labels") == part("/spec/labels")
        && metadata.get("labels") == part("/metadata/labels")
        && metadata.get("ownerReferences") == part("/metadata/ownerReferences")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(managers: &[&str], label: &str) -> DynamicObject {
        let fields: Vec<Value> = managers.iter().map(|manager| json!({"manager": manager})).collect();
        serde_json::from_value(json!({
            "metadata": {"name": "x", "labels": {"node": "n"}, "managedFields": fields},
            "spec": {"labels": {"a": label}},
        }))
        .unwrap()
    }

    #[test]
    fn managers_decide_what_becomes_of_an_object() {
        let wanted = json!({"metadata": {"labels": {"node": "n"}}, "spec": {"labels": {"a": "new"}}});
        let old: Labels = [("a".to_owned(), "old".to_owned())].into();
        let foreign = |names: &str| Ownership::Foreign(names.to_owned());
        for (managers, label, replaced, expected) in [
            (&[MANAGER][..], "new", false, Ownership::Current),
            (&[MANAGER], "old", false, Ownership::Ours),
            (&[MANAGER, "kubectl-edit"], "edited", false, Ownership::Ours),
            (&[GFD], "new", false, Ownership::Replaceable),
            (&[GFD], "x", false, Ownership::Replaceable),
            (&[MANAGER, GFD], "x", false, Ownership::Replaceable),
            (&[MANAGER, GFD], "new", true, Ownership::Current),
            (&[MANAGER, GFD], "old", true, Ownership::Ours),
            (&[MANAGER, GFD], "x", true, foreign("'gpu-feature-discovery', 'linkwise'")),
            (&[GFD], "new", true, foreign("'gpu-feature-discovery'")),
            (&["kubectl"], "new", false, foreign("'kubectl'")),
            (&[], "new", false, foreign("")),
        ] {
            let judged = ownership(Some(&found(managers, label)), &wanted, Some(&old), replaced);
            assert_eq!(judged, expected, "{managers:?} {label} {replaced}");
        }
        assert_eq!(ownership(None, &wanted, None, false), Ownership::Ours);
    }

    #[test]
    fn object_without_owner_is_written_again() {
        let mut wanted = json!({"metadata": {"labels": {"node": "n"}}, "spec": {"labels": {"a": "new"}}});
        wanted["metadata"]["ownerReferences"] = json!([{"uid": "1"}]);
        assert_eq!(ownership(Some(&found(&[MANAGER], "new")), &wanted, None, false), Ownership::Ours);
    }
}
