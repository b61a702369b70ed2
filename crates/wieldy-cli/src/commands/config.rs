//! `wieldy config show`: every value and where it comes from.

use serde_json::json;

use crate::config::Config;
use crate::exit::{Exit, Failure};
use crate::output::{Printer, shown_in_line};

pub(crate) fn show(config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    if printer.json {
        let values: Vec<_> = config
            .values
            .iter()
            .map(|shown| json!({"key": shown.key, "value": shown.value, "origin": shown.origin.to_string()}))
            .collect();
        printer.json(&values)?;
        return Ok(Exit::Success);
    }
    for shown in &config.values {
        let setting = format!("{} = {}", shown_in_line(&shown.key), shown_in_line(&shown.value.to_string()));
        printer.line(&format!("{setting}  # {}", shown_in_line(&shown.origin.to_string())))?;
    }
    Ok(Exit::Success)
}
