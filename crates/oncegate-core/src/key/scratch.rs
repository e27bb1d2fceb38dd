//! The buffers of a derivation, and the scan of a document into them.

use std::cell::Cell;

use super::encode::Child;
use super::error::KeyError;
use super::format::{DocumentPlace, Format, SharedFormat, Wanted, foreign_form};
use super::input::KeySource;
use super::json::Document;
use super::path::Node;
use super::paths::PathTrees;

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
        let Some(SharedFormat(format)) = reading.format else {
            if let Some(what) = foreign_form(payload) {
                return Err(KeyError::Framed { what });
            }
            let PathTrees { tree, targets, .. } = reading.paths;
            self.doc.scan(payload, tree, *targets, reading.whole())?;
            return Ok(Some(payload));
        };
        let PathTrees {
            layers,
            default_layers,
            with_default,
            targets,
            ..
        } = reading.paths;
        let nothing = Node::default();
        self.text.clear();
        self.doc.begin(*targets);
        let whole = reading.all_but.map(|except| Layer {
            wanted: Wanted::all_but(except),
            paths: &nothing,
            is_whole: true,
        });
        for layer in whole.into_iter().chain(Layer::all(layers, false)) {
            if let Some(document) = self.read(&**format, message, layer, reading)? {
                return Ok(Some(document));
            }
        }
        if with_default
            .iter()
            .any(|target| self.doc.value(*target, false).is_none())
        {
            // What this finds are defaults, or values that equal them.
            let Document {
                found, defaults, ..
            } = &mut self.doc;
            std::mem::swap(found, defaults);
            for layer in Layer::all(default_layers, true) {
                self.read(&**format, message, layer, reading)?;
            }
            let Document {
                found, defaults, ..
            } = &mut self.doc;
            std::mem::swap(found, defaults);
        }
        Ok(None)
    }

    /// Makes a document with these parts of a message and scans it. Returns the document if it is
    /// a part of the message: then all paths have been read from it.
    fn read<'m>(
        &mut self,
        format: &dyn Format,
        message: &'m dyn KeySource,
        layer: Layer<'_>,
        reading: Scanning<'_>,
    ) -> Result<Option<&'m [u8]>, KeyError> {
        let start = self.text.len();
        match format.document(message, layer.wanted, reading.limit, &mut self.text)? {
            DocumentPlace::Borrowed(document) => {
                let PathTrees { tree, targets, .. } = reading.paths;
                self.doc.scan(document, tree, *targets, reading.whole())?;
                Ok(Some(document))
            }
            DocumentPlace::Written => {
                within("document", self.text.len(), reading.limit)?;
                self.doc
                    .scan_more(&self.text, start, layer.paths, layer.is_whole)?;
                Ok(None)
            }
        }
    }
}

/// A document that a format writes: some parts of a message.
struct Layer<'a> {
    wanted: Wanted<'a>,
    /// The paths that are read from it.
    paths: &'a Node,
    is_whole: bool,
}

impl<'a> Layer<'a> {
    fn all(trees: &'a [Node], takes_defaults: bool) -> impl Iterator<Item = Self> {
        trees.iter().map(move |paths| Layer {
            wanted: Wanted::of(paths, takes_defaults),
            paths,
            is_whole: false,
        })
    }
}

/// The parts of a document to read, and how.
#[derive(Clone, Copy)]
pub(super) struct Scanning<'a> {
    pub(super) format: Option<&'a SharedFormat>,
    pub(super) paths: &'a PathTrees,
    /// The exceptions, where the document is read as a whole.
    pub(super) all_but: Option<&'a Node>,
    /// The most bytes of all that is written.
    pub(super) limit: usize,
}

impl Scanning<'_> {
    fn whole(&self) -> bool {
        self.all_but.is_some()
    }
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
