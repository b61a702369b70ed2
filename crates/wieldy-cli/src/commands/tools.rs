//! `wieldy tools`: lists the tools, shows the definition of one, and checks manifests.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;
use serde_json::json;
use wieldy::{CallError, CallLimit, Caller, LimitOrigin, Problem, ToolFilter, ToolSpec};

use crate::args::{ToolsArgs, ToolsCommand};
use crate::config::{Config, Environment, key_of_limit};
use crate::exit::{Exit, Failure};
use crate::output::{Printer, counted, hint_for, shown, shown_in_line};
use crate::{assemble, upstreams};

/// Runs the command.
pub(crate) fn run(
    args: &ToolsArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    match &args.command {
        None => list(args, config, environment, printer),
        Some(ToolsCommand::Show { name }) => show(name, config, environment, printer),
        Some(ToolsCommand::Check { file }) => check(file, config, environment, printer),
    }
}

/// Lists tools, one per line.
fn list(args: &ToolsArgs, config: &Config, environment: &Environment, printer: &Printer) -> Result<Exit, Failure> {
    let executor = assemble::catalogue(config, environment)?;
    upstreams::recall(config, environment, &executor, printer)?;
    let filter = ToolFilter {
        category: args.category.clone(),
        scope: args.scope.clone(),
        provider: args.provider.clone(),
        read_only: args.read_only.then_some(true),
        text: args.text.clone(),
    };
    let tools = executor.registry().list(&Caller::local(), &filter);
    if printer.json {
        let specs: Vec<&ToolSpec> = tools.iter().map(|tool| tool.spec()).collect();
        printer.json(&specs)?;
        return Ok(Exit::Success);
    }
    let specs: Vec<&ToolSpec> = tools.iter().map(|tool| tool.spec()).collect();
    printer.data(table(&specs, printer.width()).as_bytes())?;
    if specs.is_empty() {
        printer.tell("no tool fits");
    }
    Ok(Exit::Success)
}

/// Formats name, category, `reads` or `writes`, and the first sentence of the description; each line within `width`.
fn table(specs: &[&ToolSpec], width: usize) -> String {
    let rows: Vec<[String; 4]> = specs
        .iter()
        .map(|spec| {
            let reads = if spec.annotations.read_only { "reads" } else { "writes" };
            let about = shown_in_line(first_sentence(&spec.description));
            [shown_in_line(&spec.name), shown_in_line(&spec.category), reads.to_owned(), about]
        })
        .collect();
    let longest = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths = [longest(0), longest(1), longest(2)];
    let mut text = String::new();
    for [name, category, reads, about] in &rows {
        let line =
            format!("{name:a$}  {category:b$}  {reads:c$}  {about}", a = widths[0], b = widths[1], c = widths[2]);
        let line = line.trim_end();
        if line.chars().count() > width {
            let cut: String = line.chars().take(width.saturating_sub(1)).collect();
            text.push_str(&cut);
            text.push('…');
        } else {
            text.push_str(line);
        }
        text.push('\n');
    }
    text
}

fn first_sentence(description: &str) -> &str {
    let line = description.trim().lines().next().unwrap_or_default();
    line.split_once(". ").map_or(line, |(sentence, _)| sentence).trim_end_matches('.')
}

/// Prints one definition.
fn show(name: &str, config: &Config, environment: &Environment, printer: &Printer) -> Result<Exit, Failure> {
    let executor = assemble::catalogue(config, environment)?;
    upstreams::recall(config, environment, &executor, printer)?;
    let tool = executor.registry().find(name, &Caller::local()).map_err(|not_found| {
        let error = CallError::from(not_found);
        Failure { hint: hint_for(&error, name), ..Failure::from(error) }
    })?;
    let limits = executor.call_limits(&Caller::local(), &tool);
    if printer.json {
        printer.json(&ShownTool { spec: tool.spec(), resources: &limits })?;
    } else {
        printer.data(description(tool.spec(), &limits).as_bytes())?;
    }
    Ok(Exit::Success)
}

/// A definition, and the resource limits of its calls.
#[derive(Serialize)]
struct ShownTool<'a> {
    #[serde(flatten)]
    spec: &'a ToolSpec,
    resources: &'a [CallLimit],
}

/// Formats a limit in words: its value, the most that a call may ask for, and where both come from.
fn limit_in_words(tool: &str, limit: &CallLimit) -> String {
    let (key, per) = key_of_limit(limit.limit);
    let origin = |origin: LimitOrigin| match origin {
        LimitOrigin::Executor => "`resources`".to_owned(),
        LimitOrigin::Tool => "the tool's definition".to_owned(),
        LimitOrigin::OperatorForTool => format!("`resources.tools.{tool}`"),
        LimitOrigin::BuiltIn => "built in".to_owned(),
        LimitOrigin::Machine => "this machine".to_owned(),
        LimitOrigin::ExecutorMax => "`resources.max`".to_owned(),
        LimitOrigin::ToolMax => "the maximum in the tool's definition".to_owned(),
        LimitOrigin::OperatorMaxForTool => format!("`resources.tools.{tool}.max`"),
        LimitOrigin::Plan => "the plan".to_owned(),
        LimitOrigin::Parent => "the sandbox".to_owned(),
    };
    let amount = |amount: Option<u64>, from| match amount {
        Some(amount) => format!("{} ({})", amount / per, origin(from)),
        None => "no limit".to_owned(),
    };
    format!("{key} {}, at most {}", amount(limit.value, limit.from), amount(limit.max, limit.max_from))
}

