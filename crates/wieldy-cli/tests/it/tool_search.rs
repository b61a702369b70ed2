//! `tool_search`: tests that tools are found by the words of users.

use std::collections::BTreeSet;

use serde_json::json;

use crate::mcp::Client;
use crate::world::World;

/// Questions in the words of users, each with the tool to be found.
const QUESTIONS: &[(&str, &str)] = &[
    ("run a shell command", "Bash"),
    ("execute a script", "Bash"),
    ("use the terminal", "Bash"),
    ("compile the project", "Build"),
    ("run the unit tests", "Build"),
    ("does my code still build", "Build"),
    ("remove a file", "Delete"),
    ("rm", "Delete"),
    ("get rid of a directory", "Delete"),
    ("replace a string in a file", "Edit"),
    ("change one line of code", "Edit"),
    ("patch a file", "Edit"),
    ("see the rest of truncated output", "GetArtifact"),
    ("the output was cut off", "GetArtifact"),
    ("fetch an artifact by id", "GetArtifact"),
    ("find files by name", "Glob"),
    ("which files have the extension .py", "Glob"),
    ("wildcard match of paths", "Glob"),
    ("ls", "List"),
    ("show directory contents", "List"),
    ("what is in this folder", "List"),
    ("ps", "ProcessList"),
    ("which background jobs are running", "ProcessList"),
    ("show my running servers", "ProcessList"),
    ("see the logs of the dev server", "ProcessRead"),
    ("tail the output of a background job", "ProcessRead"),
    ("has the background task finished", "ProcessRead"),
    ("kill a process", "ProcessStop"),
    ("terminate the server", "ProcessStop"),
    ("shut down a background job", "ProcessStop"),
    ("send input to a running program", "ProcessWrite"),
    ("type an answer at an interactive prompt", "ProcessWrite"),
    ("stdin of a process", "ProcessWrite"),
    ("cat", "Read"),
    ("open a file", "Read"),
    ("show me the contents of README.md", "Read"),
    ("find text in files", "Search"),
    ("grep", "Search"),
    ("where is this function used", "Search"),
    ("look for TODO comments", "Search"),
    ("create a new file", "Write"),
    ("save text to disk", "Write"),
    ("overwrite a config file", "Write"),
    ("what did I do earlier", "history_search"),
    ("past tool calls", "history_search"),
    ("previous commands that failed", "history_search"),
    ("how often do tools fail", "history_stats"),
    ("usage statistics", "history_stats"),
    ("average duration of calls", "history_stats"),
    ("which tool is slow", "history_stats"),
    ("execute", "Bash"),
    ("how many calls may I make at once", "GetState"),
    ("what are my limits", "GetState"),
    ("performance metrics", "GetMetrics"),
    ("p95 latency of a tool", "GetMetrics"),
    ("log entries of a call", "GetLogs"),
    ("show me warnings and errors of this session", "GetLogs"),
    ("event log", "GetLogs"),
    ("files larger than 1 MB", "QueryVFS"),
    ("recently modified files", "QueryVFS"),
    ("write down a decision for later", "thread_push"),
    ("add an entry to a thread", "thread_push"),
    ("read a thread", "thread_read"),
    ("show the entries of a thread", "thread_read"),
    ("search my threads", "thread_seek"),
    ("find an earlier decision", "thread_seek"),
    ("list open threads", "thread_list"),
    ("which threads are closed", "thread_list"),
    ("remind me of this in two hours", "notify_self"),
    ("leave myself a note for later", "notify_self"),
    ("where in the code is the configuration parsed", "search_code"),
    ("search the code base for a function name", "search_code"),
    ("read a note", "vault_read"),
    ("properties of a note", "vault_read"),
    ("write a note in the vault", "vault_write"),
    ("new note", "vault_write"),
    ("search my notes", "vault_search"),
    ("find notes about tea", "vault_search"),
    ("list notes", "vault_list"),
    ("which notes are in the vault", "vault_list"),
    ("rename a note", "vault_move"),
    ("move a note and change its links", "vault_move"),
    ("index page of a folder of notes", "vault_create_index"),
    ("page with links to all notes", "vault_create_index"),
    ("where is this function defined", "find_definition"),
    ("who calls this function", "find_references"),
    ("overview of the project", "get_repo_map"),
    ("outline of a source file", "InspectModule"),
];

