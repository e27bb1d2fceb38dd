//! Reasons as text for people: on one line, and without characters that act on a terminal.

/// The text on one line: every white space becomes a blank, so that words stay apart, and control
/// characters and those that [change direction](changes_direction) are left out.
///
/// ```
/// use oncegate_core::reason::one_line;
///
/// assert_eq!(one_line("no such\naccount \u{1b}[31m\u{202e}7"), "no such account [31m7");
/// ```
pub fn one_line(text: &str) -> String {
    let spaced = text
        .chars()
        .map(|c| if c.is_whitespace() { ' ' } else { c });
    spaced
        .filter(|c| !c.is_control() && !changes_direction(*c))
        .collect()
}

/// Returns whether the character changes the order in which a terminal shows others, so that the
/// text looks like another one.
pub fn changes_direction(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
