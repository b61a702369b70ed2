//! The log: on standard error or in a file, as text or as JSON, with a line for each event of an executor.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use jiff::Timestamp;
use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use wieldy::{Executor, LOG_TARGETS};

use crate::config::{Levels, LogConfig, LogFileConfig, LogFormat, Rotate};
use crate::exit::Failure;
use crate::output::Printer;

/// Starts the log as configured.
pub(crate) fn start(config: &LogConfig, printer: &Printer) -> Result<(), Failure> {
    let writer = match &config.file {
        None => BoxMakeWriter::new(io::stderr),
        Some(file) => BoxMakeWriter::new(Mutex::new(LogFile::open(file, Timestamp::now()).map_err(|error| {
            let doing = format!("cannot write the log to `{}`", file.path.display());
            Failure::broken(anyhow::Error::new(error).context(doing)).hint("the key `log.file` names another file")
        })?)),
    };
    let has_colours = config.file.is_none() && printer.stderr_has_colours();
    let layer = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(has_colours);
    let layer = match config.format {
        LogFormat::Text => layer.boxed(),
        LogFormat::Json => layer.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed(),
    };
    // This fails only if a log was started before, and then that one is used.
    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer).with(filter(config)));
    Ok(())
}

/// Runs `work` and logs the executor's events meanwhile, including the last ones.
pub(crate) async fn with_events<T>(config: &LogConfig, executor: &Executor, work: impl Future<Output = T>) -> T {
    let filter = filter(config);
    if !LOG_TARGETS.iter().any(|target| filter.would_enable(target, &Level::ERROR)) {
        return work.await;
    }
    let log = wieldy::log_events(executor);
    let result = work.await;
    log.finish().await;
    result
}

/// Returns the filter of log lines.
fn filter(config: &LogConfig) -> Targets {
    let Levels { all, targets } = &config.levels;
    let all = all.unwrap_or(Levels::DEFAULT);
    let mut filter = Targets::new().with_default(all);
    // The command itself already prints failures on standard error. To log them as well, name the target or use `info`.
    if config.file.is_none() && all < LevelFilter::INFO {
        filter = filter.with_targets(LOG_TARGETS.map(|target| (target, LevelFilter::OFF)));
    }
    // rmcp logs whole messages with any secrets in them, and our own lines contain what matters.
    filter = filter.with_target("rmcp", LevelFilter::OFF);
    // A named level applies to all targets below it, too.
    for (name, level) in targets {
        let below = LOG_TARGETS.iter().filter(|target| target.starts_with(name.as_str()));
        filter = filter.with_targets(below.map(|target| (*target, *level))).with_target(name, *level);
    }
    filter
}

/// A log file that lines are appended to. With rotation, the file of this day or hour.
struct LogFile {
    config: LogFileConfig,
    path: PathBuf,
    file: File,
}

impl LogFile {
    fn open(config: &LogFileConfig, now: Timestamp) -> io::Result<Self> {
        let path = path_at(config, now);
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        // Only the owner may read the log, because it shows the actions of agents.
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
        if let (Some(keep), false) = (config.keep, config.rotate == Rotate::Never) {
            forget_oldest(config, keep);
        }
        Ok(Self { config: config.clone(), path, file })
    }

    fn write_at(&mut self, bytes: &[u8], now: Timestamp) -> io::Result<usize> {
        if path_at(&self.config, now) != self.path
            // If the next file cannot be opened, logging continues in the present one.
            && let Ok(next) = Self::open(&self.config, now)
        {
            *self = next;
        }
        self.file.write(bytes)
    }
}

/// Writes each line at once, so none is lost in any end of the program.
impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_at(bytes, Timestamp::now())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Returns the name of the file at some time: `wieldy.log` becomes `wieldy.2026-01-31.log`. Days and hours are in UTC,
/// as in the lines.
fn path_at(config: &LogFileConfig, now: Timestamp) -> PathBuf {
    let period = match config.rotate {
        Rotate::Never => return config.path.clone(),
        Rotate::Daily => now.strftime("%Y-%m-%d"),
        Rotate::Hourly => now.strftime("%Y-%m-%d-%H"),
    };
    let (before, after) = around_period(&config.path);
    config.path.with_file_name(format!("{before}{period}{after}"))
}

/// Returns the parts before and after the day or hour in the names of a rotated log.
fn around_period(path: &Path) -> (String, String) {
    let text = |part: Option<&std::ffi::OsStr>| part.map(|part| part.to_string_lossy().into_owned());
    let after = text(path.extension()).map(|extension| format!(".{extension}")).unwrap_or_default();
    (format!("{}.", text(path.file_stem()).unwrap_or_default()), after)
}

