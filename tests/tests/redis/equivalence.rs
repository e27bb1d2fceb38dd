//! The scripts against the rules, and mutants of the scripts that the same sequences must catch.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::redis::RedisStore;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::Record;
use oncegate_core::store::Store;
use oncegate_core::testing::equivalence::{Plan, Subject, compare};
use oncegate_tests::Redis;

use crate::hand::{self, Hand};

struct OnRedis {
    store: Arc<RedisStore>,
    hand: Hand,
    scope: Scope,
}

impl OnRedis {
    async fn with(redis: &Redis, store: RedisStore) -> Self {
        Self { store: Arc::new(store), hand: Hand::on(redis).await, scope: hand::scope() }
    }
}

#[async_trait]
impl Subject for OnRedis {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    fn scope(&self) -> Scope {
        self.scope.clone()
    }

    async fn pass(&self, waits: &[(StoreKey, Duration)]) {
        self.hand.pass(waits).await;
    }

    async fn plant(&self, records: &[(StoreKey, Record)]) {
        self.hand.plant(records).await;
    }
}

#[tokio::test]
async fn the_scripts_equal_the_rules() {
    let redis = Redis::shared().await;
    let subject = OnRedis::with(&redis, hand::timeless(redis.url()).connect().await.unwrap()).await;
    let plan = Plan { seed: fastrand::u64(..), sequences: 10_000, steps: 12 };
    let reached = compare(&subject, plan).await.unwrap_or_else(|difference| panic!("{difference}"));
    assert_eq!(reached.missing(), Vec::<&str>::new(), "seed {}", plan.seed);
}

/// A script, what stands in it once, and what a mutant has in its place.
const MUTANTS: &[(&str, &str, &str)] = &[
    // A claim that overwrites whatever is there.
    ("claim", "'NX', 'GET'", "'GET'"),
    // A lease that is over one millisecond of 30 days too late, or never.
    ("claim", "PTTL', KEYS[1]) - 2592000000", "PTTL', KEYS[1]) - 2588400000"),
    ("claim", "if left >= 0 then", "if left < 0 then"),
    // The wait is told without its end.
    ("claim", "left + 1)", "left + 3600001)"),
    // The same token is a stranger to its own claim.
    ("claim", "string.sub(old, 2, 17) == string.sub(claim, 2, 17)", "false"),
    // Any token of the same tag is the owner.
    (
        "claim",
        "string.sub(old, 2, 17) == string.sub(claim, 2, 17)",
        "string.sub(old, 2, 5) == string.sub(claim, 2, 5)",
    ),
    // The result is handed out before the fingerprint is compared.
    ("claim", "  return 'M'\n", "  if state ~= 'C' then return 'M' end\n"),
    // Fingerprints of different specifications are compared.
    ("claim", "string.byte(ours) == string.byte(theirs)", "string.byte(theirs) ~= 0"),
    // A crash does not count, or counts beyond the last number.
    ("claim", "pending and 25 or 13) + 1", "pending and 25 or 13) + (pending and 0 or 1)"),
    ("claim", "+ 1, 255)", "+ 1, 254)"),
    // A takeover looks like a first attempt, or is forgotten after a release.
    ("claim", "(pending and 'R')", "(pending and 'P')"),
    ("claim", "(state == 'T' and 'Q')", "(state == 'T' and 'P')"),
    // A clock that went back hands out a smaller fence.
    ("claim", "if last >= fence then", "if false then"),
    ("claim", "tonumber(last) + 1)", "tonumber(last))"),
    // The fence of a released record is read from the wrong place.
    ("claim", "string.sub(old, 14, 29)", "string.sub(old, 13, 28)"),
    // A taker-over keeps the fingerprint of the one before him.
    ("claim", "string.sub(claim, 2, 24) .. string.char", "string.sub(claim, 2, 17) .. theirs .. string.char"),
    // An extend without an owner, or one that moves an end back.
    ("extend", "string.sub(old, 2, 17) ~= ARGV[1]", "false"),
    ("extend", ", 'GT')", ")"),
    ("extend", "string.sub(ARGV[1], 1, 4) and 'H' or 'L'", "string.sub(ARGV[1], 1, 4) and 'L' or 'L'"),
    // A complete without an owner; one that keeps nothing of a lost claim; one that takes another's fingerprint.
    ("complete", "string.sub(old, 2, 17) ~= string.sub(ARGV[1], 2, 17)", "false"),
    ("complete", "  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])\n  return 'R'", "  return 'R'"),
    ("complete", "string.sub(old, 18, 24) .. string.sub(ARGV[2], 13)", "string.sub(ARGV[2], 6)"),
    ("complete", "string.sub(ARGV[2], 2, 5) and 'H' or 'L'", "string.sub(ARGV[2], 2, 5) and 'L' or 'H'"),
    // A release without an owner; one that counts what must not count; one that forgets a recovery or a fence.
    ("release", "string.sub(old, 2, 17) ~= ARGV[1]", "false"),
    ("release", "attempt = attempt - 1", "attempt = attempt"),
    ("release", "state == 'P' and 'S' or 'T'", "'S'"),
    ("release", "#old == 41 and string.sub(old, 26) or '0", "'0"),
    // A fail without an owner, or one that forgets the attempt.
    ("fail", "string.sub(old, 2, 17) ~= ARGV[1]", "false"),
    ("fail", "string.sub(old, 18, 25)", "string.sub(old, 18, 24) .. '\\1'"),
    // A hand-over that keeps the record for ever, or marks nothing.
    ("hand_over", "string.sub(old, 2), 'KEEPTTL')", "string.sub(old, 2))"),
    // What is found settled is written once more, but with another record or another expiry.
    ("hand_over", "KEYS[1], old, 'KEEPTTL')", "KEYS[1], old)"),
    ("complete", "KEYS[1], old, 'KEEPTTL')", "KEYS[1], ARGV[2], 'KEEPTTL')"),
    ("fail", "KEYS[1], old, 'KEEPTTL')", "KEYS[1], old)"),
    ("hand_over", "'G' .. string.sub(old, 2)", "'F' .. string.sub(old, 2)"),
    // A reopen that nobody is told of.
    ("claim", "say('N', rest)", "say('P', rest)"),
    // A reopen of whatever is there, or of nothing.
    ("reopen", "if old == ARGV[1] then", "if old then"),
    ("reopen", "if old == ARGV[1] then", "if false then"),
];

#[tokio::test]
async fn mutants_of_the_scripts_are_caught() {
    let redis = Redis::shared().await;
    let seed = fastrand::u64(..);
    let mut survivors = Vec::new();
    for mutant in MUTANTS {
        let (script, from, to) = *mutant;
        let builder = hand::timeless(redis.url()).rewrite_script(script, from, to).unwrap();
        let subject = OnRedis::with(&redis, builder.connect().await.unwrap()).await;
        if compare(&subject, Plan { seed, sequences: 1_500, steps: 12 }).await.is_ok() {
            survivors.push(mutant);
        }
    }
    assert!(survivors.is_empty(), "seed {seed}: these mutants were not caught: {survivors:#?}");
}
