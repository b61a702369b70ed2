//! What can go wrong with a server, told apart: it cannot be reached, it breaks the protocol, it wants a login. That a tool says
//! that it failed is none of these.

use std::sync::Arc;
use std::time::Duration;

use rmcp::ErrorData;
use rmcp::model::ErrorCode;
use rmcp::service::{ClientInitializeError, ServiceError};
use wieldy_core::{CallError, Code, RunError};

/// Why a server gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The connection could not be made, or broke.
    #[error("{0}")]
    Transport(Arc<str>),
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
    /// It wants to know who asks.
    #[error("it wants a login")]
    NeedsLogin,
}

impl Failure {
    pub(crate) fn transport(why: impl Into<Arc<str>>) -> Self {
        Self::Transport(why.into())
    }

    pub(crate) fn protocol(why: impl Into<Arc<str>>) -> Self {
        Self::Protocol { message: why.into(), code: None }
    }

    /// It was asked who it is, and answered something else.
    pub(crate) fn no_introduction() -> Self {
        Self::protocol("something that is no introduction")
    }

    /// What a call is told that needed the server `name`; `patience` is how long it is left alone.
    pub(crate) fn error(&self, name: &str, patience: Option<Duration>) -> CallError {
        let error = match self {
            Self::Transport(why) => {
                CallError::new(Code::TransportFailed, format!("the MCP server `{name}` cannot be reached: {why}"))
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
            Self::Configuration(why) => {
                CallError::new(Code::Configuration, format!("the MCP server `{name}` cannot be used: {why}"))
                    .suggest(format!("put the section `mcp.servers.{name}` of the configuration right"))
            }
            Self::NeedsLogin => CallError::new(Code::Configuration, format!("the MCP server `{name}` wants a login"))
                .suggest(format!("`wieldy mcp login {name}`, or give it a token by `bearer` or `headers`")),
        };
        let error = error.detail("server", name);
        match patience {
            Some(patience) => error.after(patience),
            None => error,
        }
    }

    /// The same for a call that was sent: whether it had its effect is known only where the server refused it.
    pub(crate) fn of_a_call(&self, name: &str) -> RunError {
        let refused = [ErrorCode::METHOD_NOT_FOUND, ErrorCode::INVALID_PARAMS, ErrorCode::INVALID_REQUEST];
        let is_refused =
            matches!(self, Self::Protocol { code: Some(code), .. } if refused.iter().any(|known| known.0 == *code));
        let error = RunError::from(self.error(name, None));
        if is_refused || *self == Self::NeedsLogin { error.before_effect() } else { error }
    }
}

impl From<ErrorData> for Failure {
    fn from(error: ErrorData) -> Self {
        Self::Protocol { message: error.message.as_ref().into(), code: Some(error.code.0) }
    }
}

impl From<ServiceError> for Failure {
    fn from(error: ServiceError) -> Self {
        match error {
            ServiceError::McpError(error) => error.into(),
            ServiceError::TransportSend(error) => Self::of_transport(error.error.as_ref()),
            ServiceError::TransportClosed => Self::transport("the connection is closed"),
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
            ClientInitializeError::ExpectedInitResult(_) => Self::no_introduction(),
            other => Self::protocol(other.to_string()),
        }
    }
}

impl Failure {
    /// The innermost reason is the one that says something.
    fn of_transport(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut current = error;
        loop {
            if current.is::<rmcp::transport::streamable_http_client::AuthRequiredError>() {
                return Self::NeedsLogin;
            }
            match current.source() {
                Some(source) => current = source,
                None => return Self::transport(current.to_string()),
            }
        }
    }
}
