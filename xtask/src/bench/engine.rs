//! The engine: one call through the whole pipeline, batches, observers and many tools.

use anyhow::Result;
use tokio::runtime::Runtime;

use super::floor::{ByHand, timed};
use super::harness::{Contestant, Effort, compete};
use super::table::Row;

const FLOOR: &str = "by hand";
const FLOOR_SPAWNED: &str = "by hand, spawn + timeout";

pub(super) fn measure(quick: bool) -> Result<Vec<Row>> {
    let effort = Effort::new(quick);
    let runtime = one_core()?;
    let hand = ByHand::new();
    let measured = compete(
        effort,
        vec![
            Contestant::new(FLOOR, |times| timed(&runtime, times, || hand.call())),
            Contestant::new(FLOOR_SPAWNED, |times| timed(&runtime, times, || hand.call_spawned())),
        ],
    );
    Ok(vec![Row::timed(&measured, FLOOR_SPAWNED, FLOOR, None)])
}

fn one_core() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_time().build()?)
}
