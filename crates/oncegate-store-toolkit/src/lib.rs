//! The parts that the stores of oncegate share: calls that travel in [batches](batch), the [pace of
//! a purge](purge), [archives](archive) of expired records, a comparison of the server's [clock]
//! with this machine's, files with a [password], and the [wait](start) for a server that is away at
//! the start.
//!
//! The crate knows no database. Programs use its [`archive`] alone, as `oncegate::archive`.

pub mod archive;
pub mod batch;
pub mod clock;
pub mod password;
pub mod purge;
pub mod start;
