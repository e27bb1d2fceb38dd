//! The random choices of a sequence: few values, chosen so that they collide.

use std::time::Duration;

use bytes::Bytes;

use super::kinds::PLANTED_FENCING_TOKENS;
use crate::key::Fingerprint;
use crate::record::{
    FencingToken, MAX_REASON_BYTES, Record, Recovery, State, StoreTime, TAIL, Token, TokenTag,
};
use crate::rules::{Operation, ReleaseCause, Resolution};
use crate::testing::fingerprint;

/// The unit in which time passes.
pub const STEP: Duration = Duration::from_secs(3_600);

/// A fencing token in the past of any clock.
const PAST_FENCING_TOKEN: u64 = 1_600_000_000_000_000;

/// Possible reasons. One looks like a fencing token, one contains multi-byte characters.
const REASONS: [&str; 4] = [
    "",
    "card declined",
    "1700000000000000",
    "später, wenn überhaupt",
];

/// Possible results, including an empty one and bytes that are not text.
const RESULTS: [&[u8]; 4] = [b"", b"{\"charged\":1}", b"\0\xff\r\n", &[b'x'; 300]];

/// The random choices of a sequence.
pub(super) struct Choices {
    random: fastrand::Rng,
    tokens: [Token; 4],
    fingerprint: Option<Fingerprint>,
    fenced: bool,
}

