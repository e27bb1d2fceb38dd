//! The row of one message, dead letter or effect: the known facts in a fixed size.

use oncegate_core::key::Digest;

use super::super::dry_run::Standing;

/// An encoded row. Rows of one event have the same first 16 bytes, and their messages come first,
/// in order.
pub(super) type EncodedRow = [u8; Row::BYTES];

/// The known facts about one message, dead letter or effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// The identity of the event, the same for all its rows.
    pub(super) event: u128,
    pub(super) what: What,
    pub(super) place: RowPlace,
    /// The digest of the message's key; zeros where there is none.
    pub(super) digest: Digest,
}

/// The subject of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Message(Found),
    DeadLetter,
    Effect,
}

/// The position of a message, or the number of an effect as its offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RowPlace {
    /// The number of the topic in the order in which topics were first seen.
    pub(super) topic: u16,
    pub(super) partition: u32,
    pub(super) offset: u64,
}

impl RowPlace {
    /// Stands for the topic of an effect whose key is a UUID, and sorts after all topics.
    pub(super) const UUID: u16 = u16::MAX - 1;
    /// Stands for the topic of an effect whose key is something else.
    pub(super) const NO_UUID: u16 = u16::MAX;
}

/// The state of a message's record, and whether the message is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Found {
    pub(super) state: RecordState,
    /// `true` when the consumer group has committed an offset past it, or none is known.
    pub(super) acknowledged: bool,
}

/// The state of a record; of several reads of one record, the greatest is the latest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum RecordState {
    Missing,
    Unreadable,
    Abandoned,
    RetryDue,
    Waiting,
    InProgress,
    Failed,
    HandedOver,
    Completed,
    /// The record belongs to a message with other content.
    Mismatched,
    /// No key can be derived, so there is no record.
    NoKey,
}

const STATES: [RecordState; 11] = [
    RecordState::Missing,
    RecordState::Unreadable,
    RecordState::Abandoned,
    RecordState::RetryDue,
    RecordState::Waiting,
    RecordState::InProgress,
    RecordState::Failed,
    RecordState::HandedOver,
    RecordState::Completed,
    RecordState::Mismatched,
    RecordState::NoKey,
];

impl RecordState {
    pub(super) fn of(standing: &Standing) -> Self {
        match standing {
            Standing::Completed => Self::Completed,
            Standing::WithoutRecord => Self::Missing,
            Standing::Abandoned => Self::Abandoned,
            Standing::RetryDue => Self::RetryDue,
            Standing::InProgress => Self::InProgress,
            Standing::Waiting => Self::Waiting,
            Standing::Failed { handed_over: true } => Self::HandedOver,
            Standing::Failed { handed_over: false } => Self::Failed,
            Standing::Mismatched => Self::Mismatched,
            Standing::Unreadable(_) => Self::Unreadable,
            Standing::Undecodable { .. } => Self::NoKey,
        }
    }

    /// Returns whether the record, if there is one, is that of the message.
    pub(super) fn is_of_message(self) -> bool {
        self < Self::Mismatched
    }
}

/// The bit of the last byte before the digest that says whether a message is acknowledged.
const ACKNOWLEDGED: u8 = 0x80;

impl Row {
    /// The size of an encoded row.
    pub(super) const BYTES: usize = 48;

    pub(super) fn encode(&self) -> EncodedRow {
        let (kind, state) = match self.what {
            What::Message(Found {
                state,
                acknowledged,
            }) => (0, state as u8 | if acknowledged { ACKNOWLEDGED } else { 0 }),
            What::DeadLetter => (1, 0),
            What::Effect => (2, 0),
        };
        let RowPlace {
            topic,
            partition,
            offset,
        } = self.place;
        let mut bytes = [0; Self::BYTES];
        let parts: [&[u8]; 7] = [
            &self.event.to_be_bytes(),
            &[kind],
            &topic.to_be_bytes(),
            &partition.to_be_bytes(),
            &offset.to_be_bytes(),
            &[state],
            self.digest.as_bytes(),
        ];
        let mut left = bytes.as_mut_slice();
        for part in parts {
            let (here, rest) = left.split_at_mut(part.len());
            here.copy_from_slice(part);
            left = rest;
        }
        bytes
    }

    /// Decodes a row that `encode` has made.
    pub(super) fn decode(bytes: &EncodedRow) -> Self {
        let mut left = bytes.as_slice();
        let event = u128::from_be_bytes(take(&mut left));
        let [kind] = take(&mut left);
        let topic = u16::from_be_bytes(take(&mut left));
        let partition = u32::from_be_bytes(take(&mut left));
        let offset = u64::from_be_bytes(take(&mut left));
        let [state] = take(&mut left);
        let digest = Digest::from_bytes(take(&mut left));
        let known = STATES.get(usize::from(state & !ACKNOWLEDGED)).copied();
        let what = match kind {
            0 => What::Message(Found {
                state: known.unwrap_or(RecordState::Unreadable),
                acknowledged: state & ACKNOWLEDGED != 0,
            }),
            1 => What::DeadLetter,
            _ => What::Effect,
        };
        Self {
            event,
            what,
            place: RowPlace {
                topic,
                partition,
                offset,
            },
            digest,
        }
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let (taken, rest) = bytes.split_first_chunk().expect("a row has all its parts");
    *bytes = rest;
    *taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_their_encoding_and_messages_come_first() {
        fn row(what: What, offset: u64) -> Row {
            Row {
                event: 7 << 64 | 3,
                what,
                place: RowPlace {
                    topic: 2,
                    partition: 11,
                    offset,
                },
                digest: Digest::from_bytes([9; 16]),
            }
        }
        for (number, state) in (0..).zip(STATES) {
            assert_eq!(state as usize, number, "a state is found by its number");
            for acknowledged in [false, true] {
                let row = row(
                    What::Message(Found {
                        state,
                        acknowledged,
                    }),
                    1 << 40,
                );
                assert_eq!(Row::decode(&row.encode()), row);
            }
        }
        let message = What::Message(Found {
            state: RecordState::NoKey,
            acknowledged: true,
        });
        let ordered = [
            row(message, 1),
            row(message, 256),
            row(What::DeadLetter, 0),
            row(What::Effect, 0),
        ];
        assert!(ordered.map(|row| row.encode()).is_sorted());
        assert!(ordered.iter().all(|row| Row::decode(&row.encode()) == *row));
    }
}
