//! Errors of queries to a PostgreSQL server.

use std::time::Duration;

use tokio_postgres::error::SqlState;

use super::server::error_text;
use crate::error::StoreError;

/// The reason why there is no result.
pub(super) enum QueryError {
    Server(tokio_postgres::Error),
    Timeout(Duration),
    Disconnected(String),
}

impl QueryError {
    pub(super) fn into_error(self, what: &str) -> StoreError {
        let error = match self {
            Self::Server(error) => error,
            Self::Timeout(timeout) => {
                let seconds = timeout.as_secs();
                return StoreError::Unavailable(format!("{what}: the server did not answer within {seconds} s"));
            }
            Self::Disconnected(why) => return StoreError::Unavailable(format!("{what}: {why}")),
        };
        let code = error.code().cloned();
        let message = format!("{what}: {}", error_text(error));
        let hopeless = [
            SqlState::UNDEFINED_TABLE,
            SqlState::UNDEFINED_COLUMN,
            SqlState::UNIQUE_VIOLATION,
            SqlState::DATA_CORRUPTED,
            SqlState::INDEX_CORRUPTED,
        ];
        match code {
            Some(code) if hopeless.contains(&code) => StoreError::Damaged(message),
            _ => StoreError::Unavailable(message),
        }
    }
}
