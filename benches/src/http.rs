//! Compares a route behind the `Idempotency-Key` layer with the same route without it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{Request, StatusCode, header};
use axum::routing::post;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use oncegate::MemoryStore;
use oncegate::core::store::Store;
use oncegate::http::{IdempotencyLayer, Principal, request_gate};
use oncegate::redis::RedisStore;
use oncegate_testkit::{HttpServer, RedisServer};
use tokio::task::JoinSet;
use tokio::time::sleep_until;

use crate::cores::Cores;
use crate::figure::{Figure, Unit};
use crate::held::percentile;
use crate::messages::fresh_scope;
use crate::rounds::{Plan, Rounds};
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "http",
    question: "an axum route that answers at once, 64 connections: what does the layer add?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

const CONNECTIONS: usize = 64;
const BODY: &str = r#"{"order":"A-7","customer":{"id":7},"amount":1999,"currency":"EUR"}"#;
/// The time between two requests while latencies are measured: 4,000 a second, which is little for
/// every contestant.
const PACE: Duration = Duration::from_micros(250);

/// The names of what is measured of a contestant: its rate, and the latencies of requests at
/// [`PACE`].
#[derive(Clone, Copy, Debug)]
struct Series {
    rate: &'static str,
    p50: &'static str,
    p99: &'static str,
}

const MEMORY: Series = Series {
    rate: "layer, memory",
    p50: "p50, layer, memory",
    p99: "p99, layer, memory",
};
const REDIS: Series = Series {
    rate: "layer, Redis",
    p50: "p50, layer, Redis",
    p99: "p99, layer, Redis",
};
const REPLAYS: Series = Series {
    rate: "replays, Redis",
    p50: "p50, replays, Redis",
    p99: "p99, replays, Redis",
};
const BARE: Series = Series {
    rate: "without the layer",
    p50: "p50, without the layer",
    p99: "p99, without the layer",
};

async fn run(plan: &Plan) -> Vec<Figure> {
    let redis = RedisServer::start_with(&BENCH_REDIS).await;
    let mut rounds = plan.rounds(
        "http",
        &[MEMORY, REDIS, REPLAYS, BARE].map(|series| series.rate),
    );
    while rounds.next() {
        let memory = HttpServer::start(guarded(MemoryStore::new())).await;
        measure(plan, &mut rounds, MEMORY, memory.address()).await;
        let store = RedisStore::connect(redis.url())
            .await
            .expect("it was started");
        let server = HttpServer::start(guarded(store)).await;
        measure(plan, &mut rounds, REDIS, server.address()).await;
        // The same keys again: every response is replayed from the record.
        measure(plan, &mut rounds, REPLAYS, server.address()).await;
        let bare = HttpServer::start(route()).await;
        measure(plan, &mut rounds, BARE, bare.address()).await;
    }
    let mut figures = Vec::new();
    for series in [MEMORY, REDIS, REPLAYS] {
        figures.push(rounds.against(series.rate, Unit::MessagesPerSecond, BARE.rate));
        figures.push(rounds.against(series.p50, Unit::Micros, BARE.p50));
        figures.push(rounds.against(series.p99, Unit::Micros, BARE.p99));
    }
    figures
}

/// Measures the rate of as many requests as all connections send, and then the latencies of paced
/// ones.
async fn measure(plan: &Plan, rounds: &mut Rounds, series: Series, address: SocketAddr) {
    let requests = plan.size(20_000, 640);
    let rate = async {
        let started = Instant::now();
        send(address, "busy", requests, Duration::ZERO).await;
        requests as f64 / started.elapsed().as_secs_f64()
    };
    rounds.measure(series.rate, rate).await;
    let mut micros = send(address, "paced", plan.size(12_000, 640), PACE).await;
    micros.sort_by(f64::total_cmp);
    rounds.note(series.p50, percentile(&micros, 0.5));
    rounds.note(series.p99, percentile(&micros, 0.99));
}

fn route() -> Router {
    Router::new().route(
        "/charges",
        post(async |order: Bytes| {
            (
                StatusCode::CREATED,
                format!(r#"{{"charged":{}}}"#, order.len()),
            )
        }),
    )
}

fn guarded(store: impl Store + 'static) -> Router {
    let layer = IdempotencyLayer::new(
        request_gate(fresh_scope(), store),
        Principal::single_tenant(),
    );
    route().layer(layer)
}

/// Sends requests, each with its own key, and one each `pace` if that is not zero. Returns how long
/// each took, in microseconds.
async fn send(
    address: SocketAddr,
    keys: &'static str,
    requests: usize,
    pace: Duration,
) -> Vec<f64> {
    let client: Client<HttpConnector, Full<Bytes>> =
        Client::builder(TokioExecutor::new()).build_http();
    let uri: Arc<str> = format!("http://{address}/charges").into();
    let mut connections = JoinSet::new();
    let started = Instant::now();
    for connection in 0..CONNECTIONS {
        let client = client.clone();
        let uri = Arc::clone(&uri);
        connections.spawn(async move {
            let mut micros = Vec::new();
            for n in (connection..requests).step_by(CONNECTIONS) {
                let request = Request::post(&*uri)
                    .header("idempotency-key", format!("\"{keys}-{n}\""))
                    .header(header::CONTENT_TYPE, "application/json")
                    .body(Full::from(BODY))
                    .expect("it is well-formed");
                if !pace.is_zero() {
                    sleep_until((started + pace * n as u32).into()).await;
                }
                let sent = Instant::now();
                let response = client.request(request).await.expect("the server answers");
                assert_eq!(response.status(), StatusCode::CREATED);
                response.into_body().collect().await.expect("a whole body");
                micros.push(sent.elapsed().as_secs_f64() * 1e6);
            }
            micros
        });
    }
    let mut micros = Vec::with_capacity(requests);
    while let Some(connection) = connections.join_next().await {
        micros.extend(connection.expect("no connection panics"));
    }
    micros
}
