//! A member of a consumer group: its poll thread, its commit thread, and its replacement when its
//! client fails.

pub(crate) mod begin;
pub(crate) mod buffer;
pub(crate) mod callbacks;
pub(crate) mod commit;
pub(crate) mod commit_desk;
pub(crate) mod connection;
pub(crate) mod connection_watch;
pub(crate) mod member;
pub(crate) mod member_client;
pub(crate) mod membership;
pub(crate) mod poll;
pub(crate) mod positions;
pub(crate) mod succession;
pub(crate) mod unread;
pub(crate) mod wake;
