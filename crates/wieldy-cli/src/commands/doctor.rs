//! `wieldy doctor`: shows which isolation levels and limits work here, and for the others why not and what to do.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use serde::Serialize;
use wieldy::{Enforcement, Enforcer, Holds, Level, Limit, ProbeState, Probed, Report};

use crate::args::DoctorArgs;
use crate::assemble;
use crate::commands::history::human_size;
use crate::config::{Config, Environment, FILE_NAME, Trust};
use crate::exit::{Exit, Failure};
use crate::history::{existing, failed};
use crate::output::{Printer, shown_in_line};

pub(crate) async fn run(
    args: &DoctorArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let report = wieldy::probe(&assemble::probe_options(config, environment)).await;
    let isolation = config.isolation;
    let (history, mut folder) = (history(config), folder(config));
    folder.extend(broken_manifests(config, environment));
    let is_ok = report.works(isolation) && history.probed.state != ProbeState::Fails;
    if printer.json {
        let plan = args.plan.then(|| report.plan.as_ref().map_or(&[][..], Vec::as_slice));
        printer.json(&Told { ok: is_ok, isolation, report: &report, history: &history, folder: &folder, plan })?;
    } else {
        printer.data(text(&report, &history, &folder, isolation, printer.stdout_has_colours()).as_bytes())?;
        if args.plan {
            printer.data(plan_text(&report).as_bytes())?;
        }
    }
    if is_ok {
        return Ok(Exit::Success);
    }
    if !report.works(isolation) {
        let told = anyhow!("the isolation level `{isolation}` does not work here");
        let hint = "follow the advice for it above, or choose a level that works with `isolation`";
        printer.tell_failure(&Failure::broken(told).hint(hint));
    }
    if history.probed.state == ProbeState::Fails {
        let told = anyhow!("the history cannot be used, so no call runs");
        printer.tell_failure(&Failure::broken(told).hint("follow the advice for it above"));
    }
    Ok(Exit::Broken)
}

/// The JSON output; its form is documented and stable.
#[derive(Serialize)]
struct Told<'a> {
    ok: bool,
    isolation: Level,
    #[serde(flatten)]
    report: &'a Report,
    history: &'a ProbedHistory,
    /// The configuration that came with the folder.
    folder: &'a [Probed],
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'a [String]>,
}

/// The probe of the history: whether calls can be recorded.
#[derive(Serialize)]
struct ProbedHistory {
    #[serde(flatten)]
    probed: Probed,
    /// The address of the history; null if calls are recorded in memory.
    address: Option<String>,
    /// The number of records; null if the history does not exist yet or cannot be read.
    records: Option<u64>,
    bytes: Option<u64>,
}

/// Probes the history without creating one.
fn history(config: &Config) -> ProbedHistory {
    let address = config.history.address.as_ref().map(ToString::to_string);
    let probed = |state, told: String, hint| Probed { name: "history".into(), state, told, hint };
    let place = address.clone().unwrap_or_default();
    let (mut records, mut bytes) = (None, None);
    let probed = match existing(config).and_then(|store| match store {
        Some(store) => store.extent().map(Some).map_err(|error| failed(error, config)),
        None => Ok(None),
    }) {
        _ if address.is_none() => {
            let told = "in memory, as there is no state folder: the records are lost when the command ends";
            probed(ProbeState::Found, told.into(), Some("`--state DIR` names a folder".into()))
        }
        Ok(Some((count, size))) => {
            (records, bytes) = (Some(count), Some(size));
            probed(ProbeState::Works, format!("{place}: {count} records in {}", human_size(size)), None)
        }
        Ok(None) => probed(ProbeState::Found, format!("{place}: the first call makes it"), None),
        Err(failure) => probed(ProbeState::Fails, failure.error().message, failure.hint),
    };
    ProbedHistory { probed, address, records, bytes }
}

/// Returns the trust of the configuration that came with the folder.
fn folder(config: &Config) -> Vec<Probed> {
    let hint = "`wieldy trust` shows what it would do, and asks";
    let probed = |name: &Path, is_trusted: bool, untrusted: String| {
        let (state, told, hint) = match is_trusted {
            true => (ProbeState::Works, "trusted".to_owned(), None),
            false => (ProbeState::Found, untrusted, Some(hint.to_owned())),
        };
        Probed { name: name.to_string_lossy().into_owned(), state, told, hint }
    };
    let folder = &config.folder;
    let file = folder.trust.map(|trust| match folder.keys.len() {
        0 => probed(Path::new(FILE_NAME), true, String::new()),
        keys => {
            let told = format!("not trusted, and {keys} of its keys ignored; `wieldy config show` lists them");
            probed(Path::new(FILE_NAME), trust == Trust::Trusted, told)
        }
    });
    let read = folder.read.keys().filter(|path| *path != Path::new(FILE_NAME));
    let trusted = read.map(|path| probed(path, true, String::new()));
    let untrusted = folder.untrusted.iter().map(|path| probed(path, false, "not trusted, and left out".into()));
    file.into_iter().chain(trusted).chain(untrusted).collect()
}

