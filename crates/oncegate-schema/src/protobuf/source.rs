//! Looks over the source of a `.proto` file before it is compiled.
//!
//! The compiler reads what stands between braces by recursion, without a limit, and an overflow of
//! the stack ends the process. A registry gives any source to every consumer of its topic, so the
//! nesting is limited here. The texts and comments, in which braces do not count, are read as the
//! compiler reads them; what it would refuse in them is refused here.

/// The deepest nesting of brackets. Google's compiler allows 32 messages inside each other; options
/// add a few levels.
const MAX_NESTING: usize = 64;

/// Returns an error when a source nests too deeply, or has a text or comment that has no end.
pub(super) fn check(source: &str) -> Result<(), String> {
    let mut rest = source.as_bytes();
    // Brackets of each kind are counted by themselves: a wrong one must not hide another.
    let mut open = [0_usize; 4];
    while let Some((byte, after)) = rest.split_first() {
        rest = match byte {
            b'"' | b'\'' => string(after, *byte)?,
            b'#' => line(after),
            b'/' => match after.split_first() {
                Some((b'/', after)) => line(after),
                Some((b'*', after)) => block(after)?,
                _ => after,
            },
            byte => {
                count(*byte, &mut open);
                if open.iter().sum::<usize>() > MAX_NESTING {
                    return Err(format!("it nests deeper than {MAX_NESTING} levels"));
                }
                after
            }
        };
    }
    Ok(())
}

fn count(byte: u8, open: &mut [usize; 4]) {
    const PAIRS: [[u8; 2]; 4] = [*b"{}", *b"()", *b"[]", *b"<>"];
    for (count, [opening, closing]) in open.iter_mut().zip(PAIRS) {
        if byte == opening {
            *count += 1;
        } else if byte == closing {
            *count = count.saturating_sub(1);
        }
    }
}

fn line(rest: &[u8]) -> &[u8] {
    let end = rest.iter().position(|byte| *byte == b'\n');
    end.map_or(&[], |end| rest.get(end + 1..).unwrap_or_default())
}

/// Reads over the rest of a block comment. Comments do not nest.
fn block(rest: &[u8]) -> Result<&[u8], String> {
    let next = rest
        .windows(2)
        .position(|pair| pair == b"*/" || pair == b"/*");
    match next.map(|at| rest.split_at(at)) {
        Some((_, [b'*', b'/', after @ ..])) => Ok(after),
        Some(_) => Err("a comment begins inside a comment".to_owned()),
        None => Err("a comment has no end".to_owned()),
    }
}

/// Reads over the rest of a string, with the escapes that there are.
fn string(mut rest: &[u8], quote: u8) -> Result<&[u8], String> {
    loop {
        rest = match rest {
            [byte, after @ ..] if *byte == quote => return Ok(after),
            [b'\n' | 0, ..] | [] => return Err("a string has no end in its line".to_owned()),
            [b'\\', escape @ ..] => escaped(escape).ok_or("a string has an unknown escape")?,
            [_, after @ ..] => after,
        };
    }
}

/// The bytes after an escape, of which the backslash has been read.
fn escaped(escape: &[u8]) -> Option<&[u8]> {
    let (kind, after) = escape.split_first()?;
    let digits = match kind {
        b'a' | b'b' | b'f' | b'n' | b'r' | b't' | b'v' | b'?' | b'\\' | b'\'' | b'"' => 0,
        // More digits of these two are read as characters, which is the same here.
        b'0'..=b'7' => 0,
        b'x' | b'X' => 1,
        b'u' => 4,
        b'U' => 8,
        _ => return None,
    };
    let (hex, after) = after.split_at_checked(digits)?;
    hex.iter().all(u8::is_ascii_hexdigit).then_some(after)
}

#[cfg(test)]
mod tests {
    use super::{MAX_NESTING, check};

    fn nested(open: &str, close: &str, levels: usize) -> String {
        format!("{}{}", open.repeat(levels), close.repeat(levels))
    }

    #[test]
    fn nesting_is_limited_in_all_brackets_together() {
        for (open, close) in [("{", "}"), ("(", ")"), ("[", "]"), ("<", ">"), ("a:{", "}")] {
            assert_eq!(check(&nested(open, close, MAX_NESTING)), Ok(()), "{open}");
            assert!(check(&nested(open, close, MAX_NESTING + 1)).is_err());
        }
        assert!(check(&nested("{<[", "]>}", MAX_NESTING / 2)).is_err());
        // A bracket of another kind closes nothing.
        assert!(check(&"{ ) ".repeat(MAX_NESTING + 1)).is_err());
        assert_eq!(check(&"{}".repeat(10_000)), Ok(()));
    }

    #[test]
    fn texts_and_comments_hide_brackets_as_the_compiler_has_it() {
        let many = "{".repeat(MAX_NESTING + 1);
        for hidden in [
            format!("'{many}'"),
            format!("\"{many}\\\"{many}\\\\\""),
            format!("'\\x7b\\u00fc\\U0001F600\\17{many}'"),
            format!("// {many}\n{{}}"),
            format!("# {many}"),
            format!("/* {many} \n * {many} **/ {{}}"),
            format!("/**/ '{many}'"),
        ] {
            assert_eq!(check(&hidden), Ok(()), "{hidden}");
        }
        for shown in [
            format!("'' {many}"),
            format!("// \n{many}"),
            format!("/* */{many}"),
            format!("'\\'' {many}"),
            format!("/ {many}"),
        ] {
            assert!(check(&shown).is_err(), "{shown}");
        }
        for broken in [
            "'a",
            "'a\n'",
            "'\\q'",
            "'\\x'",
            "'\\u12'",
            "/*",
            "/* /* */ */",
        ] {
            assert!(check(broken).is_err(), "{broken}");
        }
    }
}
