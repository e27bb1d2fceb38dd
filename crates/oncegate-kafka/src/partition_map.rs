//! A map with partitions as its keys.

use std::collections::HashMap;
use std::sync::Arc;

use super::assignment::Partition;

/// A map from partitions to values, in which a partition is found by the name of its topic and its number.
///
/// A member may own tens of thousands of partitions, and each message is looked up.
#[derive(Debug)]
pub(crate) struct PartitionMap<T> {
    topics: HashMap<Arc<str>, HashMap<i32, T>>,
    len: usize,
}

impl<T> Default for PartitionMap<T> {
    fn default() -> Self {
        Self { topics: HashMap::new(), len: 0 }
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
        self.topics.values_mut().for_each(|of_topic| of_topic.retain(|_, value| is_kept(value)));
        self.topics.retain(|_, of_topic| !of_topic.is_empty());
        self.len = self.topics.values().map(HashMap::len).sum();
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partition(topic: &str, number: i32) -> Partition {
        Partition { topic: topic.into(), number }
    }

    #[test]
    fn partitions_of_one_number_in_two_topics_are_two() {
        let mut map = PartitionMap::default();
        let (orders, refunds) = (partition("orders", 7), partition("refunds", 7));
        assert_eq!(
            (map.insert(&orders, 1), map.insert(&refunds, 2), map.insert(&orders, 3)),
            (None, None, Some(1))
        );
        assert_eq!(
            (map.get("orders", 7), map.of(&refunds), map.get("orders", 8)),
            (Some(&3), Some(&2), None)
        );
        assert_eq!((map.len(), map.values().sum::<i32>()), (2, 5));
        assert_eq!((map.remove(&orders), map.remove(&orders), map.len()), (Some(3), None, 1));
        map.retain(|value| *value != 2);
        assert!(map.is_empty() && map.of(&refunds).is_none());
    }
}
