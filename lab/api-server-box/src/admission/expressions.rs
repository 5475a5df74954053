//! CEL expressions of admission policies: their environment and variables, and their values as JSON.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use cel::common::types::{CelNull, CelString};
use cel::objects::{Key as MapKey, Map};
use cel::{Context, Env, Program, StructDef, Value as Cel, add_overload, extensions};
use serde_json::{Map as JsonMap, Value};

/// The value of a policy's variable, or the error of its expression.
pub(super) type Variable = Result<Value, String>;

/// The CEL type of an operation of a patch.
pub(super) const PATCH: &str = "JSONPatch";

/// The fields of [`PATCH`].
pub(super) const PATCH_FIELDS: [&str; 4] = ["op", "path", "from", "value"];

/// The names that an expression may use.
pub(super) struct Scope {
    pub variables: BTreeSet<&'static str>,
    /// Set if patches and `jsonpatch.escapeKey` are allowed.
    pub has_patches: bool,
}

impl Scope {
    /// Match conditions of a mutating policy. Not modelled: `oldObject`, `request`, `namespaceObject`, `authorizer`.
    pub fn conditions(has_params: bool) -> Self {
        let params = has_params.then_some("params");
        Self { variables: ["object"].into_iter().chain(params).collect(), has_patches: false }
    }

    /// The match conditions of a validating policy; its variables and validations may use `variables` too.
    pub fn validations(has_params: bool, has_variables: bool) -> Self {
        let more = has_variables.then_some("variables").into_iter().chain(has_params.then_some("params"));
        Self { variables: ["object", "oldObject", "request"].into_iter().chain(more).collect(), has_patches: false }
    }

    /// The variables of a mutating policy.
    pub fn variables(has_params: bool) -> Self {
        let mut scope = Self::conditions(has_params);
        scope.variables.insert("variables");
        scope
    }

    /// The mutations of a mutating policy.
    pub fn mutations(has_params: bool) -> Self {
        Self { has_patches: true, ..Self::variables(has_params) }
    }
}

/// CEL's standard library, the list functions, and the type and the function that patches need.
static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut env = Env::stdlib();
    extensions::lists(&mut env).expect("no other function has these names");
    add_overload!(env, fn escape_key: (CelString) -> CelString<'static>, name = "jsonpatch.escapeKey")
        .expect("no other function has this name");
    let text = || Box::new(CelString::from(String::new()));
    let patch = StructDef::new(PATCH.to_owned())
        .add_field_with_default("op".to_owned(), text())
        .add_field_with_default("path".to_owned(), text())
        .add_field_with_default("from".to_owned(), text())
        .add_field_with_default("value".to_owned(), Box::new(CelNull));
    env.add_type(patch).expect("no other type has this name");
    Arc::new(env)
});

fn escape_key(key: &CelString<'_>) -> CelString<'static> {
    CelString::from(key.inner().replace('~', "~0").replace('/', "~1"))
}

/// A program, or the reason why the text does not compile.
type Compiled = Arc<Result<Program, String>>;

/// Compiles an expression. Keeps the program for later calls, because parsing takes most of the time.
pub(super) fn compiled(expression: &str) -> Compiled {
    static PROGRAMS: Mutex<BTreeMap<String, Compiled>> = Mutex::new(BTreeMap::new());
    let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let compile = || Arc::new(ENVIRONMENT.compile(expression).map_err(|errors| errors.to_string()));
    Arc::clone(programs.entry(expression.to_owned()).or_insert_with(compile))
}

/// The value of an expression that may read inputs by name, and the variables of its policy.
pub(super) fn evaluate(
    expression: &str,
    inputs: &[(&str, &Value)],
    variables: &BTreeMap<String, Variable>,
) -> Result<Value, String> {
    let program = compiled(expression);
    let program = program.as_ref().as_ref().map_err(Clone::clone)?;
    let mut context = Context::with_env(Arc::clone(&ENVIRONMENT));
    for (name, value) in inputs {
        context.add_variable_from_value(*name, to_cel(value));
    }
    // A variable without a value is left out, so that an expression that reads it fails.
    let known = variables.iter().filter_map(|(name, value)| Some((name.clone(), to_cel(value.as_ref().ok()?))));
    context.add_variable_from_value("variables", known.collect::<HashMap<_, _>>());
    let value = program.execute(&context).map_err(|error| error.to_string())?;
    to_json(&value)
}

fn to_cel(value: &Value) -> Cel {
    match value {
        Value::Null => Cel::Null,
        Value::Bool(value) => Cel::Bool(*value),
        Value::Number(number) => {
            number.as_i64().map_or_else(|| Cel::Float(number.as_f64().unwrap_or(f64::NAN)), Cel::Int)
        }
        Value::String(text) => Cel::from(text.as_str()),
        Value::Array(list) => Cel::List(Arc::new(list.iter().map(to_cel).collect())),
        Value::Object(map) => {
            let entries = map.iter().map(|(key, value)| (MapKey::from(key.as_str()), to_cel(value)));
            Cel::Map(Map { map: Arc::new(entries.collect()) })
        }
    }
}

fn to_json(value: &Cel) -> Result<Value, String> {
    Ok(match value {
        Cel::Null => Value::Null,
        Cel::Bool(value) => Value::from(*value),
        Cel::Int(value) => Value::from(*value),
        Cel::UInt(value) => Value::from(*value),
        Cel::Float(value) => Value::from(*value),
        Cel::String(text) => Value::from(text.as_str()),
        Cel::List(list) => Value::Array(list.iter().map(to_json).collect::<Result<_, _>>()?),
        Cel::Map(map) => {
            let entry = |(key, value): (&MapKey, &Cel)| match key {
                MapKey::String(key) => Ok((key.as_str().to_owned(), to_json(value)?)),
                other => Err(format!("a map with the key {other:?} is not JSON")),
            };
            Value::Object(map.map.iter().map(entry).collect::<Result<JsonMap<_, _>, _>>()?)
        }
        Cel::Struct(patch) if patch.name() == PATCH => {
            let mut operation = JsonMap::new();
            for field in PATCH_FIELDS {
                let Some(value) = patch.field_value(field) else { continue };
                let value = to_json(&Cel::try_from(value).map_err(|error| error.to_string())?)?;
                // An unset field has one of these values.
                let is_unset = value.is_null() || (field == "from" && value == "");
                if !is_unset {
                    operation.insert(field.to_owned(), value);
                }
            }
            Value::Object(operation)
        }
        other => return Err(format!("{} is not JSON", other.type_of())),
    })
}
