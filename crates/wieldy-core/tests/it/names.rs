//! Names: aliases of tools and of arguments, and the names of callers.

use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{
    Batch, Body, Call, Caller, Code, Manifest, Provider, RegisterError, SharedTool, ToolSpec, schema_of,
};
use wieldy_testkit::{Act, Puppet, World};

#[derive(serde::Deserialize, schemars::JsonSchema)]
#[expect(dead_code, reason = "only its schema matters")]
struct Login {
    user: String,
    seal: Option<String>,
    password: Option<String>,
}

fn login() -> SharedTool {
    let spec = ToolSpec { input_schema: schema_of::<Login>(), ..ToolSpec::new("login", "") };
    let spec = spec.sensitive("seal").argument_alias("name", "user").argument_alias("who", "user");
    Puppet::new(spec.argument_alias("stamp", "seal").argument_alias("word", "password"), [Act::Echo]).0
}

/// Returns the arguments of every call as they were recorded.
fn recorded(world: &World) -> Vec<Value> {
    let events = world.events();
    let pending = events.iter().filter_map(|event| match &event.body {
        Body::CallPending { arguments, .. } => Some(arguments.value().into_owned()),
        _ => None,
    });
    pending.collect()
}

// Shows: C1.2
#[tokio::test(start_paused = true)]
async fn an_alias_of_an_argument_is_replaced_before_the_first_record() {
    let world = World::new([login()]);
    let result = world.call("login", json!({"stamp": "4711-x", "name": "ada", "word": "hunter22"})).await;
    assert_eq!(result.text(), r#"{"seal":"4711-x","user":"ada","password":"hunter22"}"#, "in the order of the call");
    let hidden = json!({"seal": "[redacted]", "user": "ada", "password": "[redacted]"});
    assert_eq!((&json!(result)["arguments"], recorded(&world)), (&hidden, vec![hidden.clone()]));
    assert_eq!(result.arguments["seal"], "4711-x", "the program has the whole");
    let schema = world.executor.registry().find("login", &Caller::local()).ok().unwrap().spec().input_schema.clone();
    let properties: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
    assert_eq!(properties, ["user", "seal", "password"], "aliases are not in the schema");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn two_names_for_one_argument_are_refused_and_recorded_without_secrets() {
    let world = World::new([login()]);
    for (arguments, message, suggestion, record) in [
        (
            json!({"name": "ada", "user": "ada"}),
            "`/name`: it is another name for `user`, and `user` is given too",
            "give only `user`",
            json!({"name": "ada", "user": "ada"}),
        ),
        (
            json!({"who": "ada", "name": "bob"}),
            "`/name`: it is another name for `user`, and `who` is given too",
            "give only `user`",
            json!({"who": "ada", "name": "bob"}),
        ),
        (
            json!({"user": "ada", "seal": "1-x-1", "stamp": "1-x-2"}),
            "`/stamp`: it is another name for `seal`, and `seal` is given too",
            "give only `seal`",
            json!({"user": "ada", "seal": "[redacted]", "stamp": "[redacted]"}),
        ),
        (
            json!({"user": "ada", "password": "hunter22", "word": "hunter33"}),
            "`/word`: it is another name for `password`, and `password` is given too",
            "give only `password`",
            json!({"user": "ada", "password": "[redacted]", "word": "[redacted]"}),
        ),
    ] {
        let result = world.call("login", arguments.clone()).await;
        let shown = json!(result)["arguments"].clone();
        let error = result.error.unwrap();
        assert_eq!((error.code, error.message.as_str()), (Code::ValidationFailed, message), "{arguments}");
        assert_eq!((error.suggestion.as_deref(), result.attempts), (Some(suggestion), 0), "{arguments}");
        assert_eq!((recorded(&world).last(), &shown), (Some(&record), &record), "{arguments}");
    }
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_batch_knows_the_paths_of_aliased_arguments() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    #[expect(dead_code, reason = "only its schema matters")]
    struct File {
        path: String,
    }
    let spec = ToolSpec { input_schema: schema_of::<File>(), ..ToolSpec::new("write", "") };
    let spec = spec.writes("path").argument_alias("file_path", "path");
    let (tool, strings) = Puppet::new(spec, [Act::Take(std::time::Duration::from_secs(1))]);
    let world = World::new([tool]);
    let write = |name: &str, path: &str| Call::new("write", json!({ name: path }));
    let same = Batch::new([write("file_path", "a"), write("path", "a"), write("file_path", "a")]);
    assert_eq!(world.executor.batch(same).await.unwrap().summary.succeeded, 3);
    assert_eq!(strings.most_at_once(), 1, "one file is written by one call at a time");
    let others = Batch::new([write("file_path", "a"), write("file_path", "b")]);
    world.executor.batch(others).await.unwrap();
    assert_eq!(strings.most_at_once(), 2);
}

#[test]
fn an_alias_that_cannot_stand_for_an_argument_is_refused_at_registration() {
    let world = World::new([]);
    let spec = ToolSpec { input_schema: schema_of::<Login>(), ..ToolSpec::new("login", "") };
    let served = ToolSpec { name: "x__login".into(), provider: Provider::Mcp("x".into()), ..spec.clone() };
    for (spec, mistake) in [
        (spec.clone().argument_alias("seal", "user"), "the alias `seal` is itself an argument"),
        (spec.clone().argument_alias("a", "b"), "the alias `a` stands for `b`, and there is no such argument"),
        (
            served.argument_alias("name", "user"),
            "the definition of a server's tool cannot have aliases of arguments, and `x` has",
        ),
    ] {
        let name = spec.name.clone();
        let error = world.executor.register(Puppet::new(spec, [Act::Echo]).0).unwrap_err();
        assert!(matches!(error, RegisterError::ArgumentAlias { .. }));
        assert_eq!(error.to_string(), format!("the tool `{name}` cannot be registered: {mistake}"));
    }
}

#[test]
fn a_manifest_declares_aliases_of_arguments() {
    let text = |alias: &str| {
        format!(
            "[[tool]]\nname = \"count\"\ndescription = \"\"\ncommand = [\"wc\", \"{{path}}\"]\n\
             argument-aliases = {{ {alias} }}\n[tool.arguments]\npath = {{ type = \"string\" }}\n"
        )
    };
    let manifest = Manifest::from_toml(&text("file_path = \"path\"")).unwrap();
    let aliases = &manifest.tools[0].spec.argument_aliases;
    assert_eq!(json!(aliases), json!({"file_path": "path"}));
    let error = Manifest::from_toml(&text("path = \"path\", a = \"b\"")).unwrap_err();
    let problems: Vec<&str> = error.0.iter().map(|problem| problem.message.as_str()).collect();
    let wanted =
        ["the alias `a` stands for `b`, and there is no such argument", "the alias `path` is itself an argument"];
    assert_eq!(problems, wanted);
}

// Shows: E1
#[tokio::test(start_paused = true)]
async fn a_weak_alias_gives_way_and_never_goes_quietly_to_another_tool() {
    let named = |name: &str| ToolSpec::new(name, "");
    let puppet = |spec: ToolSpec, says: &'static str| Puppet::new(spec, [Act::Say(says)]).0;
    let served = || puppet(named("fs__write_file").provider(Provider::Mcp("fs".into())), "fs");
    let world = World::new([puppet(named("Write").weak_alias("write_file"), "ours")]);
    assert_eq!(world.call("write_file", json!({})).await.text(), "ours");
    world.executor.register(served()).unwrap();
    let error = world.call("write_file", json!({})).await.error.unwrap();
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::ToolNotFound, "`write_file` could be any of `Write`, `fs__write_file`")
    );
    assert_eq!(world.call("Write", json!({})).await.text(), "ours");
    assert_eq!(world.call("fs__write_file", json!({})).await.text(), "fs");
    world.executor.unregister("fs__write_file");
    assert_eq!(world.call("write_file", json!({})).await.text(), "ours");
    // The other order is the same, and a tool of the very name has it.
    world.executor.register(served()).unwrap();
    world.executor.register(puppet(named("write_file"), "own")).unwrap();
    assert_eq!(world.call("write_file", json!({})).await.text(), "own");
    world.executor.register(puppet(named("Write").weak_alias("write_file"), "ours")).unwrap();
    assert_eq!(world.call("write_file", json!({})).await.text(), "own");
}

