//! The memory for request bodies: a limit for all of them together, and one for those of each
//! caller.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::problem::Problem;

/// The memory for request bodies, shared by all requests of a layer.
#[derive(Debug)]
pub(super) struct BodyMemory {
    most_bytes: usize,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    bytes: usize,
    /// The bytes of each caller whose requests hold memory now: no more callers than requests.
    callers: HashMap<Arc<str>, usize>,
}

/// The memory that one request's body occupies. It is free again when this is dropped.
#[derive(Debug)]
pub(super) struct OccupiedMemory {
    memory: Arc<BodyMemory>,
    caller: Arc<str>,
    caller_bytes: usize,
    bytes: usize,
    /// The limit that refused the last bytes.
    refused: Option<Refused>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    All,
    Caller,
}

impl BodyMemory {
    pub(super) fn new(most_bytes: usize) -> Self {
        Self {
            most_bytes,
            used: Mutex::default(),
        }
    }

    /// Returns the size of the whole memory, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.most_bytes
    }

    /// Occupies nothing yet, for a request of this caller. Its requests may hold `caller_bytes`
    /// together.
    pub(super) fn none(self: &Arc<Self>, caller: &str, caller_bytes: usize) -> OccupiedMemory {
        OccupiedMemory {
            memory: Arc::clone(self),
            caller: caller.into(),
            caller_bytes,
            bytes: 0,
            refused: None,
        }
    }

    /// Locks the sums. A panic elsewhere does no harm: each change leaves them consistent.
    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock()
    }
}

impl OccupiedMemory {
    /// Occupies this many bytes more. Returns `false` when fewer are left.
    pub(super) fn occupy(&mut self, bytes: usize) -> bool {
        let mut used = self.memory.lock();
        let all = used.bytes.saturating_add(bytes);
        let of_caller = used
            .callers
            .get(&self.caller)
            .copied()
            .unwrap_or_default()
            .saturating_add(bytes);
        self.refused = if all > self.memory.most_bytes {
            Some(Refused::All)
        } else if of_caller > self.caller_bytes {
            Some(Refused::Caller)
        } else {
            used.bytes = all;
            used.callers.insert(Arc::clone(&self.caller), of_caller);
            self.bytes += bytes;
            None
        };
        self.refused.is_none()
    }

    /// Returns the problem to send to a client whose body was refused.
    pub(super) fn refusal(&self) -> Problem {
        match self.refused {
            Some(Refused::Caller) => Problem::CallerOverloaded,
            Some(Refused::All) | None => Problem::Overloaded,
        }
    }
}

impl Drop for OccupiedMemory {
    fn drop(&mut self) {
        let mut used = self.memory.lock();
        used.bytes = used.bytes.saturating_sub(self.bytes);
        if let Some(of_caller) = used.callers.get_mut(&self.caller) {
            *of_caller = of_caller.saturating_sub(self.bytes);
            if *of_caller == 0 {
                used.callers.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callers_memory_is_counted_until_its_last_request_ends() {
        let memory = Arc::new(BodyMemory::new(10));
        let mut one = memory.none("a", 6);
        let mut two = memory.none("a", 6);
        assert!(one.occupy(4) && two.occupy(2) && !two.occupy(1));
        assert_eq!(two.refusal().name(), "caller-overloaded");
        let mut other = memory.none("b", 6);
        assert!(other.occupy(4) && !other.occupy(1));
        assert_eq!(other.refusal().name(), "overloaded");
        drop(one);
        assert!(two.occupy(1) && other.occupy(1));
        drop((two, other));
        assert!(memory.lock().callers.is_empty() && memory.lock().bytes == 0);
    }
}
