//! Compares deriving a key from a payload with only parsing the payload.

use std::hint::black_box;
use std::time::Instant;

use bytes::Bytes;
use oncegate_core::key::{CompiledKey, KeyInput, Scope};
use serde_json::Value;

use crate::Benchmark;
use crate::cores::Cores;
use crate::figure::{Figure, Unit};
use crate::messages::{ROUTE, key, payload};
use crate::rounds::Plan;

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "key",
    question: "a key of two fields out of 200 bytes of JSON, against serde_json's Value",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

async fn run(plan: &Plan) -> Vec<Figure> {
    let key = key().compile(&Scope::new("billing").expect("a valid scope")).expect("a valid key");
    let payloads: Vec<Bytes> = (0..1_000).map(payload).collect();
    let times = plan.size(500, 5);
    let mut rounds = plan.rounds("key", &["two fields", "serde_json::Value"]);
    while rounds.next() {
        rounds
            .measure("two fields", async { nanos(&payloads, times, |payload| derive(&key, payload)) })
            .await;
        rounds.measure("serde_json::Value", async { nanos(&payloads, times, parse) }).await;
    }
    vec![rounds.against("two fields", Unit::NanosPerMessage, "serde_json::Value")]
}

fn derive(key: &CompiledKey, payload: &Bytes) {
    black_box(key.derive(ROUTE, &KeyInput::payload(payload)).expect("a key"));
}

fn parse(payload: &Bytes) {
    black_box(serde_json::from_slice::<Value>(payload).expect("valid JSON"));
}

fn nanos(payloads: &[Bytes], times: usize, work: impl Fn(&Bytes)) -> f64 {
    let started = Instant::now();
    for _ in 0..times {
        payloads.iter().for_each(&work);
    }
    started.elapsed().as_secs_f64() * 1e9 / (times * payloads.len()) as f64
}
