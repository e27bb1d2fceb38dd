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

/// A count with its noun, in the singular for one: `1 message`, `2 messages`, `0 losses`.
///
/// ```
/// use oncegate_core::reason::counted;
///
/// assert_eq!(counted(1_u64, "partition"), "1 partition");
/// assert_eq!(counted(2_u64, "loss"), "2 losses");
/// assert_eq!(counted(0_u64, "query"), "0 queries");
/// ```
pub fn counted(count: impl Into<u64>, noun: &str) -> String {
    let count = count.into();
    format!("{count} {}", noun_for(count, noun))
}

/// The noun in the form for a count: `message` for one, `messages` for others.
pub fn noun_for(count: u64, noun: &str) -> String {
    if count == 1 {
        return noun.to_owned();
    }
    if ["s", "x", "ch", "sh"].iter().any(|end| noun.ends_with(end)) {
        return format!("{noun}es");
    }
    match noun.strip_suffix('y') {
        Some(stem) if !stem.ends_with(['a', 'e', 'i', 'o', 'u']) => format!("{stem}ies"),
        _ => format!("{noun}s"),
    }
}

/// Returns whether the character changes the order in which a terminal shows others, so that the
/// text looks like another one.
pub fn changes_direction(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
