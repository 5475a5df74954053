//! MutatingAdmissionPolicies (`admissionregistration.k8s.io/v1`): change a pod that a client creates.
//!
//! The rules are those of Kubernetes 1.36 (`apiserver/pkg/admission/plugin/policy/mutating`). The server compiles a
//! policy when a client creates it, and refuses the policy if one of its expressions does not compile. A binding
//! applies a policy to new pods, once for each object that the binding's `paramRef` finds. The mutations of a policy
//! are JSON patches, evaluated in order. An error refuses the request; with `failurePolicy: Ignore`, the pod is
//! created, with the changes of all mutations that did not fail. If a policy applied without an error or changed the
//! pod, policies with `reinvocationPolicy: IfNeeded` are evaluated once more, with the parameters with which they
//! applied (`mutating/dispatcher.go`, `reinvocationcontext.go`). While the server starts, a policy whose conditions
//! hold refuses the request regardless of its failure policy, because the schemas for patches are not loaded yet.
//! Bindings are evaluated in the order of their names; on the real server in random order.
//!
//! Features that are not modelled are refused by name when a client creates the policy or the binding: apply
//! configurations, `Object` literals (an API server of 1.36.2 panics on a list of them), and parameters of another
//! namespace. Only pods are changed. After each policy, LimitRanger fills in defaults again (`limits`).

mod check;
mod expressions;
pub(super) mod limits;
mod patch;
pub(super) mod validating;

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::refusal::{Cause, Refusal};
use crate::resource::pod;
use crate::store::{Key, ResourceType, Store};
use check::Wanted;
use expressions::Scope;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PolicySpec {
    #[serde(default)]
    failure_policy: FailurePolicy,
    #[serde(default)]
    reinvocation_policy: Reinvocation,
    param_kind: Option<ParamKind>,
    match_constraints: Resources,
    #[serde(default)]
    match_conditions: Vec<Named>,
    #[serde(default)]
    variables: Vec<Named>,
    mutations: Vec<Mutation>,
}

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
enum FailurePolicy {
    #[default]
    Fail,
    Ignore,
}

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
enum Reinvocation {
    #[default]
    Never,
    IfNeeded,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ParamKind {
    api_version: String,
    kind: String,
}

/// An expression with its name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
    expression: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Mutation {
    patch_type: PatchType,
    json_patch: Expression,
}

#[derive(Debug, Deserialize)]
enum PatchType {
    #[serde(rename = "JSONPatch")]
    JsonPatch,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expression {
    expression: String,
}

/// The resources that a policy or a binding applies to.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Resources {
    #[serde(default)]
    resource_rules: Vec<Rule>,
    #[serde(default)]
    namespace_selector: LabelSelector,
    #[serde(default)]
    object_selector: LabelSelector,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Rule {
    api_groups: Vec<String>,
    api_versions: Vec<String>,
    resources: Vec<String>,
    operations: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct LabelSelector {
    #[serde(default)]
    match_labels: BTreeMap<String, String>,
    #[serde(default)]
    match_expressions: Vec<Requirement>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Requirement {
    key: String,
    operator: Operator,
    #[serde(default)]
    values: Vec<String>,
}

#[derive(Debug, Deserialize)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct BindingSpec {
    policy_name: String,
    param_ref: Option<ParamRef>,
    #[serde(default)]
    match_resources: Resources,
}

/// The selection of a policy's parameters, by name or by labels. They are objects of the policy's `paramKind` in the
/// namespace of the admitted object.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ParamRef {
    name: Option<String>,
    selector: Option<LabelSelector>,
    parameter_not_found_action: NotFound,
}

impl ParamRef {
    fn finds(&self, metadata: &Value) -> bool {
        self.name.as_ref().is_none_or(|name| metadata["name"] == name.as_str())
            && self.selector.as_ref().is_none_or(|selector| selector.selects(metadata))
    }
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
enum NotFound {
    Allow,
    Deny,
}

impl LabelSelector {
    /// Returns true if the selector selects the object with this `metadata`. An empty selector selects all objects.
    fn selects(&self, metadata: &Value) -> bool {
        let label = |key: &str| metadata["labels"][key].as_str();
        let holds = |Requirement { key, operator, values }: &Requirement| {
            let is_listed = label(key).is_some_and(|value| values.iter().any(|listed| listed == value));
            match operator {
                Operator::In => is_listed,
                Operator::NotIn => !is_listed,
                Operator::Exists => label(key).is_some(),
                Operator::DoesNotExist => label(key).is_none(),
            }
        };
        self.match_labels.iter().all(|(key, value)| label(key) == Some(value))
            && self.match_expressions.iter().all(holds)
    }
}

impl Rule {
    fn matches(&self, resource: &ResourceType, plural: &str, operation: &str) -> bool {
        let (group, version) = resource.api.split_once('/').unwrap_or(("", resource.api));
        let has = |list: &[String], wanted: &str| list.iter().any(|listed| listed == wanted || listed == "*");
        has(&self.api_groups, group)
            && has(&self.api_versions, version)
            && has(&self.resources, plural)
            && has(&self.operations, operation)
    }
}

impl Resources {
    /// Returns true if a rule covers an operation on this resource.
    fn covers(&self, resource: &ResourceType, plural: &str, operation: &str) -> bool {
        self.resource_rules.iter().any(|rule| rule.matches(resource, plural, operation))
    }

