//! Vault.
mod front_matter;
mod link;
mod markdown;
mod names;
mod yaml_text;
