//! A record as an item with readable attributes.
//!
//! | attribute | type | holds |
//! |---|---|---|
//! | `id` | S | the store key, or `<scope>:descriptor`; the table's only key attribute |
//! | `state` | S | `pending`, `released`, `completed` or `failed` |
//! | `owner` | B | pending: the token; otherwise the tag of the attempt that ended it |
//! | `expires` | N | the record's expiry, in ms since 1970; a lease or delay ends 30 days before |
//! | `ttl` | N | when DynamoDB may delete the item, in seconds since 1970; it decides nothing |
//! | `rev` | B | random, new with each write: whether the item still is what was read |
//! | `attempt` | N | absent when completed |
//! | `recovery` | S | `earlier` or `takeover`; absent when none |
//! | `fencing_token` | N | the fencing token, if there is one |
//! | `fingerprint` | B | if there is one |
//! | `handed_over` | BOOL | of a failed record |
//! | `reason` | S | of a released or failed record; absent when empty |
//! | `result` | B | of a completed record; absent when empty |

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use bytes::Bytes;
use oncegate_core::key::{Fingerprint, Scope};
use oncegate_core::record::{FencingToken, Record, Recovery, State, StoreTime, Token, TokenTag};

/// An item, by the names of its attributes.
pub(crate) type Item = HashMap<String, AttributeValue>;

pub(crate) const ID: &str = "id";
pub(crate) const STATE: &str = "state";
pub(crate) const OWNER: &str = "owner";
pub(crate) const EXPIRES: &str = "expires";
pub(crate) const TTL: &str = "ttl";
pub(crate) const REVISION: &str = "rev";
pub(crate) const DESCRIPTOR: &str = "descriptor";
pub(crate) const PENDING: &str = "pending";

/// The time for which an expired item is kept for DynamoDB's deletion. The clocks of the deletion
/// and of the answers may differ a little, and nothing is gained by haste.
const TTL_MARGIN: Duration = Duration::from_secs(3_600);

/// The last instant that is written as `ttl`, in seconds: the end of the year 9999.
const TTL_LAST_S: u64 = 253_402_300_799;

/// The most that an item may have: 400 KB, which DynamoDB means as 400 × 1,024 bytes.
pub(crate) const ITEM_MOST_BYTES: usize = 400 * 1_024;

/// More than all attributes of a record besides its result, its reason and its id.
const OTHER_BYTES: usize = 512;

/// The mark of one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Revision([u8; 8]);

impl Revision {
    pub(crate) fn random() -> Self {
        Self(fastrand::u64(..).to_be_bytes())
    }

    pub(crate) fn value(self) -> AttributeValue {
        AttributeValue::B(Blob::new(self.0))
    }

    /// Returns whether this write has made the item.
    pub(crate) fn has_made(self, item: &Item) -> bool {
        matches!(item.get(REVISION), Some(AttributeValue::B(found)) if found.as_ref() == self.0)
    }
}

/// The id of a scope's descriptor. No record has it: a digest is longer.
pub(crate) fn descriptor_id(scope: &Scope) -> String {
    format!("{}:{DESCRIPTOR}", scope.as_str())
}

pub(crate) fn text(value: impl Into<String>) -> AttributeValue {
    AttributeValue::S(value.into())
}

pub(crate) fn number(value: u64) -> AttributeValue {
    AttributeValue::N(value.to_string())
}

pub(crate) fn binary(value: &[u8]) -> AttributeValue {
    AttributeValue::B(Blob::new(value))
}

/// Returns the size of the record's item in bytes, or a little more.
pub(crate) fn size_of(id: &str, record: &Record) -> usize {
    let own = match &record.state {
        State::Pending { .. } => 0,
        State::Released { reason, .. } | State::Failed { reason, .. } => reason.len(),
        State::Completed { result, .. } => result.len(),
    };
    OTHER_BYTES + id.len() + own
}

