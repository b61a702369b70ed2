//! Tests of the defaults of the builder.

use serde_json::json;
use wieldy::{
    Call, Caller, Code, Executor, Level, Options, Provider, ResourceLimits, Store, ToolFilter, Unbound, history_tools,
};

// Shows: B2
#[tokio::test]
async fn the_built_in_tools_work_on_the_workspace() {
    let workspace = tempfile::tempdir().unwrap();
    let executor = wieldy::builder(workspace.path()).unwrap().build().unwrap();
    let written = executor.call(Call::new("Write", json!({"path": "a.txt", "content": "hi\n"}))).await;
    assert_eq!(written.error, None);
    assert_eq!(std::fs::read_to_string(workspace.path().join("a.txt")).unwrap(), "hi\n");
}

// Shows: B6.1
#[tokio::test]
async fn programs_are_isolated_unless_something_else_is_asked_for() {
    let workspace = tempfile::tempdir().unwrap();
    let executor = wieldy::builder(workspace.path()).unwrap().build().unwrap();
    let folder = workspace.path().canonicalize().unwrap();
    let result = executor.call(Call::new("Bash", json!({"command": "echo hi; pwd"}))).await;
    assert_eq!(result.text(), format!("hi\n{}\n", folder.display()));
    assert_eq!(result.sandbox.map(|sandbox| sandbox.level), Some(Level::Native));
    // A missing level is never replaced by another.
    let mut call = Call::new("Bash", json!({"command": "echo hi"}));
    call.options.isolation = Some(Level::Firecracker);
    let refused = executor.call(call).await;
    assert_eq!(refused.error.map(|error| error.code), Some(Code::SandboxCreationFailed));

    let mut builder = wieldy::builder(workspace.path()).unwrap();
    builder.isolation = Level::None;
    let result = builder.build().unwrap().call(Call::new("Bash", json!({"command": "echo hi; pwd"}))).await;
    assert_eq!(result.text(), format!("hi\n{}\n", folder.display()));
    assert_eq!(result.sandbox.map(|sandbox| sandbox.level), Some(Level::None));
}

#[tokio::test]
async fn a_call_may_ask_for_a_core_and_two_gibibytes() {
    let workspace = tempfile::tempdir().unwrap();
    let executor = wieldy::builder(workspace.path()).unwrap().build().unwrap();
    let limits = |cpu_millicores, mib: u64| ResourceLimits {
        cpu_millicores: Some(cpu_millicores),
        memory_bytes: Some(mib << 20),
        ..ResourceLimits::NONE
    };
    let called = async |limits| {
        let call = Call::new("Bash", json!({"command": "true"}));
        executor.call(call.with(Options { limits, ..Options::default() })).await
    };
    let result = called(limits(1000, 2048)).await;
    assert_eq!(result.error, None);
    assert_eq!(result.sandbox.unwrap().limits, limits(1000, 2048).or(ResourceLimits::DEFAULT));
    let refused = called(limits(500, 1 << 30)).await.error.unwrap();
    let allowed = wieldy::machine().at_most(ResourceLimits::CALL_MAX).memory_bytes.unwrap();
    assert_eq!((refused.code, &refused.details["allowed"]), (Code::ResourceLimitExceeded, &json!(allowed)));
    // Never more than the machine has.
    let too_many = called(limits(wieldy::machine().cpu_millicores.unwrap() + 1, 1)).await.error.unwrap();
    assert_eq!(too_many.details["limit"], "cpu_millicores");
}

#[test]
fn a_workspace_that_is_not_there_is_an_error_at_once() {
    let told = wieldy::builder("/no/such/folder".as_ref()).err().unwrap().to_string();
    assert_eq!(told, "cannot open the workspace `/no/such/folder`");
}

#[test]
fn the_schemas_of_built_in_tools_can_be_compiled() {
    let workspace = tempfile::tempdir().unwrap();
    let history = Store::at(&workspace.path().join("history.db").to_str().unwrap().parse().unwrap());
    let ours = wieldy::builder(workspace.path()).unwrap().tools(history_tools(history)).build().unwrap();
    let strict = Executor::builder().build().unwrap();
    for tool in ours.registry().list(&Caller::local(), &ToolFilter::default()) {
        assert_eq!(tool.spec().provider, Provider::Builtin);
        // Schemas of external tools are compiled when they are registered.
        let mut spec = tool.spec().clone();
        spec.provider = Provider::Local;
        strict.register(Unbound::tool(spec, "nothing")).unwrap();
    }
}

// Shows: E3.3
#[tokio::test]
async fn a_program_that_asks_for_it_gets_the_places_of_panics() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Threads {
        other: bool,
    }
    let panicking = wieldy::tool(wieldy::ToolSpec::new("t", "panics"), async |arguments: Threads, _run| {
        if arguments.other {
            let work = || wieldy::CaughtPanic::catch(|| panic!("there"));
            tokio::task::spawn_blocking(work).await.unwrap().unwrap_or_else(|panic| panic.resume())
        }
        // A panic that was caught elsewhere has another place.
        let _ = std::panic::catch_unwind(|| panic!("not this one"));
        panic!("here")
    });
    let executor = Executor::builder().tools([std::sync::Arc::new(panicking) as _]).build().unwrap();
    let trace = async |other: bool| {
        let result = executor.call(Call::new("t", json!({"other": other}))).await;
        result.error.unwrap().trace
    };
    assert_eq!(trace(false).await, None, "without a hook it is not known");
    wieldy::record_panic_places();
    wieldy::record_panic_places();
    for other in [false, true] {
        let trace = trace(other).await.unwrap();
        let place = trace.lines().next().unwrap();
        assert!(place.starts_with("panicked at crates/wieldy/tests/it/facade.rs:"), "{trace}");
    }
}
