//! Named sandboxes: each is usable by its owner only.

use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Call, CallError, Caller, Code, Command, Confinement, Exit, Level, Options, Outcome, OutputSink, Place,
    ResourceLimits, Run, Sandbox, SandboxChange, SandboxError, SandboxId, SandboxRef, SandboxStatus, ToolSpec, tool,
};
use wieldy_testkit::{Act, Puppet, World};

/// A sandbox backend that runs no processes and only keeps a list.
#[derive(Clone, Default)]
struct Books {
    kept: Arc<Mutex<Vec<SandboxStatus>>>,
    listener: Arc<Mutex<Option<Listener>>>,
}

type Listener = Arc<dyn Fn(SandboxChange) + Send + Sync>;

impl Sandbox for Books {
    fn level(&self) -> Level {
        Level::Native
    }

    fn execute<'a>(
        &'a self,
        _: &'a Command,
        _: &'a Confinement,
        _: Arc<dyn OutputSink>,
        _: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        Box::pin(async { Err(SandboxError::creation_because("there are no processes here")) })
    }

    fn create<'a>(&'a self, confinement: &'a Confinement) -> BoxFuture<'a, Result<SandboxStatus, SandboxError>> {
        Box::pin(async {
            let mut kept = self.kept.lock().unwrap();
            let id = SandboxId(format!("books-{}", kept.len() + 1));
            let session = match &confinement.place {
                Place::Session(key) => Some(key.clone()),
                Place::Own | Place::Sandbox(_) => None,
            };
            kept.push(SandboxStatus {
                sandbox: SandboxRef { id, level: Level::Native },
                session,
                created_at: Timestamp::UNIX_EPOCH,
                running: 0,
                executed: 0,
                limits: confinement.place_limits,
                enforcement: Vec::new(),
            });
            Ok(kept.last().unwrap().clone())
        })
    }

    fn list(&self) -> Vec<SandboxStatus> {
        self.kept.lock().unwrap().clone()
    }

    fn destroy<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, bool> {
        Box::pin(async {
            let gone = self.kept.lock().unwrap().extract_if(.., |one| one.sandbox.id == *id).next();
            let Some(gone) = gone else { return false };
            self.listener.lock().unwrap().as_ref().unwrap()(SandboxChange::Destroyed(gone.sandbox));
            true
        })
    }

    fn listen(&self, listener: Listener) {
        *self.listener.lock().unwrap() = Some(listener);
    }
}

fn world() -> World {
    world_with(Books::default())
}

fn world_with(books: Books) -> World {
    World::with([Puppet::reading("t", Act::Echo)], |builder| {
        *builder = std::mem::take(builder).sandbox(books);
        builder.isolation = Level::Native;
    })
}

fn caller(tenant: &str, agent: &str, session: Option<&str>) -> Caller {
    let tenant = Some(tenant.to_owned());
    Caller { tenant, session: session.map(str::to_owned), agent: agent.into(), ..Caller::local() }
}

fn within(id: &SandboxId, caller: &Caller) -> Caller {
    Caller { parent_sandbox: Some(id.clone()), ..caller.clone() }
}

