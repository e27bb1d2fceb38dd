//! Steps of a message between which a process can be made to end or to stop.

use std::fmt;

/// A step of a message, or of its partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// The claim has not been sent.
    ClaimBefore,
    /// The claim was granted, and the consumer does not have the reply.
    ClaimAfter,
    /// The handler runs, and its effect has not happened. The handler passes this point itself.
    EffectBefore,
    /// The effect has happened. The handler passes this point itself.
    EffectAfter,
    /// The completion has not been sent.
    CompleteBefore,
    /// The completion is in flight, and not answered.
    CompleteSent,
    /// The completion was answered, and the consumer does not have the reply.
    CompleteAfter,
    /// The message is about to be acknowledged.
    AckBefore,
    /// The message was acknowledged, and its offset is not committed yet.
    AckAfter,
    /// The source has released partitions, and the consumer group does not know it yet.
    Revoke,
}

/// Every point of a message, in the order in which it passes them.
pub const POINTS: [Point; 9] = [
    Point::ClaimBefore,
    Point::ClaimAfter,
    Point::EffectBefore,
    Point::EffectAfter,
    Point::CompleteBefore,
    Point::CompleteSent,
    Point::CompleteAfter,
    Point::AckBefore,
    Point::AckAfter,
];

impl Point {
    /// Returns the name: `complete-sent`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClaimBefore => "claim-before",
            Self::ClaimAfter => "claim-after",
            Self::EffectBefore => "effect-before",
            Self::EffectAfter => "effect-after",
            Self::CompleteBefore => "complete-before",
            Self::CompleteSent => "complete-sent",
            Self::CompleteAfter => "complete-after",
            Self::AckBefore => "ack-before",
            Self::AckAfter => "ack-after",
            Self::Revoke => "revoke",
        }
    }
}

/// The action of a process at a [`Point`]: it can end itself, stop itself, or wait. It runs on the
/// thread that passes the point.
pub trait PointHook: Send + Sync + fmt::Debug {
    /// The process is at this point.
    fn pass(&self, point: Point);

    /// Returns whether something is to happen at this point and has not yet. Needed for
    /// [`Point::CompleteSent`] alone: a completion is then sent, and its answer is waited for only
    /// for a few milliseconds before the point is passed.
    fn is_set(&self, point: Point) -> bool;
}

/// Nothing happens at any point.
#[derive(Debug)]
pub(super) struct NoHook;

impl PointHook for NoHook {
    fn pass(&self, _: Point) {}

    fn is_set(&self, _: Point) -> bool {
        false
    }
}
