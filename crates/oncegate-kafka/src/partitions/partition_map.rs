//! A map with partitions as its keys.

use std::collections::HashMap;
use std::sync::Arc;

use rdkafka::topic_partition_list::{TopicPartitionList, TopicPartitionListElem};

use super::partition::Partition;

/// A map from partitions to values, in which a partition is found by the name of its topic and its
/// number.
///
/// A member may own tens of thousands of partitions, and each message is looked up.
#[derive(Debug)]
pub(crate) struct PartitionMap<T> {
    topics: HashMap<Arc<str>, HashMap<i32, T>>,
    len: usize,
}

impl<T> Default for PartitionMap<T> {
    fn default() -> Self {
        Self {
            topics: HashMap::new(),
            len: 0,
        }
    }
}

impl<T> PartitionMap<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn get(&self, topic: &str, number: i32) -> Option<&T> {
        self.topics.get(topic)?.get(&number)
    }

    pub(crate) fn of(&self, partition: &Partition) -> Option<&T> {
        self.get(&partition.topic, partition.number)
    }

    /// Returns the value that the partition had.
    pub(crate) fn insert(&mut self, partition: &Partition, value: T) -> Option<T> {
        let of_topic = self.topics.entry(Arc::clone(&partition.topic)).or_default();
        let former = of_topic.insert(partition.number, value);
        self.len += usize::from(former.is_none());
        former
    }

    /// Returns the value that `read` finds in each element of a list of the client's.
    ///
    /// The list's own search is linear, so that of each partition in its list would be quadratic:
    /// 1.1 s of the poll thread for 20,000 partitions.
    pub(crate) fn of_list(
        list: &TopicPartitionList,
        read: impl Fn(&TopicPartitionListElem<'_>) -> T,
    ) -> Self {
        let mut map = Self::default();
        for element in list.elements() {
            let value = read(&element);
            let number = element.partition();
            let former = match map.topics.get_mut(element.topic()) {
                Some(of_topic) => of_topic.insert(number, value),
                None => map
                    .topics
                    .entry(element.topic().into())
                    .or_default()
                    .insert(number, value),
            };
            map.len += usize::from(former.is_none());
        }
        map
    }

    pub(crate) fn remove(&mut self, partition: &Partition) -> Option<T> {
        let of_topic = self.topics.get_mut(&partition.topic)?;
        let removed = of_topic.remove(&partition.number)?;
        if of_topic.is_empty() {
            self.topics.remove(&partition.topic);
        }
        self.len -= 1;
        Some(removed)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.topics.values().flat_map(HashMap::values)
    }

    /// Keeps the values for which `is_kept` returns `true`.
    pub(crate) fn retain(&mut self, mut is_kept: impl FnMut(&mut T) -> bool) {
        self.topics
            .values_mut()
            .for_each(|of_topic| of_topic.retain(|_, value| is_kept(value)));
        self.topics.retain(|_, of_topic| !of_topic.is_empty());
        self.len = self.topics.values().map(HashMap::len).sum();
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Returns a list for a single call. It must not outlive the call: a consumer whose lists are alive
/// cannot be dropped.
pub(crate) fn list_of<'a>(partitions: impl Iterator<Item = &'a Partition>) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for partition in partitions {
        list.add_partition(&partition.topic, partition.number);
    }
    list
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rdkafka::topic_partition_list::Offset;

    use super::*;

    fn partition(topic: &str, number: i32) -> Partition {
        Partition {
            topic: topic.into(),
            number,
        }
    }

    /// `clippy.toml` forbids the list's own search.
    #[test]
    fn a_list_of_20_000_partitions_is_read_once() {
        const PARTITIONS: i32 = 10_000;
        let mut list = TopicPartitionList::new();
        for number in 0..PARTITIONS {
            list.add_partition("orders", number)
                .set_offset(Offset::Offset(i64::from(number)))
                .expect("an offset");
            list.add_partition("refunds", number);
        }
        let reads = Cell::new(0);
        let map = PartitionMap::of_list(&list, |element| {
            reads.set(reads.get() + 1);
            element.offset()
        });
        assert_eq!((map.len(), reads.get()), (20_000, 20_000));
        for number in 0..PARTITIONS {
            assert_eq!(
                map.get("orders", number),
                Some(&Offset::Offset(i64::from(number)))
            );
            assert_eq!(map.get("refunds", number), Some(&Offset::Invalid));
        }
        assert_eq!(map.get("orders", PARTITIONS), None);
    }

    #[test]
    fn partitions_of_one_number_in_two_topics_are_two() {
        let mut map = PartitionMap::default();
        let orders = partition("orders", 7);
        let refunds = partition("refunds", 7);
        assert_eq!(
            (
                map.insert(&orders, 1),
                map.insert(&refunds, 2),
                map.insert(&orders, 3)
            ),
            (None, None, Some(1))
        );
        assert_eq!(
            (map.get("orders", 7), map.of(&refunds), map.get("orders", 8)),
            (Some(&3), Some(&2), None)
        );
        assert_eq!((map.len(), map.values().sum::<i32>()), (2, 5));
        assert_eq!(
            (map.remove(&orders), map.remove(&orders), map.len()),
            (Some(3), None, 1)
        );
        map.retain(|value| *value != 2);
        assert!(map.is_empty() && map.of(&refunds).is_none());
    }
}