/// Further questions by another author, who had not seen the synonyms of the ranking.
const OTHERS: &[(&str, &str)] = &[
    ("npm install", "Bash"),
    ("invoke git", "Bash"),
    ("cargo check", "Build"),
    ("run pytest", "Build"),
    ("unlink", "Delete"),
    ("clean up temporary files", "Delete"),
    ("fix a typo", "Edit"),
    ("rename a variable", "Edit"),
    ("download the full result", "GetArtifact"),
    ("next page of a long output", "GetArtifact"),
    ("debug messages", "GetLogs"),
    ("trace of what happened", "GetLogs"),
    ("requests per second", "GetMetrics"),
    ("error rate over time", "GetMetrics"),
    ("status of the executor", "GetState"),
    ("remaining quota", "GetState"),
    ("all markdown documents", "Glob"),
    ("find *.rs", "Glob"),
    ("dir", "List"),
    ("subfolders of src", "List"),
    ("is the web server still up", "ProcessList"),
    ("list daemons", "ProcessList"),
    ("what has the server printed so far", "ProcessRead"),
    ("watch the console of a job", "ProcessRead"),
    ("ctrl-c", "ProcessStop"),
    ("cancel the long-running task", "ProcessStop"),
    ("press enter", "ProcessWrite"),
    ("answer y to the installer", "ProcessWrite"),
    ("biggest files", "QueryVFS"),
    ("files changed today", "QueryVFS"),
    ("print lines 10 to 20", "Read"),
    ("inspect package.json", "Read"),
    ("rg", "Search"),
    ("which files mention the word password", "Search"),
    ("store a report as markdown", "Write"),
    ("generate a script file", "Write"),
    ("show my last calls", "history_search"),
    ("did I already run this", "history_search"),
    ("success rate", "history_stats"),
    ("most used tools", "history_stats"),
    ("remember a result", "thread_push"),
    ("answer a question in a thread", "thread_push"),
    ("who wrote in this thread", "thread_read"),
    ("last entries of the release thread", "thread_read"),
    ("find entries about the database", "thread_seek"),
    ("what did we decide about caching", "thread_seek"),
    ("my latest threads", "thread_list"),
    ("all threads", "thread_list"),
    ("set a reminder", "notify_self"),
    ("ranked code search", "search_code"),
    ("find source code by keywords", "search_code"),
    ("which notes link to this one", "vault_read"),
    ("note a fact in my vault", "vault_write"),
    ("vault full text search", "vault_search"),
    ("notes with a tag", "vault_list"),
    ("move a folder of notes", "vault_move"),
    ("table of contents of a vault", "vault_create_index"),
    ("go to definition", "find_definition"),
    ("references of a symbol", "find_references"),
    ("map of the most used definitions", "get_repo_map"),
    ("imports of a module", "InspectModule"),
];

/// Questions that once found nothing.
const MISSED: [(&str, &str); 6] = [
    ("ripgrep", "Search"),
    ("sed", "Edit"),
    ("touch", "Write"),
    ("look at a file", "Read"),
    ("what files are here", "List"),
    ("throughput", "GetMetrics"),
];

/// Asks all questions, and returns those whose tool is not among the first five.
fn missed(world: &World, questions: &[(&str, &str)]) -> Vec<String> {
    let mut client = Client::start(world, &["--set", "serve.mcp.tools=search"]);
    let mut missed = Vec::new();
    for (number, (question, tool)) in (1..).zip(questions) {
        let found = client.call(number, "tool_search", json!({"query": question, "limit": 5}));
        let text = found["result"]["content"][0]["text"].as_str().unwrap().to_owned();
        let names: Vec<&str> = text.lines().filter_map(|line| line.split_once(": ")).map(|(name, _)| name).collect();
        if !names.contains(tool) {
            missed.push(format!("{question:?} did not find {tool}, but {names:?}"));
        }
    }
    client.end();
    missed
}

#[test]
fn tools_are_found_by_the_words_of_users() {
    let missed = missed(&World::new(), QUESTIONS);
    // Recall among the first five of at least 0.95.
    assert!(missed.len() <= QUESTIONS.len() / 20, "{missed:#?}");
}

#[test]
fn tools_are_found_by_the_words_of_others() {
    let missed = missed(&World::new(), OTHERS);
    // Recall among the first five of at least 0.9.
    assert!(missed.len() <= OTHERS.len() / 10, "{missed:#?}");
}

#[test]
fn tools_that_were_missed_once_are_found() {
    assert_eq!(missed(&World::new(), &MISSED), Vec::<String>::new());
}

/// No tool has more than four of the questions, and every tool has one.
#[test]
fn the_questions_are_about_all_tools() {
    let listed = World::new().json(&["tools", "--json"]);
    let tools: BTreeSet<&str> = listed.as_array().unwrap().iter().filter_map(|tool| tool["name"].as_str()).collect();
    for questions in [QUESTIONS, OTHERS] {
        let asked: BTreeSet<&str> = questions.iter().map(|(_, tool)| *tool).collect();
        assert_eq!(asked, tools);
        for tool in asked {
            let count = questions.iter().filter(|(_, of)| *of == tool).count();
            assert!((1..=4).contains(&count), "{count} questions are about {tool}");
        }
    }
}