/// Returns the manifests that are skipped because of a mistake.
fn broken_manifests(config: &Config, environment: &Environment) -> Vec<Probed> {
    let broken = |path: &PathBuf| {
        let failure = assemble::tools_of(path, config, environment).err()?;
        let told = failure.error().message;
        Some(Probed { name: path.display().to_string(), state: ProbeState::Fails, told, hint: failure.hint })
    };
    assemble::manifest_paths(config, environment).iter().filter_map(broken).collect()
}

/// Formats the report for people: a paragraph for each kind of item, a line for each item, advice below it.
fn text(report: &Report, history: &ProbedHistory, folder: &[Probed], isolation: Level, colours: bool) -> String {
    let of_level = report.holds.iter().find(|holds| holds.level == isolation);
    let limits = of_level.iter().flat_map(|holds| holds.limits.iter().map(|it| limit(isolation, it)));
    let limits: Vec<Probed> = limits.collect();
    let holds: Vec<Probed> = report.holds.iter().map(held).collect();
    let user = if report.user == 0 { "root".to_owned() } else { format!("user {}", report.user) };
    let (history, folder) = (vec![history.probed.clone()], folder.to_vec());
    let placeholders = (!report.placeholders.is_empty()).then(|| Probed {
        name: "placeholders".into(),
        state: ProbeState::Works,
        told: report.placeholders.join(", "),
        hint: None,
    });
    let placeholders: Vec<Probed> = placeholders.into_iter().collect();
    let paragraphs = [
        (format!("isolation levels (configured: {isolation})"), &report.levels),
        (format!("kernel {} on {}, as {user}", report.kernel, report.architecture), &report.features),
        (format!("control groups: {}", report.cgroups), &report.controllers),
        (format!("limits at level {isolation}, and how they are enforced"), &limits),
        ("what each level enforces, where it works".to_owned(), &holds),
        (
            "placeholders in this workspace while a command runs, so that no program creates these names".to_owned(),
            &placeholders,
        ),
        ("where calls are recorded".to_owned(), &history),
        ("configuration that came with this folder, and manifests with mistakes".to_owned(), &folder),
    ];
    let lines = paragraphs.iter().flat_map(|(_, lines)| lines.iter());
    let width = lines.map(|probed| probed.name.chars().count()).max().unwrap_or_default();
    let paragraphs = paragraphs.iter().filter(|(_, lines)| !lines.is_empty()).map(|(title, lines)| {
        let lines: String = lines.iter().map(|probed| line(probed, width, colours)).collect();
        format!("{}\n{lines}", shown_in_line(title))
    });
    paragraphs.collect::<Vec<_>>().join("\n")
}

fn line(probed: &Probed, width: usize, colours: bool) -> String {
    let (sign, colour) = match probed.state {
        ProbeState::Works => ("✓", "32"),
        ProbeState::Found => ("?", "33"),
        ProbeState::Fails => ("✗", "31"),
    };
    let sign = if colours { format!("\x1b[{colour}m{sign}\x1b[0m") } else { sign.to_owned() };
    let mut text = format!("  {sign} {:width$}  {}\n", shown_in_line(&probed.name), shown_in_line(&probed.told));
    if let Some(hint) = &probed.hint {
        let _ = writeln!(text, "    {:width$}  → {}", "", shown_in_line(hint));
    }
    text
}

