//! The registry's entry for a tool of an upstream server.

use std::sync::Arc;

use serde_json::{Map, Value};
use wieldy_core::{AnyTool, BoxFuture, Input, Outcome, Run, RunError, ToolSpec};

use super::upstream::Upstream;

/// The `_meta` key of a call's context.
const META_CONTEXT: &str = "wieldy/context";

/// A tool of an upstream server.
pub(super) struct UpstreamTool {
    upstream: Arc<Upstream>,
    /// The tool's name on its server.
    name: String,
    spec: ToolSpec,
}

impl UpstreamTool {
    pub(super) fn new(upstream: Arc<Upstream>, name: String, spec: ToolSpec) -> Self {
        Self { upstream, name, spec }
    }
}

impl UpstreamTool {
    /// Returns the entries of `_meta` that the operator lets the server have.
    fn meta(&self, run: &Run) -> Map<String, Value> {
        let settings = &self.upstream.settings;
        let mut meta = if settings.pass_meta { run.notes().clone() } else { Map::new() };
        if settings.pass_context && !run.context().is_empty() {
            meta.insert(META_CONTEXT.into(), Value::Object(run.context().clone()));
        }
        meta
    }
}

impl AnyTool for UpstreamTool {
    fn spec(&self) -> ToolSpec {
        self.spec.clone()
    }

    fn takes_notes(&self) -> bool {
        self.upstream.settings.pass_meta
    }

    fn run<'a>(&'a self, input: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        Box::pin(async move {
            let Value::Object(arguments) = input.value() else {
                return Err(RunError::invalid_input("the arguments of an MCP tool must be an object"));
            };
            let ready = async {
                let slot = self.upstream.slots.acquire().await;
                let session = self.upstream.session().await?;
                Ok::<_, RunError>((slot, session))
            };
            let (_slot, session) = tokio::select! {
                ready = ready => ready?,
                () = run.stop().cancelled() => {
                    let server = &self.upstream.settings.name;
                    return Err(RunError::from(format!("nothing was sent to the MCP server `{server}` yet")).before_effect());
                }
            };
            // Checked only now, because starting the server for this call may have shown that the tool changed.
            if let Some(refusal) = self.upstream.refusal(&self.name) {
                return Err(RunError::from(refusal).before_effect());
            }
            let mut outcome = session.call(&self.name, arguments, self.meta(run), run).await?;
            if let Some(failure) = &mut outcome.failure
                && let Some(hint) = self.upstream.settings.hint(&failure.message)
            {
                failure.suggestion = Some(hint);
            }
            Ok(outcome)
        })
    }
}
