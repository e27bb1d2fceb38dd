//! The extent of a JSON object, byte by byte: where it ends, or that it is none.
//!
//! Lenient where the meaning is clear, because libraries write these: `NaN` and `Infinity`, control
//! characters and bytes that are not UTF-8 in strings. A line feed in a string is none of them: a
//! value was cut off there.

/// An object as far as it was read.
#[derive(Debug)]
pub(super) struct Object {
    /// The objects and arrays that are open, the outermost first.
    open: Vec<Open>,
    state: State,
    /// The number of bytes that were read.
    read: usize,
    /// The place of the last object within this one that has ended.
    last_within: Option<(usize, usize)>,
}

#[derive(Debug)]
struct Open {
    is_object: bool,
    begin: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// `{` was read: a name or the end follows.
    FirstName,
    Name,
    Colon,
    /// `[` was read: a value or the end follows.
    FirstValue,
    Value,
    /// A value was read: a comma or an end follows.
    AfterValue,
    /// In a number, `true` and such.
    Scalar,
    String {
        is_name: bool,
        is_escaped: bool,
    },
}

/// The meaning of a byte for an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The object may go on behind it.
    GoesOn,
    /// The object ends with it.
    Ends,
    /// The byte cannot be in an object here: there is none.
    Breaks,
}

impl Object {
    /// An object of which `{` was read.
    pub(super) fn begun() -> Self {
        Self {
            open: vec![Open {
                is_object: true,
                begin: 0,
            }],
            state: State::FirstName,
            read: 1,
            last_within: None,
        }
    }

    /// Returns where the object ends that the text begins with; `None` if there is no whole one.
    pub(super) fn end_of(text: &[u8]) -> Option<usize> {
        let mut object = Self::begun();
        for (place, byte) in text.iter().enumerate().skip(1) {
            match object.step(*byte) {
                Step::GoesOn => {}
                Step::Ends => return Some(place + 1),
                Step::Breaks => return None,
            }
        }
        None
    }

    /// The place of the last object within this one that has ended: its first byte, and the one
    /// behind its last.
    pub(super) fn last_within(&self) -> Option<(usize, usize)> {
        self.last_within
    }

    /// The places where the objects and arrays begin that are still open, the outermost first.
    pub(super) fn open_from(&self) -> impl Iterator<Item = usize> {
        self.open.iter().map(|open| open.begin)
    }

    /// Reads the next byte.
    pub(super) fn step(&mut self, byte: u8) -> Step {
        if self.state == State::Scalar {
            if matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'-' | b'.') {
                self.read += 1;
                return Step::GoesOn;
            }
            self.state = State::AfterValue;
        }
        let next = self.after(byte);
        self.read += 1;
        match next {
            Next::State(state) => {
                self.state = state;
                Step::GoesOn
            }
            Next::Break => Step::Breaks,
            Next::Close => self.close(),
        }
    }

    fn after(&mut self, byte: u8) -> Next {
        let is_in_object = self.open.last().is_some_and(|open| open.is_object);
        match (self.state, byte) {
            (
                State::String {
                    is_name,
                    is_escaped,
                },
                byte,
            ) => match byte {
                b'\n' => Next::Break,
                b'"' if !is_escaped && is_name => Next::State(State::Colon),
                b'"' if !is_escaped => Next::State(State::AfterValue),
                byte => Next::State(State::String {
                    is_name,
                    is_escaped: byte == b'\\' && !is_escaped,
                }),
            },
            (state, b' ' | b'\t' | b'\r' | b'\n') => Next::State(state),
            (State::FirstName, b'}') => Next::Close,
            (State::FirstName | State::Name, b'"') => Next::State(State::String {
                is_name: true,
                is_escaped: false,
            }),
            (State::Colon, b':') => Next::State(State::Value),
            (State::FirstValue, b']') => Next::Close,
            (State::FirstValue | State::Value, byte) => self.value(byte),
            (State::AfterValue, b',') if is_in_object => Next::State(State::Name),
            (State::AfterValue, b',') => Next::State(State::Value),
            (State::AfterValue, b'}') if is_in_object => Next::Close,
            (State::AfterValue, b']') if !is_in_object => Next::Close,
            _ => Next::Break,
        }
    }

    /// Begins a value.
    fn value(&mut self, byte: u8) -> Next {
        let (is_object, state) = match byte {
            b'"' => {
                return Next::State(State::String {
                    is_name: false,
                    is_escaped: false,
                });
            }
            // A number, `true`, `false`, `null`, `NaN`, `Infinity`.
            b'-' | b'0'..=b'9' | b't' | b'f' | b'n' | b'N' | b'I' => {
                return Next::State(State::Scalar);
            }
            b'{' => (true, State::FirstName),
            b'[' => (false, State::FirstValue),
            _ => return Next::Break,
        };
        self.open.push(Open {
            is_object,
            begin: self.read,
        });
        Next::State(state)
    }

    fn close(&mut self) -> Step {
        let closed = self.open.pop();
        if self.open.is_empty() {
            return Step::Ends;
        }
        if let Some(Open {
            is_object: true,
            begin,
        }) = closed
        {
            self.last_within = Some((begin, self.read));
        }
        self.state = State::AfterValue;
        Step::GoesOn
    }
}

/// The consequence of a byte.
enum Next {
    State(State),
    /// An object or array ends.
    Close,
    Break,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a text that begins with `{`. Returns the last step, and behind how many bytes.
    fn read(text: &str) -> (Step, usize) {
        let mut object = Object::begun();
        for (place, byte) in text.bytes().enumerate().skip(1) {
            let step = object.step(byte);
            if step != Step::GoesOn {
                return (step, place + 1);
            }
        }
        (Step::GoesOn, text.len())
    }

    #[test]
    fn an_object_ends_where_it_ends() {
        for whole in [
            "{}",
            r#"{ "a" : [ 1 , -2.5e7, NaN, -Infinity, true, null, "x\"}" , [] , {} ] }"#,
            "{\n\"a\":\"tab\tand\u{1b}escape\"\n}",
        ] {
            assert_eq!(Object::end_of(whole.as_bytes()), Some(whole.len()));
            assert_eq!(
                read(&format!("{whole}{{")),
                (Step::Ends, whole.len()),
                "{whole}"
            );
        }
    }

    #[test]
    fn what_is_no_object_breaks_at_once() {
        for (text, at) in [
            ("{step", 2),
            ("{{", 2),
            ("{,", 2),
            (r#"{"a" 1"#, 6),
            (r#"{"a":step"#, 6),
            (r#"{"a":1]"#, 7),
            (r#"{"a":[1}"#, 8),
            (r#"{"a":1,}"#, 8),
            ("{\"a\":\"cut\n", 10),
        ] {
            assert_eq!(read(text), (Step::Breaks, at), "{text}");
        }
    }

    #[test]
    fn the_last_object_within_is_known() {
        let mut object = Object::begun();
        for byte in br#""a":{"b":{}},"c":[{"d":1}"#.iter().copied() {
            assert_eq!(object.step(byte), Step::GoesOn);
        }
        assert_eq!(object.last_within(), Some((19, 26)));
    }
}
