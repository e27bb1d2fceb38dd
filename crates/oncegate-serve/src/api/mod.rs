//! Claims over HTTP, for functions in any language.
