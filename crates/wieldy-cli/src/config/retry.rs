//! The section `retry`: how often and after which delays failed calls are tried again.

use wieldy::{Backoff, RetryPolicy};

use super::file::{FileBackoff, FileRetry};
use super::layers::{ConfigError, Layers};
use super::value::Time;
use super::{conflict, small, time};

/// Resolves the section. The longest delay must not be shorter than the first one.
pub(super) fn resolve(layers: &Layers, file: &FileRetry, mistakes: &mut Vec<ConfigError>) -> RetryPolicy {
    let (base, cap) = (time(file.base), time(file.cap));
    if cap < base {
        let message = format!("`retry.cap` is {}, less than `retry.base`, which is {}", Time(cap), Time(base));
        mistakes.push(conflict(layers, ["retry.base", "retry.cap"], message, None));
    }
    let backoff = match file.backoff.as_ref().expect("the defaults have every key") {
        FileBackoff::Exponential => Backoff::Exponential,
        FileBackoff::Linear => Backoff::Linear,
    };
    RetryPolicy { retries: small(file.retries), base, cap, backoff }
}
