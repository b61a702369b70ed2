//! The harness: a warm-up, then rounds in which each contestant runs one batch, so that noise affects all alike.

use std::time::{Duration, Instant};

/// A contestant to be timed.
pub(super) struct Contestant<'a> {
    name: &'static str,
    /// Runs the work this many times and returns how long it took, without setup and cleanup.
    run: Box<dyn FnMut(u64) -> Duration + 'a>,
}

impl<'a> Contestant<'a> {
    pub(super) fn new(name: &'static str, run: impl FnMut(u64) -> Duration + 'a) -> Self {
        Self { name, run: Box::new(run) }
    }
}

/// The effort of a measurement.
#[derive(Clone, Copy)]
pub(super) struct Effort {
    warm_up: Duration,
    batch: Duration,
    rounds: usize,
}

impl Effort {
    pub(super) fn new(quick: bool) -> Self {
        let ms = Duration::from_millis;
        match quick {
            true => Self { warm_up: ms(50), batch: ms(2), rounds: 41 },
            false => Self { warm_up: ms(300), batch: ms(5), rounds: 301 },
        }
    }
}

impl Effort {
    /// Returns the effort for work that takes milliseconds: small batches and many rounds.
    pub(super) fn processes(quick: bool) -> Self {
        let ms = Duration::from_millis;
        Self { warm_up: ms(100), batch: ms(4), rounds: if quick { 60 } else { 400 } }
    }

    /// Returns the effort for work that takes a good part of a second.
    pub(super) fn containers(quick: bool) -> Self {
        Self { rounds: if quick { 7 } else { 31 }, ..Self::processes(quick) }
    }
}

/// The measured times in nanoseconds per run of the work, one sample per round.
pub(super) struct Measured {
    samples: Vec<(&'static str, Vec<f64>)>,
}

/// The spread of one contestant's samples, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub(super) min: f64,
    pub(super) p50: f64,
    pub(super) p95: f64,
}

/// Measures the contestants in turn.
pub(super) fn compete(effort: Effort, mut contestants: Vec<Contestant<'_>>) -> Measured {
    let sizes: Vec<u64> = contestants.iter_mut().map(|contestant| batch_size(effort, contestant)).collect();
    let mut samples: Vec<_> = contestants.iter().map(|one| (one.name, Vec::with_capacity(effort.rounds))).collect();
    for round in 0..effort.rounds {
        // Each round starts with another contestant, so that none always runs first.
        for step in 0..contestants.len() {
            let index = (round + step) % contestants.len();
            let took = (contestants[index].run)(sizes[index]);
            samples[index].1.push(took.as_secs_f64() * 1e9 / sizes[index] as f64);
        }
    }
    Measured { samples }
}

/// Warms up, and returns how many runs of the work fit into a batch.
fn batch_size(effort: Effort, contestant: &mut Contestant<'_>) -> u64 {
    let began = Instant::now();
    let mut size = 1;
    loop {
        let took = (contestant.run)(size).max(Duration::from_nanos(1));
        let wanted = (size as f64 * effort.batch.as_secs_f64() / took.as_secs_f64()).ceil() as u64;
        if began.elapsed() >= effort.warm_up {
            return wanted.max(1);
        }
        size = wanted.clamp(1, size * 4);
    }
}

impl Measured {
    pub(super) fn spread(&self, name: &str) -> Spread {
        spread_of(self.of(name).to_vec())
    }

    /// Returns the median over the rounds of the ratio to `floor`, where each sample is divided by the floor's of the
    /// same round.
    pub(super) fn ratio(&self, name: &str, floor: &str) -> f64 {
        let ratios = self.of(name).iter().zip(self.of(floor)).map(|(ours, floor)| ours / floor).collect();
        quantile(&sorted(ratios), 0.5)
    }

    fn of(&self, name: &str) -> &[f64] {
        let found = self.samples.iter().find(|(known, _)| *known == name);
        &found.unwrap_or_else(|| panic!("`{name}` did not take part")).1
    }
}

pub(super) fn spread_of(samples: Vec<f64>) -> Spread {
    let sorted = sorted(samples);
    Spread { min: sorted[0], p50: quantile(&sorted, 0.5), p95: quantile(&sorted, 0.95) }
}

fn sorted(mut samples: Vec<f64>) -> Vec<f64> {
    samples.sort_by(f64::total_cmp);
    samples
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_compare_each_round_with_itself() {
        let measured = Measured { samples: vec![("ours", vec![2.0, 20.0, 6.0]), ("floor", vec![1.0, 10.0, 2.0])] };
        assert_eq!(measured.ratio("ours", "floor"), 2.0);
        assert_eq!(measured.spread("ours"), Spread { min: 2.0, p50: 6.0, p95: 20.0 });
    }

    #[test]
    fn every_contestant_runs_in_every_round() {
        let effort = Effort { warm_up: Duration::ZERO, batch: Duration::from_micros(10), rounds: 5 };
        let fixed = |nanos: u64| move |times: u64| Duration::from_nanos(nanos * times);
        let measured = compete(effort, vec![Contestant::new("a", fixed(100)), Contestant::new("b", fixed(300))]);
        assert_eq!(measured.of("a").len(), 5);
        assert!((measured.ratio("b", "a") - 3.0).abs() < 0.01);
    }
}
