//! Copies of a history: a backup of a file, and a copy into another database.

use std::path::Path;

use serde::Serialize;

use crate::database::{Database, TextPlace, Value, one_int};
use crate::error::StoreError;
use crate::projection::{TEXT_BYTES_MAX, opening_text};
use crate::query::{COLUMNS, parse_row};
use crate::store::Store;

/// The result of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Copied {
    /// The number of records.
    pub records: u64,
    /// The number of calls.
    pub executions: u64,
}

impl Store {
    /// Copies the whole history into a new file while others write. The history must be a file itself.
    pub fn backup(&self, target: &Path) -> Result<(), StoreError> {
        self.with(|database| database.backup(target))
    }

    /// Copies a snapshot of the history into another one, which must be new. Open calls are closed there, as *outcome
    /// unknown*, by the first executor that writes there.
    pub fn copy_to(&self, target: &Store) -> Result<Copied, StoreError> {
        self.with(|from| {
            target.with(|to| {
                let mut copied = Copied::default();
                from.in_snapshot(&mut |from| {
                    to.in_transaction(&mut |to| {
                        if one_int(to, "SELECT seq FROM trail", &[])? != Some(0) {
                            return Err(StoreError::Query(format!("the history `{}` is not empty", target.address())));
                        }
                        copied = copy_all(from, to)?;
                        Ok(())
                    })
                })?;
                Ok(copied)
            })
        })
    }
}

/// A table and its columns, each with the letter of its type: `i`nteger, `r`eal, `t`ext, point in time (`@`), `b`ytes.
struct CopiedTable {
    name: &'static str,
    columns: &'static [(&'static str, char)],
}

const TABLES: &[CopiedTable] = &[
    CopiedTable {
        name: "instances",
        columns: &[
            ("number", 'i'),
            ("id", 't'),
            ("version", 't'),
            ("host", 't'),
            ("process", 'i'),
            ("started_at", '@'),
            ("seen_at", '@'),
            ("ended_at", '@'),
            ("last_seq", 'i'),
        ],
    },
    CopiedTable {
        name: "events",
        columns: &[
            ("seq", 'i'),
            ("instance", 'i'),
            ("instance_seq", 'i'),
            ("at", '@'),
            ("name", 't'),
            ("execution", 'i'),
            ("subject", 't'),
            ("data", 't'),
            ("hash", 'b'),
        ],
    },
    CopiedTable {
        name: "tool_executions",
        columns: &[
            ("id", 'i'),
            ("execution_id", 't'),
            ("tool_name", 't'),
            ("parameters_json", 't'),
            ("status", 't'),
            ("error_message", 't'),
            ("error_code", 't'),
            ("started_at", '@'),
            ("completed_at", '@'),
            ("duration_ms", 'r'),
            ("output_size_bytes", 'i'),
            ("sandbox_id", 't'),
            ("agent_id", 't'),
            ("user_id", 't'),
            ("batch_id", 't'),
            ("session_id", 't'),
            ("tenant_id", 't'),
            ("attempts", 'i'),
            ("usage_json", 't'),
            ("metadata_json", 't'),
            ("workspace", 't'),
            ("provider", 't'),
            ("result_size_bytes", 'i'),
            ("instance", 'i'),
        ],
    },
    CopiedTable { name: "results", columns: &[("id", 'i'), ("result_json", 't')] },
    CopiedTable {
        name: "answers",
        columns: &[
            ("id", 'i'),
            ("task", 'i'),
            ("tenant", 't'),
            ("key", 't'),
            ("fingerprint", 't'),
            ("result_json", 't'),
            ("expires_at", '@'),
        ],
    },
    CopiedTable { name: "sandboxes", columns: &[("id", 'i'), ("instance", 'i'), ("sandbox", 't'), ("closer", 'i')] },
    CopiedTable {
        name: "notes",
        columns: &[("id", 'i'), ("note", 't'), ("owner", 't'), ("scope", 't'), ("replace_name", 't'), ("data", 't')],
    },
    CopiedTable { name: "metadata_entries", columns: &[("entry", 'b'), ("execution", 'i')] },
    CopiedTable {
        name: "heads",
        columns: &[("seq", 'i'), ("hash", 'b'), ("at", '@'), ("key", 't'), ("signature", 'b')],
    },
    CopiedTable {
        name: "tallies",
        columns: &[
            ("day", 'i'),
            ("tenant_id", 't'),
            ("agent_id", 't'),
            ("tool_name", 't'),
            ("status", 't'),
            ("bucket", 'i'),
            ("calls", 'i'),
            ("output_bytes", 'i'),
            ("result_bytes", 'i'),
        ],
    },
    CopiedTable { name: "trail", columns: &[("one", 'i'), ("seq", 'i'), ("hash", 'b')] },
];

