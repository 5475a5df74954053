//! Checks an expression before the server stores the policy: names, functions, and those types that are known without a
//! schema. Kubernetes objects may have any type here, as in the real server.

use std::collections::BTreeMap;

use cel::common::ast::{ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue};

use super::expressions::{PATCH, PATCH_FIELDS, Scope, compiled};

/// The type that the value of an expression must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Any,
    Bool,
    /// A list of patches.
    Patches,
}

/// The type of a value, as far as it is known before evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Type {
    /// Unknown before evaluation.
    Dyn,
    Bool,
    Int,
    String,
    Map,
    Patch,
    /// A list of elements of this type; `Dyn` for an empty list.
    List(Box<Self>),
    /// A type that no rule needs, by its name in CEL.
    Other(&'static str),
}

/// The functions that expressions may call, with the types of their results. The real server has more functions.
const FUNCTIONS: [(&str, Type); 7] = [
    ("size int", Type::Int),
    ("string", Type::String),
    ("startsWith endsWith contains matches hasValue", Type::Bool),
    ("range flatten distinct value or orValue of none ofNonZeroValue", Type::Dyn),
    // Operators that the parser turns into functions.
    ("_[_] _[?_] _?._", Type::Dyn),
    ("@not_strictly_false", Type::Bool),
    ("-_", Type::Int),
];

/// Operators with a boolean result.
const BOOLEAN: [&str; 10] = ["_&&_", "_||_", "!_", "_==_", "_!=_", "_>=_", "_<=_", "_>_", "_<_", "@in"];
/// Operators on two values of the same type.
const ARITHMETIC: [&str; 5] = ["_+_", "_-_", "_*_", "_/_", "_%_"];
/// The namespaces of functions, such as `lists` in `lists.range`.
const NAMESPACES: [&str; 2] = ["lists", "optional"];

/// Compiles an expression.
///
/// # Errors
///
/// The server's message, if the text does not compile or its value is known to have another type than `wanted`.
pub(super) fn compile(expression: &str, scope: &Scope, wanted: Wanted) -> Result<(), String> {
    let program = compiled(expression);
    let program = program.as_ref().as_ref().map_err(|errors| format!("compilation failed: {errors}"))?;
    let mut check = Check { scope, locals: Vec::new() };
    let found = check.type_of(program.expression()).map_err(|why| format!("compilation failed: {why}"))?;
    match (wanted, &found) {
        (Wanted::Any, _) | (_, Type::Dyn) | (Wanted::Bool, Type::Bool) => Ok(()),
        (Wanted::Patches, Type::List(element)) if matches!(**element, Type::Dyn | Type::Patch) => Ok(()),
        (Wanted::Bool, _) => Err(format!("must evaluate to bool but got {found:?}")),
        (Wanted::Patches, _) => Err(format!("must evaluate to list(JSONPatch) but got {found:?}")),
    }
}

struct Check<'a> {
    scope: &'a Scope,
    /// Variables of comprehensions, the innermost last.
    locals: Vec<BTreeMap<String, Type>>,
}

