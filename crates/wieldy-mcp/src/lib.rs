//! MCP in both directions: [`server`] offers an executor's tools to MCP clients, [`client`] turns the tools of other
//! MCP servers into tools of an executor. [`mod@convert`] converts between MCP's types and ours.
//!
//! | modules of `server` | do |
//! | --- | --- |
//! | `stdio`, `http_endpoint` | transports: one message per line; streamable HTTP with sessions |
//! | `handler`, `call`, `request_options`, `progress`, `follow` | every MCP request (of tasks too: results are in core's `task`, over a restart in the store's table `answers`); `tools/call`; its options in `_meta`; its progress; one running call until its response |
//! | `http_tools_call`, `session`, `stream` | a call over HTTP without the SDK; HTTP sessions; resumable SSE streams |
//! | `peer`, `questions`, `pending`, `batch`, `scan` | the client of a call; questions to its user; pending requests; JSON-RPC batches; messages that are too long |
//! | `catalogue`, `meta`, `batch_tool`, `words`, `resources` | tool lists; the tools that find and call tools; the tool `batch`; the search for tools; artifacts as resources |
//!
//! | modules of `client` | do |
//! | --- | --- |
//! | `upstreams`, `upstream`, `upstream_session` | all servers; one server with start, retry and pinning; one MCP session |
//! | `settings`, `import`, `pins`, `tool_definition`, `tool` | an operator's settings; lists of other clients; agreed definitions; tools of a server |
//! | `stdio_process`, `http_setup`, `http_transport`, `http_call` | transports: a program in a sandbox; streamable HTTP; `tools/call` without the SDK |
//! | `http_request`, `http_pool`, `sse`, `header_params`, `answer` | one bounded request; the connection pool; events; arguments in headers; responses |
//! | `router`, `upstream_task`, `failure`, `login` | messages before the SDK; tasks of a server; failures by kind; OAuth |
//!
//! If a server dies during a call: `upstream_session` (`await_answer`), `failure` (`error_of_sent_call`), and `upstream`
//! (`run`) for its restart.

pub mod client;
mod convert;
pub mod server;
