//! Resuming after a restart: restores results that clients may still ask for, and reruns interrupted calls.

use std::sync::Arc;

use crate::call::{Call, ExecutionId, Options, ToolResult};
use crate::confinement::ResourceLimits;
use crate::entry::Entry;
use crate::error::CallError;
use crate::event::{Body, CallState};
use crate::executor::Executor;
use crate::flight::Flight;
use crate::journal::{Interrupted, RememberedAnswer};
use crate::outcome::Outcome;

impl Executor {
    /// Runs the calls again, as tasks, that earlier executors left open and whose callers asked for that. If a tool
    /// must not run twice, its call ends as *outcome unknown*. Must be called within a tokio runtime; a second call
    /// does nothing.
    pub fn resume(&self) -> Vec<ExecutionId> {
        let interrupted =
            std::mem::take(&mut *self.inner.interrupted.lock().expect("no code panics while it holds them"));
        interrupted.into_iter().map(|was| self.continue_in_background(self.reopen(was))).collect()
    }

    /// Returns a new entry for a call that an earlier executor left open.
    fn reopen(&self, was: Interrupted) -> Box<Entry> {
        let engine = &*self.inner;
        let call = Call {
            tool: was.tool.as_str().into(),
            arguments: Arc::new(was.arguments.clone()),
            call_id: was.call_id.clone(),
            caller: Arc::new(was.caller.clone()),
            options: Options { rerun: true, ..Options::default() },
            context: None,
            metadata: None,
            notes: None,
        };
        let tool = engine.registry.find(&call.tool, &call.caller);
        let provider = tool.as_ref().ok().map(|tool| Arc::clone(&tool.provider));
        let flight = Arc::new(Flight::resumed(&was, &call, provider, &engine.recorder));
        engine.flights.add(Arc::clone(&flight));
        let repeatable = tool.as_ref().is_ok_and(|tool| tool.spec.annotations.repeatable());
        let may_continue = match was.state {
            CallState::Running { attempt } if repeatable => {
                let error = Box::new(CallError::interrupted(true));
                let next = Body::RetryAttempt { attempt: attempt + 1, attempts_max: attempt + 1, delay_ms: 0, error };
                flight.record(next).taken().is_ok()
            }
            CallState::Open => true,
            CallState::Waiting { .. } => repeatable,
            _ => false,
        };
        let refused = (!may_continue).then(|| Box::new(CallError::interrupted(repeatable)));
        Entry::reopened(self, call, flight, tool, refused)
    }

    /// Takes over the results of earlier executors.
    pub(crate) fn restore(&self, answers: Vec<RememberedAnswer>) {
        for RememberedAnswer { result, tenant, task, keyed } in answers {
            if let Some(keyed) = &keyed {
                self.inner.keys.restore(keyed, tenant.as_deref(), &outcome_of(&result));
            }
            if task {
                self.inner.tasks.restore(result, tenant);
            }
        }
    }
}

impl Options {
    /// Returns true if a later executor, which does not know these options, may run the call again.
    pub(crate) fn may_rerun(&self) -> bool {
        // Every field is listed, so that a new option cannot be forgotten here.
        let Self {
            timeout,
            queue_timeout,
            deadline,
            silence,
            retries,
            retry_delay,
            backoff,
            retry_if,
            priority: _,
            require_confirmation,
            confirmer,
            idempotency_key,
            fresh,
            read_only,
            limits,
            isolation,
            network,
            rerun,
            labels: _,
        } = self;
        *rerun
            // A client with an idempotency key sends the call again itself: a rerun without the key would be a second
            // run.
            && idempotency_key.is_none()
            && [timeout, queue_timeout, deadline, silence, retry_delay].into_iter().all(Option::is_none)
            && retries.is_none()
            && backoff.is_none()
            && retry_if.is_none()
            && !require_confirmation
            && confirmer.is_none()
            && !fresh
            && !read_only
            && *limits == ResourceLimits::default()
            && isolation.is_none()
            && network.is_none()
    }
}

pub(crate) fn outcome_of(result: &ToolResult) -> Outcome {
    Outcome {
        content: result.content.clone(),
        structured: result.structured.clone(),
        failure: result.error.clone(),
        artifact: result.artifact,
        partial: result.partial,
        usage: result.usage.clone(),
        sandbox: result.sandbox.clone(),
        passed_on: result.passed_on.clone(),
    }
}
