//! [`Unbound`]: a tool that is defined and cannot run here.

use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::input::Input;
use crate::outcome::{Outcome, RunError};
use crate::run::Run;
use crate::tool::{AnyTool, ToolSpec};

/// A definition whose implementation is not there: it can be seen, and says what to do when it is called.
pub struct Unbound {
    spec: ToolSpec,
    problem: String,
    suggestion: String,
}

impl Unbound {
    /// A tool that needs something configured, in words such as "a GitHub token (`github.token`)".
    pub fn tool(spec: ToolSpec, needs: impl Into<String>) -> Arc<dyn AnyTool> {
        let problem = format!("`{}` is defined, but what it needs is not configured", spec.name);
        Arc::new(Self { spec, problem, suggestion: format!("configure {}", needs.into()) })
    }

    /// A tool that cannot run because of a problem, with a suggestion that ends it.
    pub fn because(spec: ToolSpec, problem: impl std::fmt::Display, suggestion: impl Into<String>) -> Arc<dyn AnyTool> {
        let problem = format!("`{}` cannot run: {problem}", spec.name);
        Arc::new(Self { spec, problem, suggestion: suggestion.into() })
    }
}

impl AnyTool for Unbound {
    fn spec(&self) -> ToolSpec {
        self.spec.clone()
    }

    fn run<'a>(&'a self, _input: &'a Input, _run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        Box::pin(async move { Err(RunError::configuration(&self.problem, &self.suggestion)) })
    }
}
