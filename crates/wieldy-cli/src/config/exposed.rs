//! Secrets in the workspace: configuration files that contain tokens, and files that store them. Every caller could
//! read them there, so they are hidden from tools.

use std::path::{Path, PathBuf};

use toml::Value;

use super::layers::keys_in;
use super::sandbox::at_home;
use super::{Config, Environment, FILE_BYTES_MAX, FILE_NAME, Text, is_secret, mcp, read_regular, shown_url};
use crate::{assemble, history, upstreams};

impl Config {
    /// Records every file that holds a secret, and warns about files that should be moved out of the workspace.
    /// `secrets` are the keys of configuration files that hold a secret.
    pub(super) fn hide_secret_files(&mut self, mut secrets: Vec<(PathBuf, Vec<String>)>, environment: &Environment) {
        // Other commands may use the workspace's own file, so it is checked even if this command uses another one.
        let beside = self.workspace.join(FILE_NAME);
        if secrets.iter().all(|(path, _)| assemble::whole(path) != assemble::whole(&beside))
            && let Ok(bytes) = read_regular(&beside, FILE_BYTES_MAX)
        {
            let keys = keys_in(&String::from_utf8_lossy(&bytes), holds_secret);
            secrets.push((beside, keys));
        }
        for (path, keys) in secrets.into_iter().filter(|(_, keys)| !keys.is_empty()) {
            self.warn_of_secrets(&path, &keys);
            self.secret_files.push(path);
        }
        let named = self
            .values
            .iter()
            .filter(|shown| shown.key.strip_suffix(".file").is_some_and(|key| is_secret(key) || mcp::is_secret(key)));
        let named = named.filter_map(|shown| at_home(Path::new(shown.value.as_str()?), environment.home()).ok());
        let mut files: Vec<PathBuf> = named.collect();
        for path in &self.mcp.files {
            let servers = upstreams::read(path, self).unwrap_or_default();
            let mut told = servers.iter().flat_map(|server| server.env.iter().chain(&server.headers));
            if told.any(|(name, text)| is_told_secret(name, text)) {
                files.push(path.clone());
            }
        }
        files.extend(self.secret_files_of_manifests(environment));
        self.secret_files.extend(files);
    }

    /// Returns the files that hold secrets of command tools: those that manifests name, and manifests with secrets in
    /// them.
    fn secret_files_of_manifests(&mut self, environment: &Environment) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for path in assemble::manifest_paths(self, environment) {
            // A file that cannot be read is reported where its tools are registered.
            let Ok((manifest, _)) = assemble::read_manifest(&path, self) else { continue };
            let mut keys = Vec::new();
            for tool in &manifest.tools {
                for (name, variable) in tool.command.iter().flat_map(|command| &command.environment) {
                    match Text::of_manifest(variable, &path, environment.home()) {
                        Ok(Text::In(file)) => files.push(file),
                        Ok(Text::Written(text)) if is_told_secret(name, &text) => {
                            keys.push(format!("{}.environment.{name}", tool.spec.name));
                        }
                        _ => {}
                    }
                }
            }
            if !keys.is_empty() {
                self.warn_of_secrets(&path, &keys);
                files.push(path);
            }
        }
        files
    }

    /// Warns about a file that should be moved out of the workspace.
    fn warn_of_secrets(&mut self, path: &Path, keys: &[String]) {
        if self.is_in_workspace(path) {
            self.warnings.push(format!(
                "`{}` is in the workspace and holds a secret ({}), so it is hidden from tools; move it to ~/.config/wieldy, \
                 or write the secret as `${{NAME}}` or `{{ file = \"…\" }}`",
                path.display(),
                keys.join(", ")
            ));
        }
    }

    fn is_in_workspace(&self, path: &Path) -> bool {
        assemble::whole(path).starts_with(assemble::whole(&self.workspace))
    }
}

/// Returns true if the value of a key is a secret written in the configuration itself.
pub(super) fn holds_secret(key: &str, value: &Value) -> bool {
    let text = value.to_string();
    if let Value::String(text) = value {
        let last = key.rsplit('.').next().unwrap_or_default();
        if is_secret(key) || key.ends_with(".oauth.client-secret") {
            return !text.contains("${");
        }
        if mcp::is_secret(key) {
            return is_told_secret(last, text);
        }
        if key == "history.url" {
            return shown_url(text) != *text;
        }
    }
    if let Value::Array(words) = value {
        let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
        let is_option =
            |name: &str, text: &str| name.starts_with("--") && is_told_secret(name.trim_start_matches('-'), text);
        let in_one = words.iter().filter_map(|word| word.split_once('='));
        if words.windows(2).any(|pair| is_option(pair[0], pair[1])) || in_one.into_iter().any(|(n, t)| is_option(n, t))
        {
            return true;
        }
    }
    wieldy::redact::text(&text) != text
}

/// Returns true if a variable or a header of a server is a secret, by its name or its look.
fn is_told_secret(name: &str, text: &str) -> bool {
    let name = name.to_ascii_uppercase().replace('-', "_");
    let is_login = ["AUTHORIZATION", "PROXY_AUTHORIZATION", "COOKIE"].contains(&name.as_str());
    !text.contains("${") && (is_login || history::is_secret(&name, text) || wieldy::redact::text(text) != text)
}
