//! Failures of a server, by kind: unreachable, protocol error, configuration, login. A tool that reports its own
//! failure is none of these.

use std::sync::Arc;
use std::time::Duration;

use rmcp::ErrorData;
use rmcp::model::ErrorCode;
use rmcp::service::{ClientInitializeError, ServiceError};
use rmcp::transport::streamable_http_client::StreamableHttpError;
use serde_json::Value;
use wieldy_core::{CallError, Code, Provider, RunError};

/// The reason why a server gave no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The connection could not be made, or it broke.
    #[error("{0}")]
    Transport(Arc<str>),
    /// The request never reached the server.
    #[error("{0}")]
    Unreached(Arc<str>),
    /// The request never reached the server, and none will over this session: the server forgot the session and refuses
    /// to open another one in the same way.
    #[error("it does not know the session any more and opens no new one: {0}")]
    Forgotten(Arc<str>),
    /// The server answered that it is busy.
    #[error("it is busy: {}", http_status(*status))]
    Busy {
        /// The HTTP status.
        status: u16,
        /// The pause that the server asked for.
        retry_after: Option<Duration>,
    },
    /// The server refused, or sent something that is not valid MCP.
    #[error("{message}")]
    Protocol {
        /// The server's message.
        message: Arc<str>,
        /// The JSON-RPC error code, if there is one.
        code: Option<i32>,
        /// The data that the server sent with its error.
        data: Option<Arc<Value>>,
    },
    /// A setting or a file on our side is missing or wrong.
    #[error("{0}")]
    Configuration(Arc<str>),
    /// The server answered with a redirect that is not followed. It may have carried out the request first.
    #[error("{0}")]
    Redirected(Arc<str>),
    /// The server asks for a login.
    #[error("it wants a login")]
    NeedsLogin,
    /// The server refuses access for this login.
    #[error("it refuses access")]
    Forbidden {
        /// The scopes that the server says a login needs.
        scope: Option<Arc<str>>,
    },
}

/// The error text for a closed connection.
pub(super) const CLOSED: &str = "the connection is closed";
/// Marks an error response that we made ourselves because the server's own was unusable.
const OURS: &str = "wieldy/transport";

impl Failure {
    pub(crate) fn transport(why: impl Into<Arc<str>>) -> Self {
        Self::Transport(why.into())
    }

    pub(crate) fn unreached(why: impl Into<Arc<str>>) -> Self {
        Self::Unreached(why.into())
    }

    pub(crate) fn protocol(why: impl AsRef<str>) -> Self {
        Self::Protocol { message: first_of(why.as_ref()).into(), code: None, data: None }
    }

    /// Returns the error of a call that needed the server `name`. `patience` is the pause before the server is tried
    /// again.
    pub(crate) fn error(&self, name: &str, patience: Option<Duration>) -> CallError {
        let error = match self {
            Self::Transport(_) | Self::Unreached(_) | Self::Forgotten(_) | Self::Busy { .. } => {
                CallError::new(Code::TransportFailed, format!("the MCP server `{name}` cannot be reached: {self}"))
                    .suggest(format!("`wieldy mcp test {name}` shows details"))
            }
            Self::Protocol { message, code, data } => {
                let error =
                    CallError::new(Code::UpstreamProtocolError, format!("the MCP server `{name}` answered: {message}"));
                let error =
                    error.suggest("check the arguments against the tool's schema; if they fit, the server is at fault");
                let error = match code {
                    Some(code) => error.detail("mcp_code", *code),
                    None => error,
                };
                match data {
                    Some(data) => error.server_data(&Provider::Mcp(name.into()).to_string(), Value::clone(data)),
                    None => error,
                }
            }
            Self::Configuration(why) | Self::Redirected(why) => {
                CallError::new(Code::Configuration, format!("the MCP server `{name}` cannot be used: {why}"))
                    .suggest(format!("correct the section `mcp.servers.{name}` of the configuration"))
            }
            Self::NeedsLogin => CallError::new(Code::Configuration, format!("the MCP server `{name}` wants a login"))
                .suggest(format!("`wieldy mcp login {name}`, or give it a token by `headers`")),
            Self::Forbidden { scope } => {
                let error = CallError::new(Code::Configuration, format!("the MCP server `{name}` refuses access"));
                match scope {
                    Some(scope) => error
                        .suggest(format!(
                            "add the scopes in `details.scope` to `mcp.servers.{name}.oauth.scopes`, then run \
                             `wieldy mcp login {name}`"
                        ))
                        .detail("scope", &**scope),
                    None => error.suggest("the operator of the server must give more rights to this token or login"),
                }
            }
        };
        let error = error.detail("server", name);
        match patience.or(self.retry_after()) {
            Some(patience) => error.after(patience),
            None => error,
        }
    }

    /// Returns true if only the operator can fix this, so that a retry is useless.
    pub(crate) fn is_for_the_operator(&self) -> bool {
        matches!(self, Self::NeedsLogin | Self::Configuration(_) | Self::Redirected(_))
    }

    /// Returns true if the server no longer knows our session.
    pub(crate) fn ends_the_connection(&self) -> bool {
        let unknown = Some(ErrorCode::UNSUPPORTED_PROTOCOL_VERSION.0);
        matches!(self, Self::Forgotten(_)) || matches!(self, Self::Protocol { code, .. } if *code == unknown)
    }

