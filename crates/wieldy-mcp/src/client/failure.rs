//! What can go wrong with a server, told apart: it cannot be reached, it breaks the protocol, it wants a login. That a tool says
//! that it failed is none of these.

use std::sync::Arc;
use std::time::Duration;

use rmcp::ErrorData;
use rmcp::model::ErrorCode;
use rmcp::service::{ClientInitializeError, ServiceError};
use rmcp::transport::streamable_http_client::StreamableHttpError;
use wieldy_core::{CallError, Code, RunError};

/// Why a server gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The connection could not be made, or broke.
    #[error("{0}")]
    Transport(Arc<str>),
    /// It never got what was meant for it.
    #[error("{0}")]
    Unreached(Arc<str>),
    /// The same, and it never will: it has forgotten us, and does not let us introduce ourselves again as we did.
    #[error("it has forgotten the session and opens no other: {0}")]
    Forgotten(Arc<str>),
    /// It is there, but does not serve us now.
    #[error("it is busy: {}", http_status(*status))]
    Busy {
        /// The status of HTTP that it answered with.
        status: u16,
        /// How long it asked to be left alone.
        retry_after: Option<Duration>,
    },
    /// It said something that MCP does not know, or refused.
    #[error("{message}")]
    Protocol {
        /// What it said.
        message: Arc<str>,
        /// MCP's code, where it gave one.
        code: Option<i32>,
    },
    /// Something that it needs is missing here.
    #[error("{0}")]
    Configuration(Arc<str>),
    /// It answered by sending us elsewhere, which is not followed: it may have done first what it was asked.
    #[error("{0}")]
    Redirected(Arc<str>),
    /// It wants to know who asks.
    #[error("it wants a login")]
    NeedsLogin,
    /// It knows who asks, and refuses.
    #[error("it refuses access")]
    Forbidden {
        /// What it says that a login would have to be for.
        scope: Option<Arc<str>>,
    },
}

/// What is told of a connection that is over.
pub(super) const CLOSED: &str = "the connection is closed";
/// Marks an error that did not come from the server but was made here, because of what the server did.
const OURS: &str = "wieldy/transport";

impl Failure {
    pub(crate) fn transport(why: impl Into<Arc<str>>) -> Self {
        Self::Transport(why.into())
    }

    pub(crate) fn unreached(why: impl Into<Arc<str>>) -> Self {
        Self::Unreached(why.into())
    }

    pub(crate) fn protocol(why: impl AsRef<str>) -> Self {
        Self::Protocol { message: first_of(why.as_ref()).into(), code: None }
    }

    /// What a call is told that needed the server `name`; `patience` is how long it is left alone.
    pub(crate) fn error(&self, name: &str, patience: Option<Duration>) -> CallError {
        let error = match self {
            Self::Transport(_) | Self::Unreached(_) | Self::Forgotten(_) | Self::Busy { .. } => {
                CallError::new(Code::TransportFailed, format!("the MCP server `{name}` cannot be reached: {self}"))
                    .suggest(format!("`wieldy mcp test {name}` tells more"))
            }
            Self::Protocol { message, code } => {
                let error =
                    CallError::new(Code::UpstreamProtocolError, format!("the MCP server `{name}` answered: {message}"));
                let error =
                    error.suggest("check the arguments against the tool's schema; if they fit, the server is at fault");
                match code {
                    Some(code) => error.detail("mcp_code", *code),
                    None => error,
                }
            }
            Self::Configuration(why) | Self::Redirected(why) => {
                CallError::new(Code::Configuration, format!("the MCP server `{name}` cannot be used: {why}"))
                    .suggest(format!("put the section `mcp.servers.{name}` of the configuration right"))
            }
            Self::NeedsLogin => CallError::new(Code::Configuration, format!("the MCP server `{name}` wants a login"))
                .suggest(format!("`wieldy mcp login {name}`, or give it a token by `headers`")),
            Self::Forbidden { scope } => {
                let error = CallError::new(Code::Configuration, format!("the MCP server `{name}` refuses access"));
                match scope {
                    Some(scope) => error
                        .suggest(format!("`wieldy mcp login {name}` with these among the `scopes` of its `oauth`"))
                        .detail("scope", &**scope),
                    None => error.suggest("whoever runs the server has to allow what this token or login asks for"),
                }
            }
        };
        let error = error.detail("server", name);
        match patience.or(self.retry_after()) {
            Some(patience) => error.after(patience),
            None => error,
        }
    }

