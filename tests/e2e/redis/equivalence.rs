//! The scripts, and the plain commands that stand for them, against the rules by the same
//! sequences; and mutants of the scripts that these must catch.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::redis::{RedisBuilder, RedisStore};
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::Record;
use oncegate_core::store::Store;
use oncegate_core::testing::equivalence::{Plan, Subject, compare};
use oncegate_testkit::{Redis, RedisServer, sequences};

use crate::hand::{self, Hand};

struct OnRedis {
    store: Arc<RedisStore>,
    hand: Hand,
    scope: Scope,
}

impl OnRedis {
    async fn with(redis: &Redis, store: RedisStore) -> Self {
        let hand = Hand::on(redis).await.of(&store);
        Self {
            store: Arc::new(store),
            hand,
            scope: hand::scope(),
        }
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

/// One seed for all, so that every path runs the same sequences.
static SEED: LazyLock<u64> = LazyLock::new(|| fastrand::u64(..));

/// The time that a server on a busy machine may take: an answer that is late is another test.
const PATIENCE: Duration = Duration::from_secs(60);

async fn equals_the_rules(redis: &Redis, builder: RedisBuilder) {
    let store = builder.response_timeout(PATIENCE).connect();
    let subject = OnRedis::with(redis, store.await.unwrap()).await;
    let plan = Plan {
        seed: *SEED,
        sequences: sequences(),
        steps: 12,
    };
    let reached = compare(&subject, plan)
        .await
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert_eq!(reached.missing(), Vec::<&str>::new(), "seed {}", plan.seed);
}

// invariant: store-equals-rules
#[tokio::test]
async fn the_scripts_equal_the_rules() {
    let redis = Redis::shared().await;
    equals_the_rules(&redis, hand::timeless(redis.url()).scripts_alone()).await;
}

// invariant: store-equals-rules
#[tokio::test]
async fn shortcuts_equal_the_rules() {
    let redis = Redis::shared().await;
    equals_the_rules(&redis, hand::timeless(redis.url())).await;
}

// invariant: store-equals-rules
#[tokio::test]
async fn shortcuts_of_valkey_equal_the_rules() {
    let valkey = RedisServer::valkey(&[]).await;
    equals_the_rules(&valkey, hand::timeless(valkey.url())).await;
}

// invariant: store-equals-rules
#[tokio::test]
async fn completions_in_buckets_equal_the_rules() {
    let redis = Redis::shared().await;
    equals_the_rules(&redis, hand::timeless(redis.url()).compact(10_000)).await;
    let valkey = RedisServer::valkey(&[]).await;
    equals_the_rules(&valkey, hand::timeless(valkey.url()).compact(10_000)).await;
}

/// A script, what stands in it once, and what a mutant has in its place.
const MUTANTS: &[(&str, &str, &str)] = &[
    // A claim that overwrites whatever is there.
    ("claim", "'NX', 'GET'", "'GET'"),
    // A claim that never expires.
    ("claim", "'GET', 'PX', ARGV[2])", "'GET')"),
    // A claim that reads a completed record like a lease that is over.
    (
        "claim",
        "if state == 'C' then\n  return say",
        "if state == 'C' and redis.call('PTTL', KEYS[1]) >= 2592000000 then\n  return say",
    ),
    // A fencing token that is counted in the record alone, and begins again when the record is
    // lost.
    (
        "claim",
        "time[1] .. (#micros == 6 and micros or string.sub('00000' .. micros, -6))",
        "'0000000000000001'",
    ),
    // A lease that is over one millisecond of 30 days too late, or never.
    (
        "claim",
        "PTTL', KEYS[1]) - 2592000000",
        "PTTL', KEYS[1]) - 2588400000",
    ),
    ("claim", "if left >= 0 then", "if left < 0 then"),
    // A lease beyond the longest of the scope is not cut, or in the reply alone; a delay is cut,
    // too.
    (
        "claim",
        "if pending and left > longest then",
        "if false then",
    ),
    ("claim", "  redis.call('PEXPIRE', KEYS[1], ARGV[3])\n", ""),
    (
        "claim",
        "if pending and left > longest then",
        "if left > longest then",
    ),
    // The reply names the wait without its end.
    ("claim", "left + 1)", "left + 3600001)"),
    // The same token is not recognised as the claim's own.
    (
        "claim",
        "string.sub(old, 2, 17) == string.sub(claim, 2, 17)",
        "false",
    ),
    // Any token of the same tag is the owner.
    (
        "claim",
        "string.sub(old, 2, 17) == string.sub(claim, 2, 17)",
        "string.sub(old, 2, 5) == string.sub(claim, 2, 5)",
    ),
    // The result is handed out before the fingerprint is compared.
    (
        "claim",
        "  return 'M'\n",
        "  if state ~= 'C' then return 'M' end\n",
    ),
    // Fingerprints of different specifications are compared.
    (
        "claim",
        "string.byte(ours) == string.byte(theirs)",
        "string.byte(theirs) ~= 0",
    ),
    // A crash does not count, or counts beyond the last number.
    (
        "claim",
        "pending and 25 or 13) + 1",
        "pending and 25 or 13) + (pending and 0 or 1)",
    ),
    ("claim", "+ 1, 255)", "+ 1, 254)"),
    // A takeover looks like a first attempt, or is forgotten after a release.
    (
        "claim",
        "((pending or state == 'U') and 'R')",
        "((pending or state == 'U') and 'P')",
    ),
    ("claim", "(pending or state == 'U')", "pending"),
    ("claim", "(state == 'T' and 'Q')", "(state == 'T' and 'P')"),
    // A clock that went back hands out a smaller fencing token.
    ("claim", "if last >= fencing_token then", "if false then"),
    ("claim", "tonumber(last) + 1)", "tonumber(last))"),
    // The fencing token of a released record is read from the wrong place.
    (
        "claim",
        "string.sub(old, 14, 29)",
        "string.sub(old, 13, 28)",
    ),
    // A takeover keeps the fingerprint of the previous owner.
    (
        "claim",
        "string.sub(claim, 2, 24) .. string.char",
        "string.sub(claim, 2, 17) .. theirs .. string.char",
    ),
    // An extend that makes an expired record again.
    (
        "extend",
        "if not old then\n  return 'L'",
        "if not old then\n  redis.call('SET', KEYS[1], 'P' .. ARGV[1] .. string.rep('\\0', 7) .. '\\1', 'PX', ARGV[2])\n  return 'H'",
    ),
    // An extend without an owner, or one that moves an end back.
    ("extend", "string.sub(old, 2, 17) ~= ARGV[1]", "false"),
    ("extend", ", 'GT')", ")"),
    (
        "extend",
        "string.sub(ARGV[1], 1, 4) and 'H' or 'L'",
        "string.sub(ARGV[1], 1, 4) and 'L' or 'L'",
    ),
    // A complete without an owner; one that keeps nothing of a lost claim; one that takes another's
    // fingerprint.
    (
        "complete",
        "string.sub(old, 2, 17) ~= string.sub(ARGV[1], 2, 17)",
        "false",
    ),
    (
        "complete",
        "  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])\n  return 'R'",
        "  return 'R'",
    ),
    (
        "complete",
        "string.sub(old, 18, 24) .. string.sub(ARGV[2], 13)",
        "string.sub(ARGV[2], 6)",
    ),
    (
        "complete",
        "string.sub(ARGV[2], 2, 5) and 'A' or 'L'",
        "string.sub(ARGV[2], 2, 5) and 'L' or 'A'",
    ),
    // A release that is a plain DEL.
    (
        "release",
        "redis.call('SET', KEYS[1], new, 'PX', ARGV[2])",
        "redis.call('DEL', KEYS[1])",
    ),
    // A release without an owner; one that counts what must not count; one that forgets a recovery
    // or a fencing token.
    ("release", "string.sub(old, 2, 17) ~= ARGV[1]", "false"),
    ("release", "attempt = attempt - 1", "attempt = attempt"),
    ("release", "has_outcome and 'S' or 'T'", "'S'"),
    ("release", "left or has_outcome", "has_outcome"),
    // One after which a run that was thrown away has an outcome, or does not count.
    (
        "release",
        "state == 'P' and ARGV[3] ~= 'discarded'",
        "state == 'P'",
    ),
    ("release", "'failed' and ARGV[3] ~= 'discarded'", "'failed'"),
    ("release", "#old == 41 and string.sub(old, 26) or '0", "'0"),
    // A fail without an owner, or one that forgets the attempt.
    ("fail", "string.sub(old, 2, 17) ~= ARGV[1]", "false"),
    (
        "fail",
        "string.sub(old, 18, 25)",
        "string.sub(old, 18, 24) .. '\\1'",
    ),
    // A hand-over that marks a newer failure, keeps the record for ever, or marks nothing.
    ("hand_over", "string.sub(old, 2, 5) ~= ARGV[1]", "false"),
    (
        "hand_over",
        "string.sub(old, 2), 'KEEPTTL')",
        "string.sub(old, 2))",
    ),
    // What is found settled is written once more, but with another record or another expiry.
    ("hand_over", "KEYS[1], old, 'KEEPTTL')", "KEYS[1], old)"),
    (
        "complete",
        "KEYS[1], old, 'KEEPTTL')",
        "KEYS[1], ARGV[2], 'KEEPTTL')",
    ),
    ("fail", "KEYS[1], old, 'KEEPTTL')", "KEYS[1], old)"),
    (
        "hand_over",
        "'G' .. string.sub(old, 2)",
        "'F' .. string.sub(old, 2)",
    ),
    // A reopen that the next grant does not report.
    ("claim", "say('N', rest)", "say('P', rest)"),
    // A reopen of whatever is there, or of nothing.
    ("reopen", "if old == ARGV[1] then", "if old then"),
    ("reopen", "if old == ARGV[1] then", "if false then"),
    // A resolve of whatever is there, of what runs, of what is final, or one that is not repeated.
    ("resolve", "if old == ARGV[1] then", "if true then"),
    ("resolve", "open = left < 2592000000", "open = true"),
    (
        "resolve",
        "(kind == 'failed' and state == 'C')",
        "kind == 'failed'",
    ),
    ("resolve", "kind == 'released' or", "kind ~= 'pending' or"),
    ("resolve", "'PX', ARGV[3]", "'KEEPTTL'"),
    ("resolve", "if kind == wanted and", "if"),
    (
        "resolve",
        "string.sub(old, 2, 5) == string.sub(ARGV[2], 2, 5)",
        "false",
    ),
];

/// The same of what first attempts take instead.
const MUTANTS_OF_SHORTCUTS: &[(&str, &str, &str)] = &[
    // A claim that overwrites whatever is there, never expires, or is another's.
    ("first_claims", "'NX', 'GET'", "'GET'"),
    ("first_claims", "'GET', 'PX', lease)", "'GET')"),
    ("first_claims", "ARGV[n + 1]", "ARGV[2]"),
    // What was there is taken for nothing.
    ("first_claims", "and 0 or old", "and 0 or false"),
    // A completion without an owner, or with another's tail.
    ("first_completions", "old == first", "old"),
    (
        "first_completions",
        "find(old, first, 1, true) == 1",
        "true",
    ),
    // A completion that is kept for ever, or is another's.
    ("first_completions", ", 'PX', retention)", ")"),
    ("first_completions", "ARGV[2 * n + 1]", "ARGV[3]"),
    // What was not completed is reported for another key.
    (
        "first_completions",
        "others[#others + 1] = n",
        "others[#others + 1] = 1",
    ),
];

/// The same of what goes before the scripts.
const MUTANTS_OF_BUCKETS: &[(&str, &str, &str)] = &[
    // What is over still counts, or nothing does.
    ("compact", "if now > ends then", "if false then"),
    ("compact", "if now > ends then", "if true then"),
    // The retention is forgotten, or begins when the clock did.
    ("compact", "ends = now + retention", "ends = now"),
    // A fingerprint is lost, or comes from nowhere.
    (
        "compact",
        "(#value == 17 and string.sub(value, 5, 11) or no_fingerprint)",
        "no_fingerprint",
    ),
    (
        "compact",
        "(fingerprint ~= no_fingerprint and fingerprint or '')",
        "''",
    ),
    // A claim does not look into the bucket.
    ("compact", "local found = find()", "local found = false"),
    // No other script looks into it.
    (
        "compact",
        "return server.call('GET', key) or find()",
        "return server.call('GET', key)",
    ),
    // A result is dropped.
    ("compact", "if #record == 12 and", "if"),
    // The claim stays under the completion.
    ("compact", "return server.call('DEL', key)", "return"),
    // A completion stays under what replaces it.
    (
        "compact",
        "server.call('HDEL', bucket, field)",
        "bucket = bucket",
    ),
    // A reader gets the expiry of a key that does not exist.
    (
        "compact",
        "return ends\n",
        "return server.call(verb, key, ...)\n",
    ),
];

// invariant: store-equals-rules
#[tokio::test]
async fn mutants_of_the_scripts_are_caught() {
    catches(MUTANTS, |url| hand::timeless(url).scripts_alone()).await;
}

// invariant: store-equals-rules
#[tokio::test]
async fn mutants_of_the_shortcuts_are_caught() {
    catches(MUTANTS_OF_SHORTCUTS, hand::timeless).await;
}

// invariant: store-equals-rules
#[tokio::test]
async fn mutants_of_the_buckets_are_caught() {
    catches(MUTANTS_OF_BUCKETS, |url| hand::timeless(url).compact(1_500)).await;
}

async fn catches(mutants: &[(&str, &str, &str)], builder: fn(&str) -> RedisBuilder) {
    let redis = Redis::shared().await;
    let seed = fastrand::u64(..);
    let mut survivors = Vec::new();
    for mutant in mutants {
        let (script, from, to) = *mutant;
        let builder = builder(redis.url())
            .rewrite_script(script, from, to)
            .unwrap();
        let subject = OnRedis::with(&redis, builder.connect().await.unwrap()).await;
        if compare(
            &subject,
            Plan {
                seed,
                sequences: 1_500,
                steps: 12,
            },
        )
        .await
        .is_ok()
        {
            survivors.push(mutant);
        }
    }
    assert!(
        survivors.is_empty(),
        "seed {seed}: these mutants were not caught: {survivors:#?}"
    );
}
