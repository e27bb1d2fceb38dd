//! Hand-made histories.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{
    EffectName, Entry, Evidence, Occurrence, OffsetCommit, Op, ProducedMessage, STORE_LOSS,
    SUCCEEDED, StoreAnswer, judge,
};

pub(super) const KEY: &str = "fire:a-key";
pub(super) const ORIGIN: &str = "orders/0@0";
pub(super) const LEASE_MS: u64 = 1_200;
/// The time between two lines.
pub(super) const LINE_US: u64 = 1_000;

/// A history in the making.
#[derive(Clone)]
pub(super) struct Tale {
    pub(super) evidence: Evidence,
    pub(super) now_us: u64,
    pub(super) calls: u64,
}

pub(super) fn token(letter: char) -> String {
    letter.to_string().repeat(32)
}

pub(super) fn claim(owner: char) -> Op {
    Op::Claim {
        token: token(owner),
        lease_ms: LEASE_MS,
        fingerprint: None,
        fenced: true,
    }
}

pub(super) fn complete(owner: char) -> Op {
    Op::Complete {
        token: token(owner),
        fingerprint: None,
        result: format!("\"5/1 by {owner}\""),
        retention_ms: 86_400_000,
    }
}

pub(super) fn granted(attempt: u8, fencing_token: u64) -> Option<StoreAnswer> {
    let takeover = attempt > 1;
    Some(StoreAnswer::Granted {
        attempt,
        takeover,
        recovered: takeover,
        fencing_token: Some(fencing_token),
    })
}

/// The effect of the message.
pub(super) fn paid() -> EffectName {
    EffectName::new("5", "1")
}

pub(super) fn held() -> Option<StoreAnswer> {
    Some(StoreAnswer::Held { recreated: false })
}

impl Tale {
    /// Order 5 was produced, and nothing has happened to it.
    pub(super) fn new() -> Self {
        let one = ProducedMessage {
            origin: ORIGIN.to_owned(),
            effect: paid(),
            key: Some(KEY.to_owned()),
        };
        let evidence = Evidence {
            topic: "orders".to_owned(),
            produced: vec![one],
            records: Some(BTreeMap::new()),
            max_attempts: Some(60),
            ..Evidence::default()
        };
        Self {
            evidence,
            now_us: 1_000_000_000,
            calls: 0,
        }
    }

    /// A whole message, as it should be.
    pub(super) fn clean() -> Self {
        Self::new()
            .run(1, 'a', granted(1, 10_000))
            .call(1, complete('a'), held())
            .ack(1)
            .end(1)
    }

    pub(super) fn say(mut self, pid: u32, what: Occurrence) -> Self {
        self.now_us += LINE_US;
        self.evidence.entries.push(Entry {
            at_us: self.now_us,
            pid,
            what,
        });
        self
    }

    pub(super) fn pass(mut self, millis: u64) -> Self {
        self.now_us += millis * 1_000;
        self
    }

    /// A call and its answer; `None` is one that never comes.
    pub(super) fn call(mut self, pid: u32, op: Op, answer: Option<StoreAnswer>) -> Self {
        self.calls += 1;
        let call = self.calls;
        let tale = self.say(
            pid,
            Occurrence::Invoke {
                call,
                key: KEY.to_owned(),
                op,
            },
        );
        match answer {
            Some(answer) => tale.say(pid, Occurrence::Ok { call, answer }),
            None => tale.say(pid, Occurrence::Info { call }),
        }
    }

    /// A claim, and a handler that pays.
    pub(super) fn run(self, pid: u32, owner: char, answer: Option<StoreAnswer>) -> Self {
        let key = KEY.to_owned();
        let origin = ORIGIN.to_owned();
        let content = "1".to_owned();
        let begun = Occurrence::Begun {
            key: key.clone(),
            origin: origin.clone(),
            attempt: 1,
            fencing_token: None,
            content,
        };
        let ended = Occurrence::Ended {
            key,
            origin,
            attempt: 1,
            outcome: SUCCEEDED.to_owned(),
        };
        let mut tale = self
            .call(pid, claim(owner), answer)
            .say(pid, begun)
            .say(pid, ended);
        *tale.evidence.effects.entry(paid()).or_default() += 1;
        tale
    }

    pub(super) fn ack(self, pid: u32) -> Self {
        self.say(
            pid,
            Occurrence::Ack {
                origin: ORIGIN.to_owned(),
                key: Some(KEY.to_owned()),
            },
        )
    }

    pub(super) fn duplicate(self, result: &str) -> Self {
        let key = KEY.to_owned();
        let origin = ORIGIN.to_owned();
        let content = "1".to_owned();
        let name = result
            .split(' ')
            .next()
            .and_then(|name| name.split_once('/'));
        let of = name
            .map(|(event, content)| EffectName::new(event, content))
            .expect("it names an effect");
        self.say(
            1,
            Occurrence::Duplicate {
                key,
                origin,
                content,
                result: result.to_owned(),
                of,
            },
        )
    }

    pub(super) fn forget(self) -> Self {
        let fault = STORE_LOSS.to_owned();
        self.say(
            0,
            Occurrence::FaultBegins {
                fault: fault.clone(),
            },
        )
        .say(0, Occurrence::FaultEnds { fault })
    }

    /// Everything is committed, and the record is there.
    /// Another attempt, which completes.
    pub(super) fn completed_as(self, attempt: u8) -> Self {
        let answer = StoreAnswer::Granted {
            attempt,
            takeover: false,
            recovered: false,
            fencing_token: Some(20_000),
        };
        self.pass(10)
            .call(1, claim('b'), Some(answer))
            .call(1, complete('b'), held())
            .ack(1)
            .end(1)
    }

    pub(super) fn end(mut self, offset: i64) -> Self {
        self.commit(offset);
        self.set_record("completed");
        self
    }

    pub(super) fn set_record(&mut self, state: &str) {
        self.evidence.records = Some(BTreeMap::from([(KEY.to_owned(), state.to_owned())]));
    }

    pub(super) fn commit(&mut self, offset: i64) {
        let at_ms = i64::try_from(self.now_us / 1_000).expect("it is soon after 1970") + 1;
        self.evidence.commits.push(OffsetCommit {
            partition: 0,
            offset,
            at_ms,
        });
    }

    pub(super) fn broken(&self) -> BTreeSet<&'static str> {
        judge(&self.evidence)
            .broken
            .iter()
            .map(|one| one.invariant)
            .collect()
    }
}