    /// Returns the pause that the server asked for.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Returns the error of a call that was sent. It says that the call had no effect only if the server never got it
    /// or refused it.
    pub(crate) fn error_of_sent_call(&self, name: &str) -> RunError {
        let refused = [
            ErrorCode::METHOD_NOT_FOUND,
            ErrorCode::INVALID_PARAMS,
            ErrorCode::INVALID_REQUEST,
            ErrorCode::UNSUPPORTED_PROTOCOL_VERSION,
        ];
        let had_no_effect = match self {
            Self::Unreached(_) | Self::Forgotten(_) => true,
            Self::NeedsLogin | Self::Forbidden { .. } | Self::Configuration(_) => true,
            // 429: rate limits are checked before a request is run. Another busy status may come after it has begun.
            Self::Busy { status, .. } => *status == 429,
            Self::Protocol { code, .. } => code.is_some_and(|code| refused.iter().any(|known| known.0 == code)),
            Self::Transport(_) | Self::Redirected(_) => false,
        };
        let error = RunError::from(self.error(name, None));
        if had_no_effect { error.before_effect() } else { error }
    }

    /// Returns the error of a call that the server made a task of. The task may have had an effect, even if it cannot
    /// be found later.
    pub(crate) fn of_a_task(&self, name: &str) -> RunError {
        self.error(name, None).into()
    }
}

/// Formats an HTTP status with its reason phrase.
pub(super) fn http_status(status: u16) -> String {
    let reason = http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
    reason.map_or_else(|| format!("HTTP {status}"), |reason| format!("HTTP {status} ({reason})"))
}

/// Returns the error response for a request whose real response is unusable.
pub(super) fn broken_answer(why: &'static str) -> ErrorData {
    ErrorData::internal_error(why, Some(OURS.into()))
}

impl From<ErrorData> for Failure {
    fn from(error: ErrorData) -> Self {
        if error.data.as_ref().is_some_and(|data| data == OURS) {
            return Self::Transport(error.message.as_ref().into());
        }
        let data = error.data.filter(|data| !data.is_null()).map(|data| Arc::new(bounded(data)));
        Self::Protocol { message: first_of(&error.message).into(), code: Some(error.code.0), data }
    }
}

/// Replaces error data that are too large to keep. The engine keeps less than this of them.
fn bounded(data: Value) -> Value {
    const BYTES_MAX: usize = 256 * 1024;
    let bytes = data.to_string().len();
    if bytes <= BYTES_MAX { data } else { format!("{bytes} bytes of data, too large to be kept").into() }
}

/// Returns as much of a server's text as fits into an error or a progress line.
pub(super) fn first_of(text: &str) -> &str {
    const BYTES_MAX: usize = 500;
    &text[..text.floor_char_boundary(BYTES_MAX)]
}

impl From<ServiceError> for Failure {
    fn from(error: ServiceError) -> Self {
        match error {
            ServiceError::McpError(error) => error.into(),
            ServiceError::TransportSend(error) => Self::of_transport(error.error.as_ref()),
            ServiceError::TransportClosed => Self::transport(CLOSED),
            ServiceError::UnexpectedResponse => Self::protocol("a response of the wrong type"),
            other => Self::transport(other.to_string()),
        }
    }
}

impl From<ClientInitializeError> for Failure {
    fn from(error: ClientInitializeError) -> Self {
        if error.is_authorization_required() {
            return Self::NeedsLogin;
        }
        match error {
            ClientInitializeError::TransportError { error, .. } => Self::of_transport(error.error.as_ref()),
            ClientInitializeError::ConnectionClosed(_) => Self::transport("it closed the connection at once"),
            ClientInitializeError::JsonRpcError(error) => error.into(),
            ClientInitializeError::LegacyFallbackFailed { fallback, .. } => (*fallback).into(),
            ClientInitializeError::NoCompatibleProtocolVersion { server_supported, .. } => {
                let known: Vec<String> = server_supported.iter().map(ToString::to_string).collect();
                Self::protocol(format!(
                    "it speaks only the MCP revision {}, which wieldy does not know",
                    known.join(", ")
                ))
            }
            other => Self::protocol(other.to_string()),
        }
    }
}

impl From<&StreamableHttpError<Self>> for Failure {
    fn from(error: &StreamableHttpError<Self>) -> Self {
        match error {
            StreamableHttpError::Client(failure) => failure.clone(),
            StreamableHttpError::AuthRequired(_) => Self::NeedsLogin,
            StreamableHttpError::InsufficientScope(refused) => {
                Self::Forbidden { scope: refused.required_scope.as_deref().map(Into::into) }
            }
            // The server refused the request because of the session, so it did nothing.
            StreamableHttpError::SessionExpired => Self::unreached("it does not know the session any more"),
            StreamableHttpError::ReinitializationFailed(error) => Self::Forgotten(first_of(&error.message).into()),
            other => Self::transport(other.to_string()),
        }
    }
}

impl Failure {
    /// Finds the error of our own HTTP client in the chain. Without one, uses the root cause.
    fn of_transport(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut current = error;
        loop {
            if let Some(error) = current.downcast_ref::<StreamableHttpError<Self>>() {
                return error.into();
            }
            match current.source() {
                Some(source) => current = source,
                None => return Self::transport(current.to_string()),
            }
        }
    }
}