fn limit(level: Level, enforcement: &Enforcement) -> Probed {
    let (state, told, hint) = match enforcement.by {
        Enforcer::Kernel => (ProbeState::Works, "the kernel, for all processes of a call together", None),
        Enforcer::KernelPerProcess => (ProbeState::Works, "the kernel, for each process by itself", None),
        Enforcer::KernelPerSandbox => {
            let hint = "calls of one session that run at the same time share it; a control group limits each call";
            (ProbeState::Works, "the kernel, for all processes of a sandbox together", Some(hint))
        }
        Enforcer::Watcher => (ProbeState::Works, "a watcher, which ends a run above the limit", None),
        Enforcer::Executor => (ProbeState::Works, "wieldy itself, which stores no more", None),
        Enforcer::Nobody => {
            let hint = match level {
                Level::None => "this level enforces almost no limits; use `native`",
                Level::Gvisor if enforcement.limit == Limit::Processes => {
                    "gVisor's kernel has no such limit; the memory limit works, or use `runc`"
                }
                _ => "a control group enforces it; follow the advice for it above",
            };
            (ProbeState::Fails, "not enforced", Some(hint))
        }
    };
    Probed { name: enforcement.limit.to_string(), state, told: told.into(), hint: hint.map(str::to_owned) }
}

/// Returns the limits that a level enforces, on one line.
fn held(holds: &Holds) -> Probed {
    let unheld: Vec<&str> =
        holds.limits.iter().filter(|it| it.by == Enforcer::Nobody).map(|it| it.limit.as_str()).collect();
    let (state, limits) = match unheld.as_slice() {
        [] => (ProbeState::Works, "every limit".to_owned()),
        unheld => (ProbeState::Fails, format!("every limit but {}", unheld.join(", "))),
    };
    let can = |network: &str| holds.networks.contains(&network);
    let network = match (can("none"), can("open"), can("hosts")) {
        (true, true, true) => "no network, listed hosts or an open one",
        (true, true, false) => "no network or an open one; lists of hosts are refused",
        (true, false, _) => "no network; anything else is refused",
        (false, ..) => "always the machine's network",
    };
    Probed { name: holds.level.to_string(), state, told: format!("{limits}; {network}"), hint: None }
}

