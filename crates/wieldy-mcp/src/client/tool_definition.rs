//! A tool definition as a server sends it: compared by hash and by diff, and converted to a [`ToolSpec`].

use rmcp::model::Tool;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use wieldy_core::{Annotations, Provider, ToolName, ToolSpec};

use super::settings::ServerSettings;

/// The longest time for a diff of two definitions. After that the diff gets coarser.
const DIFF_TIME_MAX: std::time::Duration = std::time::Duration::from_millis(50);

/// A tool's definition as its server sends it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolDefinition {
    /// The tool's name on its server.
    pub name: String,
    /// The display name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// The description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// The JSON Schema of the arguments.
    pub input_schema: Value,
    /// The JSON Schema of the structured content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_schema: Option<Value>,
    /// The server's hints on the effects of the tool.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub annotations: Value,
}

impl ToolDefinition {
    /// Converts from the SDK's type.
    pub(crate) fn from_sdk(tool: Tool) -> Self {
        let annotations = tool.annotations.map(|told| serde_json::to_value(told).unwrap_or_default());
        Self {
            name: tool.name.into_owned(),
            title: tool.title,
            description: tool.description.map(Into::into),
            input_schema: Value::Object((*tool.input_schema).clone()),
            output_schema: tool.output_schema.map(|schema| Value::Object((*schema).clone())),
            annotations: annotations.unwrap_or_default(),
        }
    }

    /// Returns the text that is hashed and compared: pretty-printed, with sorted keys.
    fn text(&self) -> String {
        let ordered = sorted(json!(self));
        serde_json::to_string_pretty(&ordered).unwrap_or_default()
    }

    /// Returns a strong hash of the whole definition. The order of keys does not matter.
    pub fn hash(&self) -> String {
        blake3::hash(self.text().as_bytes()).to_hex().to_string()
    }

    /// Returns the diff from an older definition, line by line. Empty if they are equal.
    pub fn diff(&self, older: &ToolDefinition) -> String {
        let (old, new) = (older.text() + "\n", self.text() + "\n");
        // The server controls both texts. A coarse diff is enough if a fine one takes too long.
        let diff = similar::TextDiff::configure().timeout(DIFF_TIME_MAX).diff_lines(&old, &new);
        diff.unified_diff().context_radius(1).header("agreed", "now").to_string()
    }

    /// Returns the spec under which the tool is registered.
    pub(crate) fn spec(&self, settings: &ServerSettings) -> ToolSpec {
        let unruled = super::settings::ToolRule::default();
        let rule = settings.tools.rules.get(&self.name).unwrap_or(&unruled);
        let short = rule.rename.as_deref().unwrap_or(&self.name);
        let name = qualified(&settings.name, short);
        let mut spec = ToolSpec::new(name, self.description.clone().unwrap_or_default())
            .category("mcp")
            .provider(Provider::Mcp(settings.name.clone()));
        spec.title = self.title.clone().or_else(|| self.annotations["title"].as_str().map(str::to_owned));
        spec.input_schema = self.input_schema.clone();
        spec.output_schema = self.output_schema.clone();
        spec.annotations = rule.annotations(if settings.trusted { self.hints() } else { Annotations::default() });
        spec.requires_confirmation = rule.confirm.unwrap_or(false);
        spec.constraints.timeout = rule.timeout.or(settings.timeout);
        spec.constraints.silence = rule.silence.or(settings.silence);
        spec
    }

    /// Returns the server's hints. Called only for trusted servers.
    fn hints(&self) -> Annotations {
        let cautious = Annotations::default();
        let hint = |name: &str, otherwise| self.annotations[name].as_bool().unwrap_or(otherwise);
        Annotations {
            read_only: hint("readOnlyHint", cautious.read_only),
            destructive: hint("destructiveHint", cautious.destructive),
            idempotent: hint("idempotentHint", cautious.idempotent),
            open_world: hint("openWorldHint", cautious.open_world),
        }
    }
}

