//! Selectors of devices in CEL, as the API server and the scheduler of Kubernetes evaluate them.
//!
//! `device` has `driver`, `attributes` and `capacity` (by domain, then name; a domain that the device does not have is
//! an empty map) and `allowMultipleAllocations`. Beside CEL's standard library there are its string and list
//! functions, `cel.bind`, and Kubernetes' `semver` and `quantity`
//! (`staging/src/k8s.io/dynamic-resource-allocation/cel/compile.go`). An expression is not checked by type before: what
//! the real API server would refuse when a claim is created is an error when it is evaluated.

mod library;
mod values;

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use cel::{Context, Env, Program, Value};

use crate::api::Device;

/// Expressions that were compiled, and the environment they are evaluated in.
pub(crate) struct Selectors {
    env: Arc<Env>,
    programs: RefCell<BTreeMap<String, Rc<Result<Program, String>>>>,
}

/// A device as expressions see it, made when the first one looks.
#[derive(Default)]
pub(crate) struct View(OnceCell<Context<'static, 'static>>);

impl Selectors {
    /// # Errors
    ///
    /// The CEL library takes none of our functions under its name.
    pub fn new() -> Result<Self, String> {
        Ok(Self { env: Arc::new(library::environment()?), programs: RefCell::default() })
    }

    /// Whether an expression selects a device of a driver.
    ///
    /// # Errors
    ///
    /// Its text is no CEL, it reads what the device does not have, or its value is no boolean.
    pub fn selects(&self, expression: &str, driver: &str, device: &Device, view: &View) -> Result<bool, String> {
        let program = Rc::clone(
            self.programs
                .borrow_mut()
                .entry(expression.to_owned())
                .or_insert_with(|| Rc::new(self.env.compile(expression).map_err(|errors| errors.to_string()))),
        );
        let program = program.as_ref().as_ref().map_err(Clone::clone)?;
        let context = view.0.get_or_init(|| {
            let mut context = Context::with_env(Arc::clone(&self.env));
            context.add_variable_as_val("device", values::device(driver, device));
            context
        });
        match program.execute(context) {
            Ok(Value::Bool(selected)) => Ok(selected),
            Ok(other) => Err(format!("its value is {}, no boolean", other.type_of())),
            Err(error) => Err(error.to_string()),
        }
    }
}
