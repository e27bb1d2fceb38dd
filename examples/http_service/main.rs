//! A payment service behind `Idempotency-Key`: the program of docs/tutorials/http.md.

use std::time::Duration;

use axum::routing::post;
use axum::{Extension, Json, Router};
use oncegate::http::{Attempt, IdempotencyLayer, Principal, request_gate};
use oncegate::shutdown_signal;
use oncegate::sqlite::SqliteStore;
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Payment {
    order: String,
    amount: u64,
}

#[derive(Serialize)]
struct Receipt {
    order: String,
    reference: String,
}

async fn pay(
    Extension(attempt): Extension<Attempt>,
    Json(payment): Json<Payment>,
) -> Json<Receipt> {
    let Payment { order, amount } = payment;
    // Your bank's client, which gets the reference: it is the same for every attempt of this
    // request.
    let reference = attempt.idempotency_key("charge");
    println!("charging {amount} for {order}");
    Json(Receipt { order, reference })
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // An error is printed with its causes.
    let store = SqliteStore::open("payments.db").await?;
    let gate = request_gate("payments", store);
    // Keys of two callers must not meet: with more than one, say here who calls (docs/HTTP.md).
    let idempotency = IdempotencyLayer::new(gate, Principal::single_tenant());
    idempotency.open().await?; // reports wrong settings at start-up

    let app = Router::new()
        .route("/payments", post(pay))
        .layer(idempotency.clone());
    let address = std::env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("listening at {address}");
    axum::serve(listener, app)
        .with_graceful_shutdown(shutdown_signal())
        .await?;
    idempotency.drain(Duration::from_secs(20)).await; // handlers whose clients have disconnected
    Ok(())
}
