//! The table that a benchmark prints: ours, the floor, the ratio, the goal, met or not.

use anyhow::Result;
use serde_json::{Value, json};

use super::harness::{Measured, Spread};

/// One line of the table.
pub(super) struct Row {
    pub(super) name: String,
    pub(super) ours: Figure,
    /// The name and figure that it is compared with.
    pub(super) floor: Option<(&'static str, Figure)>,
    pub(super) ratio: Option<f64>,
    pub(super) goal: Option<Goal>,
}

/// A figure with its unit.
#[derive(Clone, Copy)]
pub(super) enum Figure {
    /// The spread over the rounds, in nanoseconds.
    Time(Spread),
    PerSecond(f64),
    Bytes(f64),
}

/// A goal of a row.
#[derive(Clone, Copy)]
pub(super) enum Goal {
    RatioAtMost(f64),
    PerSecondAtLeast(f64),
    BytesAtMost(f64),
    RatioAtLeast(f64),
    /// The largest 95th percentile, in nanoseconds.
    TimeAtMost(f64),
}

impl Row {
    /// Makes a row that compares two contestants of one measurement.
    pub(super) fn timed(measured: &Measured, name: &'static str, floor: &'static str, goal: Option<f64>) -> Self {
        Self {
            name: name.to_owned(),
            ours: Figure::Time(measured.spread(name)),
            floor: Some((floor, Figure::Time(measured.spread(floor)))),
            ratio: Some(measured.ratio(name, floor)),
            goal: goal.map(Goal::RatioAtMost),
        }
    }

    /// Returns true if the goal is met, `None` without a goal.
    pub(super) fn met(&self) -> Option<bool> {
        self.goal.map(|goal| match (goal, self.ours) {
            (Goal::RatioAtMost(max), _) => self.ratio.is_some_and(|ratio| ratio <= max),
            (Goal::RatioAtLeast(min), _) => self.ratio.is_some_and(|ratio| ratio >= min),
            (Goal::TimeAtMost(max), Figure::Time(spread)) => spread.p95 <= max,
            (Goal::PerSecondAtLeast(min), Figure::PerSecond(rate)) => rate >= min,
            (Goal::BytesAtMost(max), Figure::Bytes(bytes)) => bytes <= max,
            _ => false,
        })
    }

    fn cells(&self) -> [String; 6] {
        let floor = self.floor.map_or_else(String::new, |(name, figure)| format!("{figure} ({name})"));
        let met = self.met().map_or("", |met| if met { "yes" } else { "NO" });
        [
            self.name.clone(),
            self.ours.to_string(),
            floor,
            self.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}×")),
            self.goal.map_or_else(String::new, |goal| goal.to_string()),
            met.to_owned(),
        ]
    }

    fn json(&self) -> Value {
        json!({
            "row": self.name,
            "ours": self.ours.json(),
            "floor": self.floor.map(|(name, figure)| json!({"name": name, "figure": figure.json()})),
            "ratio": self.ratio,
            "goal": self.goal.map(|goal| goal.to_string()),
            "met": self.met(),
        })
    }
}

impl Figure {
    fn json(self) -> Value {
        match self {
            Self::Time(spread) => json!({"min_ns": spread.min, "p50_ns": spread.p50, "p95_ns": spread.p95}),
            Self::PerSecond(rate) => json!({"per_second": rate}),
            Self::Bytes(bytes) => json!({"bytes": bytes}),
        }
    }
}

impl std::fmt::Display for Figure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let micros = |nanos: f64| nanos / 1e3;
        match self {
            Self::Time(Spread { min, p50, p95 }) => {
                write!(f, "{:.2} µs [{:.2} … {:.2}]", micros(*p50), micros(*min), micros(*p95))
            }
            Self::PerSecond(rate) => write!(f, "{rate:.0} /s"),
            Self::Bytes(bytes) if *bytes >= 1024.0 => write!(f, "{:.1} KiB", bytes / 1024.0),
            Self::Bytes(bytes) => write!(f, "{bytes:.0} B"),
        }
    }
}

impl std::fmt::Display for Goal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::RatioAtMost(max) => write!(f, "≤ {max}×"),
            Self::RatioAtLeast(min) => write!(f, "≥ {min:.2}×"),
            Self::TimeAtMost(max) if *max < 1e6 => write!(f, "p95 ≤ {:.0} µs", max / 1e3),
            Self::TimeAtMost(max) => write!(f, "p95 ≤ {:.0} ms", max / 1e6),
            Self::PerSecondAtLeast(min) => write!(f, "≥ {min:.0} /s"),
            Self::BytesAtMost(max) => write!(f, "≤ {:.0} KiB", max / 1024.0),
        }
    }
}

/// Prints the rows for people, and how many goals are met.
pub(super) fn print(rows: &[Row]) -> Result<()> {
    let heading = ["row", "ours: p50 [min … p95]", "floor", "ratio", "goal", "met"].map(str::to_owned);
    let lines: Vec<[String; 6]> = std::iter::once(heading).chain(rows.iter().map(Row::cells)).collect();
    let widths: Vec<usize> =
        (0..6).map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0)).collect();
    for (index, line) in lines.iter().enumerate() {
        let cells: Vec<String> = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        println!("{}", cells.join("  ").trim_end());
        if index == 0 {
            println!("{}", "─".repeat(widths.iter().sum::<usize>() + 2 * 5));
        }
    }
    let met = rows.iter().filter(|row| row.met() == Some(true)).count();
    let goals = rows.iter().filter(|row| row.goal.is_some()).count();
    println!("\n{met} of {goals} goals met. A sample is the mean of one batch; a ratio is the median over the rounds.");
    Ok(())
}

/// Prints the rows for programs.
pub(super) fn print_json(rows: &[Row]) -> Result<()> {
    let rows: Vec<Value> = rows.iter().map(Row::json).collect();
    println!("{}", serde_json::to_string_pretty(&json!({"rows": rows}))?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_met_by_the_figure_that_it_is_about() {
        let row = |ours, ratio, goal| Row { name: "x".into(), ours, floor: None, ratio, goal: Some(goal) };
        assert_eq!(row(Figure::Bytes(4096.0), None, Goal::BytesAtMost(8192.0)).met(), Some(true));
        assert_eq!(row(Figure::PerSecond(99.0), None, Goal::PerSecondAtLeast(100.0)).met(), Some(false));
        assert_eq!(row(Figure::Bytes(1.0), Some(1.8), Goal::RatioAtMost(1.7)).met(), Some(false));
        assert_eq!(row(Figure::Bytes(1.0), None, Goal::PerSecondAtLeast(1.0)).met(), Some(false));
    }
}
