//! The partitions of a member: epochs, watermarks, and what may be committed. Nothing here talks to
//! a broker.

pub(crate) mod assignment;
pub(crate) mod assignments;
pub(crate) mod clock;
pub(crate) mod fetch_limits;
pub(crate) mod ledger;
pub(crate) mod partition;
pub(crate) mod partition_map;
pub(crate) mod standing;
pub(crate) mod watermark;
