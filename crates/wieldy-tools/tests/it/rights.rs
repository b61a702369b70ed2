//! The permission to start programs: every tool that starts or controls one requires it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{
    Call, Caller, Code, CommandSpec, Executor, Held, Level, Manifest, OutputForm, SharedTool, Status, ToolSpec,
};
use wieldy_sandbox::Unconfined;
use wieldy_tools::shell::{CommandTool, RUN_PROGRAMS, shell_tools};

const MANIFEST: &str = r#"
    [[tool]]
    name = "says_nothing"
    description = ""
    command = ["touch", "from_says_nothing"]

    [[tool]]
    name = "names_none"
    description = ""
    command = ["touch", "from_names_none"]
    permissions = []

    [[tool]]
    name = "names_another"
    description = ""
    command = ["touch", "from_names_another"]
    permissions = ["deploy"]
"#;

const JSON: &str = r#"{"tools": [{"name": "in_json", "description": "", "command": ["touch", "from_in_json"]}]}"#;

fn environment() -> BTreeMap<String, String> {
    BTreeMap::from([("PATH".into(), "/usr/bin:/bin".into())])
}

/// Returns every kind of tool that starts a program, and the tools for background processes.
fn program_tools() -> Vec<SharedTool> {
    let manifests = [Manifest::from_toml(MANIFEST).unwrap(), Manifest::from_json(JSON).unwrap()];
    let in_code = CommandSpec {
        program: "touch".into(),
        arguments: vec!["from_in_code".into()],
        stdin: None,
        environment: BTreeMap::new(),
        folder: None,
        output: OutputForm::Text,
        repeats_failures: false,
    };
    let command = |spec, command| -> SharedTool { Arc::new(CommandTool::new(spec, command, environment()).unwrap()) };
    let mut tools = shell_tools(environment());
    tools.retain(|tool| tool.spec().name != "GetState"); // it only reads state
    for tool in manifests.into_iter().flat_map(|manifest| manifest.tools) {
        tools.push(command(tool.spec, tool.command.unwrap()));
    }
    let spec = ToolSpec { input_schema: json!({"type": "object"}), ..ToolSpec::new("in_code", "") };
    tools.push(command(spec, in_code));
    tools
}

fn arguments(tool: &str) -> Value {
    match tool {
        "Bash" | "Build" => json!({"command": format!("touch from_{tool}")}),
        "ProcessRead" | "ProcessWrite" | "ProcessStop" => json!({"process": "p1"}),
        _ => json!({}),
    }
}

// Shows: D4.2
#[tokio::test]
async fn a_caller_without_the_permission_starts_and_steers_no_program() {
    let workspace = tempfile::tempdir().unwrap();
    let mut builder = Executor::builder().sandbox(Unconfined::default()).tools(program_tools());
    builder.workspace = workspace.path().to_owned();
    builder.isolation = Level::None;
    let executor = builder.build().unwrap();
    let holding = |permissions: &[&str]| Caller {
        permissions: Held::only(permissions.iter().copied()),
        session: Some("s".into()),
        ..Caller::agent("guest")
    };
    let call = async |tool: &str, caller: Caller| {
        let result = executor.call(Call::new(tool, arguments(tool)).by(caller)).await;
        (result.status, result.error.map(|error| (error.code, error.details["missing_permissions"].clone())))
    };
    for tool in program_tools() {
        let name = tool.spec().name;
        let needs = if name == "names_another" { "deploy" } else { RUN_PROGRAMS };
        assert_eq!(tool.spec().required_permissions, [needs], "{name}");
        let refused = (Status::PermissionDenied, Some((Code::PermissionDenied, json!([needs]))));
        for permissions in [&[][..], &["files.read", "files.write"]] {
            assert_eq!(call(&name, holding(permissions)).await, refused, "{name} with {permissions:?}");
        }
    }
    let made = || workspace.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(made(), [""; 0], "nothing ran");

    let success = (Status::Success, None);
    for tool in ["Bash", "Build", "ProcessList", "says_nothing", "names_none", "in_json", "in_code"] {
        assert_eq!(call(tool, holding(&[RUN_PROGRAMS])).await, success, "{tool}");
    }
    assert_eq!(call("names_another", holding(&["deploy"])).await, success);
    assert_eq!(call("Bash", Caller::local()).await, success, "the local user holds every permission");
    assert_eq!(made().len(), 7);
}
