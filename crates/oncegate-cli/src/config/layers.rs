//! Merges file, environment and flags into one table, and records where each value came from.

use std::collections::BTreeMap;
use std::ops::Range;

use toml::{Table, Value};
use toml_edit::{Document, Item};

/// The path of a setting: `["consumer", "billing", "lease"]`.
pub(crate) type Path = Vec<String>;

/// The origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Bytes of the file: of the name of the setting, and of its value.
    File {
        name: Range<usize>,
        value: Range<usize>,
    },
    Environment(String),
    Flag(String),
}

/// The prefix of all variables. Those with two underscores after each part of a path are settings.
const PREFIX: &str = "ONCEGATE_";
const SEPARATOR: &str = "__";
/// The table of the consumers.
const CONSUMERS: &str = "consumer";
/// The tables of tables that have names of the user's.
const NAMED: [&str; 3] = [CONSUMERS, "outbox", "door"];
/// The table of what they inherit.
const DEFAULTS: &str = "defaults";

/// The merged table, and the origins of its parts.
#[derive(Debug, Default)]
pub(crate) struct Layers {
    pub(super) table: Table,
    origins: BTreeMap<Path, Origin>,
    /// Values that were given as text and may stand for another type: `64` for a number.
    texts: Vec<Path>,
    /// Variables that may mean several tables of the file, and are the setting of none.
    pub(super) ambiguous: Vec<Ambiguous>,
}

/// A variable whose name fits several tables of the file.
#[derive(Debug)]
pub(super) struct Ambiguous {
    pub(super) variable: String,
    pub(super) section: String,
    pub(super) names: Vec<String>,
}

/// Adds the names of all secrets of the form `{ env = "NAME" }`.
fn add_named(value: &Value, variables: &mut Vec<String>) {
    match value {
        Value::Table(table) => match table.get("env") {
            Some(Value::String(name)) if table.len() == 1 => variables.push(name.clone()),
            _ => table.values().for_each(|value| add_named(value, variables)),
        },
        Value::Array(values) => values.iter().for_each(|value| add_named(value, variables)),
        _ => {}
    }
}

/// The text is no TOML.
#[derive(Debug)]
pub(super) struct Broken {
    pub(super) what: String,
    pub(super) at: Range<usize>,
}

impl Layers {
    pub(super) fn of_file(text: &str) -> Result<Self, Broken> {
        let document = Document::parse(text).map_err(|error| Broken {
            what: error.message().to_owned(),
            at: error.span().unwrap_or(0..0),
        })?;
        let mut layers = Self::default();
        layers.table = layers.table_of(document.as_table(), &Path::new());
        Ok(layers)
    }

    fn table_of(&mut self, table: &dyn toml_edit::TableLike, path: &Path) -> Table {
        table
            .iter()
            .map(|(name, item)| {
                let path = [path.as_slice(), &[name.to_owned()]].concat();
                let named = table.key(name).and_then(toml_edit::Key::span);
                let value = item.span().or_else(|| named.clone());
                if let Some(value) = value {
                    let name = named.unwrap_or_else(|| value.clone());
                    self.origins
                        .insert(path.clone(), Origin::File { name, value });
                }
                (name.to_owned(), self.value_of(item, &path))
            })
            .collect()
    }

    fn value_of(&mut self, item: &Item, path: &Path) -> Value {
        if let Some(table) = item.as_table_like() {
            return Value::Table(self.table_of(table, path));
        }
        if let Some(tables) = item.as_array_of_tables() {
            return Value::Array(
                tables
                    .iter()
                    .map(|table| Value::Table(self.table_of(table, path)))
                    .collect(),
            );
        }
        match item.as_value() {
            Some(toml_edit::Value::Array(array)) => {
                let values = array.iter();
                Value::Array(
                    values
                        .map(|value| self.value_of(&Item::Value(value.clone()), path))
                        .collect(),
                )
            }
            Some(toml_edit::Value::String(text)) => Value::String(text.value().clone()),
            Some(toml_edit::Value::Integer(number)) => Value::Integer(*number.value()),
            Some(toml_edit::Value::Float(number)) => Value::Float(*number.value()),
            Some(toml_edit::Value::Boolean(flag)) => Value::Boolean(*flag.value()),
            Some(toml_edit::Value::Datetime(date)) => Value::Datetime(*date.value()),
            _ => Value::Table(Table::new()),
        }
    }

    /// The variables of the environment that hold settings, and those that settings name as places
    /// of secrets.
    pub(super) fn variables(&self) -> Vec<String> {
        // Also those that a flag overrides.
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let mut variables: Vec<String> = names
            .filter(|name| name.starts_with(PREFIX) && name.contains(SEPARATOR))
            .collect();
        add_named(&Value::Table(self.table.clone()), &mut variables);
        variables.sort();
        variables.dedup();
        variables
    }

    /// Settings among these variables, over what is there already.
    pub(super) fn add_environment(
        &mut self,
        variables: impl IntoIterator<Item = (String, String)>,
    ) {
        for (name, value) in variables {
            // An empty variable is one that is not set, as shells and containers have them.
            let Some(rest) = name
                .strip_prefix(PREFIX)
                .filter(|rest| rest.contains(SEPARATOR) && !value.is_empty())
            else {
                continue;
            };
            let mut path: Path = rest.split(SEPARATOR).map(str::to_lowercase).collect();
            if let [section, table, ..] = path.as_mut_slice()
                && NAMED.contains(&section.as_str())
            {
                match self.tables_like(section, table).as_slice() {
                    [] => {}
                    [known] => table.clone_from(known),
                    several => {
                        self.ambiguous.push(Ambiguous {
                            variable: name.clone(),
                            section: section.clone(),
                            names: several.to_vec(),
                        });
                        continue;
                    }
                }
            }
            if let Some(properties) = path.iter().position(|part| part == "properties") {
                // Names in the environment have no dots, and those of properties no underscores.
                let property = path
                    .split_off(properties + 1)
                    .join(SEPARATOR)
                    .replace('_', ".");
                path.push(property);
            }
            self.set(path, value, Origin::Environment(name));
        }
    }

