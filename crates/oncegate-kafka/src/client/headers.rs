//! The names of the headers that this crate writes and reads.

/// The prefix of all our headers.
pub(crate) const PREFIX: &str = "oncegate-";

/// The header with the id of a dead letter. A message that was sent back by a redrive has none.
pub(crate) const ID_HEADER: &str = "oncegate-id";
/// The header with the scope that has written a dead letter.
pub(crate) const SCOPE_HEADER: &str = "oncegate-scope";

/// The header with the route of a message that was retried or redriven.
pub(crate) const ROUTE_HEADER: &str = "oncegate-route";

/// The header with the time of the first failed attempt, in milliseconds since 1970.
pub(crate) const FIRST_FAILED_HEADER: &str = "oncegate-first-failed-at";