    /// Whether trying again is in vain until somebody has done something about it.
    pub(crate) fn is_for_the_operator(&self) -> bool {
        matches!(self, Self::NeedsLogin | Self::Configuration(_) | Self::Redirected(_))
    }

    /// Whether the server does not know us any more as we introduced ourselves.
    pub(crate) fn ends_the_connection(&self) -> bool {
        let unknown = Some(ErrorCode::UNSUPPORTED_PROTOCOL_VERSION.0);
        matches!(self, Self::Forgotten(_)) || matches!(self, Self::Protocol { code, .. } if *code == unknown)
    }

    /// How long the server asked to be left alone.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// The same for a call that was sent: whether it had its effect is known only where it never arrived, or was refused.
    pub(crate) fn of_a_call(&self, name: &str) -> RunError {
        let refused = [
            ErrorCode::METHOD_NOT_FOUND,
            ErrorCode::INVALID_PARAMS,
            ErrorCode::INVALID_REQUEST,
            ErrorCode::UNSUPPORTED_PROTOCOL_VERSION,
        ];
        let had_no_effect = match self {
            Self::Unreached(_) | Self::Forgotten(_) => true,
            Self::NeedsLogin | Self::Forbidden { .. } | Self::Configuration(_) => true,
            // Whoever counts requests does so before anything else; what else is busy may have begun.
            Self::Busy { status, .. } => *status == 429,
            Self::Protocol { code, .. } => code.is_some_and(|code| refused.iter().any(|known| known.0 == code)),
            Self::Transport(_) | Self::Redirected(_) => false,
        };
        let error = RunError::from(self.error(name, None));
        if had_no_effect { error.before_effect() } else { error }
    }

    /// The same for a call that the server made a task of: whatever is learnt of that later, it may have had its effect.
    pub(crate) fn of_a_task(&self, name: &str) -> RunError {
        self.error(name, None).into()
    }
}

/// A status of HTTP as people know it.
pub(super) fn http_status(status: u16) -> String {
    let reason = http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
    reason.map_or_else(|| format!("HTTP {status}"), |reason| format!("HTTP {status} ({reason})"))
}

/// The answer to a request whose real one cannot be had.
pub(super) fn broken_answer(why: &'static str) -> ErrorData {
    ErrorData::internal_error(why, Some(OURS.into()))
}

impl From<ErrorData> for Failure {
    fn from(error: ErrorData) -> Self {
        if error.data.as_ref().is_some_and(|data| data == OURS) {
            return Self::Transport(error.message.as_ref().into());
        }
        Self::Protocol { message: first_of(&error.message).into(), code: Some(error.code.0) }
    }
}

/// As much of what a server says as fits into an error or a line of progress.
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
            ServiceError::UnexpectedResponse => Self::protocol("something that is no answer to what it was asked"),
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
                Self::protocol(format!("it speaks only {} of MCP, which wieldy does not know", known.join(", ")))
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
            // It said so instead of doing anything.
            StreamableHttpError::SessionExpired => Self::unreached("it has forgotten the session"),
            StreamableHttpError::ReinitializationFailed(error) => Self::Forgotten(first_of(&error.message).into()),
            other => Self::transport(other.to_string()),
        }
    }
}

impl Failure {
    /// What our own client of HTTP says; otherwise the innermost reason, which is the one that says something.
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
