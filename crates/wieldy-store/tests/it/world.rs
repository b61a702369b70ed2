//! A history to test with, and an executor that writes it.

use std::sync::Arc;

use tempfile::TempDir;
use wieldy_core::{Executor, ExecutorBuilder, SharedTool};
use wieldy_store::{Address, JournalOptions, Store, StoreJournal};

/// A place for a history of its own.
pub(crate) struct Place {
    pub(crate) folder: TempDir,
    pub(crate) address: Address,
}

impl Place {
    pub(crate) fn sqlite() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Sqlite(folder.path().join("history.db"));
        Self { folder, address }
    }

    /// The address as text, for another process.
    pub(crate) fn url(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn store(&self) -> Store {
        Store::open(&self.address).unwrap()
    }

    pub(crate) fn store_again(&self) -> Result<Store, wieldy_store::StoreError> {
        Store::open(&self.address)
    }

    pub(crate) fn options(&self) -> JournalOptions {
        JournalOptions { key: Some(self.folder.path().join("audit.key")), ..JournalOptions::default() }
    }

    /// An executor that writes here.
    pub(crate) fn executor(&self, tools: impl IntoIterator<Item = SharedTool>) -> Living {
        self.executor_with(tools, &self.options(), |_| {})
    }

    pub(crate) fn executor_with(
        &self,
        tools: impl IntoIterator<Item = SharedTool>,
        options: &JournalOptions,
        change: impl FnOnce(&mut ExecutorBuilder),
    ) -> Living {
        let journal = Arc::new(self.store().journal(options).unwrap());
        let mut builder = Executor::builder().tools(tools);
        builder.journal = Arc::clone(&journal) as _;
        change(&mut builder);
        Living { executor: builder.build().unwrap(), journal }
    }

    /// The history is whole.
    pub(crate) fn check(&self) -> wieldy_store::Verdict {
        let verdict = self.store().verify(&[], None, &mut |_| {}).unwrap();
        assert_eq!(verdict.problem, None, "{verdict:?}");
        verdict
    }
}

/// An executor and its journal.
pub(crate) struct Living {
    pub(crate) executor: Executor,
    pub(crate) journal: Arc<StoreJournal>,
}

impl Living {
    /// Stops as if the process were killed: nothing more is written, and its sign of life is gone.
    pub(crate) async fn end(self) {
        self.journal.flush().await.unwrap();
    }
}
