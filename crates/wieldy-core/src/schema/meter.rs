//! Metering: bounds the work of checking a value, by counting every read of a value.
//!
//! A schema is a program that its author wrote and its reader runs. The validator has no limit of its own, so it reads
//! values through [`Metered`], where every read costs units. [`within`] sets the allowed units, time and stack. When
//! one of them is used up, the check is unwound and returns only [`Spent`].

use std::any::Any;
use std::borrow::Cow;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use jsonschema::JsonType;
use jsonschema::json::{Array, Json, Node, NodeIdentity, Object, SerdeJson};
use serde_json::{Map, Number, Value};

use super::patterns::Price;

/// The work that a check may cost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allowance {
    /// The rough number of reads of values.
    units: u64,
    /// The time. The clock is read only now and then, so a check exceeds it by a few steps.
    time: Duration,
    /// Bytes of stack below the function that began the check.
    stack: usize,
}

impl Allowance {
    /// A check on the caller's thread, short enough that other calls there can wait.
    pub(crate) const IN_PLACE: Self = Self { units: 20_000, time: Duration::from_millis(5), stack: 128 * 1024 };
    /// A check on a thread of its own.
    pub(crate) const ON_WORKER: Self = Self { units: 50_000_000, time: Duration::from_secs(5), stack: 1024 * 1024 };
}

/// The check cost more than its allowance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spent;

/// The number of ticks between two reads of the clock.
const CLOCK_EVERY: u32 = 4096;
/// The number of ticks that a text counts: a pattern may take long on it.
const TEXT_TICKS: u32 = 256;
/// The number of bytes of a text that cost one unit.
const TEXT_UNIT_BYTES: usize = 32;

struct Meter {
    units_left: Cell<u64>,
    ticks_left: Cell<u32>,
    time: Cell<Duration>,
    /// The deadline. Set when the clock is first read: most checks are over before that.
    until: Cell<Option<Instant>>,
    stack: Cell<usize>,
    stack_begin: Cell<usize>,
    prices: Cell<Prices>,
}

/// The prices that a schema sets for reads of values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prices {
    /// One more than the number of patterns that each property of an object is matched with.
    pub(super) property: u64,
    /// The price of a text or a name, by its length.
    pub(super) patterns: Price,
}

impl Prices {
    /// Returns the price of a text of this length.
    fn text(self, length: usize) -> u64 {
        self.patterns.units(length as u64).saturating_add((1 + length / TEXT_UNIT_BYTES) as u64)
    }
}

thread_local! {
    static METER: Meter = const { Meter {
        units_left: Cell::new(u64::MAX),
        ticks_left: Cell::new(CLOCK_EVERY),
        time: Cell::new(Duration::MAX),
        until: Cell::new(None),
        stack: Cell::new(usize::MAX),
        stack_begin: Cell::new(0),
        prices: Cell::new(Prices { property: 1, patterns: Price::NONE }),
    } };
}

/// Runs a check within an allowance.
pub(super) fn within<T>(allowance: Allowance, prices: Prices, check: impl FnOnce() -> T) -> Result<T, Spent> {
    METER.with(|meter| {
        meter.units_left.set(allowance.units);
        meter.ticks_left.set(CLOCK_EVERY);
        meter.time.set(allowance.time);
        meter.until.set(None);
        meter.stack.set(allowance.stack);
        meter.stack_begin.set(stack_pointer());
        meter.prices.set(prices);
    });
    unless_spent(check)
}

/// Runs a part of a check with at most this many of the remaining units. If the check as a whole has no more units, the
/// whole check ends.
pub(crate) fn at_most<T>(units: u64, part: impl FnOnce() -> T) -> Result<T, Spent> {
    let before = METER.with(|meter| meter.units_left.get());
    let allowed = before.min(units);
    METER.with(|meter| meter.units_left.set(allowed));
    let done = unless_spent(part);
    let left = METER.with(|meter| meter.units_left.get());
    if done.is_err() && (left > 0 || allowed == before) {
        stop();
    }
    METER.with(|meter| meter.units_left.set(before - (allowed - left)));
    done
}

fn unless_spent<T>(check: impl FnOnce() -> T) -> Result<T, Spent> {
    // Unwind safe: the validator is only read, and a check's own values are dropped with it.
    catch_unwind(AssertUnwindSafe(check)).map_err(|thrown: Box<dyn Any + Send>| match thrown.downcast::<Spent>() {
        Ok(spent) => *spent,
        Err(panic) => resume_unwind(panic),
    })
}

/// Counts work. Unwinds to [`within`] if it exceeds the allowance.
pub(crate) fn spend(units: usize) {
    METER.with(|meter| meter.spend(units as u64, 1));
}

impl Meter {
    fn spend(&self, units: u64, ticks: u32) {
        let Some(left) = self.units_left.get().checked_sub(units) else {
            self.units_left.set(0);
            stop()
        };
        self.units_left.set(left);
        if self.stack_begin.get().abs_diff(stack_pointer()) > self.stack.get() {
            stop();
        }
        match self.ticks_left.get().checked_sub(ticks) {
            Some(left) => self.ticks_left.set(left),
            None => self.look_at_the_clock(),
        }
    }

    #[cold]
    fn look_at_the_clock(&self) {
        self.ticks_left.set(CLOCK_EVERY);
        let now = Instant::now();
        match self.until.get() {
            None => self.until.set(now.checked_add(self.time.get())),
            Some(until) if now > until => stop(),
            Some(_) => {}
        }
    }
}

/// Unwinds silently: this is not a panic that a panic hook should report.
#[cold]
fn stop() -> ! {
    resume_unwind(Box::new(Spent))
}

