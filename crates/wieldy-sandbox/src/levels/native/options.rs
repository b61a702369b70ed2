//! The settings of the isolation level `native`.

use std::path::PathBuf;
use std::time::Duration;

use crate::pool::IdleLimits;

/// The settings of the native level.
#[derive(Debug, Clone)]
pub struct NativeOptions {
    /// The folder of the executor's own files, which no sandbox ever sees, except for a folder in its `homes` that is
    /// mounted.
    pub state: Option<PathBuf>,
    /// The home folder of the user who runs the executor; secret files in it are masked wherever it is mounted.
    pub home: Option<PathBuf>,
    /// The number of sandboxes that are built ahead for calls without a session.
    pub warm_sandboxes: usize,
    /// The number of warm inits, each of which can become the first process of a sandbox of any plan.
    pub warm_inits: usize,
    /// The idle time after which the sandbox of a session, or a warm one, is ended.
    pub idle_max: Duration,
    /// The limits of idle sandboxes that are kept for sessions.
    pub idle_limits: IdleLimits,
}

impl Default for NativeOptions {
    fn default() -> Self {
        Self {
            state: None,
            home: std::env::home_dir(),
            warm_sandboxes: 1,
            warm_inits: 1,
            idle_max: Duration::from_secs(10 * 60),
            idle_limits: IdleLimits::default(),
        }
    }
}
