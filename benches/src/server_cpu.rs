//! What the rules cost the server, against the least that two scripts can do.

use oncegate_tests::RedisServer;

use crate::bare::{Bare, CLAIM, COMPLETE, Pair};
use crate::figure::{Bound, Figure, Unit};
use crate::messages::fresh_scope;
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "server_cpu",
    question: "the server's processor time per claim and complete: what do the rules cost?",
    run: |plan| Box::pin(run(plan)),
};

/// One `SET`, and nothing decided.
const BARE_CLAIM: &str = "return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'GET', 'PX', ARGV[2])";

/// Get, compare, set, and nothing else known.
const BARE_COMPLETE: &str = "\
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return 'H'
end
return 'L'";

const PIPELINE: usize = 64;
/// The contestants take turns this often within one round: the ratios are close, and the machine drifts.
const TURNS: usize = 12;

async fn run(plan: &Plan) -> Vec<Figure> {
    // Without the append-only file: its cost is the same for all, and would hide the differences.
    let mut settings = BENCH_REDIS.to_vec();
    settings.extend(["--appendonly", "no"]);
    let server = RedisServer::start_with(&settings).await;
    let mut bare = Bare::connect(&server).await;
    let contestants = [
        ("scripts", bare.load(CLAIM, COMPLETE, false).await),
        ("scripts, fenced", bare.load(CLAIM, COMPLETE, true).await),
        ("bare pair", bare.load(BARE_CLAIM, BARE_COMPLETE, false).await),
    ];
    let count = plan.size(10_000, 500);
    let mut rounds = plan.rounds("server_cpu", &["all in turns"]);
    while rounds.next() {
        let mut used = [0.0; 3];
        let turns = async {
            for _ in 0..TURNS {
                for ((_, pair), used) in contestants.iter().zip(&mut used) {
                    *used += cost(&mut bare, pair, count).await;
                }
            }
            used.iter().sum()
        };
        rounds.measure("all in turns", turns).await;
        for ((name, _), used) in contestants.iter().zip(used) {
            rounds.note(name, used / (TURNS * count) as f64);
        }
    }
    vec![
        rounds.against("scripts", Unit::MicrosPerMessage, "bare pair").target(Bound::RatioAtMost, 1.05),
        rounds
            .against("scripts, fenced", Unit::MicrosPerMessage, "bare pair")
            .target(Bound::RatioAtMost, 1.20),
    ]
}

/// The server's processor time for so many pairs, in microseconds.
async fn cost(bare: &mut Bare, pair: &Pair, count: usize) -> f64 {
    bare.flush().await;
    let before = bare.server_cpu_micros().await;
    bare.run(pair, &fresh_scope(), count, PIPELINE).await;
    bare.server_cpu_micros().await - before
}
