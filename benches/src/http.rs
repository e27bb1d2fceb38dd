//! Compares a route behind the `Idempotency-Key` layer with the same route without it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

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

use crate::cores::Cores;
use crate::figure::{Figure, Unit};
use crate::messages::fresh_scope;
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "http",
    question: "an axum route that answers at once, 64 connections: what does the layer add?",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

const CONNECTIONS: usize = 64;
const BODY: &str = r#"{"order":"A-7","customer":{"id":7},"amount":1999,"currency":"EUR"}"#;

async fn run(plan: &Plan) -> Vec<Figure> {
    let redis = RedisServer::start_with(&BENCH_REDIS).await;
    let requests = plan.size(20_000, 640);
    let contestants = ["layer, memory", "layer, Redis", "replays, Redis", "without the layer"];
    let mut rounds = plan.rounds("http", &contestants);
    while rounds.next() {
        let memory = HttpServer::start(guarded(MemoryStore::new())).await;
        rounds.measure("layer, memory", rate(memory.address(), requests)).await;
        let store = RedisStore::connect(redis.url()).await.expect("it was started");
        let server = HttpServer::start(guarded(store)).await;
        rounds.measure("layer, Redis", rate(server.address(), requests)).await;
        // The same keys again: every response is replayed from the record.
        rounds.measure("replays, Redis", rate(server.address(), requests)).await;
        let bare = HttpServer::start(route()).await;
        rounds.measure("without the layer", rate(bare.address(), requests)).await;
    }
    let against = |contestant| rounds.against(contestant, Unit::MessagesPerSecond, "without the layer");
    vec![against("layer, memory"), against("layer, Redis"), against("replays, Redis")]
}

fn route() -> Router {
    let charge = async |order: Bytes| (StatusCode::CREATED, format!(r#"{{"charged":{}}}"#, order.len()));
    Router::new().route("/charges", post(charge))
}

fn guarded(store: impl Store + 'static) -> Router {
    let layer = IdempotencyLayer::new(request_gate(fresh_scope(), store), Principal::single_tenant());
    route().layer(layer)
}

/// Requests per second, each with its own key.
async fn rate(address: SocketAddr, requests: usize) -> f64 {
    let client: Client<HttpConnector, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let uri: Arc<str> = format!("http://{address}/charges").into();
    let mut connections = JoinSet::new();
    let started = Instant::now();
    for connection in 0..CONNECTIONS {
        let (client, uri) = (client.clone(), Arc::clone(&uri));
        connections.spawn(async move {
            for n in (connection..requests).step_by(CONNECTIONS) {
                let request = Request::post(&*uri)
                    .header("idempotency-key", format!("\"key-{n}\""))
                    .header(header::CONTENT_TYPE, "application/json")
                    .body(Full::from(BODY))
                    .expect("it is well-formed");
                let response = client.request(request).await.expect("the server answers");
                assert_eq!(response.status(), StatusCode::CREATED);
                response.into_body().collect().await.expect("a whole body");
            }
        });
    }
    while let Some(connection) = connections.join_next().await {
        connection.expect("no connection panics");
    }
    requests as f64 / started.elapsed().as_secs_f64()
}