impl Choices {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let token = random.u128(1 << 100..);
        // The second token has the first one's tag; the third differs from it only in the tag.
        let tokens =
            [token, token ^ 1, token ^ (1 << 96), random.u128(1 << 100..)].map(Token::from_bits);
        let fingerprint = any_fingerprint(&mut random);
        let fenced = random.bool();
        Self {
            random,
            tokens,
            fingerprint,
            fenced,
        }
    }

    /// The record of the key at the start; usually none.
    pub(super) fn planted(&mut self) -> Option<Record> {
        if self.random.u8(..) < 160 {
            return None;
        }
        let attempt = self.pick([1, 2, 253, 254, 255]);
        let fencing_token = self.pick([
            None,
            Some(FencingToken(PAST_FENCING_TOKEN)),
            Some(FencingToken(PLANTED_FENCING_TOKENS + 41)),
        ]);
        let token = self.pick(self.tokens);
        let reason = self.reason();
        let state = match self.random.u8(..5) {
            0 | 1 => {
                let recovery = self.pick([Recovery::None, Recovery::Earlier, Recovery::Takeover]);
                State::Pending {
                    token,
                    attempt,
                    recovery,
                    fencing_token,
                }
            }
            2 | 3 => {
                let by = self.pick([token.tag(), TokenTag::NONE]);
                let recovery = self.pick([Recovery::None, Recovery::Earlier, Recovery::Takeover]);
                let attempt = if self.random.bool() { attempt } else { 0 };
                State::Released {
                    by,
                    attempt,
                    recovery,
                    fencing_token,
                    reason: crate::rules::cut_reason(&reason),
                }
            }
            _ => {
                let handed_over = self.random.bool();
                let reason = crate::rules::cut_reason(&reason);
                State::Failed {
                    by: token.tag(),
                    attempt,
                    handed_over,
                    reason,
                }
            }
        };
        let left = TAIL + self.half_steps();
        let expires_at = StoreTime::default() + left;
        Some(Record {
            expires_at,
            fingerprint: self.fingerprint,
            state,
        })
    }

    /// The record that an operator has read: usually the current one.
    pub(super) fn expected(
        &mut self,
        current: Option<(Record, Record)>,
        seen: &[(Record, Record)],
    ) -> Option<(Record, Record)> {
        if current.is_some() && self.random.u8(..3) > 0 {
            return current;
        }
        self.random.choice(seen).cloned()
    }

    /// The next operation, usually with the record's owner token.
    pub(super) fn operation(
        &mut self,
        record: Option<&Record>,
        expected: Option<&Record>,
    ) -> Operation {
        let token = self.token(record);
        match self.random.u8(..100) {
            0..36 => self.claim(token),
            36..48 => Operation::Extend {
                token,
                lease: self.half_steps(),
            },
            48..60 => {
                let fingerprint = self.fingerprint();
                let result = Bytes::from_static(self.pick(RESULTS));
                Operation::Complete {
                    token,
                    fingerprint,
                    result,
                    retention: self.retention(),
                }
            }
            60..76 => {
                let ends = [
                    ReleaseCause::Failed,
                    ReleaseCause::Failed,
                    ReleaseCause::Interrupted,
                    ReleaseCause::NotStarted,
                    ReleaseCause::Discarded,
                    ReleaseCause::Abandoned,
                ];
                let end = self.pick(ends);
                let reason = self.reason();
                Operation::Release {
                    token,
                    delay: self.half_steps(),
                    end,
                    reason,
                }
            }
            76..84 => {
                let reason = self.reason();
                Operation::Fail {
                    token,
                    reason,
                    retention: self.retention(),
                }
            }
            84..89 => Operation::HandOver {
                by: self.failed_by(record),
            },
            89..95 if let Some(expected) = expected => self.resolve(token, expected.clone()),
            _ => match expected {
                Some(expected) => Operation::Reopen {
                    expected: expected.clone(),
                },
                None => Operation::HandOver {
                    by: self.failed_by(record),
                },
            },
        }
    }

    /// A resolve, sometimes with the token of one of before.
    fn resolve(&mut self, token: Token, expected: Record) -> Operation {
        let resolution = if self.random.bool() {
            Resolution::Completed {
                result: Bytes::from_static(self.pick(RESULTS)),
            }
        } else {
            Resolution::Failed {
                reason: self.reason(),
            }
        };
        Operation::Resolve {
            expected,
            token,
            resolution,
            retention: self.retention(),
        }
    }

    /// A claim by this owner or, just as often, by another one.
    fn claim(&mut self, token: Token) -> Operation {
        let fingerprint = self.fingerprint();
        let fenced = if self.random.u8(..5) > 0 {
            self.fenced
        } else {
            !self.fenced
        };
        let token = if self.random.bool() {
            token
        } else {
            self.pick(self.tokens)
        };
        let longest_lease = if self.random.u8(..4) > 0 {
            Duration::MAX
        } else {
            self.half_steps()
        };
        Operation::Claim {
            token,
            lease: self.half_steps(),
            fingerprint,
            fenced,
            longest_lease,
        }
    }

    /// The tag of the owner that failed the record, usually.
    fn failed_by(&mut self, record: Option<&Record>) -> TokenTag {
        match record.map(|record| &record.state) {
            Some(State::Failed { by, .. }) if self.random.u8(..4) > 0 => *by,
            _ => self.pick(self.tokens).tag(),
        }
    }

    /// The pause before the next operation: whole steps, sometimes so many that a claimed record
    /// expires.
    pub(super) fn wait(&mut self) -> Duration {
        let tail = u32::try_from(TAIL.as_secs() / STEP.as_secs()).unwrap_or(u32::MAX);
        match self.random.u8(..100) {
            0..50 => Duration::ZERO,
            50..68 => STEP,
            68..80 => STEP * 2,
            80..96 => STEP * 4,
            96 => STEP * (tail - 1),
            97 => STEP * tail,
            98 => STEP * (tail + 1),
            _ => STEP * (tail + 5),
        }
    }

    fn token(&mut self, record: Option<&Record>) -> Token {
        let owner = match record.map(|record| &record.state) {
            Some(State::Pending { token, .. }) => Some(*token),
            Some(
                State::Released { by, .. } | State::Completed { by, .. } | State::Failed { by, .. },
            ) => self.tokens.iter().find(|token| token.tag() == *by).copied(),
            None => None,
        };
        let stranger = self.pick(self.tokens);
        if self.random.u8(..3) > 0 {
            owner.unwrap_or(stranger)
        } else {
            stranger
        }
    }

    fn fingerprint(&mut self) -> Option<Fingerprint> {
        if self.random.u8(..4) > 0 {
            self.fingerprint
        } else {
            any_fingerprint(&mut self.random)
        }
    }

    fn half_steps(&mut self) -> Duration {
        STEP / 2 + STEP * self.random.u32(..4)
    }

    fn retention(&mut self) -> Duration {
        let many = self.pick([0, 2, 5, 30 * 24, 400 * 24]);
        STEP / 2 + STEP * many
    }

    fn reason(&mut self) -> String {
        let reason = self.pick(REASONS);
        if self.random.u8(..8) == 0 {
            reason.repeat(MAX_REASON_BYTES / 16 + 1)
        } else {
            reason.to_owned()
        }
    }

    fn pick<T: Copy, const N: usize>(&mut self, from: [T; N]) -> T {
        from.get(self.random.usize(..N))
            .copied()
            .expect("the index is below the length")
    }
}

fn any_fingerprint(random: &mut fastrand::Rng) -> Option<Fingerprint> {
    match random.u8(..6) {
        0 => None,
        1 => Some(fingerprint(1, 1)),
        2 => Some(fingerprint(1, 2)),
        3 => Some(fingerprint(0, 1)),
        4 => Some(fingerprint(0, 2)),
        _ => Some(fingerprint(2, 1)),
    }
}