/// Encodes a record.
pub(crate) fn encode(id: &str, record: &Record, revision: Revision) -> Item {
    let expires_ms = record.expires_at.millis();
    let ttl_s = (expires_ms / 1_000).saturating_add(TTL_MARGIN.as_secs());
    let mut item = NewItem(Item::with_capacity(12));
    item.set(ID, text(id));
    item.set(EXPIRES, number(expires_ms));
    item.set(TTL, number(ttl_s.min(TTL_LAST_S)));
    item.set(REVISION, revision.value());
    if let Some(fingerprint) = &record.fingerprint {
        item.set("fingerprint", binary(fingerprint.as_bytes()));
    }
    match &record.state {
        State::Pending {
            token,
            attempt,
            recovery,
            fencing_token,
        } => {
            item.set(STATE, text(PENDING));
            item.set(OWNER, binary(token.as_bytes()));
            item.set_attempt(*attempt, *recovery, *fencing_token);
        }
        State::Released {
            by,
            attempt,
            recovery,
            fencing_token,
            reason,
        } => {
            item.set(STATE, text("released"));
            item.set(OWNER, binary(&by.0));
            item.set_attempt(*attempt, *recovery, *fencing_token);
            item.set_reason(reason);
        }
        State::Completed { by, result } => {
            item.set(STATE, text("completed"));
            item.set(OWNER, binary(&by.0));
            if !result.is_empty() {
                item.set("result", binary(result));
            }
        }
        State::Failed {
            by,
            attempt,
            handed_over,
            reason,
        } => {
            item.set(STATE, text("failed"));
            item.set(OWNER, binary(&by.0));
            item.set_attempt(*attempt, Recovery::None, None);
            item.set("handed_over", AttributeValue::Bool(*handed_over));
            item.set_reason(reason);
        }
    }
    item.0
}

/// An item that is being made.
struct NewItem(Item);

impl NewItem {
    fn set(&mut self, name: &str, value: AttributeValue) {
        self.0.insert(name.to_owned(), value);
    }

    fn set_attempt(
        &mut self,
        attempt: u8,
        recovery: Recovery,
        fencing_token: Option<FencingToken>,
    ) {
        self.set("attempt", number(attempt.into()));
        if recovery != Recovery::None {
            self.set("recovery", text(recovery.as_str()));
        }
        if let Some(FencingToken(value)) = fencing_token {
            self.set("fencing_token", number(value));
        }
    }

    fn set_reason(&mut self, reason: &str) {
        if !reason.is_empty() {
            self.set("reason", text(reason));
        }
    }
}

/// A record as it was found, with the mark of the write that made it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) record: Record,
    pub(crate) revision: Revision,
}

/// Decodes a record.
///
/// # Errors
/// With the attribute that is not as this release writes it. Such an item is never overwritten.
pub(crate) fn decode(item: &Item) -> Result<Found, String> {
    let attributes = Attributes(item);
    let expires_at = StoreTime::from_millis(attributes.number(EXPIRES)?);
    let fingerprint = attributes
        .optional("fingerprint", Attributes::bytes::<{ Fingerprint::BYTES }>)?
        .map(Fingerprint::from_bytes);
    let state = match attributes.text(STATE)? {
        PENDING => State::Pending {
            token: Token::from(attributes.bytes::<16>(OWNER)?),
            attempt: attributes.attempt()?,
            recovery: attributes.recovery()?,
            fencing_token: attributes.fencing_token()?,
        },
        "released" => State::Released {
            by: attributes.tag()?,
            attempt: attributes.attempt()?,
            recovery: attributes.recovery()?,
            fencing_token: attributes.fencing_token()?,
            reason: attributes.reason()?,
        },
        "completed" => State::Completed {
            by: attributes.tag()?,
            result: attributes.result()?,
        },
        "failed" => State::Failed {
            by: attributes.tag()?,
            attempt: attributes.attempt()?,
            handed_over: attributes.flag("handed_over")?,
            reason: attributes.reason()?,
        },
        _ => return Err(wrong(STATE)),
    };
    let revision = Revision(attributes.bytes(REVISION)?);
    Ok(Found {
        record: Record {
            expires_at,
            fingerprint,
            state,
        },
        revision,
    })
}

fn wrong(name: &str) -> String {
    format!("attribute `{name}` is missing, or is not as this release writes it")
}

struct Attributes<'a>(&'a Item);

impl<'a> Attributes<'a> {
    fn text(&self, name: &str) -> Result<&'a str, String> {
        let value = self.0.get(name).and_then(|value| value.as_s().ok());
        value.map(String::as_str).ok_or_else(|| wrong(name))
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<T, String> {
        let value = self.0.get(name).and_then(|value| value.as_n().ok());
        value
            .and_then(|digits| digits.parse().ok())
            .ok_or_else(|| wrong(name))
    }

