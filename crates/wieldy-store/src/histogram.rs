//! Histograms of call durations by day, so that statistics need not read the calls.
//!
//! Buckets grow by an eighth of a power of two, so durations are right within 5 percent.

/// Microseconds in a day.
pub(crate) const DAY: i64 = 24 * 60 * 60 * 1_000_000;

/// The key of a histogram row.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BucketKey {
    /// Days since 1970, in UTC.
    pub(crate) day: i64,
    pub(crate) tenant: String,
    pub(crate) agent: String,
    pub(crate) tool: String,
    pub(crate) status: String,
    pub(crate) bucket: i64,
}

/// The counts of a histogram row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct BucketCounts {
    pub(crate) calls: i64,
    pub(crate) output_bytes: i64,
    pub(crate) result_bytes: i64,
}

impl BucketCounts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.output_bytes += other.output_bytes;
        self.result_bytes += other.result_bytes;
    }
}

/// Returns the bucket of a duration.
pub(crate) fn bucket(duration_ms: f64) -> i64 {
    let micros = (duration_ms * 1000.0).max(1.0);
    (micros.log2() * 8.0).floor() as i64
}

/// Returns the duration in the middle of a bucket, in milliseconds.
pub(crate) fn duration_ms(bucket: i64) -> f64 {
    ((bucket as f64 + 0.5) / 8.0).exp2() / 1000.0
}

/// Returns the duration that the share `q` of all calls does not exceed. `buckets` are in order, with their counts.
pub(crate) fn quantile(buckets: &[(i64, i64)], q: f64) -> f64 {
    let total: i64 = buckets.iter().map(|(_, calls)| calls).sum();
    let wanted = ((total as f64) * q).ceil().max(1.0) as i64;
    let mut seen = 0;
    for (bucket, calls) in buckets {
        seen += calls;
        if seen >= wanted {
            return duration_ms(*bucket);
        }
    }
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_stands_for_a_duration_within_five_percent() {
        let mut micros = 1.0;
        while micros < 1e11 {
            let estimate = duration_ms(bucket(micros / 1000.0)) * 1000.0;
            assert!((estimate / micros - 1.0).abs() < 0.05, "{micros} µs is estimated as {estimate} µs");
            micros *= 1.01;
        }
        assert_eq!((bucket(0.0), bucket(-1.0), bucket(0.0005)), (0, 0, 0));
    }

    #[test]
    fn a_quantile_is_the_duration_that_a_share_does_not_exceed() {
        let buckets = [(bucket(1.0), 50), (bucket(10.0), 45), (bucket(100.0), 5)];
        let about = |q: f64| quantile(&buckets, q).round();
        assert_eq!((about(0.5), about(0.51), about(0.95), about(0.96), about(1.0)), (1.0, 10.0, 10.0, 97.0, 97.0));
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
