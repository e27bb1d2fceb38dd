//! Measures how fast completed messages are recognised, which limits the speed of a replay.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate::redis::RedisStore;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store as _};
use oncegate_testkit::RedisServer;

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::redis_store;
use crate::messages::fresh_scope;
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "replay",
    question: "completed keys prefetched, and claimed again, beside bare pipelines of GET over the same keys",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// The number of keys in a batch, and of batches in flight, for all contestants.
const BATCH: usize = 256;
const BATCHES_AT_ONCE: usize = 4;

const RETENTION: Duration = Duration::from_secs(7 * 86_400);

async fn run(plan: &Plan) -> Vec<Figure> {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let bare = Bare::connect(&server).await;
    let plain = redis_store(&server)
        .connect()
        .await
        .expect("the server may be used");
    let keys = keys(plan.size(400_000, 5_000));
    complete(&plain, &keys).await;
    let compact = redis_store(&server)
        .compact(keys.len() as u64)
        .connect()
        .await
        .expect("the server may be used");
    complete(&compact, &keys).await;
    let mut rounds = plan.rounds(
        "replay",
        &[
            "prefetch",
            "bare GETs",
            "claims",
            "prefetch, compact",
            "claims, compact",
        ],
    );
    while rounds.next() {
        rounds
            .measure("prefetch", By::Ahead(&plain).over(&keys))
            .await;
        rounds
            .measure("bare GETs", By::Get(&bare).over(&keys))
            .await;
        rounds
            .measure("claims", By::Claims(&plain).over(&keys))
            .await;
        rounds
            .measure("prefetch, compact", By::Ahead(&compact).over(&keys))
            .await;
        rounds
            .measure("claims, compact", By::Claims(&compact).over(&keys))
            .await;
    }
    let against = |name| rounds.against(name, Unit::MessagesPerSecond, "bare GETs");
    vec![
        against("prefetch").target(Bound::RatioAtLeast, 0.8),
        against("claims"),
        against("prefetch, compact"),
        against("claims, compact"),
    ]
}

fn keys(count: usize) -> Vec<StoreKey> {
    let scope = Scope::new(fresh_scope()).expect("it is one");
    (0..count)
        .map(|_| StoreKey::new(&scope, Digest::from_bytes(fastrand::u128(..).to_be_bytes())))
        .collect()
}

/// The way in which the keys are requested.
#[derive(Clone, Copy)]
enum By<'a> {
    Ahead(&'a RedisStore),
    Claims(&'a RedisStore),
    Get(&'a Bare),
}

impl By<'_> {
    /// Keys per second.
    async fn over(self, keys: &[StoreKey]) -> f64 {
        let started = Instant::now();
        let lanes: Vec<_> = (0..BATCHES_AT_ONCE)
            .map(|lane| self.lane(keys, lane))
            .collect();
        join_all(lanes).await;
        keys.len() as f64 / started.elapsed().as_secs_f64()
    }

    async fn lane(self, keys: &[StoreKey], lane: usize) {
        for batch in keys.chunks(BATCH).skip(lane).step_by(BATCHES_AT_ONCE) {
            match self {
                Self::Ahead(store) => prefetch(store, batch).await,
                Self::Claims(store) => claim(store, batch).await,
                Self::Get(bare) => bare.get(batch).await,
            }
        }
    }
}

async fn complete(store: &RedisStore, keys: &[StoreKey]) {
    for batch in keys.chunks(BATCH) {
        let operation = Operation::Complete {
            token: Token::from_bits(fastrand::u128(1..)),
            fingerprint: None,
            result: b"".as_slice().into(),
            retention: RETENTION,
        };
        let replies = store
            .execute(
                batch
                    .iter()
                    .map(|key| Command {
                        key: key.clone(),
                        operation: operation.clone(),
                    })
                    .collect(),
            )
            .await;
        assert!(
            replies
                .iter()
                .all(|reply| matches!(reply, Ok(Reply::Applied { .. }))),
            "each is recorded"
        );
    }
}

async fn prefetch(store: &RedisStore, keys: &[StoreKey]) {
    let found = store.prefetch(keys.to_vec()).await;
    assert!(
        found.iter().all(|found| matches!(found, Ok(Some(_)))),
        "each is completed"
    );
}

async fn claim(store: &RedisStore, keys: &[StoreKey]) {
    let token = Token::from_bits(fastrand::u128(1..));
    let operation = Operation::Claim {
        token,
        lease: Duration::from_secs(30),
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    assert!(
        store
            .execute(
                keys.iter()
                    .map(|key| Command {
                        key: key.clone(),
                        operation: operation.clone(),
                    })
                    .collect()
            )
            .await
            .iter()
            .all(|reply| {
                matches!(
                    reply,
                    &Ok(Reply::Verdict {
                        verdict: Verdict::Completed { .. },
                        ..
                    })
                )
            }),
        "each is completed"
    );
}