fn plan_text(report: &Report) -> String {
    match &report.plan {
        Ok(lines) => {
            let lines: String = lines.iter().map(|line| format!("  {}\n", shown_in_line(line))).collect();
            format!("\nwhat programs see\n{lines}")
        }
        Err(reason) => format!("\nwhat programs see\n  nothing: {}\n", shown_in_line(reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probed(name: &str, state: ProbeState, hint: Option<&str>) -> Probed {
        Probed { name: name.into(), state, told: "told\u{1b}".into(), hint: hint.map(str::to_owned) }
    }

    fn report() -> Report {
        Report {
            kernel: "6.1.0".into(),
            architecture: "x86_64".into(),
            user: 1000,
            levels: vec![
                probed("none", ProbeState::Works, None),
                probed("native", ProbeState::Fails, Some("do this")),
                probed("runc", ProbeState::Found, None),
            ],
            features: vec![probed("Landlock", ProbeState::Works, None)],
            cgroups: "v2",
            controllers: vec![probed("cpu", ProbeState::Fails, Some("delegate"))],
            limits: vec![
                Enforcement { limit: Limit::CpuMillicores, by: Enforcer::Nobody },
                Enforcement { limit: Limit::MemoryBytes, by: Enforcer::Watcher },
            ],
            holds: vec![
                Holds {
                    level: Level::Native,
                    limits: vec![
                        Enforcement { limit: Limit::CpuMillicores, by: Enforcer::Nobody },
                        Enforcement { limit: Limit::MemoryBytes, by: Enforcer::Watcher },
                    ],
                    networks: vec!["none", "open", "hosts"],
                },
                Holds {
                    level: Level::Gvisor,
                    limits: vec![Enforcement { limit: Limit::Processes, by: Enforcer::Nobody }],
                    networks: vec!["none", "open"],
                },
            ],
            refused: Vec::new(),
            placeholders: vec!["refs".into(), "wieldy.toml".into()],
            plan: Ok(vec!["bind /usr read".into()]),
        }
    }

    fn probed_history() -> ProbedHistory {
        let probed = probed("history", ProbeState::Works, None);
        ProbedHistory { probed, address: Some("/a.db".into()), records: Some(5), bytes: Some(4096) }
    }

    #[test]
    fn lines_are_aligned_and_advice_is_below_them() {
        insta::assert_snapshot!(text(&report(), &probed_history(), &[], Level::Native, false), @r#"
        isolation levels (configured: native)
          ✓ none            told\u{1b}
          ✗ native          told\u{1b}
                            → do this
          ? runc            told\u{1b}

        kernel 6.1.0 on x86_64, as user 1000
          ✓ Landlock        told\u{1b}

        control groups: v2
          ✗ cpu             told\u{1b}
                            → delegate

        limits at level native, and how they are enforced
          ✗ cpu_millicores  not enforced
                            → a control group enforces it; follow the advice for it above
          ✓ memory_bytes    a watcher, which ends a run above the limit

        what each level enforces, where it works
          ✗ native          every limit but cpu_millicores; no network, listed hosts or an open one
          ✗ gvisor          every limit but processes; no network or an open one; lists of hosts are refused

        placeholders in this workspace while a command runs, so that no program creates these names
          ✓ placeholders    refs, wieldy.toml

        where calls are recorded
          ✓ history         told\u{1b}
        "#);
    }

    #[test]
    fn an_unenforced_limit_comes_with_advice_for_the_level() {
        let of = |level| limit(level, &Enforcement { limit: Limit::Processes, by: Enforcer::Nobody }).hint.unwrap();
        assert_eq!(of(Level::Gvisor), "gVisor's kernel has no such limit; the memory limit works, or use `runc`");
        assert_eq!(of(Level::None), "this level enforces almost no limits; use `native`");
        assert_eq!(of(Level::Runc), "a control group enforces it; follow the advice for it above");
        assert!(text(&report(), &probed_history(), &[], Level::Gvisor, false).contains("limits at level gvisor,"));
    }

    #[test]
    fn a_limit_of_a_sandbox_is_not_shown_as_one_of_a_call() {
        let told = limit(Level::Native, &Enforcement { limit: Limit::Processes, by: Enforcer::KernelPerSandbox });
        assert_eq!(
            (told.state, told.told.as_str()),
            (ProbeState::Works, "the kernel, for all processes of a sandbox together")
        );
        assert!(told.hint.is_some_and(|hint| hint.contains("share it")));
    }

    #[test]
    fn colours_are_only_where_they_are_wanted() {
        let coloured = line(&probed("x", ProbeState::Fails, None), 1, true);
        assert_eq!(coloured, "  \x1b[31m✗\x1b[0m x  told\\u{1b}\n");
    }

    #[test]
    fn a_plan_or_the_reason_for_its_absence_is_shown() {
        assert_eq!(plan_text(&report()), "\nwhat programs see\n  bind /usr read\n");
        let none = Report { plan: Err("no workspace".into()), ..report() };
        assert_eq!(plan_text(&none), "\nwhat programs see\n  nothing: no workspace\n");
    }

    #[test]
    fn the_json_has_the_documented_form() {
        let report = report();
        let plan = report.plan.clone().unwrap();
        let told = Told {
            ok: false,
            isolation: Level::Native,
            report: &report,
            history: &probed_history(),
            folder: &[],
            plan: Some(&plan),
        };
        insta::assert_snapshot!(serde_json::to_string_pretty(&told).unwrap(), @r#"
        {
          "ok": false,
          "isolation": "native",
          "kernel": "6.1.0",
          "architecture": "x86_64",
          "user": 1000,
          "levels": [
            {
              "name": "none",
              "state": "works",
              "told": "told\u001b",
              "hint": null
            },
            {
              "name": "native",
              "state": "fails",
              "told": "told\u001b",
              "hint": "do this"
            },
            {
              "name": "runc",
              "state": "found",
              "told": "told\u001b",
              "hint": null
            }
          ],
          "features": [
            {
              "name": "Landlock",
              "state": "works",
              "told": "told\u001b",
              "hint": null
            }
          ],
          "cgroups": "v2",
          "controllers": [
            {
              "name": "cpu",
              "state": "fails",
              "told": "told\u001b",
              "hint": "delegate"
            }
          ],
          "limits": [
            {
              "limit": "cpu_millicores",
              "by": "nobody"
            },
            {
              "limit": "memory_bytes",
              "by": "watcher"
            }
          ],
          "holds": [
            {
              "level": "native",
              "limits": [
                {
                  "limit": "cpu_millicores",
                  "by": "nobody"
                },
                {
                  "limit": "memory_bytes",
                  "by": "watcher"
                }
              ],
              "networks": [
                "none",
                "open",
                "hosts"
              ]
            },
            {
              "level": "gvisor",
              "limits": [
                {
                  "limit": "processes",
                  "by": "nobody"
                }
              ],
              "networks": [
                "none",
                "open"
              ]
            }
          ],
          "refused": [],
          "placeholders": [
            "refs",
            "wieldy.toml"
          ],
          "history": {
            "name": "history",
            "state": "works",
            "told": "told\u001b",
            "hint": null,
            "address": "/a.db",
            "records": 5,
            "bytes": 4096
          },
          "folder": [],
          "plan": [
            "bind /usr read"
          ]
        }
        "#);
    }
}
