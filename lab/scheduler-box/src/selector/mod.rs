//! Selectors of devices in CEL, as the API server and the scheduler of Kubernetes evaluate them.
//!
//! `device` has `driver`, `attributes` and `capacity` (by domain, then name; a domain that the device does not have is
//! an empty map) and `allowMultipleAllocations`. There is CEL's standard library, and nothing of what Kubernetes adds to it
//! (`staging/src/k8s.io/dynamic-resource-allocation/cel/compile.go`): no expression of ours uses that. Types are not
//! checked before evaluation: an expression that the real API server would refuse at a claim's creation fails here when it
//! is evaluated.

mod values;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cel::{Context, Env, Program, Value};

use crate::api::Device;

/// Compiled expressions and their environment. Copies share them.
#[derive(Clone)]
pub(crate) struct Selectors {
    env: Arc<Env>,
    programs: Arc<Mutex<BTreeMap<String, Compiled>>>,
}

/// A program, or the reason why the text is not one.
type Compiled = Arc<Result<Program, String>>;

impl fmt::Debug for Selectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Selectors")
    }
}

/// A device as expressions see it, made at the first use.
#[derive(Default)]
pub(crate) struct View(OnceCell<Context<'static, 'static>>);

impl Selectors {
    pub fn new() -> Self {
        Self { env: Arc::new(Env::stdlib()), programs: Arc::default() }
    }

    /// Returns true if an expression selects a device of a driver.
    ///
    /// # Errors
    ///
    /// The text is not CEL, it reads something that the device does not have, or its value is not a boolean.
    pub fn selects(&self, expression: &str, driver: &str, device: &Device, view: &View) -> Result<bool, String> {
        let program = self.compiled(expression);
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

    fn compiled(&self, expression: &str) -> Compiled {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let program = programs
            .entry(expression.to_owned())
            .or_insert_with(|| Arc::new(self.env.compile(expression).map_err(|errors| errors.to_string())));
        Arc::clone(program)
    }
}