impl Check<'_> {
    fn type_of(&mut self, expression: &IdedExpr) -> Result<Type, String> {
        match &expression.expr {
            Expr::Unspecified => Err("an empty expression".to_owned()),
            Expr::Literal(literal) => Ok(match literal {
                LiteralValue::Boolean(_) => Type::Bool,
                LiteralValue::Int(_) => Type::Int,
                LiteralValue::String(_) => Type::String,
                LiteralValue::Bytes(_) => Type::Other("bytes"),
                LiteralValue::Double(_) => Type::Other("double"),
                LiteralValue::UInt(_) => Type::Other("uint"),
                LiteralValue::Null => Type::Other("null"),
            }),
            Expr::Ident(name) => self.variable(name),
            Expr::Select(select) => {
                self.type_of(&select.operand)?;
                Ok(if select.test { Type::Bool } else { Type::Dyn })
            }
            Expr::Call(call) => self.call(&call.func_name, call.target.as_deref(), &call.args),
            Expr::Comprehension(comprehension) => self.comprehension(comprehension),
            Expr::List(list) => {
                let elements = list.elements.iter().map(|one| self.type_of(one)).collect::<Result<Vec<_>, _>>()?;
                Ok(Type::List(Box::new(same(elements)?)))
            }
            Expr::Map(map) => {
                let (mut keys, mut values) = (Vec::new(), Vec::new());
                for entry in &map.entries {
                    let EntryExpr::MapEntry(entry) = &entry.expr else { return Err("not a map entry".to_owned()) };
                    keys.push(self.type_of(&entry.key)?);
                    values.push(self.type_of(&entry.value)?);
                }
                same(keys)?;
                same(values)?;
                Ok(Type::Map)
            }
            Expr::Struct(literal) => {
                let name = literal.type_name.as_str();
                if name != PATCH || !self.scope.has_patches {
                    return Err(format!("undeclared reference to '{name}', or a type that is not modelled"));
                }
                for entry in &literal.entries {
                    let EntryExpr::StructField(entry) = &entry.expr else { return Err("not a field".to_owned()) };
                    let (field, found) = (entry.field.as_str(), self.type_of(&entry.value)?);
                    if !PATCH_FIELDS.contains(&field) {
                        return Err(format!("undefined field '{field}' of {PATCH}"));
                    }
                    if field != "value" && !matches!(found, Type::String | Type::Dyn) {
                        return Err(format!(
                            "expected type of field '{field}' is 'string' but provided type is {found:?}"
                        ));
                    }
                }
                Ok(Type::Patch)
            }
        }
    }

    fn variable(&self, name: &str) -> Result<Type, String> {
        let local = self.locals.iter().rev().find_map(|locals| locals.get(name));
        match local {
            Some(local) => Ok(local.clone()),
            None if self.scope.variables.contains(name) => Ok(Type::Dyn),
            None => Err(format!("undeclared reference to '{name}'")),
        }
    }

    fn call(&mut self, name: &str, target: Option<&IdedExpr>, arguments: &[IdedExpr]) -> Result<Type, String> {
        let namespace = match target.map(|target| &target.expr) {
            Some(Expr::Ident(namespace)) => Some(namespace.as_str()),
            _ => None,
        };
        let is_escape = namespace == Some("jsonpatch") && name == "escapeKey";
        if is_escape && !self.scope.has_patches {
            return Err("undeclared reference to 'jsonpatch'".to_owned());
        }
        if let Some(target) = target
            && !is_escape
            && !namespace.is_some_and(|namespace| NAMESPACES.contains(&namespace))
        {
            self.type_of(target)?;
        }
        let types = arguments.iter().map(|one| self.type_of(one)).collect::<Result<Vec<_>, _>>()?;
        if is_escape {
            return Ok(Type::String);
        }
        match (name, types.as_slice()) {
            ("_?_:_", [_, one, other]) => joined(one, other).ok_or_else(|| overload(name, &types)),
            (_, [one, other]) if ARITHMETIC.contains(&name) => joined(one, other).ok_or_else(|| overload(name, &types)),
            _ if BOOLEAN.contains(&name) => Ok(Type::Bool),
            _ => {
                let known = FUNCTIONS.iter().find(|(known, _)| known.split(' ').any(|known| known == name));
                known.map(|(_, result)| result.clone()).ok_or_else(|| format!("undeclared reference to '{name}'"))
            }
        }
    }

    fn comprehension(&mut self, comprehension: &ComprehensionExpr) -> Result<Type, String> {
        let ComprehensionExpr { iter_range, iter_var, iter_var2, accu_var, accu_init, loop_cond, loop_step, result } =
            comprehension;
        self.type_of(iter_range)?;
        let accumulated = self.type_of(accu_init)?;
        let mut locals = BTreeMap::from([(iter_var.clone(), Type::Dyn), (accu_var.clone(), accumulated)]);
        locals.extend(iter_var2.clone().map(|name| (name, Type::Dyn)));
        self.locals.push(locals);
        self.type_of(loop_cond)?;
        let step = self.type_of(loop_step)?;
        // An accumulator may begin as an empty list; the result of a step tells the type of the elements.
        if let Some(locals) = self.locals.last_mut() {
            locals.insert(accu_var.clone(), step);
        }
        let result = self.type_of(result);
        self.locals.pop();
        result
    }
}

/// The common type of the elements of a literal. The server refuses mixed types (`HomogeneousAggregateLiterals`).
fn same(mut types: Vec<Type>) -> Result<Type, String> {
    let last = types.pop().unwrap_or(Type::Dyn);
    let other = types.iter().find(|other| **other != last);
    other.map_or(Ok(last.clone()), |other| Err(format!("expected type {other:?} but found {last:?}")))
}

/// The common type of two values; `None` if their types differ.
fn joined(one: &Type, other: &Type) -> Option<Type> {
    match (one, other) {
        (Type::List(one), Type::List(other)) => Some(Type::List(Box::new(joined(one, other)?))),
        (Type::Dyn, known) | (known, Type::Dyn) => Some(known.clone()),
        (one, other) => (one == other).then(|| one.clone()),
    }
}

fn overload(name: &str, types: &[Type]) -> String {
    format!("found no matching overload for '{name}' applied to {types:?}")
}
