//! The texts of the Lua scripts.

use std::borrow::Cow;

/// Precedes every verb when completions are kept in buckets.
pub(super) const COMPACT: &str = include_str!("../lua/compact.lua");

/// The part that several scripts share. It replaces their line [`INCLUDE`].
const RECORD: &str = include_str!("../lua/lib/record.lua");
const INCLUDE: &str = "-- include lib/record.lua\n";

/// The name of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    // These concern one record, and run through `compact.lua` when completions are kept in buckets.
    Claim,
    Extend,
    Complete,
    Release,
    Fail,
    HandOver,
    Reopen,
    Resolve,
    Read,
    // These do not.
    Describe,
    FirstClaims,
    FirstCompletions,
    /// The same as `Extend`, always for the record's own key alone.
    ExtendOwn,
}

pub(super) const VERBS: usize = 13;

/// The files without their ending, in the order of `Verb`.
pub(super) const NAMES: [&str; VERBS] = [
    "claim",
    "extend",
    "complete",
    "release",
    "fail",
    "hand_over",
    "reopen",
    "resolve",
    "read",
    "describe",
    "first_claims",
    "first_completions",
    "extend",
];

#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) text: Cow<'static, str>,
    pub(super) sha: Box<str>,
}

impl Source {
    /// The sources of all scripts.
    pub(super) fn all() -> [Self; VERBS] {
        // The order is that of `Verb`.
        [
            Self::file(include_str!("../lua/claim.lua")),
            Self::file(include_str!("../lua/extend.lua")),
            Self::file(include_str!("../lua/complete.lua")),
            Self::file(include_str!("../lua/release.lua")),
            Self::file(include_str!("../lua/fail.lua")),
            Self::file(include_str!("../lua/hand_over.lua")),
            Self::file(include_str!("../lua/reopen.lua")),
            Self::file(include_str!("../lua/resolve.lua")),
            Self::file(include_str!("../lua/read.lua")),
            Self::file(include_str!("../lua/describe.lua")),
            Self::file(include_str!("../lua/first_claims.lua")),
            Self::file(include_str!("../lua/first_completions.lua")),
            Self::file(include_str!("../lua/extend.lua")),
        ]
    }

    /// The script of a file in `lua/`.
    fn file(text: &'static str) -> Self {
        if text.contains(INCLUDE) {
            Self::new(text.replace(INCLUDE, RECORD))
        } else {
            Self::new(text)
        }
    }

    pub(super) fn new(text: impl Into<Cow<'static, str>>) -> Self {
        let text = text.into();
        let sha = redis::Script::new(&text).get_hash().into();
        Self { text, sha }
    }
}
