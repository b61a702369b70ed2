//! The terms of a call, settled before any check or person is asked: its timeouts, retries and confinement.

use std::sync::Arc;
use std::time::Duration;

use crate::attempt::RetryPolicy;
use crate::call::Call;
use crate::clock::{Clocks, TIMEOUT_MAX};
use crate::confinement::{Confinement, ResourceLimits};
use crate::error::{CallError, Code};
use crate::executor::Executor;
use crate::flight::Flight;
use crate::input::Violations;
use crate::registry::Registered;
use crate::sandbox::Level;

/// The terms under which a call runs.
pub(crate) struct Terms {
    pub(crate) clocks: Clocks,
    pub(crate) retry: RetryPolicy,
    pub(crate) level: Level,
    /// The confinement of its processes; the executor's own if neither call nor tool says anything.
    pub(crate) confinement: Option<Arc<Confinement>>,
}

impl Executor {
    /// Settles the terms of a call: its timeouts, its retries, and where its processes run.
    pub(crate) fn terms(&self, call: &Call, flight: &Flight, tool: &Registered) -> Result<Terms, CallError> {
        let (engine, options, spec) = (&*self.inner, &call.options, &tool.spec);
        let zero = [
            ("timeout", options.timeout),
            ("queue_timeout", options.queue_timeout),
            ("deadline", options.deadline),
            ("silence", options.silence),
        ];
        let zero = zero.into_iter().filter(|(_, clock)| *clock == Some(Duration::ZERO)).map(|(name, _)| name);
        if let Some(name) = zero.chain(options.limits.zeroes()).next() {
            return Err(Violations::one("", format!("the option `{name}` is 0, so nothing could ever run")).into());
        }
        if options.read_only && !spec.annotations.read_only {
            let message = format!("`{}` may change something, and this call may only read", tool.name);
            return Err(CallError::new(Code::PermissionDenied, message)
                .suggest("call it by itself, so that it is judged and shown on its own"));
        }
        let level = options.isolation.unwrap_or(engine.isolation);
        if !level.is_at_least(engine.isolation) {
            return Err(CallError::new(
                Code::PermissionDenied,
                format!("the isolation level `{level}` is weaker than this executor's `{}`", engine.isolation),
            )
            .suggest("leave the isolation level to the executor"));
        }
        if let Some(network) = options.network.as_ref().filter(|asked| !asked.is_within(&engine.confinement.network)) {
            let message =
                format!("the network `{network}` is wider than this executor's, `{}`", engine.confinement.network);
            return Err(CallError::new(Code::PermissionDenied, message).suggest("leave the network to the executor"));
        }
        self.check_parent(&call.caller)?;
        let learnt = engine.timings.as_ref().and_then(|timings| timings.timeout(&tool.name));
        let mut retry = spec.retry.unwrap_or(engine.retry);
        retry.retries = options.retries.or(spec.retries).unwrap_or(retry.retries);
        retry.backoff = options.backoff.or(spec.backoff).unwrap_or(retry.backoff);
        if let Some(delay) = options.retry_delay.or(spec.retry_delay) {
            let delay = delay.min(TIMEOUT_MAX);
            // The cap must not shorten the first delay that was asked for.
            (retry.base, retry.cap) = (delay, retry.cap.max(delay));
        }
        Ok(Terms {
            clocks: Clocks::new(options, spec, &engine.clocks, learnt, flight.opened),
            retry,
            level,
            confinement: self.confinement(call, tool)?,
        })
    }

    fn confinement(&self, call: &Call, tool: &Registered) -> Result<Option<Arc<Confinement>>, CallError> {
        let (own, options) = (&self.inner.confinement, &call.options);
        let asks_for_nothing = options.network.is_none() && options.limits == ResourceLimits::NONE;
        if asks_for_nothing && self.has_usual_limits(&call.caller, tool) {
            return Ok(None);
        }
        let limits = self.limits_of_call(&call.caller, tool, &options.limits)?;
        let network = options.network.clone().unwrap_or_else(|| own.network.clone());
        Ok(Some(Arc::new(Confinement { network, limits, ..Confinement::clone(own) })))
    }
}
