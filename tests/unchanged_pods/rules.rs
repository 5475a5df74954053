//! The rules for an admitted pod, written without CEL: it is unchanged, or each container with GPUs has a claim for as
//! many GPUs instead.

use serde_json::{Value, json};

use crate::unchanged_pods::GPUS;

/// The indices of the containers that got claims; empty if the pod is unchanged. Panics at any other change.
/// `has_alternatives` is true if the templates have alternatives.
pub fn changed(before: &Value, after: &Value, has_alternatives: bool) -> Vec<usize> {
    if before == after {
        return Vec::new();
    }
    let containers = |pod: &Value| pod["spec"]["containers"].as_array().unwrap().clone();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let (old, new) = (containers(before), containers(after));
    let gpus = |place: &usize| old[*place]["resources"]["limits"].get(GPUS);
    let with_gpus = (0..old.len()).filter(|place| gpus(place).is_some_and(|count| count != "0"));
    let places: Vec<usize> = with_gpus.collect();
    // The pod keeps its claims, and a claim for each container with GPUs follows them.
    let (had, has) = (list(&before["spec"]["resourceClaims"]), list(&after["spec"]["resourceClaims"]));
    assert_eq!(has.len(), had.len() + places.len(), "{after}");
    assert_eq!(has[..had.len()], had, "{after}");
    let mut expected = before.clone();
    expected["spec"]["resourceClaims"] = Value::from(has.clone());
    for (nth, (place, claim)) in places.iter().zip(&has[had.len()..]).enumerate() {
        let count = old[*place]["resources"]["limits"][GPUS].as_str().unwrap();
        // All claims have one size. Two claims of at most four GPUs both have alternatives, otherwise only the first.
        let is_plain = has_alternatives && nth > 0 && (places.len() > 2 || count == "8");
        let template = format!("linkwise-gpus-{count}{}", if is_plain { "-any" } else { "" });
        let name = claim["name"].clone();
        assert_eq!(*claim, json!({"name": name, "resourceClaimTemplateName": template}));
        assert_eq!(has.iter().filter(|other| other["name"] == name).count(), 1, "two claims have one name: {after}");
        // The container gets the claim, and 0 of the resource, so that no LimitRange gives it a default.
        let container = &mut expected["spec"]["containers"][*place]["resources"];
        let mut claims = list(&container["claims"]);
        claims.push(json!({ "name": name }));
        container["claims"] = Value::from(claims);
        for kind in ["limits", "requests"] {
            assert!(container[kind].as_object_mut().unwrap().insert(GPUS.to_owned(), json!("0")).is_some());
        }
    }
    assert_eq!(*after, expected);
    for container in new.iter().chain(list(&after["spec"]["initContainers"]).iter()) {
        for kind in ["limits", "requests"] {
            assert!(container["resources"][kind].get(GPUS).is_none_or(|gpus| gpus == "0"), "GPUs are left: {after}");
        }
    }
    places
}
