//! Measures what the rules cost the server, compared with two minimal scripts.

use oncegate_testkit::{Redis, RedisServer};

use crate::bare::{Bare, CLAIM, COMPLETE, FIRST_CLAIMS, FIRST_COMPLETIONS, Pair};
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::messages::fresh_scope;
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "server_cpu",
    question: "the server's processor time per claim and complete: what do the rules cost?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

/// A single `SET` without any decision.
const BARE_CLAIM: &str = "return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'GET', 'PX', ARGV[2])";

/// Get, compare and set, without other states.
const BARE_COMPLETE: &str = "\
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return 'H'
end
return 'L'";

const PIPELINE: usize = 64;
/// The number of turns that the contestants take within one round. The ratios are close, and the
/// machine's speed drifts.
const TURNS: usize = 12;

/// A contestant: how it claims and completes, and on which server it is measured.
struct Contestant {
    name: &'static str,
    server: Bare,
    pair: Pair,
    used_micros: f64,
}

async fn run(plan: &Plan) -> Vec<Figure> {
    // Without the append-only file: its cost is the same for all contestants and would hide the
    // differences.
    let mut settings = BENCH_REDIS.to_vec();
    settings.extend(["--appendonly", "no"]);
    let redis = RedisServer::start_with(&settings).await;
    let valkey = RedisServer::valkey(&settings).await;
    let mut contestants = contestants(&redis, &valkey).await;
    let count = plan.size(10_000, 500);
    let mut rounds = plan.rounds("server_cpu", &["all in turns"]);
    while rounds.next() {
        contestants.iter_mut().for_each(|one| one.used_micros = 0.0);
        let turns = async {
            for _ in 0..TURNS {
                for one in &mut contestants {
                    one.used_micros += cost(&mut one.server, &one.pair, count).await;
                }
            }
            contestants.iter().map(|one| one.used_micros).sum()
        };
        rounds.measure("all in turns", turns).await;
        for Contestant {
            name, used_micros, ..
        } in &contestants
        {
            rounds.note(name, used_micros / (TURNS * count) as f64);
        }
    }
    let against = |name, baseline| rounds.against(name, Unit::MicrosPerMessage, baseline);
    vec![
        against("plain claim", "bare pair").target(Bound::RatioAtMost, 1.05),
        against("shared calls", "bare pair"),
        against("scripts", "bare pair").target(Bound::RatioAtMost, 1.05),
        against("scripts, fenced", "bare pair").target(Bound::RatioAtMost, 1.20),
        against("Valkey, plain", "Valkey, scripts"),
        against("Valkey, plain claim", "Valkey, scripts"),
    ]
}

async fn contestants(redis: &Redis, valkey: &Redis) -> Vec<Contestant> {
    let mut contestants = Vec::new();
    for (name, server, fenced) in [
        ("plain claim", redis, false),
        ("shared calls", redis, false),
        ("scripts", redis, false),
        ("scripts, fenced", redis, true),
        ("bare pair", redis, false),
        ("Valkey, plain", valkey, false),
        ("Valkey, plain claim", valkey, false),
        ("Valkey, scripts", valkey, false),
    ] {
        let mut server = Bare::connect(server).await;
        let pair = match name {
            "bare pair" => server.load(BARE_CLAIM, BARE_COMPLETE, false).await,
            "Valkey, plain" => Pair::plain(),
            "shared calls" => server
                .load(FIRST_CLAIMS, FIRST_COMPLETIONS, false)
                .await
                .together(),
            "plain claim" | "Valkey, plain claim" => {
                server.load(CLAIM, COMPLETE, false).await.plain_claim()
            }
            _ => server.load(CLAIM, COMPLETE, fenced).await,
        };
        contestants.push(Contestant {
            name,
            server,
            pair,
            used_micros: 0.0,
        });
    }
    contestants
}

/// The server's processor time for a number of claim-and-complete pairs, in microseconds.
async fn cost(bare: &mut Bare, pair: &Pair, count: usize) -> f64 {
    bare.flush().await;
    let before = bare.server_cpu_micros().await;
    bare.run(pair, &fresh_scope(), count, PIPELINE).await;
    bare.server_cpu_micros().await - before
}
