//! What `call` and `batch` have in common: on whose behalf, and how.

use std::sync::Arc;

use wieldy::{Caller, Held, Level, Options, ResourceLimits};

use crate::args::RunArgs;
use crate::config::Config;
use crate::output::Printer;

/// The person at this machine, under the name of an agent and with only the scopes and permissions that are named.
pub(crate) fn caller(run: &RunArgs) -> Arc<Caller> {
    let held = |names: &[String]| if names.is_empty() { Held::All } else { Held::only(names) };
    Arc::new(Caller {
        agent: run.agent.clone(),
        session: run.session.clone(),
        plan: run.plan.clone(),
        scopes: held(&run.scope),
        permissions: held(&run.permission),
        ..Caller::local()
    })
}

/// How each call is run.
pub(crate) fn options(run: &RunArgs) -> Options {
    Options {
        timeout: run.timeout,
        queue_timeout: run.queue_timeout,
        deadline: run.deadline,
        silence: run.silence,
        retries: run.retries,
        priority: run.priority,
        // They are the executor's own for this command; here they also hold a tool to less than it has by its manifest.
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

/// Says so where programs are not isolated: it must be asked for, and is never silent.
pub(crate) fn warn_of_no_isolation(config: &Config, printer: &Printer) {
    if config.isolation == Level::None {
        printer.tell("warning: isolation `none` isolates nothing: programs run with your own rights");
    }
}

/// Says what a session on the command line does not do: nothing of it outlives the command but its records.
pub(crate) fn tell_of_session(run: &RunArgs, printer: &Printer) {
    if run.session.is_some() {
        printer.tell(
            "note: `--session` marks the records; the session's `/tmp`, `$HOME` and read marks end with this command",
        );
    }
}
