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

pub(super) const CODE_HELP: &str = "\
Examples:
  wieldy code search 'parse the configuration'
  wieldy code find Config::load
  wieldy code refs Config --kind type
  wieldy code map src --max-tokens 2000";

pub(super) const HISTORY_HELP: &str = "\
Examples:
  wieldy history --tool Bash --since 7d
  wieldy history stats --by tool,day

Times:
  2026-11-16             the beginning of that day, here
  2026-11-16T08:30:00Z   that moment
  30m, 2h, 7d, 4w        this long ago

Statuses:
  success, failed, timeout, cancelled, permission_denied, validation_error, requires_confirmation;
  of open calls: pending, running, input_required";

pub(super) const IMPORT_HELP: &str = "\
Example:
  wieldy mcp import ~/.cursor/mcp.json --print

Supported files:
  `mcpServers` of Claude, Cursor, Windsurf, Cline and Gemini; `servers` and `mcp.servers` of VS Code;
  `context_servers` of Zed; `mcp` of opencode; `mcp_servers` of Codex (TOML).
The servers are written to --config FILE, or to ./wieldy.toml. Values that look like secrets go to files of their own in
the state folder, which the configuration then names. To follow such a file instead of copying it, name it in
`mcp.files`.";

pub(super) const LOGIN_HELP: &str = "\
Example:
  wieldy mcp login tracker

The answer comes to a port of this machine. If the browser runs on another machine, its last page does not open; with
--paste, this command reads the address of that page instead. The login is stored in the state folder, in a file that
only you can read, and is renewed automatically. `oauth` in the section of the server has the settings of the login.";

pub(super) const RUN_HELP: &str = "\
Examples:
  wieldy run -- ls -la
  wieldy run --memory 512 --timeout 10m -- sh -c 'echo $HOME'

If standard input, output and error are a terminal, the program gets one too, and keys such as Ctrl-C go to it.
Otherwise all three are pipes. The call is recorded as one of the tool `Run`.

Exit codes:
  the program's own, or 128 + N if signal N killed it; else
  124 timeout                               127 the program is not there
  125 wieldy could not run it               130 cancelled
  126 the program cannot be executed        141 the reader of standard output has gone";

pub(super) const ARGUMENTS_HELP: &str = "\
Examples:
  wieldy call Search pattern=TODO path=.
  wieldy call Bash command='ls | wc -l' --timeout 10s --json

Arguments:
  key=value   the value is a text; if the tool expects a number, the text of a number is accepted
  key:=json   the value is JSON
  --args      the whole object: as JSON, from a file with @FILE, or from standard input with -
If both are given, key=value and key:=json replace the same key of --args.
A key that is given twice is an error.";

pub(super) const TRUST_HELP: &str = "\
The wieldy.toml and the files of .wieldy/tools in a folder come from its author. Until you trust them, tools of
.wieldy/tools are left out, and wieldy.toml may only set timeouts of tools, lower limits, and hide and protect more
files. Trust is bound to the content: a changed file has to be trusted again. It is stored in
~/.config/wieldy/trust. --config FILE, $WIELDY_CONFIG, ~/.config/wieldy, --set and the environment need no trust.

Examples:
  wieldy trust            show what this folder's configuration would do, and ask
  wieldy trust --revoke   revoke the trust in this folder";
