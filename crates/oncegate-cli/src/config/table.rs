//! The JSON schema, the documentation's table of settings, and where each value of a configuration
//! came from. All are derived from `shape`.

use std::fmt::Write as _;
use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde::Serialize;
use serde_json::{Map, Value as Json};
use toml::Value;

use super::findings::dotted;
use super::shape::Config;
use super::values::Property;
use super::{Loaded, Path};

/// The placeholder for the name of a consumer.
const NAME: &str = "NAME";

/// The JSON schema of a configuration.
pub(crate) fn schema() -> Json {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings
        .into_generator()
        .into_root_schema_for::<Config>()
        .to_value();
    without_null(&mut schema);
    schema
}

/// TOML has no null: an optional value is left out.
fn without_null(schema: &mut Json) {
    if let Json::Array(schemas) = schema {
        schemas.iter_mut().for_each(without_null);
    }
    let Json::Object(object) = schema else { return };
    if let Some(Json::Array(types)) = object.get_mut("type") {
        types.retain(|name| name != "null");
        if let [one] = types.as_slice() {
            let one = one.clone();
            object.insert("type".to_owned(), one);
        }
    }
    if let Some(Json::Array(choices)) = object.get_mut("anyOf") {
        choices.retain(|choice| choice.get("type") != Some(&Json::from("null")));
        if let [Json::Object(only)] = choices.as_slice() {
            let only = only.clone();
            object.remove("anyOf");
            for (name, value) in only {
                object.entry(name).or_insert(value);
            }
        }
    }
    if let Some(Json::Array(values)) = object.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    if object.get("default").is_some_and(Json::is_null) {
        object.remove("default");
    }
    object.values_mut().for_each(without_null);
}

/// A setting in the table.
#[derive(Debug)]
struct SettingRow {
    path: Path,
    kind: String,
    default: Option<String>,
    meaning: String,
}

fn rows() -> Vec<SettingRow> {
    let mut rows = Vec::new();
    if let Json::Object(root) = schema() {
        collect(&root, &Path::new(), &mut rows);
    }
    rows
}

fn collect(schema: &Map<String, Json>, path: &Path, rows: &mut Vec<SettingRow>) {
    let properties = schema.get("properties").and_then(Json::as_object);
    for (name, property) in properties.into_iter().flatten() {
        let Some(property) = property.as_object() else {
            continue;
        };
        let at = |more: &[&str]| {
            [
                path.as_slice(),
                &more
                    .iter()
                    .map(|part| (*part).to_owned())
                    .collect::<Vec<_>>(),
            ]
            .concat()
        };
        let entries = property
            .get("additionalProperties")
            .and_then(Json::as_object);
        if let Some(entry) = entries.filter(|entry| entry.contains_key("properties")) {
            collect(entry, &at(&[name, NAME]), rows);
        } else if property.contains_key("properties") {
            // Consumers inherit the same settings that they have.
            if name != "defaults" {
                collect(property, &at(&[name]), rows);
            }
        } else {
            let meaning = property.get("description").and_then(Json::as_str);
            // The rest is about details.
            let meaning = meaning.and_then(|text| text.split("\n\n").next());
            rows.push(SettingRow {
                path: at(&[name]),
                kind: kind(property),
                default: given_default(property).map(|value| {
                    value
                        .as_str()
                        .map_or_else(|| value.to_string(), str::to_owned)
                }),
                meaning: meaning.unwrap_or_default().replace('\n', " "),
            });
        }
    }
}

/// The default of a setting. An empty table says no more than none.
fn given_default(property: &Map<String, Json>) -> Option<&Json> {
    property
        .get("default")
        .filter(|value| value.as_object().is_none_or(|table| !table.is_empty()))
}

fn kind(property: &Map<String, Json>) -> String {
    if let Some(title) = property.get("title").and_then(Json::as_str) {
        return title.to_owned();
    }
    if let Some(choices) = choices(property) {
        return choices.join(", ");
    }
    match property.get("type").and_then(Json::as_str) {
        Some("string") => "text",
        Some("integer" | "number") => "number",
        Some("boolean") => "true, false",
        Some("object") => "table",
        _ => "",
    }
    .to_owned()
}

/// The choices of a setting. Those with a description are schemas of their own.
fn choices(property: &Map<String, Json>) -> Option<Vec<&str>> {
    let choices = property.get("enum").or_else(|| property.get("oneOf"));
    let choices = choices?.as_array()?.iter();
    Some(
        choices
            .filter_map(|choice| choice.get("const").unwrap_or(choice).as_str())
            .collect(),
    )
}

/// The table of the documentation, in Markdown.
pub(crate) fn markdown() -> String {
    let mut out = String::from("| setting | value | default | |\n|---|---|---|---|\n");
    for SettingRow {
        path,
        kind,
        default,
        meaning,
    } in rows()
    {
        let default = default
            .map(|default| format!("`{default}`"))
            .unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "| `{}` | {kind} | {default} | {meaning} |",
            dotted(&path)
        );
    }
    out
}

