//! Whose object a NodeFeature is, and whether it is as wanted. Pure.

use std::collections::BTreeSet;

use kube::api::DynamicObject;
use serde_json::Value;

use super::{Labels, listed};

/// Our name among the managers of fields.
pub(super) const MANAGER: &str = "linkwise";

/// GPU Feature Discovery's: the name of its program.
const GFD: &str = "gpu-feature-discovery";

/// What is to be done with an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nothing: it is ours, and as wanted.
    Same,
    /// It may be written: it is ours, or not there.
    Ours,
    /// It is GPU Feature Discovery's, and to be replaced.
    Replaceable,
    /// It is another program's; these manage it.
    Foreign(String),
}

/// Judges what was found. `written`: what this process wrote last. `replaced`: whether it has replaced GPU Feature
/// Discovery's object before; if that one has other labels again, its writer still runs.
pub(super) fn standing(
    found: Option<&DynamicObject>,
    wanted: &Value,
    written: Option<&Labels>,
    replaced: bool,
) -> Standing {
    let Some(found) = found else { return Standing::Ours };
    let fields = found.metadata.managed_fields.iter().flatten();
    let managers: BTreeSet<&str> = fields.filter_map(|entry| entry.manager.as_deref()).collect();
    let ours = managers.contains(MANAGER);
    if ours && is_as_wanted(found, wanted) {
        return Standing::Same;
    }
    let as_written = written.is_some_and(|written| found.data.pointer("/spec/labels") == Some(&labels(written)));
    match managers.contains(GFD) {
        true if !replaced => Standing::Replaceable,
        true if ours && as_written => Standing::Ours,
        false if ours => Standing::Ours,
        _ => Standing::Foreign(listed(managers.into_iter())),
    }
}

/// Whether an update or a creation of ours, and not only an apply, wrote the object.
pub(super) fn is_updated(found: &DynamicObject) -> bool {
    let mut fields = found.metadata.managed_fields.iter().flatten();
    fields.any(|entry| entry.manager.as_deref() == Some(MANAGER) && entry.operation.as_deref() == Some("Update"))
}

fn labels(labels: &Labels) -> Value {
    labels.iter().map(|(key, value)| (key.clone(), Value::from(value.clone()))).collect()
}

/// Whether labels, node and owners are those wanted.
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
    fn owner_decides_what_becomes_of_an_object() {
        let wanted = json!({"metadata": {"labels": {"node": "n"}}, "spec": {"labels": {"a": "new"}}});
        let old: Labels = [("a".to_owned(), "old".to_owned())].into();
        let foreign = |names: &str| Standing::Foreign(names.to_owned());
        for (managers, label, replaced, expected) in [
            (&[MANAGER][..], "new", false, Standing::Same),
            (&[MANAGER], "old", false, Standing::Ours),
            (&[MANAGER, "kubectl-edit"], "edited", false, Standing::Ours),
            (&[GFD], "new", false, Standing::Replaceable),
            (&[GFD], "x", false, Standing::Replaceable),
            (&[MANAGER, GFD], "x", false, Standing::Replaceable),
            (&[MANAGER, GFD], "new", true, Standing::Same),
            (&[MANAGER, GFD], "old", true, Standing::Ours),
            (&[MANAGER, GFD], "x", true, foreign("'gpu-feature-discovery', 'linkwise'")),
            (&[GFD], "new", true, foreign("'gpu-feature-discovery'")),
            (&["kubectl"], "new", false, foreign("'kubectl'")),
            (&[], "new", false, foreign("")),
        ] {
            let judged = standing(Some(&found(managers, label)), &wanted, Some(&old), replaced);
            assert_eq!(judged, expected, "{managers:?} {label} {replaced}");
        }
        assert_eq!(standing(None, &wanted, None, false), Standing::Ours);
    }

    #[test]
    fn other_owners_or_node_make_a_difference() {
        let mut wanted = json!({"metadata": {"labels": {"node": "n"}}, "spec": {"labels": {"a": "new"}}});
        wanted["metadata"]["ownerReferences"] = json!([{"uid": "1"}]);
        assert_eq!(standing(Some(&found(&[MANAGER], "new")), &wanted, None, false), Standing::Ours);
    }
}