    /// The names in a table of tables so far: those of the consumers in `consumer`.
    pub(crate) fn names(&self, table: &str) -> Vec<String> {
        let tables = self.table.get(table).and_then(Value::as_table);
        tables
            .map(|tables| tables.keys().cloned().collect())
            .unwrap_or_default()
    }

    /// The consumers or outboxes of the file that a variable may mean: names there have neither
    /// dashes nor dots nor cases.
    fn tables_like(&self, section: &str, name: &str) -> Vec<String> {
        let mut names = self.names(section);
        names.retain(|known| known.to_lowercase().replace(['-', '.'], "_") == name);
        names
    }

    /// Sets a value that came as text.
    pub(super) fn set(&mut self, path: Path, text: String, origin: Origin) {
        insert(&mut self.table, &path, Value::String(text));
        self.origins.retain(|known, _| !known.starts_with(&path));
        self.origins.insert(path.clone(), origin);
        self.texts.push(path);
    }

    /// Parses the text at `path` as TOML; `false` when it was not given as text, or was parsed
    /// before.
    pub(super) fn reinterpret(&mut self, path: &[String]) -> bool {
        let Some(at) = self.texts.iter().position(|text| path.starts_with(text)) else {
            return false;
        };
        let path = self.texts.swap_remove(at);
        let Some(Value::String(text)) = get(&self.table, &path) else {
            return false;
        };
        let Ok(mut parsed) = toml::from_str::<Table>(&format!("x = {text}")) else {
            return false;
        };
        let Some(value) = parsed.remove("x").filter(|value| !value.is_str()) else {
            return false;
        };
        insert(&mut self.table, &path, value);
        true
    }

    /// The table in which each consumer has what it inherits, beside what it has itself.
    pub(super) fn with_inheritance(&self) -> Table {
        let mut table = self.table.clone();
        let defaults = self.table.get(DEFAULTS).and_then(Value::as_table);
        let consumers = table.get_mut(CONSUMERS).and_then(Value::as_table_mut);
        for (_, consumer) in consumers.into_iter().flatten() {
            let Value::Table(consumer) = consumer else {
                continue;
            };
            for (name, value) in defaults.into_iter().flatten() {
                consumer
                    .entry(name.clone())
                    .or_insert_with(|| value.clone());
            }
        }
        table
    }

    /// The path of a setting where it stands: that of `[defaults]`, if a consumer inherits it. A
    /// consumer with any part of a table inherits nothing of that table.
    pub(super) fn inherited(&self, path: &[String]) -> Path {
        if let [section, _, first, ..] = path
            && section == CONSUMERS
            && path.get(..3).is_some_and(|own| self.value(own).is_none())
        {
            let rest = path.get(2..).unwrap_or_default();
            let inherited = [&[DEFAULTS.to_owned()], rest].concat();
            if self.value(&[DEFAULTS.to_owned(), first.clone()]).is_some() {
                return inherited;
            }
        }
        path.to_vec()
    }

    /// Removes a wrong value, so that the rest can be read; `false` when there is no value.
    pub(super) fn remove(&mut self, path: &[String]) -> bool {
        remove(&mut self.table, path)
    }

    /// The origin of the value at `path`, or of the nearest part above it that has one.
    pub(super) fn origin(&self, path: &[String]) -> Option<&Origin> {
        (1..=path.len())
            .rev()
            .find_map(|length| self.origins.get(path.get(..length)?))
    }

    /// The origin of what was set at `path` or, first of all, below it.
    pub(super) fn origin_within(&self, path: &[String]) -> Option<&Origin> {
        let within = self
            .origins
            .iter()
            .find(|(known, _)| known.starts_with(path));
        within.map(|(_, origin)| origin).or(self.origin(path))
    }

    /// The origin of exactly this value, if it was set.
    pub(super) fn exact_origin(&self, path: &[String]) -> Option<&Origin> {
        self.value(path)?;
        self.origin(path)
    }

    pub(super) fn value(&self, path: &[String]) -> Option<&Value> {
        get(&self.table, path)
    }
}

fn get<'a>(table: &'a Table, path: &[String]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    let value = table.get(first)?;
    if rest.is_empty() {
        Some(value)
    } else {
        get(value.as_table()?, rest)
    }
}

/// A wrong value in a list, or below a value that is not a table, is removed with the whole list or
/// value.
fn remove(table: &mut Table, path: &[String]) -> bool {
    let Some((name, rest)) = path.split_first() else {
        return false;
    };
    match table.get_mut(name) {
        Some(Value::Table(inner)) if !rest.is_empty() => {
            let removed = remove(inner, rest);
            removed || table.remove(name).is_some()
        }
        Some(_) => table.remove(name).is_some(),
        None => false,
    }
}

fn insert(table: &mut Table, path: &[String], value: Value) {
    match path {
        [] => {}
        [name] => {
            table.insert(name.clone(), value);
        }
        [name, rest @ ..] => {
            let inner = table
                .entry(name.clone())
                .or_insert_with(|| Value::Table(Table::new()));
            if !inner.is_table() {
                *inner = Value::Table(Table::new());
            }
            if let Some(inner) = inner.as_table_mut() {
                insert(inner, rest, value);
            }
        }
    }
}
