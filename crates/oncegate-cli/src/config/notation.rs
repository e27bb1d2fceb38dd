//! Paths of a key that are written in another notation than that of oncegate. They are legal names
//! of fields, and no payload has such a field.

use toml::Value;

use super::Loaded;

/// The members of a key's parts that hold no path.
const NO_PATHS: [&str; 7] = ["header", "as", "is", "in", "equals", "value", "when_value"];

impl Loaded {
    /// Refuses paths that no payload has, because they are written as elsewhere.
    pub(super) fn check_notation(&mut self, name: &str) {
        for setting in ["key", "fingerprint"] {
            let at = self.place(name, &[setting]);
            if let Some((path, here)) = self.layers.value(&at).and_then(foreign) {
                self.error(
                    &at,
                    format!(
                        "the path `{path}` is written `{here}` here; a field of that very name has a backslash before its \
                         first `$`, `[` or `/`"
                    ),
                );
            }
        }
    }
}

/// Returns the first path in a key or a fingerprint that is JSONPath or a JSON pointer, with how it
/// is written here.
fn foreign(value: &Value) -> Option<(String, String)> {
    match value {
        Value::String(text) => text.split(',').find_map(|part| {
            let path = part.split([':', '|']).next().unwrap_or_default().trim();
            Some((path.to_owned(), spelt(path)?))
        }),
        Value::Array(values) => values.iter().find_map(foreign),
        Value::Table(table) => table
            .iter()
            .filter(|(name, _)| !NO_PATHS.contains(&name.as_str()))
            .find_map(|(_, value)| foreign(value)),
        _ => None,
    }
}

/// Returns how a path in another notation is written here; `None` if it is in none. A backslash
/// before its first `$`, `[` or `/` says that it is meant as a name.
fn spelt(path: &str) -> Option<String> {
    if let Some(pointer) = path.strip_prefix('/') {
        return Some(pointer.replace('.', "\\.").replace('/', "."));
    }
    let rooted = path
        .strip_prefix('$')
        .filter(|rest| rest.starts_with(['.', '[']));
    let rest = rooted.unwrap_or(path);
    let mut spelt = String::new();
    let mut left = rest;
    let mut has_brackets = false;
    while let Some((before, after)) = left.split_once('[') {
        let (inner, behind) = after.split_once(']')?;
        if before.ends_with('\\') {
            return None;
        }
        let name = inner.trim_matches(['\'', '"']);
        let is_index = !inner.is_empty() && inner.bytes().all(|byte| byte.is_ascii_digit());
        if !is_index && name == inner && inner != "*" {
            return None;
        }
        has_brackets = true;
        spelt.push_str(before);
        spelt.push('.');
        spelt.push_str(if inner == "*" { "0" } else { name });
        left = behind;
    }
    spelt.push_str(left);
    let spelt = spelt.trim_start_matches('.').replace("..", ".");
    (has_brackets || rooted.is_some()).then_some(spelt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_other_notations_are_spelt() {
        for (path, expected) in [
            ("$.order_id", Some("order_id")),
            ("$['order_id']", Some("order_id")),
            ("items[0].sku", Some("items.0.sku")),
            ("items.[0].sku", Some("items.0.sku")),
            ("$.items[12][3]", Some("items.12.3")),
            ("items[*].sku", Some("items.0.sku")),
            ("/customer/id", Some("customer.id")),
            ("order_id", None),
            ("items.0.sku", None),
            ("_id.$oid", None),
            ("$oid", None),
            ("user[name]", None),
            ("\\$.order_id", None),
            ("items\\[0].sku", None),
            ("\\/customer", None),
        ] {
            assert_eq!(spelt(path).as_deref(), expected, "{path}");
        }
    }

    #[test]
    fn each_place_of_a_path_is_looked_at() {
        for key in [
            r#""order_id,$.amount:decimal""#,
            r#"{ json = ["order_id", { path = "$.amount", as = "decimal" }] }"#,
            r#"{ parts = ["order_id", { path = "$.amount", optional = true }] }"#,
            r#"{ payload = { except = ["$.amount"] } }"#,
        ] {
            let table: toml::Table = toml::from_str(&format!("key = {key}")).unwrap();
            let found = foreign(&table["key"]);
            let expected = ("$.amount".to_owned(), "amount".to_owned());
            assert_eq!(found, Some(expected), "{key}");
        }
        let header: toml::Table = toml::from_str(r#"key = { header = "$.x" }"#).unwrap();
        assert_eq!(foreign(&header["key"]), None);
    }
}
