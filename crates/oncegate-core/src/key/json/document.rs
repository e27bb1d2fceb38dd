//! A scanned document: the wanted values, and a flat tape of the content of one.

/// A range of the payload. Payloads are at most 1 GiB, so 32 bits are enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Span {
    pub(in super::super) start: u32,
    pub(in super::super) end: u32,
}

impl Span {
    pub(super) fn new(start: usize, end: usize) -> Self {
        Self {
            start: short(start),
            end: short(end),
        }
    }

    /// The bytes of this span in the text that it was made for.
    #[inline]
    pub(in super::super) fn of(self, text: &[u8]) -> &[u8] {
        text.get(self.start as usize..self.end as usize)
            .expect("a span is used with the text it was made for")
    }
}

pub(super) fn short(at: usize) -> u32 {
    u32::try_from(at).expect("a payload has at most 1 GiB")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Kind {
    Null,
    False,
    True,
    Number,
    /// The span is the text between the quotes, without escapes.
    Text,
    /// The span is the text between the quotes, with escapes.
    EscapedText,
    Array,
    Object,
}

/// A wanted value.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Value {
    pub(in super::super) kind: Kind,
    pub(in super::super) span: Span,
    /// The position of an array or object on the tape.
    pub(in super::super) tape: usize,
}

/// A value on the tape. The content of an array or object follows it, up to `next`.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Entry {
    pub(in super::super) kind: Kind,
    pub(in super::super) span: Span,
    pub(in super::super) next: usize,
    pub(in super::super) name: Name,
}

/// The name of a member: a span of the payload, or of the arena when it had escapes.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Name {
    pub(super) span: Span,
    pub(super) unescaped: bool,
    /// The position in the payload.
    pub(super) at: u32,
}

impl Name {
    pub(super) fn of<'a>(self, arena: &'a [u8], payload: &'a [u8]) -> &'a [u8] {
        self.span.of(if self.unescaped { arena } else { payload })
    }
}

pub(super) const NO_NAME: Name = Name {
    span: Span { start: 0, end: 0 },
    unescaped: false,
    at: 0,
};

/// The result of a scan. The buffers are reused from message to message, so that a scan allocates
/// nothing.
#[derive(Debug, Default)]
pub(in super::super) struct Document {
    /// The values found, by target of the path tree.
    pub(in super::super) found: Vec<Option<Value>>,
    /// The defaults of values that were not sent, by target, where a place takes them.
    pub(in super::super) defaults: Vec<Option<Value>>,
    pub(in super::super) tape: Vec<Entry>,
    /// Names that had escapes, unescaped.
    pub(super) arena: Vec<u8>,
    /// The names of all open objects, the innermost last.
    pub(super) names: Vec<Name>,
}

impl Document {
    /// The value at a target: what was found, or its default if the place takes one.
    #[inline]
    pub(in super::super) fn value(&self, target: usize, takes_default: bool) -> Option<Value> {
        let found = self.found.get(target).copied().flatten();
        match found {
            None if takes_default => self.defaults.get(target).copied().flatten(),
            found => found,
        }
    }

    /// The document itself, after a scan with `whole`.
    pub(in super::super) fn root(&self) -> Option<Value> {
        self.tape.first().map(|root| Value {
            kind: root.kind,
            span: root.span,
            tape: 0,
        })
    }

    /// The unescaped bytes of a member's name.
    #[inline]
    pub(in super::super) fn name<'a>(&'a self, name: Name, payload: &'a [u8]) -> &'a [u8] {
        name.of(&self.arena, payload)
    }

    /// Frees memory after an unusually large message.
    pub(in super::super) fn shrink(&mut self, keep: usize) {
        self.tape.shrink_to(keep);
        self.arena.shrink_to(keep);
        self.names.shrink_to(keep);
    }
}