/// Returns the rough address of the stack's end.
#[inline(always)]
fn stack_pointer() -> usize {
    let here = 0_u8;
    std::hint::black_box(&raw const here) as usize
}

/// Counts a text by its length, because patterns read it.
fn spend_text(text: &str) {
    METER.with(|meter| meter.spend(meter.prices.get().text(text.len()), TEXT_TICKS));
}

/// Counts a value and all values within it.
fn spend_all(value: &Value) {
    match value {
        Value::Array(items) => items.iter().for_each(spend_all),
        Value::Object(map) => map.values().for_each(spend_all),
        Value::String(text) => return spend_text(text),
        _ => {}
    }
    spend(1);
}

/// Counts the work of comparing two values.
fn spend_common(left: &Value, right: &Value) {
    spend(1);
    match (left, right) {
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            left.iter().zip(right).for_each(|(left, right)| spend_common(left, right));
        }
        (Value::Object(left), Value::Object(right)) if left.len() == right.len() => {
            left.iter().for_each(|(key, left)| right.get(key).into_iter().for_each(|right| spend_common(left, right)));
        }
        (Value::String(left), Value::String(right)) if left.len() == right.len() => {
            spend(left.len() / TEXT_UNIT_BYTES);
        }
        _ => {}
    }
}

/// JSON whose reads are counted.
pub(crate) struct Metered;

/// A value whose reads are counted.
#[derive(Clone, Copy)]
pub(crate) struct Priced<T>(pub(crate) T);

impl Json for Metered {
    type Node<'a> = Priced<&'a Value>;
    type PreparedKey = String;
    type StringBuffer = Value;
    const KEYS_PER_LOOKUP: usize = SerdeJson::KEYS_PER_LOOKUP;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>(buffer: &mut Value, text: &str, look: impl FnOnce(Priced<&Value>) -> T) -> T {
        spend_text(text);
        SerdeJson::with_string_node(buffer, text, |value| look(Priced(value)))
    }
}

impl<'a> Node<'a, Metered> for Priced<&'a Value> {
    type Object = Priced<&'a Map<String, Value>>;
    type Array = Priced<&'a [Value]>;
    type Number = &'a Number;

    fn as_object(&self) -> Option<Self::Object> {
        spend(1);
        self.0.as_object().map(Priced)
    }

    fn as_array(&self) -> Option<Self::Array> {
        spend(1);
        self.0.as_array().map(|items| Priced(items.as_slice()))
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        spend(1);
        self.0.as_str().inspect(|text| spend_text(text)).map(Cow::Borrowed)
    }

    fn as_number(&self) -> Option<&'a Number> {
        spend(1);
        self.0.as_number()
    }

    fn as_boolean(&self) -> Option<bool> {
        spend(1);
        self.0.as_bool()
    }

    fn is_null(&self) -> bool {
        spend(1);
        self.0.is_null()
    }

    fn json_type(&self) -> JsonType {
        spend(1);
        Node::<SerdeJson>::json_type(&self.0)
    }

    fn string_length(&self) -> Option<u64> {
        spend(1 + self.0.as_str().map_or(0, str::len) / TEXT_UNIT_BYTES);
        Node::<SerdeJson>::string_length(&self.0)
    }

    fn equals_value(&self, expected: &Value) -> bool {
        spend_common(self.0, expected);
        Node::<SerdeJson>::equals_value(&self.0, expected)
    }

    fn to_value(&self) -> Cow<'a, Value> {
        spend(1);
        Cow::Borrowed(self.0)
    }

    fn identity(&self) -> Option<NodeIdentity> {
        spend(1);
        Node::<SerdeJson>::identity(&self.0)
    }
}

impl<'a> Object<'a, Metered> for Priced<&'a Map<String, Value>> {
    type Node = Priced<&'a Value>;
    type MemberName = &'a str;
    type MembersIter = Members<'a>;

    fn len(&self) -> usize {
        spend(1);
        self.0.len()
    }

    fn get(&self, key: &String) -> Option<Priced<&'a Value>> {
        spend(1 + key.len() / TEXT_UNIT_BYTES);
        self.0.get(key.as_str()).map(Priced)
    }

    fn members(&self) -> Members<'a> {
        Members(self.0.iter())
    }
}

/// An iterator over the properties of an object that counts each.
pub(crate) struct Members<'a>(serde_json::map::Iter<'a>);

impl<'a> Iterator for Members<'a> {
    type Item = (&'a str, Priced<&'a Value>);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, value) = self.0.next()?;
        METER.with(|meter| {
            let prices = meter.prices.get();
            let ticks = u32::try_from(prices.property).unwrap_or(u32::MAX).saturating_mul(8);
            meter.spend(prices.property.saturating_mul(prices.text(name.len())), ticks);
        });
        Some((name, Priced(value)))
    }
}

impl<'a> Array<'a, Metered> for Priced<&'a [Value]> {
    type Node = Priced<&'a Value>;
    type ElementsIter = Elements<'a>;

    fn len(&self) -> usize {
        spend(1);
        self.0.len()
    }

    fn elements(&self) -> Elements<'a> {
        Elements(self.0.iter())
    }

    fn is_unique(&self) -> bool {
        self.0.iter().for_each(spend_all);
        Array::<SerdeJson>::is_unique(&self.0)
    }
}

/// An iterator over the elements of an array that counts each.
pub(crate) struct Elements<'a>(std::slice::Iter<'a, Value>);

impl<'a> Iterator for Elements<'a> {
    type Item = Priced<&'a Value>;

    fn next(&mut self) -> Option<Self::Item> {
        spend(1);
        self.0.next().map(Priced)
    }
}