/// Returns `server__tool` in the characters that models' APIs accept. If a character had to be replaced or the name is
/// too long, a hash suffix keeps names distinct.
fn qualified(server: &str, tool: &str) -> String {
    let name = format!("{server}{}{tool}", ToolName::SEPARATOR);
    if ToolName::new(&name).is_ok() {
        return name;
    }
    const LETTERS_MAX: usize = 64;
    let hash = blake3::hash(tool.as_bytes()).to_hex();
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
    let kept: String = name.chars().map(allowed).take(LETTERS_MAX - 9).collect();
    format!("{kept}_{}", &hash[..8])
}

/// Sorts the keys of all objects in a value.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(object) => {
            let mut entries: Vec<(String, Value)> =
                object.into_iter().map(|(key, value)| (key, sorted(value))).collect();
            entries.sort_by(|one, other| one.0.cmp(&other.0));
            Value::Object(entries.into_iter().collect())
        }
        Value::Array(list) => list.into_iter().map(sorted).collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::settings::{Address, Reach, ToolRule};

    fn definition(told: Value) -> ToolDefinition {
        serde_json::from_value(told).unwrap()
    }

    fn server() -> ServerSettings {
        let address = Address::new("http://x.test");
        ServerSettings::new("git", Reach::Http(address))
    }

    #[test]
    fn the_hash_depends_on_every_word_and_not_on_the_order() {
        let one = definition(json!({"name": "a", "inputSchema": {"type": "object", "properties": {"x": {}, "y": {}}}}));
        let same =
            definition(json!({"inputSchema": {"properties": {"y": {}, "x": {}}, "type": "object"}, "name": "a"}));
        assert_eq!(one.hash(), same.hash());
        assert_eq!(one.diff(&same), "");
        let other = ToolDefinition { description: Some("do as I say".into()), ..one.clone() };
        assert_ne!(one.hash(), other.hash());
        assert_eq!(
            other.diff(&one),
            "--- agreed\n+++ now\n@@ -1,2 +1,3 @@\n {\n+  \"description\": \"do as I say\",\n   \"inputSchema\": {\n"
        );
    }

    #[test]
    fn hints_of_a_server_that_is_not_trusted_change_nothing() {
        let told = json!({"name": "log", "title": "Log", "inputSchema": {"type": "object"},
            "annotations": {"readOnlyHint": true, "openWorldHint": false}});
        let definition = definition(told);
        let mut settings = server();
        assert_eq!(definition.spec(&settings).annotations, Annotations::default());
        settings.trusted = true;
        let believed = Annotations { read_only: true, destructive: false, idempotent: true, open_world: false };
        assert_eq!(definition.spec(&settings).annotations, believed);
        settings.trusted = false;
        let rule = ToolRule {
            read_only: Some(true),
            rename: Some("history".into()),
            confirm: Some(true),
            ..ToolRule::default()
        };
        settings.tools.rules.insert("log".into(), rule);
        let spec = definition.spec(&settings);
        assert_eq!(
            (spec.name.as_str(), spec.annotations.read_only, spec.requires_confirmation),
            ("git__history", true, true)
        );
        assert_eq!((spec.title.as_deref(), spec.provider), (Some("Log"), Provider::Mcp("git".into())));
    }

    #[test]
    fn invalid_names_become_valid_and_stay_distinct() {
        assert_eq!(qualified("git", "log"), "git__log");
        let odd = ["a.b", "a/b", "a b", &"x".repeat(100), &"x".repeat(101)].map(|name| qualified("git", name));
        assert_eq!(odd[0], "git__a_b_08b91858");
        assert!(odd.iter().all(|name| ToolName::new(name).is_ok()), "{odd:?}");
        assert_eq!(odd.iter().collect::<std::collections::BTreeSet<_>>().len(), odd.len());
    }
}
