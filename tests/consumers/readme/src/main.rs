//! The README's program as it stands there.

include!(concat!(env!("OUT_DIR"), "/program.rs"));
