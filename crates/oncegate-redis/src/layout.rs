//! The binary format of a record.
//!
//! ```text
//! PENDING    P | Q | R   token[16]  fingerprint[7]  attempt[1]  fencing_token[16 digits, or nothing]
//! RELEASED   S | T | U   tag[4]     fingerprint[7]  attempt[1]  fencing_token[16 digits]  reason
//! COMPLETED  C           tag[4]     fingerprint[7]  result
//! FAILED     F | G       tag[4]     fingerprint[7]  attempt[1]  reason
//! ```
//! The first byte is the state and the format: `P` follows no recovery, `Q` an earlier one, `R` is
//! a takeover; `T` was recovered, `U` is a takeover that was not started; `G` is handed over.
//! Another format will use other letters. A fingerprint of zeros means none, and so does a released
//! fencing token of zeros. Every age is derived from the key's expiry.

use std::io::Write as _;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::key::Fingerprint;
use oncegate_core::record::{
    FencingToken, Record, Recovery, State, StoreTime, Token, TokenTag, whole_millis,
};
use oncegate_core::rules::{Grant, Verdict};
use redis::{Cmd, RedisWrite as _};

/// The longest duration that is sent: some 300 years, well within the integers that are exact in
/// Lua.
const LONGEST_MILLIS: u64 = 10_000_000_000_000;

/// The first fencing token that cannot be stored: it would have 17 digits, or Lua would round its
/// successor.
const FENCING_TOKEN_LIMIT: u64 = 1 << 53;

const NO_FENCING_TOKEN: &[u8; 16] = b"0000000000000000";

/// A duration for Redis: whole milliseconds, and never zero, which Redis refuses.
pub(super) fn millis(duration: Duration) -> u64 {
    whole_millis(duration).clamp(1, LONGEST_MILLIS)
}

/// A fingerprint's bytes; zeros for none.
pub(super) fn fingerprint_bytes(fingerprint: Option<Fingerprint>) -> [u8; 7] {
    fingerprint.map_or([0; 7], |fingerprint| *fingerprint.as_bytes())
}

fn fingerprint(bytes: [u8; 7]) -> Option<Fingerprint> {
    (bytes != [0; 7]).then_some(Fingerprint::from_bytes(bytes))
}

/// Encodes a record. Its expiry is not part of the bytes: the key has it.
pub(super) fn encode(record: &Record) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(64);
    let fingerprint = fingerprint_bytes(record.fingerprint);
    match &record.state {
        State::Pending {
            token,
            attempt,
            recovery,
            fencing_token,
        } => {
            bytes.push(pending_byte(*recovery));
            bytes.extend_from_slice(token.as_bytes());
            bytes.extend_from_slice(&fingerprint);
            bytes.push(*attempt);
            if let Some(FencingToken(number)) = fencing_token {
                bytes.extend_from_slice(format!("{number:016}").as_bytes());
            }
        }
        State::Released {
            by,
            attempt,
            recovery,
            fencing_token,
            reason,
        } => {
            bytes.push(released_byte(*recovery));
            bytes.extend_from_slice(&by.0);
            bytes.extend_from_slice(&fingerprint);
            bytes.push(*attempt);
            bytes.extend_from_slice(
                format!(
                    "{:016}",
                    fencing_token.map_or(0, |FencingToken(number)| number)
                )
                .as_bytes(),
            );
            bytes.extend_from_slice(reason.as_bytes());
        }
        State::Completed { by, result } => {
            bytes.push(b'C');
            bytes.extend_from_slice(&by.0);
            bytes.extend_from_slice(&fingerprint);
            bytes.extend_from_slice(result);
        }
        State::Failed {
            by,
            attempt,
            handed_over,
            reason,
        } => {
            bytes.push(if *handed_over { b'G' } else { b'F' });
            bytes.extend_from_slice(&by.0);
            bytes.extend_from_slice(&fingerprint);
            bytes.push(*attempt);
            bytes.extend_from_slice(reason.as_bytes());
        }
    }
    bytes
}

/// Encodes a first attempt without a fencing token, on the stack because every message takes this
/// path.
pub(super) fn first_attempt(token: &[u8; 16], fingerprint: [u8; 7]) -> [u8; 25] {
    let mut record = [b'P'; 25];
    let (_, rest) = record.split_at_mut(1);
    let (token_place, rest) = rest.split_at_mut(16);
    let (fingerprint_place, attempt_place) = rest.split_at_mut(7);
    token_place.copy_from_slice(token);
    fingerprint_place.copy_from_slice(&fingerprint);
    attempt_place.fill(1);
    record
}

/// Adds the bytes of a completion to a command, as its next argument.
pub(super) fn add_completed(
    cmd: &mut Cmd,
    TokenTag(tag): TokenTag,
    fingerprint: [u8; 7],
    result: &[u8],
) {
    let mut word = cmd.writer_for_next_arg();
    for bytes in [b"C".as_slice(), &tag, &fingerprint, result] {
        word.write_all(bytes)
            .expect("memory takes what is written to it");
    }
}

