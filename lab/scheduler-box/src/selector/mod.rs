//! CEL selectors of devices, as the API server and the scheduler of Kubernetes evaluate them.
//!
//! `device` has the fields `driver`, `attributes` and `capacity` (maps by domain, then by name; a missing domain is an
//! empty map) and `allowMultipleAllocations`. Expressions may use CEL's standard library, but not the libraries that
//! Kubernetes adds (`staging/src/k8s.io/dynamic-resource-allocation/cel/compile.go`), because no expression of linkwise
//! needs them. Types are not checked before evaluation. An expression with a wrong type therefore fails when it is
//! evaluated, whereas the real API server refuses it when a client creates the claim.

mod values;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cel::{Context, Env, Program, Value};

use crate::api::Device;

/// Compiled expressions and their environment, which clones share.
#[derive(Clone)]
pub(crate) struct Selectors {
    env: Arc<Env>,
    programs: Arc<Mutex<BTreeMap<String, Compiled>>>,
}

/// A program, or the reason why the text does not compile.
type Compiled = Arc<Result<Program, String>>;

impl fmt::Debug for Selectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Selectors")
    }
}

/// A device as expressions see it, built when it is first needed.
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
    /// The text does not compile, it reads a field that the device lacks, or its value is not a boolean.
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
            Ok(other) => Err(format!("its value is {}, not a boolean", other.type_of())),
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
