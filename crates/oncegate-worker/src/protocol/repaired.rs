//! Repairs JSON that some libraries write, so that what is right in it can be read.

/// Stands for what is no JSON while an object is parsed around it.
pub(super) const NO_JSON: &str = "\"oncegate: no JSON\"";

/// A text whose mistakes that libraries make are repaired: `NaN` and `Infinity`, bytes that are not
/// UTF-8, control characters and wrong escapes in strings.
pub(super) struct Repaired {
    pub(super) text: String,
    /// Something was not UTF-8.
    pub(super) is_lossy: bool,
}

impl Repaired {
    pub(super) fn of(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let is_lossy = text.contains(char::REPLACEMENT_CHARACTER);
        let mut repaired = String::with_capacity(text.len());
        let mut plain = String::new();
        let mut is_in_string = false;
        let mut characters = text.chars().peekable();
        while let Some(c) = characters.next() {
            match (is_in_string, c) {
                (false, '"') => {
                    repaired.push_str(&without_odd_numbers(&std::mem::take(&mut plain)));
                    repaired.push('"');
                    is_in_string = true;
                }
                (false, c) => plain.push(c),
                (true, '\\') => {
                    repaired.push('\\');
                    // A backslash that escapes nothing stands for itself.
                    match characters.next_if(|next| "\"\\/bfnrtu".contains(*next)) {
                        Some(escaped) => repaired.push(escaped),
                        None => repaired.push('\\'),
                    }
                }
                (true, c) if c < ' ' => repaired.push_str(&format!("\\u{:04x}", u32::from(c))),
                (true, c) => {
                    repaired.push(c);
                    is_in_string = c != '"';
                }
            }
        }
        repaired.push_str(&without_odd_numbers(&plain));
        Self {
            text: repaired,
            is_lossy,
        }
    }
}

/// Replaces the numbers that JSON does not have.
fn without_odd_numbers(text: &str) -> String {
    ["-Infinity", "Infinity", "NaN"]
        .into_iter()
        .fold(text.to_owned(), |text, odd| text.replace(odd, NO_JSON))
}
