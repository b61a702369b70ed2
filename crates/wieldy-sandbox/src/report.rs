//! What a supervisor tells the embedding process: records of one size, through a pipe.
//!
//! Both ends are this very program, so the form needs no version. Encoding runs between `fork` and `exec` and
//! therefore never allocates.

use std::fmt;

/// The size of every record; far below the size up to which a pipe keeps writes whole.
pub(crate) const RECORD_BYTES: usize = WORDS * size_of::<i64>();

const WORDS: usize = 6;

/// One thing that a supervisor has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Record {
    /// The process that becomes the command was made.
    Started { main: i32 },
    /// The command never ran, because this step failed.
    NotStarted { step: Step, errno: i32 },
    /// No process is left.
    Ended { status: i32, used: Used },
}

/// What the processes used, in the kernel's units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Used {
    pub(crate) cpu_us: i64,
    pub(crate) memory_peak_kib: i64,
    pub(crate) blocks_read: i64,
    pub(crate) blocks_written: i64,
}

/// What has to be done before a command runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Descriptors,
    Session,
    Reaping,
    Signals,
    Children,
    Fork,
    Limits,
    Folder,
    Program,
}

impl Step {
    const ALL: [Self; 9] = [
        Self::Descriptors,
        Self::Session,
        Self::Reaping,
        Self::Signals,
        Self::Children,
        Self::Fork,
        Self::Limits,
        Self::Folder,
        Self::Program,
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Descriptors => "cannot arrange the file descriptors",
            Self::Session => "cannot open a session of its own",
            Self::Reaping => "cannot become the one who reaps the process tree",
            Self::Signals => "cannot listen for the end of processes",
            Self::Children => "cannot list the processes it is responsible for (is `/proc` mounted?)",
            Self::Fork => "cannot make a process",
            Self::Limits => "cannot set the limits",
            Self::Folder => "cannot enter the folder",
            Self::Program => "cannot execute the program",
        })
    }
}

impl Record {
    /// The record as bytes.
    pub(crate) fn encode(self) -> [u8; RECORD_BYTES] {
        let words: [i64; WORDS] = match self {
            Self::Started { main } => [1, main.into(), 0, 0, 0, 0],
            Self::NotStarted { step, errno } => [2, errno.into(), step as i64, 0, 0, 0],
            Self::Ended { status, used } => {
                [3, status.into(), used.cpu_us, used.memory_peak_kib, used.blocks_read, used.blocks_written]
            }
        };
        let mut bytes = [0; RECORD_BYTES];
        for (place, word) in bytes.chunks_exact_mut(size_of::<i64>()).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// The record in these bytes, if they are one.
    pub(crate) fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let mut words = [0; WORDS];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(size_of::<i64>())) {
            *word = i64::from_ne_bytes(place.try_into().ok()?);
        }
        let [kind, first, rest @ ..] = words;
        let first = i32::try_from(first).ok()?;
        match kind {
            1 => Some(Self::Started { main: first }),
            2 => {
                let step = *Step::ALL.get(usize::try_from(rest[0]).ok()?)?;
                Some(Self::NotStarted { step, errno: first })
            }
            3 => {
                let [cpu_us, memory_peak_kib, blocks_read, blocks_written] = rest;
                Some(Self::Ended { status: first, used: Used { cpu_us, memory_peak_kib, blocks_read, blocks_written } })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_as_they_went() {
        let used = Used { cpu_us: 1, memory_peak_kib: i64::MAX, blocks_read: 3, blocks_written: 4 };
        let mut records = vec![Record::Started { main: 7 }, Record::Ended { status: -1, used }];
        records.extend(Step::ALL.map(|step| Record::NotStarted { step, errno: 2 }));
        for record in records {
            assert_eq!(Record::decode(&record.encode()), Some(record));
        }
        assert_eq!(Record::decode(&[9; RECORD_BYTES]), None);
    }
}