    fn selects(&self, namespace: &Value, object: &Value) -> bool {
        self.namespace_selector.selects(&namespace["metadata"]) && self.object_selector.selects(&object["metadata"])
    }
}

/// Checks a policy or a binding that a client creates. Accepts any other object.
pub(super) fn check(key: &Key, object: &Value) -> Result<(), Refusal> {
    if key.resource == ResourceType::MUTATING_ADMISSION_POLICY_BINDINGS {
        return spec::<BindingSpec>(key, object).map(drop);
    }
    if key.resource == ResourceType::VALIDATING_ADMISSION_POLICY_BINDINGS {
        return spec::<validating::BindingSpec>(key, object).map(drop);
    }
    if key.resource == ResourceType::VALIDATING_ADMISSION_POLICIES {
        return validating::check(key, object);
    }
    if key.resource != ResourceType::MUTATING_ADMISSION_POLICIES {
        return Ok(());
    }
    let policy: PolicySpec = spec(key, object)?;
    let has_params = policy.param_kind.is_some();
    let (plain, patches) = (Scope::conditions(has_params), Scope::mutations(has_params));
    let conditions =
        policy.match_conditions.iter().map(|one| ("matchConditions", &one.expression, &plain, Wanted::Bool));
    // The expression of a variable may read earlier variables.
    let variable = Scope::variables(has_params);
    let variables = policy.variables.iter().map(|one| ("variables", &one.expression, &variable, Wanted::Any));
    let mutations =
        policy.mutations.iter().map(|one| ("mutations", &one.json_patch.expression, &patches, Wanted::Patches));
    check_expressions(key, conditions.chain(variables).chain(mutations))
}

/// Refuses a policy if an expression does not compile or has another type than wanted. Each expression comes with the
/// name of its list, its scope and the wanted type.
fn check_expressions<'a>(
    key: &Key,
    expressions: impl Iterator<Item = (&'a str, &'a String, &'a Scope, Wanted)>,
) -> Result<(), Refusal> {
    let refused = expressions.filter_map(|(list, expression, scope, wanted)| {
        let why = check::compile(expression, scope, wanted).err()?;
        let message = format!("Invalid value: {expression:?}: {why}");
        Some(Cause { reason: "FieldValueInvalid", field: format!("spec.{list}[].expression"), message })
    });
    let refused: Vec<Cause> = refused.collect();
    if refused.is_empty() { Ok(()) } else { Err(Refusal::invalid(key, &refused)) }
}

/// Changes a new pod by the mutating policies. The pod already has its name, its namespace and its defaults.
pub(super) fn mutate(store: &Store, key: &Key, object: &mut Value) -> Result<(), Refusal> {
    let policies = store.list(&ResourceType::MUTATING_ADMISSION_POLICIES, None);
    let bindings = store.list(&ResourceType::MUTATING_ADMISSION_POLICY_BINDINGS, None);
    let namespace = key.namespace.as_deref().and_then(|name| store.get(&ResourceType::NAMESPACES.key(None, name)));
    let unlabelled = json!({});
    let namespace = namespace.unwrap_or(&unlabelled);
    let mut is_second_round = false;
    // The bindings and parameters with which a policy applied without an error in the first round.
    let mut invoked = BTreeSet::new();
    loop {
        let (before, mut patched) = (object.clone(), false);
        for binding in &bindings {
            let binding_name = text(&binding["metadata"]["name"]);
            let bound: BindingSpec = spec(key, binding)?;
            let named = policies.iter().find(|policy| policy["metadata"]["name"] == bound.policy_name.as_str());
            let Some(policy) = named.map(|policy| spec::<PolicySpec>(key, policy)).transpose()? else { continue };
            if (is_second_round && policy.reinvocation_policy == Reinvocation::Never)
                || !policy.match_constraints.covers(&key.resource, key.resource.plural, "CREATE")
                || ![&policy.match_constraints, &bound.match_resources].iter().all(|one| one.selects(namespace, object))
            {
                continue;
            }
            let denied = |why: String| {
                let message =
                    format!("policy '{}' with binding '{binding_name}' denied request: {why}", bound.policy_name);
                Refusal::new(422, "Invalid", message)
            };
            let ignores = policy.failure_policy == FailurePolicy::Ignore;
            match parameters(store, key, policy.param_kind.as_ref(), bound.param_ref.as_ref()) {
                Ok(parameters) => {
                    for params in parameters {
                        let params_name = params.as_ref().map(|params| text(&params["metadata"]["name"]).to_owned());
                        let invocation = (binding_name.to_owned(), params_name);
                        if is_second_round && !invoked.contains(&invocation) {
                            continue;
                        }
                        let outcome = invoke(store, &policy, object, params.as_ref());
                        limits::complete(store, key, object);
                        match outcome {
                            Err(Failed::Policy(why)) if !ignores => return Err(denied(why)),
                            Err(Failed::Server(refusal)) => return Err(refusal),
                            Ok(true) => {
                                patched = true;
                                invoked.insert(invocation);
                            }
                            Err(Failed::Policy(_)) | Ok(false) => {}
                        }
                    }
                }
                Err(_) if ignores => {}
                Err(why) => return Err(denied(why)),
            }
        }
        // A patch without an effect counts as a change too (`versionedAttributes.Dirty`).
        if is_second_round || (*object == before && !patched) {
            return Ok(());
        }
        is_second_round = true;
    }
}

/// The reason why an invocation failed.
enum Failed {
    /// The policy failed; its failure policy decides about the request.
    Policy(String),
    /// The server refuses the request, regardless of the failure policy.
    Server(Refusal),
}

/// Applies a policy with one parameter, and returns true if its conditions hold. If a mutation fails, the changes of
/// the others stay.
fn invoke(store: &Store, policy: &PolicySpec, object: &mut Value, params: Option<&Value>) -> Result<bool, Failed> {
    let failed =
        |expression: &str, why: String| Failed::Policy(format!("expression '{expression}' resulted in error: {why}"));
    fn inputs<'a>(object: &'a Value, params: Option<&'a Value>) -> Vec<(&'static str, &'a Value)> {
        [("object", object)].into_iter().chain(params.map(|params| ("params", params))).collect()
    }
    let evaluate = |expression: &str, object: &Value, variables: &BTreeMap<String, expressions::Variable>| {
        expressions::evaluate(expression, &inputs(object, params), variables).map_err(|why| failed(expression, why))
    };
    let mut error = None;
    for Named { expression, .. } in &policy.match_conditions {
        match evaluate(expression, object, &BTreeMap::new()).map(|value| value.as_bool()) {
            Ok(Some(true)) => {}
            // A false condition decides, even if another one cannot be evaluated: `matchconditions/matcher.go`.
            Ok(Some(false)) => return Ok(false),
            Ok(None) => error = error.or_else(|| Some(failed(expression, "its value is not a boolean".to_owned()))),
            Err(why) => error = error.or(Some(why)),
        }
    }
    if let Some(error) = error.take() {
        return Err(error);
    }
    if store.is_starting {
        let message = "Resource kind /v1, Kind=Pod not found. There can be a delay between when \
                       CustomResourceDefinitions are created and when they are available.";
        return Err(Failed::Server(Refusal::new(503, "ServiceUnavailable", message)));
    }
    for Mutation { patch_type: PatchType::JsonPatch, json_patch: Expression { expression } } in &policy.mutations {
        store.patches.set(store.patches.get() + 1);
        let mut variables = BTreeMap::new();
        for Named { name, expression } in &policy.variables {
            // An error of a variable matters only if an expression reads the variable.
            let value = expressions::evaluate(expression, &inputs(object, params), &variables);
            variables.insert(name.clone(), value);
        }
        let patched = evaluate(expression, object, &variables)
            .and_then(|patch| patch::apply(object, &patch).map_err(|why| Failed::Policy(format!("JSON Patch: {why}"))));
        match patched {
            Ok(mut patched) => {
                pod::complete(&mut patched).map_err(Failed::Server)?;
                *object = patched;
            }
            Err(why) => error = error.or(Some(why)),
        }
    }
    error.map_or(Ok(true), Err)
}

/// The parameters of a binding; a single `None` if the policy has no `paramKind` or the binding no `paramRef`.
fn parameters(
    store: &Store,
    key: &Key,
    kind: Option<&ParamKind>,
    wanted: Option<&ParamRef>,
) -> Result<Vec<Option<Value>>, String> {
    let (Some(kind), Some(wanted)) = (kind, wanted) else { return Ok(vec![None]) };
    let resource = store.resource_of_kind(&kind.api_version, &kind.kind);
    let resource = resource.ok_or_else(|| format!("failed to configure binding: paramKind {} not known", kind.kind))?;
    let all = store.list(resource, key.namespace.as_deref());
    let found = all.into_iter().filter(|param| wanted.finds(&param["metadata"]));
    let found: Vec<Option<Value>> = found.cloned().map(Some).collect();
    if found.is_empty() && wanted.parameter_not_found_action == NotFound::Deny {
        return Err("no params found for policy binding with `Deny` parameterNotFoundAction".to_owned());
    }
    Ok(found)
}

fn spec<T: DeserializeOwned>(key: &Key, object: &Value) -> Result<T, Refusal> {
    let kind = text(&object["kind"]);
    serde_json::from_value(object["spec"].clone()).map_err(|error| {
        Refusal::bad_request(format!("{kind} {}: not as the API has it, or not modelled: {error}", key.name))
    })
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
