//! The environment of selectors: CEL's standard library and Kubernetes' additions.

use cel::common::ast::{ComprehensionExpr, Expr, IdedExpr, ListExpr, LiteralValue};
use cel::common::types::{CelBool, CelInt, CelString};
use cel::parser::{Macro, MacroExprHelper, ParseError};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload, extensions};

use super::values::{Amount, Version};
use crate::quantity::Quantity;

pub(super) fn environment() -> Result<Env, String> {
    let mut env = Env::stdlib();
    extend(&mut env).map_err(|error| error.to_string())?;
    Ok(env)
}

fn extend(env: &mut Env) -> Result<(), DeclarationError> {
    extensions::strings(env)?;
    extensions::lists(env)?;
    env.add_macro(Macro::receiver("bind", 3, bind))?;
    // apiserver/pkg/cel/library/semverlib.go
    add_overload!(env, fn semver: (CelString) -> Result<Version>)?;
    add_overload!(env, fn is_semver: (CelString) -> CelBool)?;
    add_member_overload!(env, fn version_compare_to: (Version, Version) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn version_is_less_than: (Version, Version) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn version_is_greater_than: (Version, Version) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn major: (Version) -> CelInt)?;
    add_member_overload!(env, fn minor: (Version) -> CelInt)?;
    add_member_overload!(env, fn patch: (Version) -> CelInt)?;
    // apiserver/pkg/cel/library/quantity.go
    add_overload!(env, fn quantity: (CelString) -> Result<Amount>)?;
    add_overload!(env, fn is_quantity: (CelString) -> CelBool)?;
    add_member_overload!(env, fn amount_compare_to: (Amount, Amount) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn amount_is_less_than: (Amount, Amount) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn amount_is_greater_than: (Amount, Amount) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn is_integer: (Amount) -> CelBool)?;
    add_member_overload!(env, fn as_integer: (Amount) -> Result<CelInt>)?;
    add_member_overload!(env, fn sign: (Amount) -> CelInt)?;
    add_member_overload!(env, fn add: (Amount, Amount) -> Result<Amount>)?;
    add_member_overload!(env, fn sub: (Amount, Amount) -> Result<Amount>)?;
    Ok(())
}

/// `cel.bind(name, value, expression)`: a comprehension that only names a value.
fn bind(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    arguments: &mut Vec<IdedExpr>,
) -> Result<Option<IdedExpr>, ParseError> {
    let is_cel = matches!(target.as_ref().map(|target| &target.expr), Some(Expr::Ident(name)) if name == "cel");
    let [variable, _, _] = arguments.as_slice() else { return Ok(None) };
    if !is_cel {
        return Ok(None);
    }
    let Expr::Ident(name) = variable.expr.clone() else {
        return Err(helper.new_error(variable.id, "cel.bind() variable names must be simple identifiers"));
    };
    let (Some(result), Some(value)) = (arguments.pop(), arguments.pop()) else { return Ok(None) };
    let comprehension = ComprehensionExpr {
        iter_range: helper.next_expr(Expr::List(ListExpr::new(Vec::new()))),
        iter_var: "#unused".to_owned(),
        iter_var2: None,
        accu_var: name.clone(),
        accu_init: value,
        loop_cond: helper.next_expr(Expr::Literal(LiteralValue::Boolean(false.into()))),
        loop_step: helper.next_expr(Expr::Ident(name)),
        result,
    };
    Ok(Some(helper.next_expr(Expr::Comprehension(Box::new(comprehension)))))
}

fn refused(function: &str, text: &CelString<'_>) -> ExecutionError {
    ExecutionError::function_error(function, format!("'{}' is none", text.inner()))
}

fn semver(text: &CelString<'_>) -> Result<Version, ExecutionError> {
    semver::Version::parse(text.inner()).map(Version).map_err(|_| refused("semver", text))
}

fn is_semver(text: &CelString<'_>) -> CelBool {
    semver::Version::parse(text.inner()).is_ok().into()
}

fn version_compare_to(one: &Version, other: &Version) -> CelInt {
    CelInt::from(one.order(other) as i64)
}

fn version_is_less_than(one: &Version, other: &Version) -> CelBool {
    one.order(other).is_lt().into()
}

fn version_is_greater_than(one: &Version, other: &Version) -> CelBool {
    one.order(other).is_gt().into()
}

fn number(number: u64) -> CelInt {
    CelInt::from(i64::try_from(number).unwrap_or(i64::MAX))
}

fn major(version: &Version) -> CelInt {
    number(version.0.major)
}

fn minor(version: &Version) -> CelInt {
    number(version.0.minor)
}

fn patch(version: &Version) -> CelInt {
    number(version.0.patch)
}

fn quantity(text: &CelString<'_>) -> Result<Amount, ExecutionError> {
    Quantity::parse(text.inner()).map(Amount).ok_or_else(|| refused("quantity", text))
}

fn is_quantity(text: &CelString<'_>) -> CelBool {
    Quantity::parse(text.inner()).is_some().into()
}

fn amount_compare_to(one: &Amount, other: &Amount) -> CelInt {
    CelInt::from(one.order(other) as i64)
}

fn amount_is_less_than(one: &Amount, other: &Amount) -> CelBool {
    one.order(other).is_lt().into()
}

fn amount_is_greater_than(one: &Amount, other: &Amount) -> CelBool {
    one.order(other).is_gt().into()
}

fn is_integer(amount: &Amount) -> CelBool {
    amount.0.whole().is_some().into()
}

fn as_integer(amount: &Amount) -> Result<CelInt, ExecutionError> {
    let whole = amount.0.whole().map(CelInt::from);
    whole.ok_or_else(|| ExecutionError::function_error("asInteger", "the quantity is no whole number"))
}

fn sign(amount: &Amount) -> CelInt {
    CelInt::from(i64::try_from(amount.0.0.signum()).unwrap_or_default())
}

fn add(one: &Amount, other: &Amount) -> Result<Amount, ExecutionError> {
    let sum = one.0.0.checked_add(other.0.0).map(|sum| Amount(Quantity(sum)));
    sum.ok_or_else(|| ExecutionError::function_error("add", "the sum is too large"))
}

fn sub(one: &Amount, other: &Amount) -> Result<Amount, ExecutionError> {
    let rest = one.0.0.checked_sub(other.0.0).map(|rest| Amount(Quantity(rest)));
    rest.ok_or_else(|| ExecutionError::function_error("sub", "the difference is too large"))
}