async fn refused(world: &World, caller: Caller) -> Option<CallError> {
    world.executor.call(Call::new("t", json!({})).by(caller)).await.error.map(|error| *error)
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_belongs_to_its_agent_and_its_session() {
    let world = world();
    let (mine, no_limits) = (caller("one", "a", None), ResourceLimits::default());
    let made = world.executor.create_sandbox(&mine, None, no_limits).await.unwrap().sandbox.id;
    let in_session = caller("one", "a", Some("s"));
    let session = world.executor.create_sandbox(&in_session, None, no_limits).await.unwrap().sandbox.id;
    assert_eq!(refused(&world, within(&made, &mine)).await, None);
    assert_eq!(refused(&world, within(&made, &in_session)).await, None);
    assert_eq!(refused(&world, within(&session, &in_session)).await, None);
    let strangers = [
        within(&made, &caller("two", "a", None)),
        within(&made, &caller("one", "b", None)),
        within(&session, &caller("two", "a", Some("s"))),
        within(&session, &caller("one", "a", Some("other"))),
        within(&session, &mine),
    ];
    for stranger in strangers {
        let id = stranger.parent_sandbox.clone().unwrap().0;
        let made = world.executor.create_sandbox(&stranger, None, no_limits).await.unwrap_err();
        for error in [refused(&world, stranger.clone()).await.unwrap(), made] {
            let message = format!("cannot make a sandbox: there is no sandbox `{id}`; it was destroyed, or never made");
            assert_eq!((error.code, error.message), (Code::SandboxCreationFailed, message), "{stranger:?}");
        }
    }
    world.check();
}

#[tokio::test(start_paused = true)]
async fn the_owner_of_a_destroyed_sandbox_is_forgotten() {
    let world = world();
    let mine = caller("one", "a", None);
    let id = world.executor.create_sandbox(&mine, None, ResourceLimits::default()).await.unwrap().sandbox.id;
    let other = within(&id, &caller("two", "a", None));
    assert!(refused(&world, other.clone()).await.is_some());
    assert!(world.executor.destroy_sandbox(&id).await);
    // The tool starts no process, so a missing sandbox goes unnoticed.
    assert_eq!(refused(&world, other).await, None);
}

#[tokio::test(start_paused = true)]
async fn the_sandboxes_of_a_session_that_is_over_go_unless_something_runs_in_them() {
    let books = Books::default();
    let world = world_with(books.clone());
    let (over, other) = (caller("one", "a", Some("over")), caller("one", "a", Some("other")));
    for caller in [&over, &over, &other, &caller("one", "a", None)] {
        world.executor.create_sandbox(caller, None, ResourceLimits::default()).await.unwrap();
    }
    let left = || books.kept.lock().unwrap().iter().map(|one| one.sandbox.id.0.clone()).collect::<Vec<_>>();
    books.kept.lock().unwrap()[1].running = 1;
    world.executor.end_session(&over.session_key().unwrap()).await;
    assert_eq!(left(), ["books-2", "books-3", "books-4"], "running sandboxes are not destroyed");
    let ending = async {
        tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
        books.kept.lock().unwrap()[0].running = 0;
    };
    let session = over.session_key().unwrap();
    tokio::join!(world.executor.end_session(&session), ending);
    assert_eq!(left(), ["books-3", "books-4"], "what ends soon is waited for");
}

// Shows: B8.2
#[tokio::test(start_paused = true)]
async fn a_call_may_not_ask_for_more_than_its_parent_sandbox_has() {
    let world = world();
    let memory = |bytes| ResourceLimits { memory_bytes: Some(bytes), ..ResourceLimits::NONE };
    let mine = caller("one", "a", None);
    let id = world.executor.create_sandbox(&mine, None, memory(1500 << 20)).await.unwrap().sandbox.id;
    let called = async |limits| {
        let call = Call::new("t", json!({})).by(within(&id, &mine));
        world.executor.call(call.with(Options { limits, ..Options::default() })).await.error
    };
    assert_eq!(called(memory(1500 << 20)).await, None);
    let error = called(memory((1500 << 20) + 1)).await.unwrap();
    assert_eq!((error.code, &error.details["held_by"]), (Code::ResourceLimitExceeded, &json!("parent")));
}

#[tokio::test(start_paused = true)]
async fn a_small_parent_sandbox_reduces_no_limit_in_silence() {
    let seen = Arc::new(Mutex::new(None));
    let note = Arc::clone(&seen);
    let tool = tool(ToolSpec::new("t", "").read_only(), move |_: Value, run: Run| {
        let note = Arc::clone(&note);
        async move {
            *note.lock().unwrap() = run.confinement().limits.memory_bytes;
            Ok(Outcome::text(""))
        }
    });
    let world = World::with([Arc::new(tool) as _], |builder| {
        *builder = std::mem::take(builder).sandbox(Books::default());
        builder.isolation = Level::Native;
    });
    let memory = |bytes| ResourceLimits { memory_bytes: Some(bytes), ..ResourceLimits::NONE };
    let mine = caller("one", "a", None);
    let id = world.executor.create_sandbox(&mine, None, memory(500 << 20)).await.unwrap().sandbox.id;
    let called = async |limits| {
        let call = Call::new("t", json!({})).by(within(&id, &mine));
        world.executor.call(call.with(Options { limits, ..Options::default() })).await.error
    };
    // More than the parent has, and less than the executor's default.
    let error = called(memory(800 << 20)).await.unwrap();
    let details = ["held_by", "asked", "allowed"].map(|name| error.details[name].clone());
    assert_eq!(
        (error.code, details),
        (Code::ResourceLimitExceeded, [json!("parent"), json!(800 << 20), json!(500 << 20)])
    );
    for (asked, held) in [(memory(400 << 20), 400 << 20), (ResourceLimits::NONE, 500 << 20)] {
        assert_eq!((called(asked).await, *seen.lock().unwrap()), (None, Some(held)));
    }
}
