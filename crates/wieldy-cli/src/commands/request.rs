//! The parts that `call`, `batch` and `run` share: the caller and the options of a call.

use std::sync::Arc;

use wieldy::{Caller, Held, Level, Options, ResourceLimits};

use crate::account;
use crate::args::RunArgs;
use crate::config::Config;
use crate::output::Printer;

/// Returns the local user as the caller, under the name of an agent and with only the named scopes and permissions.
pub(crate) fn caller(run: &RunArgs) -> Arc<Caller> {
    let held = |names: &[String]| if names.is_empty() { Held::All } else { Held::only(names) };
    Arc::new(Caller {
        agent: run.agent.clone(),
        user: Some(run.user.clone().unwrap_or_else(account::name)),
        tenant: run.tenant.clone(),
        session: run.session.clone(),
        plan: run.plan.clone(),
        scopes: held(&run.scope),
        permissions: held(&run.permission),
        ..Caller::local()
    })
}

/// Returns the options of each call.
pub(crate) fn options(run: &RunArgs) -> Options {
    Options {
        timeout: run.timeout,
        queue_timeout: run.queue_timeout,
        deadline: run.deadline,
        silence: run.silence,
        retries: run.retries,
        retry_delay: run.retry_delay,
        backoff: run.retry_backoff,
        priority: run.priority,
        // The executor of this command already has these limits; as options they also replace the limits of the tool's
        // definition, and are refused above a maximum.
        limits: ResourceLimits {
            cpu_millicores: run.cpu,
            memory_bytes: run.memory.map(|megabytes| megabytes * 1024 * 1024),
            ..ResourceLimits::default()
        },
        network: run.network.clone(),
        labels: run.label.clone(),
        ..Options::default()
    }
}

/// Warns if programs are not isolated: that must be requested, and is never silent.
pub(crate) fn warn_of_no_isolation(config: &Config, printer: &Printer) {
    if config.isolation == Level::None {
        printer.tell("warning: isolation `none` isolates nothing: programs run with your own rights");
    }
}

/// Notes the limits of a session on the command line: only its records outlive the command.
pub(crate) fn tell_of_session(run: &RunArgs, printer: &Printer) {
    if run.session.is_some() {
        printer.tell(
            "note: `--session` marks the records; the session's `/tmp`, `$HOME` and read marks end with this command",
        );
    }
}
