//! Notes of an agent to itself.

mod notify_self;
mod when;

pub use notify_self::{NotifySelf, NotifySelfArgs};
