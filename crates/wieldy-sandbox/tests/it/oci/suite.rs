//! Runs the suite of all levels at those with an OCI runtime: makes their backends, and lists the cases that they
//! cannot pass, with reasons.

use std::path::Path;
use std::sync::Arc;

use wieldy_core::{Level, Sandbox};
use wieldy_sandbox::{Oci, OciOptions};

/// Returns a backend of this level with this state folder.
pub(crate) fn backend(level: Level, state: &Path) -> Arc<dyn Sandbox> {
    Arc::new(Oci::new(OciOptions::new(level, state.to_owned())))
}

/// Returns the reason why a level cannot pass a case, if it cannot.
pub(crate) fn exception(level: Level, case: &str) -> Option<&'static str> {
    let all = BOTH.iter().chain(match level {
        Level::Runc => RUNC,
        Level::Gvisor => GVISOR,
        _ => return None,
    });
    all.copied().find_map(|(known, reason)| (known == case).then_some(reason))
}

type Exception = (&'static str, &'static str);

const BOTH: &[Exception] = &[
    ("orphans_do_not_pile_up_as_zombies_while_the_command_runs", PARENT),
    ("a_supervisor_that_was_stopped_still_does_its_work", PARENT),
    ("a_stopped_supervisor_that_is_left_behind_still_does_its_work", PARENT),
    (
        "when_the_embedding_process_is_killed_nothing_of_its_commands_is_left",
        "places in the workspace stay until the next executor sweeps; `leftovers_of_a_killed_executor_are_swept` tries it",
    ),
    (
        "without_descriptors_a_command_is_refused_and_with_them_it_runs_again",
        "a container takes more descriptors than the case has in all",
    ),
];

const PARENT: &str = "what a command's parent is lies outside of its container, where it can do nothing to it";

const RUNC: &[Exception] = &[
    ("unread_input_is_no_error", "runc passes on the signal that it gets for writing to a closed pipe"),
    ("a_file_that_is_no_program_is_refused", "runc has no words for it, and ends with code 1"),
    (
        "a_program_in_the_workspace_is_not_found_by_its_bare_name",
        "runc starts nothing by a `PATH` with a folder that is not absolute and has the program",
    ),
];

const GVISOR: &[Exception] = &[
    (
        "the_peak_of_memory_does_not_count_the_embedding_process",
        "what gVisor's kernel takes is counted with what the command does",
    ),
    (
        "a_command_goes_before_the_executor_when_memory_runs_out",
        "its kernel says nothing of what the machine's has noted for it as a whole",
    ),
    (
        "a_program_in_the_workspace_is_not_found_by_its_bare_name",
        "it is not; but the `ls` that is found instead asks gVisor's kernel for what that refuses",
    ),
];
