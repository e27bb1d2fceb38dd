//! The buffers of a derivation, and the scan of a document into them.

use std::cell::Cell;

use super::encode::Child;
use super::error::KeyError;
use super::format::{DocumentPlace, SharedFormat, Wanted, foreign_form};
use super::input::KeySource;
use super::json::Document;
use super::path::Node;

/// Buffers with more entries than this are freed after a message.
const KEEP: usize = 16 * 1024;

/// The buffers of one derivation. They are kept per thread, so that a message allocates only the
/// text of its key.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) doc: Document,
    pub(super) order: Vec<Child>,
    pub(super) out: Vec<u8>,
    /// The document that a format has written.
    pub(super) text: Vec<u8>,
}

impl Scratch {
    /// Makes the document of a message and scans it. Returns the document if it is a part of the
    /// message; otherwise it is `text`.
    pub(super) fn scan<'m>(
        &mut self,
        message: &'m dyn KeySource,
        payload: &'m [u8],
        reading: Scanning<'_>,
    ) -> Result<Option<&'m [u8]>, KeyError> {
        let Scanning {
            format,
            wanted,
            targets,
            whole,
            limit,
        } = reading;
        let Some(SharedFormat(format)) = format else {
            if let Some(what) = foreign_form(payload) {
                return Err(KeyError::Framed { what });
            }
            self.doc.scan(payload, wanted, targets, whole)?;
            return Ok(Some(payload));
        };
        self.text.clear();
        let parts = if whole {
            Wanted::all()
        } else {
            Wanted::of(wanted)
        };
        match format.document(message, parts, limit, &mut self.text)? {
            DocumentPlace::Borrowed(document) => {
                self.doc.scan(document, wanted, targets, whole)?;
                Ok(Some(document))
            }
            DocumentPlace::Written => {
                within("document", self.text.len(), limit)?;
                self.doc.scan(&self.text, wanted, targets, whole)?;
                Ok(None)
            }
        }
    }
}

/// The parts of a document to read, and how.
#[derive(Clone, Copy)]
pub(super) struct Scanning<'a> {
    pub(super) format: Option<&'a SharedFormat>,
    pub(super) wanted: &'a Node,
    pub(super) targets: usize,
    pub(super) whole: bool,
    /// The most bytes of the document.
    pub(super) limit: usize,
}

thread_local! {
    /// Taken while in use. A custom key function that derives another key finds the slot empty and
    /// creates new buffers.
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Runs `work` with the buffers of this thread. `out` is empty.
pub(super) fn with_scratch<T>(work: impl FnOnce(&mut Scratch) -> T) -> T {
    let mut scratch = SCRATCH.take().unwrap_or_default();
    scratch.out.clear();
    scratch.order.clear();
    let result = work(&mut scratch);
    scratch.doc.shrink(KEEP);
    scratch.order.shrink_to(KEEP);
    scratch.out.shrink_to(KEEP);
    scratch.text.shrink_to(KEEP);
    SCRATCH.set(Some(scratch));
    result
}

pub(super) fn within(what: &str, bytes: usize, limit: usize) -> Result<(), KeyError> {
    if bytes > limit {
        return Err(KeyError::TooLarge {
            what: what.to_owned(),
            bytes,
            limit,
        });
    }
    Ok(())
}
