//! The fields of forms and of queries.

use std::collections::BTreeMap;

/// The longest value of a field, in bytes.
const VALUE_MAX_BYTES: usize = 1024;

/// The fields of a request, by name. One that is not there is empty.
#[derive(Debug, Default)]
pub(super) struct Fields(BTreeMap<String, String>);

impl Fields {
    /// Reads a form as browsers encode it. Of two fields with one name, the first counts.
    ///
    /// Values are as they are [shown], and cut to the longest one. So a search that a page
    /// carries along stays the same, and none becomes empty, which would match everything.
    pub(super) fn of(encoded: &[u8]) -> Self {
        let mut fields = BTreeMap::new();
        for (name, value) in form_urlencoded::parse(encoded) {
            fields.entry(name.into_owned()).or_insert_with(|| {
                let mut value = shown(&value);
                value.truncate(value.floor_char_boundary(VALUE_MAX_BYTES));
                value
            });
        }
        Self(fields)
    }

    /// Returns the value without spaces around it.
    pub(super) fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", |value| value.trim())
    }
}

/// Returns a query of these fields, without those that are empty.
pub(super) fn query(fields: &[(&str, &str)]) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_empty()) {
        query.append_pair(name, value);
    }
    query.finish()
}

/// Returns the text as it may be shown: characters that move the cursor or change the order in
/// which others are shown are replaced.
pub(super) fn shown(text: &str) -> String {
    text.chars()
        .map(|c| if is_harmful(c) { '\u{fffd}' } else { c })
        .collect()
}

fn is_harmful(c: char) -> bool {
    (c.is_control() && c != '\n')
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_as_browsers_write_them() {
        let long = "x".repeat(VALUE_MAX_BYTES + 1);
        let form = format!("why=the+bank%20is+back&why=second&a=%3Cb%3E&long={long}&bad=%ff");
        let fields = Fields::of(form.as_bytes());
        assert_eq!(fields.get("why"), "the bank is back");
        assert_eq!(fields.get("a"), "<b>");
        assert_eq!(fields.get("long"), "x".repeat(VALUE_MAX_BYTES));
        assert_eq!(fields.get("absent"), "");
        // A second reading of what was read once changes nothing, however many bytes a sign takes.
        let binary = "%01".repeat(500);
        let once = Fields::of(format!("reason={binary}").as_bytes());
        let again = query(&[("reason", once.get("reason"))]);
        assert_eq!(
            Fields::of(again.as_bytes()).get("reason"),
            once.get("reason")
        );
        assert!(once.get("reason").len() > VALUE_MAX_BYTES - 3);
        assert_eq!(fields.get("bad"), "\u{fffd}");
        let again = query(&[("a", "<b> & c"), ("none", "")]);
        assert_eq!(again, "a=%3Cb%3E+%26+c");
        assert_eq!(Fields::of(again.as_bytes()).get("a"), "<b> & c");
    }

    #[test]
    fn what_moves_the_cursor_is_not_shown() {
        assert_eq!(shown("a\u{1b}[2J\u{202e}b\nc"), "a\u{fffd}[2J\u{fffd}b\nc");
    }
}