    fn blob(&self, name: &str) -> Result<&'a [u8], String> {
        let value = self.0.get(name).and_then(|value| value.as_b().ok());
        value.map(Blob::as_ref).ok_or_else(|| wrong(name))
    }

    fn bytes<const N: usize>(&self, name: &str) -> Result<[u8; N], String> {
        self.blob(name)?.try_into().map_err(|_| wrong(name))
    }

    fn flag(&self, name: &str) -> Result<bool, String> {
        let value = self.0.get(name).and_then(|value| value.as_bool().ok());
        value.copied().ok_or_else(|| wrong(name))
    }

    /// `None` if there is no such attribute.
    fn optional<T>(
        &self,
        name: &str,
        read: impl FnOnce(&Self, &str) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        self.0
            .contains_key(name)
            .then(|| read(self, name))
            .transpose()
    }

    fn tag(&self) -> Result<TokenTag, String> {
        self.bytes(OWNER).map(TokenTag)
    }

    fn attempt(&self) -> Result<u8, String> {
        self.number("attempt")
    }

    fn recovery(&self) -> Result<Recovery, String> {
        match self.optional("recovery", Self::text)? {
            None => Ok(Recovery::None),
            Some("earlier") => Ok(Recovery::Earlier),
            Some("takeover") => Ok(Recovery::Takeover),
            Some(_) => Err(wrong("recovery")),
        }
    }

    fn fencing_token(&self) -> Result<Option<FencingToken>, String> {
        Ok(self
            .optional("fencing_token", Self::number)?
            .map(FencingToken))
    }

    fn reason(&self) -> Result<String, String> {
        let reason = self.optional("reason", Self::text)?;
        Ok(reason.unwrap_or_default().to_owned())
    }

    fn result(&self) -> Result<Bytes, String> {
        let result = self.optional("result", Self::blob)?;
        Ok(result.map(Bytes::copy_from_slice).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending() -> Record {
        Record {
            expires_at: StoreTime::from_millis(1_700_000_000_123),
            fingerprint: Some(Fingerprint::from_bytes([1, 2, 3, 4, 5, 6, 7])),
            state: State::Pending {
                token: Token::from(*b"0123456789abcdef"),
                attempt: 255,
                recovery: Recovery::Takeover,
                fencing_token: Some(FencingToken(u64::MAX)),
            },
        }
    }

    fn records() -> Vec<Record> {
        let by = TokenTag(*b"0123");
        let states = [
            pending().state,
            State::Released {
                by,
                attempt: 0,
                recovery: Recovery::Earlier,
                fencing_token: None,
                reason: String::new(),
            },
            State::Completed {
                by,
                result: Bytes::new(),
            },
            State::Completed {
                by,
                result: Bytes::from_static(b"\0\xff"),
            },
            State::Failed {
                by,
                attempt: 5,
                handed_over: true,
                reason: "no".to_owned(),
            },
        ];
        states
            .into_iter()
            .map(|state| Record {
                state,
                fingerprint: None,
                ..pending()
            })
            .chain([pending()])
            .collect()
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        for record in records() {
            let revision = Revision::random();
            let item = encode("billing:k", &record, revision);
            let found = decode(&item).unwrap();
            assert_eq!((found.record, found.revision), (record, revision));
            assert!(revision.has_made(&item) && !Revision([0; 8]).has_made(&item));
        }
    }

    #[test]
    fn an_item_is_deleted_later_than_its_record_expires() {
        let item = encode("billing:k", &pending(), Revision::random());
        assert_eq!(item[TTL], number(1_700_000_000 + 3_600));
        let endless = Record {
            expires_at: StoreTime::from_millis(u64::MAX),
            ..pending()
        };
        let item = encode("billing:k", &endless, Revision::random());
        assert_eq!(item[TTL], number(TTL_LAST_S));
    }

    // invariant: garbage-as-answer
    #[test]
    fn an_item_of_another_format_is_no_record() {
        let whole = encode("billing:k", &pending(), Revision::random());
        for name in [STATE, OWNER, EXPIRES, REVISION, "attempt"] {
            let mut item = whole.clone();
            item.remove(name);
            assert!(decode(&item).unwrap_err().contains(name), "{name}");
        }
        for (name, value) in [
            (STATE, text("paused")),
            (OWNER, binary(b"0123")),
            (EXPIRES, number(1).as_n().map(|n| text(n.clone())).unwrap()),
            ("attempt", number(256)),
            ("recovery", text("late")),
            ("fencing_token", AttributeValue::N("-1".to_owned())),
            ("fingerprint", binary(b"12")),
        ] {
            let mut item = whole.clone();
            item.insert(name.to_owned(), value);
            assert!(decode(&item).unwrap_err().contains(name), "{name}");
        }
    }

    #[test]
    fn the_size_is_no_smaller_than_the_item() {
        for record in records() {
            let item = encode("billing:k", &record, Revision::random());
            let size: usize = item
                .iter()
                .map(|(name, value)| {
                    name.len()
                        + match value {
                            AttributeValue::S(text) => text.len(),
                            AttributeValue::N(_) => 21,
                            AttributeValue::B(bytes) => bytes.as_ref().len(),
                            _ => 1,
                        }
                })
                .sum();
            assert!(size <= size_of("billing:k", &record), "{item:?}");
        }
    }
}
