//! The books of a backend: the sandboxes that it keeps, each built once by whoever needs it first.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OnceCell;
use wieldy_core::SandboxError;

/// Sandboxes by what they are made for; those without a value are being built.
pub(crate) type Books<K, V> = Mutex<HashMap<K, Arc<OnceCell<Arc<V>>>>>;

/// What is kept for this, which is built if there is none. Of those who need it at once one builds it, and if that fails the next.
pub(crate) async fn kept_or_built<K: Clone + Eq + Hash, V>(
    books: &Books<K, V>,
    key: K,
    build: impl Future<Output = Result<Arc<V>, SandboxError>>,
) -> Result<Arc<V>, SandboxError> {
    let cell = Arc::clone(books.lock().unwrap_or_else(PoisonError::into_inner).entry(key.clone()).or_default());
    let made = cell.get_or_try_init(|| build).await.cloned();
    if made.is_err() {
        let mut books = books.lock().unwrap_or_else(PoisonError::into_inner);
        drop(cell);
        // Whoever else has it is about to build in it, or has done so.
        let is_of_nobody = |cell: &Arc<OnceCell<_>>| Arc::strong_count(cell) == 1 && !cell.initialized();
        if books.get(&key).is_some_and(is_of_nobody) {
            books.remove(&key);
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> SandboxError {
        SandboxError::Creation { reason: "no".into() }
    }

    #[tokio::test]
    async fn what_the_next_one_builds_after_a_failure_is_in_the_books() {
        let (books, steps) = (Books::<u32, &str>::default(), tokio::sync::Notify::new());
        let fails = async {
            let build = async {
                steps.notified().await;
                Err(failure())
            };
            let failed = kept_or_built(&books, 7, build).await;
            steps.notify_one();
            failed
        };
        // It takes until the first one has been told.
        let builds = kept_or_built(&books, 7, async {
            steps.notified().await;
            Ok(Arc::new("a sandbox"))
        });
        let beginning = async {
            tokio::task::yield_now().await;
            steps.notify_one();
        };
        let (failed, built, ()) = tokio::join!(fails, builds, beginning);
        assert_eq!((failed.is_err(), built.unwrap()), (true, Arc::new("a sandbox")));
        let known = books.lock().unwrap().get(&7).and_then(|cell| cell.get().cloned());
        assert_eq!(known, Some(Arc::new("a sandbox")));
        assert!(kept_or_built(&books, 8, async { Err(failure()) }).await.is_err());
        assert_eq!(books.lock().unwrap().len(), 1, "of what failed for all, nothing is left");
    }
}
