//! The topics of the messages, and the offsets up to which they are acknowledged.

use std::collections::HashMap;
use std::sync::Arc;

use super::row::RowPlace;
use oncegate_runtime::message::Origin;

/// Numbers topics in the order in which they are first seen, and knows the acknowledged offsets.
#[derive(Debug, Default)]
pub(super) struct Topics {
    names: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, u16>,
    /// The first offset that is not acknowledged, of each partition with a commit.
    committed: HashMap<(Arc<str>, u32), u64>,
}

impl Topics {
    pub(super) fn commit(&mut self, topic: &str, partition: i32, offset: i64) {
        let at = (
            Arc::from(topic),
            u32::try_from(partition).unwrap_or_default(),
        );
        self.committed
            .insert(at, u64::try_from(offset).unwrap_or_default());
    }

    /// The place of a message, and whether it is acknowledged; `None` for an origin that is not in
    /// Kafka, or with more than 65,534 topics.
    pub(super) fn find(&mut self, origin: &Origin) -> Option<(RowPlace, bool)> {
        let Origin::Kafka {
            topic,
            partition,
            offset,
        } = origin
        else {
            return None;
        };
        let number = match self.numbers.get(topic) {
            Some(number) => *number,
            None => {
                let number = u16::try_from(self.names.len())
                    .ok()
                    .filter(|number| *number < RowPlace::UUID)?;
                self.names.push(Arc::clone(topic));
                self.numbers.insert(Arc::clone(topic), number);
                number
            }
        };
        let partition = u32::try_from(*partition).ok()?;
        let offset = u64::try_from(*offset).ok()?;
        let acknowledged = self.committed.is_empty()
            || self
                .committed
                .get(&(Arc::clone(topic), partition))
                .is_some_and(|end| offset < *end);
        Some((
            RowPlace {
                topic: number,
                partition,
                offset,
            },
            acknowledged,
        ))
    }

    pub(super) fn show(&self, place: RowPlace) -> String {
        let topic = self
            .names
            .get(usize::from(place.topic))
            .map_or("?", |name| &**name);
        format!("{topic}/{}@{}", place.partition, place.offset)
    }
}
