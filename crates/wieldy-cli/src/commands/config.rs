//! `wieldy config show`: prints every value and its origin.

use serde_json::json;

use crate::config::{self, Config, Shown};
use crate::exit::{Exit, Failure};
use crate::output::{Printer, shown_in_line};

/// Prints the effective values, and those of a folder's own file that are ignored until it is trusted.
pub(crate) fn show(config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    let ignored = config.folder.ignored();
    if printer.json {
        let told = |shown: &Shown| json!({"key": shown.key, "value": shown.value, "origin": shown.origin.to_string()});
        let ignored = ignored.iter().map(|shown| {
            let mut told = told(&without_secret(shown));
            told["ignored"] = json!("not trusted");
            told
        });
        let values: Vec<_> = config.values.iter().map(told).chain(ignored).collect();
        printer.json(&values)?;
        return Ok(Exit::Success);
    }
    let line = |shown: &Shown| {
        let setting = format!("{} = {}", shown_in_line(&shown.key), shown_in_line(&shown.value.to_string()));
        format!("{setting}  # {}", shown_in_line(&shown.origin.to_string()))
    };
    for shown in &config.values {
        printer.line(&line(shown))?;
    }
    for shown in ignored {
        printer.line(&format!("# {}, ignored until `wieldy trust`", line(&without_secret(shown))))?;
    }
    Ok(Exit::Success)
}

fn without_secret(shown: &Shown) -> Shown {
    Shown { value: config::without_secret(&shown.key, &shown.value), ..shown.clone() }
}
