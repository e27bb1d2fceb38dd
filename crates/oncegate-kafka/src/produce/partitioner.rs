//! The partition of a key, as the client's partitioner chooses it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use oncegate_outbox::TopicPart;
use parking_lot::Mutex;

/// The partitioners of librdkafka that choose by murmur2. They differ in keys that are missing.
const BY_MURMUR2: &[&str] = &["murmur2", "murmur2_random"];

/// The time after which the number of a topic's partitions is asked for again.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// The numbers of partitions of the topics of which a message was not written.
///
/// A number that has grown since costs no more than that the messages of a partition wait which
/// could be written: their order is that of their keys.
#[derive(Debug, Default)]
pub(super) struct PartitionCounts {
    topics: Mutex<HashMap<String, KnownCount>>,
}

#[derive(Debug)]
struct KnownCount {
    count: Option<u32>,
    asked_at: Instant,
}

impl PartitionCounts {
    /// Returns the partition of a key, if the number of partitions is known. The messages without a
    /// key, which go to any partition, are a part of their own.
    pub(super) fn part(&self, topic: &str, key: Option<&[u8]>) -> Option<TopicPart> {
        let count = self.topics.lock().get(topic)?.count?;
        Some(TopicPart {
            number: key.map_or(Some(count), |key| partition(key, count))?,
            of: count,
        })
    }

    /// Returns whether the number of a topic's partitions is to be asked for. Until there is an
    /// answer, others need not ask.
    pub(super) fn is_wanted(&self, topic: &str) -> bool {
        let mut topics = self.topics.lock();
        let now = Instant::now();
        topics.retain(|name, known| name == topic || known.asked_at.elapsed() < ASK_AGAIN_AFTER);
        match topics.get_mut(topic) {
            Some(known) if known.asked_at.elapsed() < ASK_AGAIN_AFTER => false,
            Some(known) => {
                known.asked_at = now;
                true
            }
            None => {
                let unknown = KnownCount {
                    count: None,
                    asked_at: now,
                };
                topics.insert(topic.to_owned(), unknown);
                true
            }
        }
    }

    /// Notes the answer; `None` if there was none.
    pub(super) fn note(&self, topic: &str, count: Option<u32>) {
        let mut topics = self.topics.lock();
        match count {
            None if topics.get(topic).is_some_and(|known| known.count.is_none()) => {
                // The next message that is not written asks again.
                topics.remove(topic);
            }
            None => {}
            Some(_) => {
                let known = KnownCount {
                    count,
                    asked_at: Instant::now(),
                };
                topics.insert(topic.to_owned(), known);
            }
        }
    }
}

/// Returns whether the client chooses partitions as [`PartitionCounts::part`] does.
pub(super) fn is_known(partitioner: Option<&str>) -> bool {
    partitioner.is_none_or(|partitioner| BY_MURMUR2.contains(&partitioner))
}

fn partition(key: &[u8], of: u32) -> Option<u32> {
    (murmur2(key) & 0x7fff_ffff).checked_rem(of)
}

/// The murmur2 of Java clients.
fn murmur2(key: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    // Keys are far smaller than 4 GiB.
    let mut hash = 0x9747_b28c ^ key.len() as u32;
    let (chunks, rest) = key.as_chunks::<4>();
    for chunk in chunks {
        let mut word = u32::from_le_bytes(*chunk).wrapping_mul(M);
        word = (word ^ (word >> 24)).wrapping_mul(M);
        hash = hash.wrapping_mul(M) ^ word;
    }
    if !rest.is_empty() {
        let tail = rest
            .iter()
            .rev()
            .fold(0, |tail, byte| tail << 8 | u32::from(*byte));
        hash = (hash ^ tail).wrapping_mul(M);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(M);
    hash ^ (hash >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_the_hash_of_java_clients() {
        // From the tests of librdkafka and Kafka.
        for (key, hash) in [
            ("kafka", 0xd067_cf64_u32),
            ("giberish123456789", 0x8f55_2b0c),
            ("1234", 0x9fc9_7b14),
            ("234", 0xe7c0_09ca),
            ("34", 0x8739_30da),
            ("4", 0x5a4b_5ca1),
            ("", 0x106e_08d9),
        ] {
            assert_eq!(murmur2(key.as_bytes()), hash, "{key}");
        }
    }

    #[test]
    fn a_part_is_known_once_the_number_of_partitions_is() {
        let counts = PartitionCounts::default();
        assert_eq!(counts.part("orders", Some(b"kafka")), None);
        assert!(counts.is_wanted("orders"));
        assert!(!counts.is_wanted("orders"), "one call asks");
        counts.note("orders", None);
        assert!(counts.is_wanted("orders"), "there was no answer");
        counts.note("orders", Some(12));
        let part = counts.part("orders", Some(b"kafka")).unwrap();
        assert_eq!(
            (part.number, part.of),
            ((0xd067_cf64_u32 & 0x7fff_ffff) % 12, 12)
        );
        assert_eq!(counts.part("orders", None).unwrap().number, 12);
    }
}
