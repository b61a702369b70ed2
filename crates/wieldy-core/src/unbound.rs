//! [`Unbound`]: a tool that is defined but cannot run here.

use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::input::Input;
use crate::outcome::{Outcome, RunError};
use crate::run::Run;
use crate::tool::{AnyTool, ToolSpec};

/// A tool without an implementation: it is listed, and a call returns an error with the remedy.
pub struct Unbound {
    spec: ToolSpec,
    problem: String,
    suggestion: String,
}

impl Unbound {
    /// Creates a tool that needs some configuration, in words such as "a GitHub token (`github.token`)".
    pub fn tool(spec: ToolSpec, needs: impl Into<String>) -> Arc<dyn AnyTool> {
        let problem = format!("`{}` is defined, but what it needs is not configured", spec.name);
        Arc::new(Self { spec, problem, suggestion: format!("configure {}", needs.into()) })
    }

    /// Creates a tool that cannot run because of a problem, with a suggestion that solves it.
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
