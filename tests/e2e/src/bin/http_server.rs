//! A service for the tests that kill it: charges orders behind `Idempotency-Key`, and writes each
//! step into a ledger.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Router};
use oncegate::BoxError;
use oncegate::core::store::Store;
use oncegate::http::{Attempt, IdempotencyLayer, Principal, request_gate};
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate_testkit::Ledger;

const LEASE: Duration = Duration::from_millis(900);

/// Where a request asks to be stopped, so that the process can be killed there.
const HOLD: &str = "x-hold";

fn holds(headers: &HeaderMap, at: &str) -> bool {
    headers.get(HOLD).is_some_and(|value| value == at)
}

async fn charge(
    State(ledger): State<Arc<Ledger>>,
    Extension(attempt): Extension<Attempt>,
    headers: HeaderMap,
    order: String,
) -> (StatusCode, String) {
    ledger.append(&format!("begun {order}"));
    if holds(&headers, "before") {
        std::future::pending::<()>().await;
    }
    let charge = format!("charged {order}");
    // An attempt that follows a crash checks first whether the charge exists.
    if !(attempt.recovered() && ledger.counts().contains_key(&charge)) {
        ledger.append(&charge);
    }
    if holds(&headers, "after") {
        std::future::pending::<()>().await;
    }
    (
        StatusCode::CREATED,
        format!(
            "attempt {}, recovered: {}",
            attempt.number(),
            attempt.recovered()
        ),
    )
}

/// Outside the layer: what it lets out may be held here.
async fn leave(State(ledger): State<Arc<Ledger>>, request: Request, next: Next) -> Response {
    let hold = holds(request.headers(), "response");
    let response = next.run(request).await;
    if hold {
        ledger.append("completed");
        std::future::pending::<()>().await;
    }
    response
}

/// Arguments: the store (a URL of Redis, or a path), the scope, the ledger's path. Writes its
/// address to the standard output.
#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [store, scope, ledger] = arguments.as_slice() else {
        return Err("http_server STORE SCOPE LEDGER".into());
    };
    let store: Arc<dyn Store> = if store.starts_with("redis:") {
        Arc::new(RedisStore::connect(store).await?)
    } else {
        Arc::new(SqliteStore::open(store).await?)
    };
    let ledger = Arc::new(Ledger::open(ledger));
    let layer = IdempotencyLayer::new(
        request_gate(scope, store).lease(LEASE),
        Principal::single_tenant(),
    );
    layer.open().await?;
    let app = Router::new()
        .route("/charges", post(charge))
        .with_state(Arc::clone(&ledger))
        .layer(layer)
        .layer(from_fn_with_state(ledger, leave));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}
