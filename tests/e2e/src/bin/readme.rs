//! The README's program, with servers and topics from the environment.

include!(concat!(env!("OUT_DIR"), "/readme.rs"));
