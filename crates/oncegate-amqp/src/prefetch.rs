//! The number of messages that the broker delivers ahead: more while many of them wait. This module
//! does no I/O.

/// The largest prefetch of a consumer, by the protocol.
const CONSUMER_MOST: u16 = u16::MAX;
/// The number of consumers that are added at most.
const MORE_CONSUMERS_MOST: usize = 6;
/// A prefetch is full when one in so many of its messages does not wait.
const FULL: usize = 4;
/// A prefetch is too large when fewer than one in so many of its messages wait.
const EMPTY: usize = 8;

/// The prefetch of all consumers of a channel.
#[derive(Debug)]
pub(crate) struct Prefetch {
    first: u16,
    more: Vec<u16>,
}

/// The change that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefetchChange {
    None,
    /// A further consumer, with this prefetch.
    Grow(u16),
    /// Only the first consumer.
    Shrink,
}

impl Prefetch {
    pub(crate) fn new(first: u16) -> Self {
        Self {
            first,
            more: Vec::new(),
        }
    }

    /// Returns how many messages may be delivered.
    fn all(&self) -> usize {
        let more = self.more.iter().map(|more| usize::from(*more));
        more.sum::<usize>() + usize::from(self.first)
    }

    /// Returns the change that is due while so many delivered messages wait, and so many have not
    /// been taken: while some are there, the consumer lacks none.
    pub(crate) fn change(&self, waiting: usize, arrived: usize) -> PrefetchChange {
        let all = self.all();
        let is_full = waiting > 0 && (all.saturating_sub(waiting)) * FULL <= all;
        if is_full && arrived == 0 && self.more.len() < MORE_CONSUMERS_MOST {
            return PrefetchChange::Grow(u16::try_from(all).unwrap_or(CONSUMER_MOST));
        }
        if !self.more.is_empty() && waiting.saturating_mul(EMPTY) < usize::from(self.first) {
            return PrefetchChange::Shrink;
        }
        PrefetchChange::None
    }

    /// Notes that the usual prefetch is larger by so many.
    pub(crate) fn widened(&mut self, more: u16) {
        self.first = self.first.saturating_add(more);
    }

    pub(crate) fn grown(&mut self, more: u16) {
        self.more.push(more);
    }

    pub(crate) fn shrunk(&mut self) {
        self.more.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_by_what_waits_and_shrinks_after_that() {
        let mut prefetch = Prefetch::new(8);
        assert_eq!(prefetch.change(5, 0), PrefetchChange::None);
        assert_eq!(prefetch.change(8, 1), PrefetchChange::None, "it is taken");
        assert_eq!(prefetch.change(7, 0), PrefetchChange::Grow(8));
        prefetch.grown(8);
        assert_eq!(prefetch.change(8, 0), PrefetchChange::None);
        assert_eq!(prefetch.change(16, 0), PrefetchChange::Grow(16));
        prefetch.grown(16);
        assert_eq!(prefetch.change(1, 0), PrefetchChange::None);
        assert_eq!(prefetch.change(0, 0), PrefetchChange::Shrink);
        prefetch.shrunk();
        assert_eq!(prefetch.change(0, 0), PrefetchChange::None);
        assert_eq!(Prefetch::new(1).change(1, 0), PrefetchChange::Grow(1));
    }

    #[test]
    fn it_grows_up_to_a_limit() {
        let mut prefetch = Prefetch::new(60_000);
        let mut consumers = 1;
        while let PrefetchChange::Grow(more) = prefetch.change(usize::MAX, 0) {
            prefetch.grown(more);
            consumers += 1;
        }
        assert_eq!(consumers, 1 + MORE_CONSUMERS_MOST);
    }
}
