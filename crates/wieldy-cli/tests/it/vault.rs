//! Tests of `wieldy vault`, of its configuration, and of the owners of vaults over HTTP.

use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::serve::Server;
use crate::world::World;

const CONFIG: &str = "[vault]\nroot = \"notes\"\n";

fn world() -> World {
    World::new()
        .file("wieldy.toml", CONFIG)
        .file("notes/Home.md", "# Home\nI drink [[Green tea]].\n")
        .file("notes/drinks/Green tea.md", "---\ntags: [drink/hot]\naliases: [Sencha]\n---\n## Brewing\nhot water\n")
}

#[test]
fn the_commands_print_notes_with_paths_that_can_be_opened() {
    let world = world();
    assert_snapshot!(world.run(&["vault", "list"]), @"
    exit: 0
    ----- stdout -----
    notes/Home.md  Home
    notes/drinks/Green tea.md  Green tea #drink/hot

    ----- stderr -----
    ");
    assert_snapshot!(world.run(&["vault", "search", "hot", "tag:drink"]), @"
    exit: 0
    ----- stdout -----
    notes/drinks/Green tea.md:6  Green tea  Brewing
        hot water

    ----- stderr -----
    ");
    assert_snapshot!(world.run(&["vault", "read", "Sencha#Brewing", "--backlinks"]), @r#"
    exit: 0
    ----- stdout -----
    ## Brewing
    hot water

    ----- stderr -----
    [this is `drinks/Green tea.md`]
    [properties: {"tags":["drink/hot"],"aliases":["Sencha"]}]
    [linked from: Home.md:2]
    "#);
    assert_snapshot!(world.run(&["vault", "move", "drinks/Green tea", "Matcha"]), @"
    exit: 0
    ----- stdout -----
    moved `drinks/Green tea.md` to `Matcha.md`; 1 link in 1 note changed
      Home.md (1)

    ----- stderr -----
    ");
    let written =
        world.run_with_input(&["vault", "write", "Home", "--mode", "append", "--body", "-"], "more [[Nowhere]]\n");
    assert!(
        written.starts_with("exit: 0\n") && written.contains("[links that lead to no note yet: Nowhere]"),
        "{written}"
    );
    let text = std::fs::read_to_string(world.path("notes/Home.md")).unwrap();
    assert_eq!(text, "# Home\nI drink [[Matcha]].\nmore [[Nowhere]]\n");
    assert!(world.run(&["vault", "index"]).contains("`index.md` written, 2 notes"));
    let result = world.json(&["vault", "search", "water", "--json"]);
    assert_eq!(result["structured"]["results"][0]["path"], "Matcha.md");
    assert_snapshot!(world.run(&["vault", "read", "Homer"]), @"
    exit: 1
    ----- stdout -----

    ----- stderr -----
    error[E3302]: there is no `Homer`
    hint: did you mean `Home`?
    ");
}

#[test]
fn without_a_root_there_is_no_vault_and_a_cloned_folder_cannot_make_one() {
    let told = "error[E3301]: no vault is configured";
    assert!(World::new().run(&["vault", "list"]).contains(told));
    let world = World::cloned().file("wieldy.toml", "[vault]\nroot = \"/\"\n[vault.projects.x]\nroot = \"/etc\"\n");
    for project in ["default", "x"] {
        let said = world.run(&["vault", "list", "--project", project]);
        assert!(said.contains(told), "{said}");
    }
    let wrong = World::new().run(&["--set", "vault.projects.a.root=/v/{team}", "vault", "list"]);
    assert!(wrong.contains("`vault.projects.a.root`: `/v/{team}` has another placeholder"), "{wrong}");
}

// Shows: C6.7
#[test]
fn over_http_each_token_reaches_the_vaults_of_its_caller_and_no_others() {
    let token = |name: &str, tenant: &str| {
        format!(
            "[serve.tokens.{name}]\ntoken = \"{name:-<40}\"\ntenant = \"{tenant}\"\nscopes = [\"*\"]\npermissions = [\"*\"]\n"
        )
    };
    let config = format!(
        "{CONFIG}[vault.projects.acme]\nroot = \"../acme\"\ntenants = [\"acme\"]\n{}{}",
        token("ada", "acme"),
        token("eve", "other"),
    );
    let world = world().file("wieldy.toml", &config).file("../acme/Plan.md", "secret plan\n");
    let server = Server::start(&world, &[]);
    let ask = |name: &str, tool: &str, project: &str| {
        let header = format!("authorization: Bearer {name:-<40}");
        let arguments = match tool {
            "vault_list" => json!({"project_id": project}),
            "vault_search" => json!({"query": "plan", "project_id": project}),
            "vault_read" => json!({"path": "Plan", "project_id": project}),
            "vault_write" => json!({"path": "New", "body": "x", "project_id": project}),
            "vault_move" => json!({"path": "Plan", "new_path": "Plan2", "dry_run": true, "project_id": project}),
            _ => json!({"path": "Index", "project_id": project}),
        };
        let (_, answer) = server.call(&[&header], tool, arguments);
        let answer: Value =
            serde_json::from_str(&answer[answer.find('{').unwrap()..=answer.rfind('}').unwrap()]).unwrap();
        (answer["result"]["isError"] == true, answer["result"]["content"][0]["text"].as_str().unwrap().to_owned())
    };
    for tool in ["vault_list", "vault_search", "vault_read", "vault_write", "vault_move", "vault_create_index"] {
        assert!(!ask("ada", tool, "acme").0, "{tool}: {:?}", ask("ada", tool, "acme"));
        for (name, project) in [("eve", "acme"), ("eve", "default"), ("ada", "default")] {
            let (refused, absent) = (ask(name, tool, project), ask(name, tool, "nothing"));
            assert!(refused.0 && refused.1.contains("E3302"), "{tool} {name} {project}: {refused:?}");
            assert_eq!(refused.1.replace(project, "P"), absent.1.replace("nothing", "P"), "{tool} {name}");
        }
    }
    server.stop();
    assert!(world.run(&["vault", "list"]).starts_with("exit: 0"), "the person at this machine has the vault");
}
