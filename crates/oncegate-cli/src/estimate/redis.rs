//! Calculates the memory that completed records need in Redis, without I/O.
//!
//! The sizes are those of Redis 7.0 with the jemalloc of Debian, and within 10 % of a real server
//! at a million keys: `estimates_are_within_a_tenth_of_a_real_redis`. A build with Redis's own
//! jemalloc takes up to 16 bytes a key less.

/// The memory of a server without keys: its own tables, a client and its buffers.
const EMPTY_SERVER_BYTES: u64 = 1 << 20;
/// An entry of a dictionary. A key with an expiry has two.
const ENTRY_BYTES: u64 = 24;
/// A slot of a dictionary's table.
const SLOT_BYTES: u64 = 8;
/// The head of a value.
const OBJECT_BYTES: u64 = 16;
/// A value up to this long is kept in one piece with its head.
const EMBEDDED_MOST_BYTES: u64 = 44;
/// The bytes before the result in a completed record.
const RECORD_HEAD_BYTES: u64 = 12;
/// The digest of a key, and the separator before it.
const DIGEST_BYTES: u64 = 23;

/// The memory of a number of completed records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) struct Memory {
    /// A key, its record and its entries in the tables.
    pub(super) bytes_per_key: u64,
    /// `used_memory` once the number of records is that of the whole retention.
    pub(super) steady_bytes: u64,
    /// The same while the tables grow: the old and the new tables exist at the same time.
    pub(super) peak_bytes: u64,
    /// The `maxmemory` to set: the peak, and a fifth for claims, retries and clients.
    pub(super) maxmemory_bytes: u64,
    /// The memory that the machine should have: includes fragmentation, and pages that are copied
    /// while the append-only file is rewritten.
    pub(super) machine_bytes: u64,
}

impl Memory {
    pub(super) fn of(keys: u64, scope_bytes: u64, result_bytes: u64) -> Self {
        let table = SLOT_BYTES * keys.next_power_of_two();
        let record = RECORD_HEAD_BYTES + result_bytes;
        let entries =
            2 * allocated(ENTRY_BYTES) + string(scope_bytes + DIGEST_BYTES) + value(record);
        let steady_bytes = EMPTY_SERVER_BYTES + keys * entries + 2 * table;
        // The next table is twice as large, and exists beside the old one until all keys have
        // moved.
        let peak_bytes = steady_bytes + 2 * table;
        let maxmemory_bytes = rounded(peak_bytes + peak_bytes / 5);
        Self {
            bytes_per_key: entries + (2 * table).div_ceil(keys.max(1)),
            steady_bytes,
            peak_bytes,
            maxmemory_bytes,
            machine_bytes: rounded(maxmemory_bytes + maxmemory_bytes / 2),
        }
    }
}

/// A string as a key of the dictionary has it.
fn string(length: u64) -> u64 {
    allocated(length + 1 + header(length))
}

fn value(length: u64) -> u64 {
    if length <= EMBEDDED_MOST_BYTES {
        // Embedded strings always have the header of 3 bytes.
        return allocated(OBJECT_BYTES + 3 + length + 1);
    }
    allocated(OBJECT_BYTES) + allocated(length + 1 + header(length))
}

/// The header of a string.
fn header(length: u64) -> u64 {
    match length {
        0..32 => 1,
        32..256 => 3,
        256..65_536 => 5,
        _ => 9,
    }
}

/// The bytes that jemalloc allocates for a request: multiples of 16 up to 128, then four classes
/// for each doubling.
fn allocated(bytes: u64) -> u64 {
    match bytes {
        0..=8 => 8,
        9..=128 => bytes.next_multiple_of(16),
        _ => bytes.next_multiple_of(bytes.next_power_of_two() / 8),
    }
}

/// Rounds up to a multiple of 16 MiB.
fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(16 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_in_classes() {
        let cases = [
            (1, 8),
            (17, 32),
            (128, 128),
            (129, 160),
            (161, 192),
            (257, 320),
            (1_025, 1_280),
            (4_097, 5_120),
        ];
        for (asked, given) in cases {
            assert_eq!(allocated(asked), given, "{asked}");
        }
    }

    /// As `scripts/bench memory` measures it: keys of 30 bytes.
    #[test]
    fn a_key_takes_what_was_measured() {
        assert_eq!(Memory::of(1_000_000, 7, 0).bytes_per_key, 145);
        assert_eq!(Memory::of(1_000_000, 7, 64).bytes_per_key, 209);
    }

    #[test]
    fn more_is_never_less() {
        let mut last = 0;
        for keys in [0, 1, 1_000, 1 << 20, (1 << 20) + 1, 1 << 30] {
            let memory = Memory::of(keys, 64, 1_000);
            assert!(memory.steady_bytes > last, "{keys}");
            assert!(
                memory.peak_bytes >= memory.steady_bytes
                    && memory.maxmemory_bytes > memory.peak_bytes
            );
            last = memory.steady_bytes;
        }
    }
}
