//! Topics that are read without a group.

pub(crate) mod dead_letter_reader;
pub(crate) mod reader;
pub(crate) mod window;