/// The fingerprint and the reply of a settled record to a claim, which do not depend on the time.
///
/// `None` for any other record.
pub(super) fn settled(bytes: Bytes) -> Option<([u8; 7], Verdict)> {
    let (state, rest) = bytes.split_first()?;
    let (tag, rest) = take::<4>(rest).ok()?;
    let (fingerprint, rest) = take::<7>(rest).ok()?;
    let verdict = match state {
        b'C' => Verdict::Completed {
            result: bytes.slice_ref(rest),
        },
        b'F' | b'G' => {
            let ([_attempt], reason) = take::<1>(rest).ok()?;
            Verdict::Failed {
                reason: text(reason),
                handed_over: *state == b'G',
                by: TokenTag(tag),
            }
        }
        _ => return None,
    };
    Some((fingerprint, verdict))
}

fn released_byte(recovery: Recovery) -> u8 {
    match recovery {
        Recovery::None => b'S',
        Recovery::Earlier => b'T',
        Recovery::Takeover => b'U',
    }
}

fn pending_byte(recovery: Recovery) -> u8 {
    match recovery {
        Recovery::None => b'P',
        Recovery::Earlier => b'Q',
        Recovery::Takeover => b'R',
    }
}

/// The recovery in a PENDING record's first byte; `None` when it is the byte of another state.
fn recovery(state: u8) -> Option<Recovery> {
    match state {
        b'P' => Some(Recovery::None),
        b'Q' => Some(Recovery::Earlier),
        b'R' => Some(Recovery::Takeover),
        _ => None,
    }
}

/// The reason why bytes are not a record.
pub(super) type Garbage = &'static str;

/// Decodes a record from `bytes` and the expiry of its key.
pub(super) fn decode(bytes: Bytes, expires_at: StoreTime) -> Result<Record, Garbage> {
    let (state, rest) = bytes.split_first().ok_or("it is empty")?;
    if let Some(recovery) = recovery(*state) {
        let Pending {
            token,
            fingerprint,
            attempt,
            fencing_token,
        } = pending(rest)?;
        let state = State::Pending {
            token,
            attempt,
            recovery,
            fencing_token,
        };
        return Ok(Record {
            expires_at,
            fingerprint,
            state,
        });
    }
    let (tag, rest) = take::<4>(rest)?;
    let by = TokenTag(tag);
    let (fingerprint_bytes, rest) = take::<7>(rest)?;
    let state = match state {
        b'C' => State::Completed {
            by,
            result: bytes.slice_ref(rest),
        },
        b'S' | b'T' | b'U' => {
            let recovery = match state {
                b'S' => Recovery::None,
                b'T' => Recovery::Earlier,
                _ => Recovery::Takeover,
            };
            let ([attempt], rest) = take::<1>(rest)?;
            let (fencing_token_digits, reason) = take::<16>(rest)?;
            let fencing_token = if &fencing_token_digits == NO_FENCING_TOKEN {
                None
            } else {
                Some(fencing_token(&fencing_token_digits)?)
            };
            State::Released {
                by,
                attempt,
                recovery,
                fencing_token,
                reason: text(reason),
            }
        }
        b'F' | b'G' => {
            let ([attempt], reason) = take::<1>(rest)?;
            State::Failed {
                by,
                attempt,
                handed_over: *state == b'G',
                reason: text(reason),
            }
        }
        _ => return Err("its first byte is not a state of format 1"),
    };
    Ok(Record {
        expires_at,
        fingerprint: fingerprint(fingerprint_bytes),
        state,
    })
}

/// Decodes the grant of a PENDING record; `rest` is what follows its first byte.
pub(super) fn grant(state: u8, rest: &[u8]) -> Result<Grant, Garbage> {
    let recovery = recovery(state).ok_or("it is not pending")?;
    let Pending {
        attempt,
        fencing_token,
        ..
    } = pending(rest)?;
    Ok(Grant {
        attempt,
        recovery,
        fencing_token,
        reopened: false,
    })
}

/// Decodes the reply to a claim of a FAILED record: the tag of the owner that failed it, and the
/// reason.
pub(super) fn failed(state: u8, rest: &[u8]) -> Result<Verdict, Garbage> {
    let (tag, reason) = take::<4>(rest)?;
    Ok(Verdict::Failed {
        reason: text(reason),
        handed_over: state == b'G',
        by: TokenTag(tag),
    })
}

/// The bytes after the first byte of a PENDING record.
struct Pending {
    token: Token,
    fingerprint: Option<Fingerprint>,
    attempt: u8,
    fencing_token: Option<FencingToken>,
}

fn pending(rest: &[u8]) -> Result<Pending, Garbage> {
    let (token, rest) = take::<16>(rest)?;
    let (fingerprint_bytes, rest) = take::<7>(rest)?;
    let ([attempt], fencing_token_digits) = take::<1>(rest)?;
    let fencing_token = if fencing_token_digits.is_empty() {
        None
    } else {
        Some(fencing_token(fencing_token_digits)?)
    };
    Ok(Pending {
        token: token.into(),
        fingerprint: fingerprint(fingerprint_bytes),
        attempt,
        fencing_token,
    })
}