fn copy_all(from: &mut dyn Database, to: &mut dyn Database) -> Result<Copied, StoreError> {
    let mut copied = Copied::default();
    for table in TABLES {
        let rows = copy_table(from, to, table)?;
        match table.name {
            "events" => copied.records = rows,
            "tool_executions" => copied.executions = rows,
            _ => {}
        }
    }
    copy_words(from, to)?;
    to.advance_counters()?;
    Ok(copied)
}

/// Maximum number of values in one statement.
const VALUES_MAX: usize = 8_000;

fn copy_table(from: &mut dyn Database, to: &mut dyn Database, table: &CopiedTable) -> Result<u64, StoreError> {
    if table.name == "trail" {
        to.execute("DELETE FROM trail", &[])?;
    }
    let names = table.columns.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let sql = format!("SELECT {names} FROM {}", table.name);
    let width = table.columns.len();
    let (mut values, mut copied) = (Vec::new(), 0);
    let mut put = |values: &mut Vec<Value>| {
        let placeholders = (0..values.len()).map(|at| {
            let kind = table.columns[at % width].1;
            to.dialect().placeholder(at + 1, kind)
        });
        let rows = placeholders.collect::<Vec<_>>();
        let rows = rows.chunks(width).map(|row| format!("({})", row.join(", "))).collect::<Vec<_>>().join(", ");
        copied += to.execute(&format!("INSERT INTO {} ({names}) VALUES {rows}", table.name), values)?;
        values.clear();
        Ok::<(), StoreError>(())
    };
    from.query(&sql, &[], &mut |row| {
        for (at, (_, kind)) in table.columns.iter().enumerate() {
            values.push(match kind {
                'i' => row.int_or_none(at)?.into(),
                '@' => row.int_or_none(at)?.map_or(Value::Null, Value::Time),
                'r' => row.real_or_none(at)?.map_or(Value::Null, Value::Real),
                'b' => Value::Bytes(row.bytes(at)?.to_vec()),
                _ => row.text_or_none(at)?.into(),
            });
        }
        if values.len() + width > VALUES_MAX { put(&mut values) } else { Ok(()) }
    })?;
    if !values.is_empty() {
        put(&mut values)?;
    }
    Ok(copied)
}

/// Rebuilds the full-text index from the rows.
fn copy_words(from: &mut dyn Database, to: &mut dyn Database) -> Result<(), StoreError> {
    let sql = format!("SELECT {} FROM tool_executions WHERE completed_at IS NOT NULL", COLUMNS);
    let mut found = Vec::new();
    from.query(&sql, &[], &mut |row| {
        let row = parse_row(row)?;
        let mut text = opening_text(&row);
        if let Some(error) = &row.error_message {
            text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
            text.push(' ');
            text.push_str(error);
        }
        found.push((row.id, text));
        if found.len() >= 1_000 { to.add_words(TextPlace::Calls, &std::mem::take(&mut found)) } else { Ok(()) }
    })?;
    to.add_words(TextPlace::Calls, &found)
}
