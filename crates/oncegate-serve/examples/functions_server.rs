//! A server of claims for the tests of the clients: `functions_server STORE TOKEN_FILE LEASE_MS
//! [LISTEN]`. It prints its address, and stops when its standard input ends.
//!
//! The store is `memory`, a URL of Redis or the path of an SQLite file.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::response::IntoResponse;
use oncegate::core::store::Store;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{Backoff, BoxError, Key, MemoryStore};
use oncegate_serve::api::{Api, ApiScope, Caller, function_gate};
use oncegate_serve::{Body, Door as _};

const LARGEST_BODY_BYTES: usize = 1024 * 1024;

async fn open(store: &str) -> Result<Arc<dyn Store>, BoxError> {
    Ok(if store == "memory" {
        Arc::new(MemoryStore::new())
    } else if store.starts_with("redis:") {
        Arc::new(RedisStore::connect(store).await?)
    } else {
        Arc::new(SqliteStore::open(store).await?)
    })
}

/// Waits until nothing holds the standard input open any more: the test that has started it.
async fn parent_is_gone() {
    use tokio::io::AsyncReadExt as _;
    let mut read = [0];
    while let Ok(1..) = tokio::io::stdin().read(&mut read).await {}
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [store, tokens, lease_ms, listen @ ..] = arguments.as_slice() else {
        return Err("functions_server STORE TOKEN_FILE LEASE_MS [LISTEN]".into());
    };
    let lease = Duration::from_millis(lease_ms.parse()?);
    let store = open(store).await?;
    let short = Backoff::new(Duration::from_millis(20), Duration::from_millis(100));
    let scopes = ["jobs", "orders", "others"].map(|name| {
        let gate = if name == "orders" {
            oncegate::Gate::new(name, Key::json(["order_id"]), Arc::clone(&store)).fenced()
        } else {
            function_gate(name, Arc::clone(&store))
        };
        ApiScope::new(gate.lease(lease))
            .max_attempts(3)
            .backoff(short)
    });
    let caller = Caller::new("tests").token_file(tokens);
    let api = Api::new(scopes, [caller.scopes(["jobs", "orders"])])?;
    api.open().await?;

    let serving = api.clone();
    let app = axum::Router::new().fallback(move |request: Request| {
        let api = serving.clone();
        async move {
            let (parts, body) = request.into_parts();
            match axum::body::to_bytes(body, LARGEST_BODY_BYTES).await {
                Ok(body) => {
                    let request = axum::http::Request::from_parts(parts, Body::from(body));
                    api.answer(request).await.map(axum::body::Body::new)
                }
                Err(error) => {
                    (axum::http::StatusCode::BAD_REQUEST, error.to_string()).into_response()
                }
            }
        }
    });
    let listen = listen.first().map_or("127.0.0.1:0", String::as_str);
    let listener = tokio::net::TcpListener::bind(listen).await?;
    println!("{}", listener.local_addr()?);
    tokio::select! {
        served = axum::serve(listener, app) => served?,
        () = parent_is_gone() => api.drain(Duration::from_secs(5)).await,
    }
    Ok(())
}
