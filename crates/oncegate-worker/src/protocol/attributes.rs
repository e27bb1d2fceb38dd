//! Limits how many of a message's own headers are passed to a worker.
//!
//! Servers refuse requests with large headers (Node: more than 16 KiB in all), and operating
//! systems refuse processes with large environments. A message must not fail because of headers
//! that its producer has set.

use oncegate_runtime::Message;
use tracing::warn;

/// The longest value that is passed to a worker, in bytes.
const VALUE_MAX_BYTES: usize = 4 * 1024;
/// The limit of all names and values together, in bytes. Within 16 KiB it leaves space for
/// oncegate's own headers and for base64.
const ALL_MAX_BYTES: usize = 8 * 1024;

/// The remaining space for the headers of one message.
#[derive(Debug)]
pub(crate) struct Room {
    left_bytes: usize,
    left_out: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self {
            left_bytes: ALL_MAX_BYTES,
            left_out: 0,
        }
    }
}

impl Room {
    /// Returns whether this header is passed to the worker; if not, it is counted.
    pub(crate) fn takes(&mut self, name: &str, value: &[u8]) -> bool {
        let left = self.left_bytes.checked_sub(name.len() + value.len());
        match left.filter(|_| value.len() <= VALUE_MAX_BYTES) {
            Some(left) => {
                self.left_bytes = left;
                true
            }
            None => {
                self.leave_out();
                false
            }
        }
    }

    /// Counts a header that cannot be passed for another reason.
    pub(crate) fn leave_out(&mut self) {
        self.left_out += 1;
    }

    /// The number of headers left out.
    pub(crate) fn left_out(&self) -> usize {
        self.left_out
    }

    /// Logs the number of headers left out, if there are any, and returns it.
    pub(crate) fn tell(&self, message: &Message) -> usize {
        if self.left_out > 0 {
            warn!(
                origin = %message.origin(),
                left_out = self.left_out,
                "headers were not passed to the worker: longer than {VALUE_MAX_BYTES} bytes, {ALL_MAX_BYTES} in all, with characters that are not allowed, or with the variable of a later one"
            );
        }
        self.left_out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_and_too_many_are_left_out_and_counted() {
        let mut room = Room::default();
        assert!(room.takes("a", &[b'x'; VALUE_MAX_BYTES]));
        assert!(!room.takes("b", &[b'x'; VALUE_MAX_BYTES + 1]));
        assert!(
            !room.takes("c", &[b'x'; VALUE_MAX_BYTES]),
            "with its name it is one byte too many"
        );
        assert!(room.takes("d", b"small"));
        assert_eq!(room.left_out(), 2);
    }
}
