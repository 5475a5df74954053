//! ValidatingAdmissionPolicies: refuse a request that a bound policy does not allow.
//!
//! The rules are those of Kubernetes 1.36 (`apiserver/pkg/admission/plugin/policy/validating`, `dispatcher.go` and
//! `validator.go`). A policy applies if all its conditions are true. It denies the request if one of its validations is
//! not true for one of its parameters. An error denies the request, except in a message or an
//! unread variable. `failurePolicy: Ignore`, actions other than `Deny`, and patches other than merge patches are not
//! modelled: the server refuses them.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::check::Wanted;
use super::expressions::{self, Scope};
use super::{Named, ParamKind, ParamRef, Resources, spec, text};
use crate::refusal::Refusal;
use crate::store::{Key, ResourceType, Store};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PolicySpec {
    #[serde(rename = "failurePolicy")]
    _failure_policy: Fail,
    param_kind: Option<ParamKind>,
    match_constraints: Resources,
    #[serde(default)]
    match_conditions: Vec<Named>,
    #[serde(default)]
    variables: Vec<Named>,
    validations: Vec<Validation>,
}

#[derive(Debug, Deserialize)]
enum Fail {
    Fail,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Validation {
    expression: String,
    message: Option<String>,
    message_expression: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct BindingSpec {
    policy_name: String,
    #[serde(rename = "validationActions")]
    _validation_actions: Vec<Action>,
    param_ref: Option<ParamRef>,
    #[serde(default)]
    match_resources: Resources,
}

#[derive(Debug, Deserialize)]
enum Action {
    Deny,
}

/// A request to create, change or delete an object, as policies see it.
pub(crate) struct AdmissionRequest<'a> {
    /// `CREATE`, `UPDATE`, `DELETE`, or `PATCH` for a patch whose result is not modelled.
    pub operation: &'static str,
    /// The `userInfo` of the client.
    pub user: &'a Value,
    pub key: &'a Key,
    /// The resource, with `/status` if the request is about the status only.
    pub plural: &'a str,
    /// The requested object; null if the request deletes it.
    pub object: &'a Value,
}

/// Checks a policy that a client creates.
pub(super) fn check(key: &Key, object: &Value) -> Result<(), Refusal> {
    let policy: PolicySpec = spec(key, object)?;
    let has_params = policy.param_kind.is_some();
    let (plain, with_variables) = (Scope::validations(has_params, false), Scope::validations(has_params, true));
    let conditions =
        policy.match_conditions.iter().map(|one| ("matchConditions", &one.expression, &plain, Wanted::Bool));
    let variables = policy.variables.iter().map(|one| ("variables", &one.expression, &with_variables, Wanted::Any));
    let validations = policy.validations.iter().flat_map(|one| {
        let message = one.message_expression.iter().map(|text| ("messages", text, Wanted::Any));
        [("validations", &one.expression, Wanted::Bool)].into_iter().chain(message)
    });
    let validations = validations.map(|(list, one, wanted)| (list, one, &with_variables, wanted));
    super::check_expressions(key, conditions.chain(variables).chain(validations))
}

/// Refuses a request that a policy does not allow.
pub(crate) fn admit(store: &Store, request: &AdmissionRequest<'_>) -> Result<(), Refusal> {
    let policies = store.list(&ResourceType::VALIDATING_ADMISSION_POLICIES, None);
    for binding in store.list(&ResourceType::VALIDATING_ADMISSION_POLICY_BINDINGS, None) {
        let bound: BindingSpec = spec(request.key, binding)?;
        let named = policies.iter().find(|policy| policy["metadata"]["name"] == bound.policy_name.as_str());
        let Some(policy) = named.map(|policy| spec::<PolicySpec>(request.key, policy)).transpose()? else { continue };
        let operation = if request.operation == "PATCH" { "UPDATE" } else { request.operation };
        if !policy.match_constraints.covers(&request.key.resource, request.plural, operation) {
            continue;
        }
        if request.operation == "PATCH" {
            return Err(Refusal::bad_request("a patch of an object with a validating policy: not modelled"));
        }
        let namespace = request.key.namespace.as_deref();
        let namespace = namespace.and_then(|name| store.get(&ResourceType::NAMESPACES.key(None, name)));
        let unlabelled = json!({});
        let namespace = namespace.unwrap_or(&unlabelled);
        let selects = |one: &Resources| one.selects(namespace, request.object);
        if ![&policy.match_constraints, &bound.match_resources].into_iter().all(selects) {
            continue;
        }
        let parameters = super::parameters(store, request.key, policy.param_kind.as_ref(), bound.param_ref.as_ref());
        let evaluated = parameters
            .and_then(|all| all.iter().try_for_each(|params| evaluate(&policy, store, request, params.as_ref())));
        evaluated.map_err(|why| {
            let name = text(&binding["metadata"]["name"]);
            let denied =
                format!("ValidatingAdmissionPolicy '{}' with binding '{name}' denied request", bound.policy_name);
            let (plural, object) = (request.key.resource.plural, &request.key.name);
            Refusal::new(422, "Invalid", format!("{plural} \"{object}\" is forbidden: {denied}: {why}"))
        })?;
    }
    Ok(())
}

fn evaluate(
    policy: &PolicySpec,
    store: &Store,
    request: &AdmissionRequest<'_>,
    params: Option<&Value>,
) -> Result<(), String> {
    let old = store.get(request.key).cloned().unwrap_or_default();
    let attributes = json!({"operation": request.operation, "name": request.key.name, "userInfo": request.user});
    let mut inputs = vec![("object", request.object), ("oldObject", &old), ("request", &attributes)];
    inputs.extend(params.map(|params| ("params", params)));
    let cel = |expression: &str, variables: &BTreeMap<String, expressions::Variable>| {
        let value = expressions::evaluate(expression, &inputs, variables);
        value.map_err(|why| format!("expression '{expression}' resulted in error: {why}"))
    };
    for Named { expression, .. } in &policy.match_conditions {
        if cel(expression, &BTreeMap::new())? != true {
            return Ok(());
        }
    }
    let mut variables = BTreeMap::new();
    for Named { name, expression } in &policy.variables {
        let value = cel(expression, &variables);
        variables.insert(name.clone(), value);
    }
    for Validation { expression, message, message_expression } in &policy.validations {
        if cel(expression, &variables)? == true {
            continue;
        }
        let text = message_expression.as_ref().and_then(|one| cel(one, &variables).ok()?.as_str().map(str::to_owned));
        return Err(text.or_else(|| message.clone()).unwrap_or_else(|| format!("failed expression: {expression}")));
    }
    Ok(())
}
