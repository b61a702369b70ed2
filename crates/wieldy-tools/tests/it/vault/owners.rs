//! Owners of projects: a caller that may not use one gets the answer of a project that does not exist.

use std::fs;

use serde_json::{Value, json};
use wieldy_core::{Caller, FileRules, Held, Owners};
use wieldy_tools::VaultProject;

use super::{VaultWorld, calls, tree};
use crate::world::refusal;

fn caller(tenant: Option<&str>, user: &str) -> Caller {
    Caller {
        tenant: tenant.map(str::to_owned),
        user: Some(user.to_owned()),
        scopes: Held::only(["librarian"]),
        permissions: Held::only(["files.read", "files.write"]),
        ..Caller::agent("bot")
    }
}

/// Returns a world with tokens, a project of `acme`, one for each tenant and user, and one without owners.
fn world() -> VaultWorld {
    VaultWorld::with(
        |options| {
            options.has_tokens = true;
            let acme = VaultProject {
                root: "other".into(),
                owners: Owners { tenants: vec!["acme".into()], ..Owners::default() },
            };
            options.projects.insert("acme".into(), acme);
        },
        FileRules::default(),
    )
}

/// Makes a call on a project that exists and on one that does not, and returns both errors under one name.
async fn both(world: &VaultWorld, caller: &Caller, project: &str, tool: &str, arguments: &Value) -> [String; 2] {
    let mut told = Vec::new();
    for project in [project, "nothing"] {
        let mut arguments = arguments.clone();
        arguments["project_id"] = json!(project);
        let result = world.by(caller.clone(), tool, arguments).await;
        assert!(result.structured.is_none() && result.text().is_empty(), "{tool} {project}: {}", result.text());
        told.push(refusal(&result).replace(project, "PROJECT"));
    }
    told.try_into().unwrap()
}

// Shows: C6.7
#[tokio::test]
async fn a_project_of_another_tenant_is_as_good_as_absent_for_every_tool() {
    let world = world();
    fs::write(world.folder.path().join("ws/other/Home.md"), "text of acme").unwrap();
    world.put("Home.md", "text");
    let before = tree(world.folder.path().join("ws").as_path());
    let outsiders = [
        caller(Some("other"), "ada"),
        caller(Some("ACME"), "ada"),
        caller(Some("acme "), "ada"),
        caller(None, "acme"),
        Caller { tenant: Some("other".into()), ..Caller::local() },
    ];
    for outsider in &outsiders {
        for (tool, arguments) in calls("Home.md") {
            let [refused, absent] = both(&world, outsider, "acme", tool, &arguments).await;
            assert_eq!(refused, absent, "{tool} {outsider:?}");
            assert!(refused.starts_with("E3302: there is no vault project `PROJECT`\n"), "{refused}");
            assert!(!refused.contains("default") && !refused.contains("outside"), "{refused}");
        }
    }
    // A project without owners is for the local caller alone, because there are tokens.
    for stranger in [caller(Some("acme"), "ada"), caller(None, "ada"), caller(Some("other"), "ada")] {
        for (tool, arguments) in calls("Home.md") {
            let [refused, absent] = both(&world, &stranger, "default", tool, &arguments).await;
            assert_eq!(refused, absent, "{tool} {stranger:?}");
        }
    }
    assert_eq!(tree(world.folder.path().join("ws").as_path()), before, "nothing was written");
}

#[tokio::test]
async fn the_owners_of_a_project_use_every_tool() {
    let world = world();
    fs::write(world.folder.path().join("ws/other/Home.md"), "text of acme").unwrap();
    let ada = caller(Some("acme"), "ada");
    for (tool, mut arguments) in calls("Home.md") {
        arguments["project_id"] = json!("acme");
        let result = world.by(ada.clone(), tool, arguments).await;
        assert!(result.is_success(), "{tool}: {:?}", result.error);
    }
    world.put("Home.md", "text");
    for (tool, arguments) in calls("Home.md") {
        let result = world.by(Caller::local(), tool, arguments).await;
        assert!(result.is_success(), "{tool}: {:?}", result.error);
    }
}

#[tokio::test]
async fn a_root_with_tenant_and_user_is_a_vault_for_each_and_no_name_leads_out_of_it() {
    let world = VaultWorld::with(
        |options| {
            options.has_tokens = true;
            let folder = options.state.clone().unwrap().parent().unwrap().join("owned/{tenant}/of-{user}");
            options.projects.insert("mine".into(), VaultProject { root: folder, ..VaultProject::default() });
        },
        FileRules::default(),
    );
    let write = |text: &str| json!({"path": "Home.md", "body": text, "project_id": "mine"});
    let callers = [("acme", "ada"), ("acme", "bob"), ("other", "ada")];
    for (tenant, user) in callers {
        let text = format!("text of {user} at {tenant}");
        let result = world.by(caller(Some(tenant), user), "vault_write", write(&text)).await;
        assert!(result.is_success(), "{:?}", result.error);
    }
    for (tenant, user) in callers {
        let own = format!("text of {user} at {tenant}");
        let read = json!({"path": "Home.md", "project_id": "mine"});
        let result = world.by(caller(Some(tenant), user), "vault_read", read).await;
        assert_eq!(result.structured.unwrap()["content"], json!(own));
        let search = json!({"query": "text", "project_id": "mine"});
        let result = world.by(caller(Some(tenant), user), "vault_search", search).await;
        assert_eq!(result.structured.as_ref().unwrap()["total"], json!(1));
        assert!(result.text().contains(&own), "{}", result.text());
    }
    let before = tree(world.folder.path());
    for bad in ["..", ".", "../acme", "acme/../other", ".ssh", "a\\b", "{user}"] {
        for caller in [caller(Some(bad), "ada"), caller(Some("acme"), bad)] {
            let result = world.by(caller, "vault_write", write("x")).await;
            assert!(refusal(&result).starts_with("E3302: there is no vault project `mine`"), "{bad}");
        }
    }
    assert_eq!(tree(world.folder.path()), before);
}

#[tokio::test]
async fn an_unknown_project_is_answered_with_those_that_the_caller_can_use() {
    let world = world();
    let refused = world.refusal("vault_list", json!({"project_id": "../ws"})).await;
    let wanted = "E3302: there is no vault project `../ws`\n(the projects that you can use: `default`, `outside`)";
    assert_eq!(refused, wanted);
    let result = world.by(caller(Some("acme"), "ada"), "vault_list", json!({"project_id": "acm"})).await;
    assert_eq!(refusal(&result), "E3302: there is no vault project `acm`\n(did you mean `acme`?)");
}
