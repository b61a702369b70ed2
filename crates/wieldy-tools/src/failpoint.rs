//! Failpoints: places where a test can abort the process as if the machine had stopped, in debug builds only.

#[cfg(debug_assertions)]
mod on {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static WANTED: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static REACHED: AtomicU64 = AtomicU64::new(0);

    /// Aborts this process when it reaches the place of `WIELDY_FAILPOINT=place:times` for the n-th time, n being
    /// `times`.
    pub(crate) fn reach(place: &str) {
        let wanted = WANTED.get_or_init(|| {
            let wanted = std::env::var("WIELDY_FAILPOINT").ok()?;
            let (place, times) = wanted.split_once(':').unwrap_or((&wanted, "1"));
            Some((place.to_owned(), times.parse().ok()?))
        });
        if let Some((name, times)) = wanted
            && name == place
            && REACHED.fetch_add(1, Ordering::SeqCst) + 1 == *times
        {
            std::process::abort();
        }
    }
}

#[cfg(debug_assertions)]
pub(crate) use on::reach;

#[cfg(not(debug_assertions))]
pub(crate) fn reach(_place: &str) {}
