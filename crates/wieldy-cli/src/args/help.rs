//! The longer texts of `--help`.

pub(super) const CONFIGURATION_HELP: &str = "\
Example:
  wieldy call List path=.

Configuration:
  One file is read, the first of:
  --config FILE, $WIELDY_CONFIG, ./wieldy.toml (after `wieldy trust`), ~/.config/wieldy/wieldy.toml.
  Every key can be set by an environment variable, and by --set:
  `limits.queue-timeout` is WIELDY_LIMITS_QUEUE_TIMEOUT.

Tools of your own:
  The manifests in `tools.manifests` are read, then ./.wieldy/tools (after `wieldy trust`), then
  ~/.config/wieldy/tools.
  Where two tools have the same name, the first one counts.

Exit codes:
  0 success                                 4 denied, or confirmation missing
  1 the tool failed                         5 timeout
  2 wrong usage or configuration            6 cancelled
  3 unknown tool or invalid arguments       7 sandbox, store or transport failed";

pub(super) const HISTORY_HELP: &str = "\
Examples:
  wieldy history --tool Bash --since 7d
  wieldy history stats --by tool,day

Times:
  2026-11-16             the beginning of that day, here
  2026-11-16T08:30:00Z   that moment
  30m, 2h, 7d, 4w        so long ago

Statuses:
  success, failed, timeout, cancelled, permission_denied, validation_error, requires_confirmation;
  of calls that are not over: pending, running, input_required";

pub(super) const IMPORT_HELP: &str = "\
Example:
  wieldy mcp import ~/.cursor/mcp.json --print

Files that are understood:
  `mcpServers` of Claude, Cursor, Windsurf, Cline and Gemini; `servers` and `mcp.servers` of VS Code;
  `context_servers` of Zed; `mcp` of opencode; `mcp_servers` of Codex (TOML).
They are written to --config FILE, or to ./wieldy.toml. Values that look like secrets go to files of their own in the
state folder, which the configuration then names. To follow such a file instead of copying it, name it in `mcp.files`.";

pub(super) const LOGIN_HELP: &str = "\
Example:
  wieldy mcp login tracker

The answer comes to a port of this machine. Where the browser runs on another one, the page that it is sent to in the end does
not open; with --paste, its address is what this command reads. The login is kept in the state folder, in a file that only
you can read, and is renewed by itself. How it is made can be said by `oauth` in the section of the server.";

pub(super) const RUN_HELP: &str = "\
Examples:
  wieldy run -- ls -la
  wieldy run --memory 512 --timeout 10m -- sh -c 'echo $HOME'

Where standard input, output and error are a terminal, the program gets one too, and keys such as Ctrl-C go to it.
Otherwise all three are pipes. The call is recorded as one of the tool `Run`.

Exit codes:
  the program's own, or 128 + N where signal N ended it; else
  124 timeout                               127 the program is not there
  125 wieldy could not run it               130 cancelled
  126 the program cannot be executed        141 the reader of standard output has gone";

pub(super) const ARGUMENTS_HELP: &str = "\
Examples:
  wieldy call Search pattern=TODO path=.
  wieldy call Bash command='ls | wc -l' --timeout 10s --json

Arguments:
  key=value   the value is a text; where the tool wants a number, a text that reads as one will do
  key:=json   the value is JSON
  --args      the whole object: as JSON, from a file with @FILE, or from standard input with -
Where both are given, key=value and key:=json replace the same key of --args.
A key that is given twice is an error.";

pub(super) const TRUST_HELP: &str = "\
A wieldy.toml and the files of .wieldy/tools that are in a folder came with it, from whoever made it. Until you trust them,
tools of .wieldy/tools are left out, and wieldy.toml may only set timeouts of tools, lower limits, and hide and protect
more. Trust holds for the files as they are now: one that changes has to be trusted again. It is kept in
~/.config/wieldy/trust. --config FILE, $WIELDY_CONFIG, ~/.config/wieldy, --set and the environment need no trust.

Examples:
  wieldy trust            show what this folder's configuration would do, and ask
  wieldy trust --revoke   trust nothing here any more";