fn take<const N: usize>(bytes: &[u8]) -> Result<([u8; N], &[u8]), Garbage> {
    bytes
        .split_first_chunk()
        .map(|(chunk, rest)| (*chunk, rest))
        .ok_or("it is too short")
}

/// Decodes a fencing token of exactly 16 digits.
fn fencing_token(digits: &[u8]) -> Result<FencingToken, Garbage> {
    let all_digits =
        digits.len() == NO_FENCING_TOKEN.len() && digits.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(digits)
        .ok()
        .filter(|_| all_digits)
        .and_then(|text| text.parse().ok());
    number
        .filter(|number| *number < FENCING_TOKEN_LIMIT)
        .map(FencingToken)
        .ok_or("its fencing token is not 16 digits")
}

/// A reason is for people: a broken character in it must not make the record unreadable.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(state: State, fingerprint: Option<Fingerprint>, bytes: &[u8]) {
        let record = Record {
            expires_at: StoreTime::from_millis(7),
            fingerprint,
            state,
        };
        assert_eq!(encode(&record), bytes);
        assert_eq!(
            decode(Bytes::copy_from_slice(bytes), record.expires_at),
            Ok(record)
        );
    }

    fn token() -> Token {
        Token::from(*b"0123456789abcdef")
    }

    fn print() -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([1, 2, 3, 4, 5, 6, 7]))
    }

    const FENCING_TOKEN: Option<FencingToken> = Some(FencingToken(1_700_000_000_000_000));

    fn pending(attempt: u8, recovery: Recovery, fencing_token: Option<FencingToken>) -> State {
        State::Pending {
            token: token(),
            attempt,
            recovery,
            fencing_token,
        }
    }

    fn released(
        attempt: u8,
        recovery: Recovery,
        fencing_token: Option<FencingToken>,
        reason: &str,
    ) -> State {
        State::Released {
            by: token().tag(),
            attempt,
            recovery,
            fencing_token,
            reason: reason.to_owned(),
        }
    }

    fn failed(handed_over: bool) -> State {
        State::Failed {
            by: token().tag(),
            attempt: 5,
            handed_over,
            reason: "no".to_owned(),
        }
    }

    #[test]
    fn records_are_packed_as_documented() {
        check(
            pending(1, Recovery::None, None),
            None,
            b"P0123456789abcdef\0\0\0\0\0\0\0\x01",
        );
        check(
            pending(255, Recovery::Earlier, FENCING_TOKEN),
            print(),
            b"Q0123456789abcdef\x01\x02\x03\x04\x05\x06\x07\xff1700000000000000",
        );
        check(
            pending(2, Recovery::Takeover, None),
            None,
            b"R0123456789abcdef\0\0\0\0\0\0\0\x02",
        );
        check(
            released(3, Recovery::None, None, "1234"),
            None,
            b"S0123\0\0\0\0\0\0\0\x0300000000000000001234",
        );
        check(
            released(3, Recovery::Earlier, FENCING_TOKEN, ""),
            None,
            b"T0123\0\0\0\0\0\0\0\x031700000000000000",
        );
        check(
            released(1, Recovery::Takeover, None, "stop"),
            None,
            b"U0123\0\0\0\0\0\0\0\x010000000000000000stop",
        );
        let completed = State::Completed {
            by: token().tag(),
            result: Bytes::from_static(b"\0\xff"),
        };
        check(
            completed,
            print(),
            b"C0123\x01\x02\x03\x04\x05\x06\x07\0\xff",
        );
        check(failed(false), None, b"F0123\0\0\0\0\0\0\0\x05no");
        check(failed(true), None, b"G0123\0\0\0\0\0\0\0\x05no");
    }

    // invariant: garbage-as-answer
    #[test]
    fn garbage_is_no_record() {
        for bytes in [
            b"".as_slice(),
            b"x",
            b"C",
            b"C0123\0\0\0\0\0\0",
            b"p0123456789abcdef\0\0\0\0\0\0\0\x01",
            b"P0123456789abcdef\0\0\0\0\0\0\0",
            b"P0123456789abcdef\0\0\0\0\0\0\0\x01123",
            b"P0123456789abcdef\0\0\0\0\0\0\0\x0117000000000000x0",
            b"P0123456789abcdef\0\0\0\0\0\0\0\x019999999999999999",
            b"S0123\0\0\0\0\0\0\0\x03000",
            b"F0123\0\0\0\0\0\0\0",
        ] {
            assert!(
                decode(Bytes::copy_from_slice(bytes), StoreTime::default()).is_err(),
                "{bytes:?}"
            );
        }
    }

    #[test]
    fn durations_are_sent_within_the_limits_of_redis_and_lua() {
        assert_eq!(millis(Duration::ZERO), 1);
        assert_eq!(millis(Duration::from_micros(1_999)), 1);
        assert_eq!(millis(Duration::MAX), LONGEST_MILLIS);
    }
}