/// Formats a definition in words, without its empty parts.
fn description(spec: &ToolSpec, limits: &[CallLimit]) -> String {
    let annotations = spec.annotations;
    let promises: Vec<&str> = [
        (annotations.read_only, "read-only"),
        (annotations.destructive, "destructive"),
        (annotations.idempotent, "idempotent"),
        (annotations.open_world, "open world"),
    ]
    .into_iter()
    .filter_map(|(holds, name)| holds.then_some(name))
    .collect();
    let seconds = |time: Option<std::time::Duration>| time.map(|time| format!("{} s", time.as_secs_f64()));
    let footprint = spec.footprint.clone().unwrap_or_default();
    let aliases: Vec<String> = spec.aliases.iter().chain(&spec.weak_aliases).cloned().collect();
    let renamed = spec.argument_aliases.iter().map(|(alias, name)| format!("{alias} for {name}"));
    let argument_aliases: Vec<String> = renamed.collect();
    let facts = [
        ("title", spec.title.clone()),
        ("category", Some(spec.category.clone())),
        ("provider", Some(spec.provider.to_string())),
        ("version", Some(spec.version.clone())),
        ("aliases", listed(&aliases)),
        ("argument names", listed(&argument_aliases)),
        ("promises", (!promises.is_empty()).then(|| promises.join(", "))),
        ("reads", listed(&footprint.reads)),
        ("writes", listed(&footprint.writes)),
        ("permissions", listed(&spec.required_permissions)),
        ("scopes", listed(&spec.agent_scopes)),
        ("confirmation", spec.requires_confirmation.then(|| "each time".to_owned())),
        ("timeout", seconds(spec.constraints.timeout)),
        ("timeout at most", seconds(spec.constraints.timeout_max)),
        ("results", spec.private_result.then(|| "not recorded".to_owned())),
        ("cached for", seconds(spec.cache.map(|cache| cache.ttl))),
    ];
    let mut text = format!("{}: {}\n\n", shown_in_line(&spec.name), shown(&spec.description));
    for (name, fact) in facts {
        if let Some(fact) = fact {
            let _ = writeln!(text, "{:16} {}", format!("{name}:"), shown_in_line(&fact));
        }
    }
    for (at, limit) in limits.iter().enumerate() {
        let name = if at == 0 { "limits:" } else { "" };
        let _ = writeln!(text, "{name:16} {}", shown_in_line(&limit_in_words(&spec.name, limit)));
    }
    let schema = serde_json::to_string_pretty(&spec.input_schema).expect("a schema is plain data");
    let schema: Vec<String> = schema.lines().map(shown_in_line).collect();
    let _ = writeln!(text, "\n{}", schema.join("\n"));
    text
}

fn listed(names: &[String]) -> Option<String> {
    (!names.is_empty()).then(|| names.join(", "))
}

/// Checks a manifest and prints all of its mistakes.
fn check(file: &Path, config: &Config, environment: &Environment, printer: &Printer) -> Result<Exit, Failure> {
    let (manifest, mut problems) = assemble::read_manifest(file, config)?;
    let executor = assemble::executor_of_built_ins(config, environment)?;
    let (mut names, mut warnings) = (Vec::new(), Vec::new());
    for tool in manifest.tools {
        let (name, line) = (tool.spec.name.clone(), tool.line);
        let problem = |message| Problem { line, tool: Some(name.clone()), message };
        warnings.extend(assemble::missing_program(&tool, config, environment).map(problem));
        let lacking = assemble::own_variables(&tool, file, environment).err();
        warnings.extend(lacking.map(|error| problem(format!("{error:#}"))));
        let is_good = problems.iter().all(|problem| problem.tool.as_ref() != Some(&name));
        match assemble::implement(tool, file, config, environment) {
            Err(more) => problems.extend(more),
            // A tool with a reported mistake would be refused again for the same one.
            Ok(tool) if is_good => {
                let refused = executor.register(tool).err();
                problems.extend(refused.map(|error| problem(format!("{:#}", anyhow::Error::new(error)))));
            }
            Ok(_) => {}
        }
        names.push(name);
    }
    if printer.json {
        let told = |problems: &[Problem]| -> Vec<serde_json::Value> {
            let told = |it: &Problem| json!({"line": it.line, "tool": it.tool, "message": it.message});
            problems.iter().map(told).collect()
        };
        let (told, warned) = (told(&problems), told(&warnings));
        let is_ok = problems.is_empty();
        printer.json(&json!({"file": file, "ok": is_ok, "tools": names, "problems": told, "warnings": warned}))?;
    } else if problems.is_empty() {
        let names: Vec<String> = names.iter().map(|name| shown_in_line(name)).collect();
        let file = shown_in_line(&file.to_string_lossy());
        let listed = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
        printer.line(&format!("{file}: {}{listed}", counted(names.len(), "tool")))?;
    }
    for warning in &warnings {
        printer.tell(&format!("warning: {}", shown(&assemble::place(file, warning))));
    }
    for problem in &problems {
        printer.tell(&shown(&assemble::place(file, problem)));
    }
    Ok(if problems.is_empty() { Exit::Success } else { Exit::WrongUsage })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_lines_up_and_fits() {
        let mut long = ToolSpec::new("Longer", "Does this. And that.").category("files").read_only();
        long.description = "Looks at something that needs many words. Really.".into();
        let short = ToolSpec::new("a\u{1b}", "x");
        assert_eq!(
            table(&[&long, &short], 40),
            "Longer   files    reads   Looks at some…\na\\u{1b}  general  writes  x\n"
        );
        assert_eq!(table(&[&short], usize::MAX), "a\\u{1b}  general  writes  x\n");
    }
}