/// Returns the agent, tenant, session and user of every opened call.
fn callers(world: &World) -> Vec<[String; 4]> {
    let events = world.events();
    let pending = events.iter().filter(|event| matches!(event.body, Body::CallPending { .. }));
    let names = pending.map(|event| {
        let Caller { agent, tenant, session, user, .. } = (*event.subject.caller).clone();
        [agent, tenant.unwrap_or_default(), session.unwrap_or_default(), user.unwrap_or_default()]
    });
    names.collect()
}

#[tokio::test(start_paused = true)]
async fn the_names_of_a_caller_are_checked_and_recorded_escaped() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    let caller = Arc::new(Caller {
        tenant: Some("t\u{202e}".into()),
        session: Some("s".repeat(257)),
        user: Some(String::new()),
        ..Caller::agent("a\nb")
    });
    let message = "the agent of the caller has the character \\u{a} at position 2";
    let call = || Call::new("t", json!({})).by(Arc::clone(&caller));
    let direct = world.executor.call(call()).await;
    let id = world.executor.spawn(call());
    let task = world.executor.wait(id, &caller).await.unwrap();
    let began = world.executor.begin(call()).await;
    for result in [&direct, &task, &began] {
        let error = result.error.as_ref().unwrap();
        assert_eq!((error.code, error.message.as_str(), result.attempts), (Code::ValidationFailed, message, 0));
    }
    let batch = Batch { caller: Arc::clone(&caller), ..Batch::new([call(), call()]) };
    assert_eq!(world.executor.batch(batch).await.unwrap_err().message, message);
    let recorded = ["a\\u{a}b".to_owned(), "t\\u{202e}".into(), "s".repeat(255) + "…", String::new()];
    assert_eq!(callers(&world), vec![recorded; 5]);
    let good = Caller { user: Some("ü".repeat(256)), ..Caller::agent("x".repeat(256)) };
    assert!(world.executor.call(Call::new("t", json!({})).by(good)).await.is_success(), "256 are allowed");
    let empty = world.executor.call(Call::new("t", json!({})).by(Caller::agent(""))).await;
    assert_eq!(empty.error.unwrap().message, "the agent of the caller is empty");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_reference_to_the_arguments_of_a_result_is_refused() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    for (pointer, refused) in [("/arguments/password", true), ("/arguments", true), ("", false), ("/tool", false)] {
        let first = Call::new("t", json!({"password": "hunter22"})).id("a");
        let second = Call::new("t", json!({"x": {"$result": "a", "pointer": pointer}})).id("b");
        let result = world.executor.batch(Batch::new([first, second])).await.unwrap();
        let second = &result.results[1];
        assert!(!second.text().contains("[redacted]"), "{}", second.text());
        let error = second.error.as_ref().map(|error| error.message.clone());
        let message =
            format!("{} of the result of `a` cannot be referred to: secrets are cut out of it", json!(pointer));
        assert_eq!(error, refused.then_some(message), "{pointer}");
    }
}