/// Returns whether a setting of this name has values that are no secret and no address: numbers,
/// times, sizes and truth values.
pub(super) fn is_plain(name: &str) -> bool {
    const KINDS: [&str; 4] = ["number", "time", "size", "true, false"];
    let named: Vec<SettingRow> = rows()
        .into_iter()
        .filter(|row| row.path.last().is_some_and(|last| last == name))
        .collect();
    !named.is_empty() && named.iter().all(|row| KINDS.contains(&row.kind.as_str()))
}

/// Returns what the documentation says of a setting of a consumer, with its default, for the help
/// of a flag.
pub(crate) fn meaning(setting: &str) -> String {
    static ROWS: LazyLock<Vec<SettingRow>> = LazyLock::new(rows);
    let path = format!("consumer.{NAME}.{setting}");
    let row = ROWS.iter().find(|row| dotted(&row.path) == path);
    let Some(SettingRow {
        meaning, default, ..
    }) = row
    else {
        return String::new();
    };
    let meaning = meaning.trim_end_matches('.');
    match default {
        Some(default) if default != "false" => format!("{meaning} [default: {default}]"),
        _ => meaning.to_owned(),
    }
}

/// An effective value, and where it came from.
#[derive(Debug, Serialize)]
pub(crate) struct Explained {
    pub(crate) path: String,
    pub(crate) value: String,
    /// A position in the file, the name of a variable, a flag, or `default`.
    pub(crate) origin: String,
}

impl Loaded {
    /// Every effective setting. Secrets are shown as `***`.
    pub(crate) fn explain(&self) -> Vec<Explained> {
        let rows = rows();
        let mut explained = Vec::new();
        for row in rows
            .iter()
            .filter(|row| row.path.get(1).is_none_or(|name| name != NAME))
        {
            explained.extend(self.explain_one(row, &row.path, &row.path));
        }
        let outboxes = self.config.outbox.keys().map(|name| ("outbox", name));
        let doors = self.config.door.keys().map(|name| ("door", name));
        for (section, name) in outboxes.chain(doors) {
            for row in rows
                .iter()
                .filter(|row| row.path.first().is_some_and(|first| first == section))
            {
                let Some(rest) = row.path.get(2..) else {
                    continue;
                };
                let path = [&[section.to_owned(), name.clone()], rest].concat();
                explained.extend(self.explain_one(row, &path, &path));
            }
        }
        for consumer in self.config.consumer.keys() {
            for row in rows
                .iter()
                .filter(|row| row.path.first().is_some_and(|first| first == "consumer"))
            {
                let Some(rest) = row.path.get(2..) else {
                    continue;
                };
                let own = [&["consumer".to_owned(), consumer.clone()], rest].concat();
                // The first part of a path is inherited as a whole, or not at all.
                let has_own = own
                    .get(..3)
                    .is_some_and(|part| self.layers.value(part).is_some());
                let source = if has_own {
                    own.clone()
                } else {
                    [&["defaults".to_owned()], rest].concat()
                };
                explained.extend(self.explain_one(row, &own, &source));
            }
        }
        explained
    }

    fn explain_one(
        &self,
        row: &SettingRow,
        path: &[String],
        source: &[String],
    ) -> Option<Explained> {
        let (value, origin) = match self.layers.value(source) {
            Some(value) => (shown(row, value), self.origin(source)?),
            None => {
                // Of alternatives such as `kafka` and `sqs`, or `http` and `exec`, only the used
                // one gets a line.
                let alternatives = ["source", "handler", "durability", "dead_letters"];
                let unused = alternatives
                    .iter()
                    .any(|part| source.contains(&(*part).to_owned()));
                let parent = source
                    .split_last()
                    .and_then(|(_, parent)| self.layers.value(parent));
                if unused && parent.is_none() {
                    return None;
                }
                (row.default.clone()?, "default".to_owned())
            }
        };
        Some(Explained {
            path: dotted(path),
            value,
            origin,
        })
    }
}

fn shown(row: &SettingRow, value: &Value) -> String {
    match value {
        Value::String(_) if row.kind == "secret" => "***".to_owned(),
        Value::String(text) => format!("{:?}", crate::stores::redacted(text)),
        Value::Table(properties) if row.path.last().is_some_and(|last| last == "properties") => {
            format!(
                "{{ {} }}",
                properties
                    .iter()
                    .map(|(name, value)| match value {
                        Value::String(_) if Property::is_secret(name) => {
                            format!("\"{name}\" = ***")
                        }
                        value => format!("\"{name}\" = {}", without_logins(value)),
                    })
                    .collect::<Vec<_>>()
                    .join(", ")
            )
        }
        value => without_logins(value)
            .to_string()
            .trim_end()
            .replace('\n', " "),
    }
}

/// The same value with no login in any of its URLs.
fn without_logins(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::String(crate::stores::redacted(text)),
        Value::Array(values) => Value::Array(values.iter().map(without_logins).collect()),
        other => other.clone(),
    }
}