/// Removes the oldest files of a rotated log. Files with similar names stay.
fn forget_oldest(config: &LogFileConfig, keep: usize) {
    let (before, after) = around_period(&config.path);
    let folder = config.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Ok(entries) = fs::read_dir(folder) else { return };
    let is_ours = |name: &str| {
        let period = name.strip_prefix(&before).and_then(|rest| rest.strip_suffix(&after));
        period.is_some_and(|period| is_period(period, config.rotate))
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut ours: Vec<String> = names.filter(|name| is_ours(name)).collect();
    // Days and hours sort by name in the order of time.
    ours.sort_unstable();
    ours.truncate(ours.len().saturating_sub(keep));
    for name in ours {
        // A file that cannot be removed is tried again next time. Another command may just have removed it.
        let _ = fs::remove_file(folder.join(name));
    }
}

fn is_period(text: &str, rotate: Rotate) -> bool {
    let form = match rotate {
        Rotate::Never => return false,
        Rotate::Daily => "0000-00-00",
        Rotate::Hourly => "0000-00-00-00",
    };
    let fits = |(c, form): (char, char)| if form == '0' { c.is_ascii_digit() } else { c == form };
    text.len() == form.len() && text.chars().zip(form.chars()).all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(time: &str) -> Timestamp {
        format!("2026-{time}:00Z").parse().unwrap()
    }

    fn config(folder: &Path, name: &str, rotate: Rotate, keep: usize) -> LogFileConfig {
        LogFileConfig { path: folder.join(name), rotate, keep: Some(keep).filter(|keep| *keep > 0) }
    }

    /// Returns all files with their texts.
    fn files(folder: &Path) -> String {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let text = |entry: fs::DirEntry| {
            format!("{}: {}", entry.file_name().display(), fs::read_to_string(entry.path()).unwrap())
        };
        let mut files: Vec<String> = entries.map(text).collect();
        files.sort_unstable();
        files.join("\n")
    }

    #[test]
    fn each_day_has_its_file_and_the_oldest_go() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("a.2025-12-30.log", "old"),
            ("a.2025-12-31.log", "old"),
            ("a.log", "not rotated"),
            ("a.2025-12-31-07.log", "of an hour"),
            ("a.2025-12-31.log.gz", "packed"),
            ("a-b.2025-12-31.log", "another"),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let mut log = LogFile::open(&config(folder.path(), "a.log", Rotate::Daily, 2), at("01-01T10:00")).unwrap();
        for (time, line) in [("01-01T10:00", "1"), ("01-01T23:59", "2"), ("01-02T00:00", "3"), ("01-02T00:01", "4")] {
            log.write_at(line.as_bytes(), at(time)).unwrap();
        }
        insta::assert_snapshot!(files(folder.path()), @"
        a-b.2025-12-31.log: another
        a.2025-12-31-07.log: of an hour
        a.2025-12-31.log.gz: packed
        a.2026-01-01.log: 12
        a.2026-01-02.log: 34
        a.log: not rotated
        ");
    }

    #[test]
    fn a_command_on_the_same_day_goes_on_in_the_file_of_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        for line in ["1", "2"] {
            let mut log = LogFile::open(&config(folder.path(), "log", Rotate::Daily, 1), at("01-01T10:00")).unwrap();
            log.write_at(line.as_bytes(), at("01-01T10:00")).unwrap();
        }
        assert_eq!(files(folder.path()), "log.2026-01-01: 12");
    }

    #[test]
    fn each_hour_has_its_file_and_all_may_be_kept() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = LogFile::open(&config(folder.path(), "a.log", Rotate::Hourly, 0), at("01-01T10:00")).unwrap();
        for (time, line) in [("01-01T10:59", "1"), ("01-01T11:00", "2"), ("01-01T12:00", "3")] {
            log.write_at(line.as_bytes(), at(time)).unwrap();
        }
        insta::assert_snapshot!(files(folder.path()), @"
        a.2026-01-01-10.log: 1
        a.2026-01-01-11.log: 2
        a.2026-01-01-12.log: 3
        ");
    }

    #[test]
    fn the_end_of_a_call_is_reported_once_by_default() {
        let wanted = |levels: &str, file: Option<LogFileConfig>| {
            let config = LogConfig { levels: levels.parse().unwrap(), format: LogFormat::Text, file };
            let filter = filter(&config);
            let most = |target: &str| {
                let levels = [Level::TRACE, Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR];
                let level = levels.into_iter().find(|level| filter.would_enable(target, level));
                level.map_or("off".to_owned(), |level| level.to_string().to_lowercase())
            };
            [most("wieldy::call"), most("wieldy::retry"), most("wieldy::assemble"), most("hyper")].join(" ")
        };
        assert_eq!(wanted("warn", None), "off off warn warn");
        assert_eq!(wanted("warn", Some(config(Path::new(""), "a", Rotate::Never, 0))), "warn warn warn warn");
        assert_eq!(wanted("info", None), "info info info info");
        assert_eq!(wanted("off", None), "off off off off");
        assert_eq!(wanted("wieldy::call=debug", None), "debug off warn warn");
        assert_eq!(wanted("error,wieldy=info", None), "info info info error");
        assert_eq!(wanted("wieldy=warn", None), "warn warn warn warn");
        assert_eq!(wanted("wieldy=warn,wieldy::call=off", None), "off warn warn warn");
        assert_eq!(wanted("trace,wieldy::retry=error", None), "trace error trace trace");
    }
}
