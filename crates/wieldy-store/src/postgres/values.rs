//! Conversion of values for the server, and back.

use std::error::Error;

use bytes::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use crate::database::{Row, Value};
use crate::error::StoreError;

/// The beginning of the server's time, the year 2000.
const EPOCH: i64 = 946_684_800_000_000;
/// The end of the server's time, by its own clock: the year 294277. Later times become infinity.
const TIME_END: i64 = 9_223_371_331_200_000_000;

/// A point in time, in microseconds since 1970. `i64::MAX` means never.
#[derive(Debug, Clone, Copy)]
pub(super) struct Time(pub(super) i64);

impl ToSql for Time {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        let micros = self.0.saturating_sub(EPOCH);
        let micros = if micros >= TIME_END { i64::MAX } else { micros };
        micros.to_sql(&Type::INT8, out)
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::TIMESTAMPTZ
    }

    to_sql_checked!();
}

impl ToSql for Value {
    fn to_sql(&self, kind: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self {
            Self::Null => Ok(IsNull::Yes),
            Self::Int(value) if *kind == Type::INT4 => i32::try_from(*value)?.to_sql(kind, out),
            Self::Int(value) => value.to_sql_checked(kind, out),
            Self::Real(value) => value.to_sql_checked(kind, out),
            // PostgreSQL's text has no NUL character. It is replaced in searches as well, so they find the stored text.
            Self::Text(value) => value.replace('\0', "\u{fffd}").to_sql_checked(kind, out),
            Self::Time(value) => Time(*value).to_sql_checked(kind, out),
            Self::Bytes(value) => value.to_sql_checked(kind, out),
        }
    }

    fn accepts(_: &Type) -> bool {
        true // each type checks itself
    }

    to_sql_checked!();
}

/// An integer of any size, or a point in time.
struct Int(i64);

impl FromSql<'_> for Int {
    fn from_sql(kind: &Type, raw: &[u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(match *kind {
            Type::INT2 => i16::from_sql(kind, raw)?.into(),
            Type::INT4 => i32::from_sql(kind, raw)?.into(),
            Type::TIMESTAMPTZ => match i64::from_sql(&Type::INT8, raw)? {
                i64::MAX => i64::MAX,
                micros => micros.saturating_add(EPOCH),
            },
            _ => i64::from_sql(kind, raw)?,
        }))
    }

    fn accepts(kind: &Type) -> bool {
        [Type::INT2, Type::INT4, Type::INT8, Type::TIMESTAMPTZ].contains(kind)
    }
}

impl Row for tokio_postgres::Row {
    fn int(&self, column: usize) -> Result<i64, StoreError> {
        self.try_get::<_, Int>(column).map(|value| value.0).map_err(unreadable)
    }

    fn int_or_none(&self, column: usize) -> Result<Option<i64>, StoreError> {
        self.try_get::<_, Option<Int>>(column).map(|value| value.map(|value| value.0)).map_err(unreadable)
    }

    fn real_or_none(&self, column: usize) -> Result<Option<f64>, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn text(&self, column: usize) -> Result<&str, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn text_or_none(&self, column: usize) -> Result<Option<&str>, StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn bytes(&self, column: usize) -> Result<&[u8], StoreError> {
        self.try_get(column).map_err(unreadable)
    }

    fn flag(&self, column: usize) -> Result<bool, StoreError> {
        self.try_get(column).map_err(unreadable)
    }
}

fn unreadable(error: tokio_postgres::Error) -> StoreError {
    StoreError::Damaged(format!("a row of the history is not readable: {}", super::server::error_text(error)))
}

/// Maximum number of bytes of a word, and of all words of a call.
const WORD_BYTES_MAX: usize = 512;
const WORDS_BYTES_MAX: usize = 256 * 1024;

/// Returns the words of a text: runs of letters and digits, in lower case.
pub(super) fn words(text: &str) -> impl Iterator<Item = String> {
    let text = &text[..text.floor_char_boundary(WORDS_BYTES_MAX)];
    text.split(|sign: char| !sign.is_alphanumeric()).filter(|word| !word.is_empty()).map(|word| {
        let mut word = word.to_lowercase();
        word.truncate(word.floor_char_boundary(WORD_BYTES_MAX));
        word
    })
}
