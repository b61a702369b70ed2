//! The places of panics. Only a panic hook knows them, and only the program may set one.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Once;

thread_local! {
    /// The place of the last panic of this thread.
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Sets a panic hook that notes where a panic happens, for the `trace` of a call whose tool panics, and then calls the
/// hook before it. The trace has a backtrace if `RUST_BACKTRACE` asks for one. Further calls do nothing.
///
/// A hook belongs to the whole program, so the library sets none by itself.
pub fn record_panic_places() {
    static SET: Once = Once::new();
    SET.call_once(|| {
        let earlier = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if let Some(place) = panic.location() {
                let backtrace = Backtrace::capture();
                let place = match backtrace.status() {
                    BacktraceStatus::Captured => format!("panicked at {place}\n{backtrace}"),
                    _ => format!("panicked at {place}"),
                };
                // A thread that is about to end has no such storage any more.
                let _ = PLACE.try_with(|last| last.replace(Some(place)));
            }
            earlier(panic);
        }));
    });
}

/// Forgets the place of an earlier panic of this thread, which was caught elsewhere.
pub(crate) fn forget_place() {
    PLACE.with_borrow_mut(|place| *place = None);
}

/// Takes the place of the panic that this thread has just caught, if a hook noted it.
pub(crate) fn take_place() -> Option<String> {
    PLACE.take()
}

/// A panic that was caught on one thread, with its place, to be resumed on another.
#[derive(Debug)]
pub struct CaughtPanic {
    payload: Box<dyn Any + Send>,
    place: Option<String>,
}

impl CaughtPanic {
    /// Runs the work, and catches its panic.
    pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Self> {
        forget_place();
        catch_unwind(AssertUnwindSafe(work)).map_err(|payload| Self { payload, place: take_place() })
    }

    /// Resumes the panic on this thread.
    pub fn resume(self) -> ! {
        PLACE.set(self.place);
        resume_unwind(self.payload)
    }
}
