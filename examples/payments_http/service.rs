//! The payment service: one route behind `Idempotency-Key`, and one SQLite file.

use std::io::{BufRead, Write};
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Extension, Json, Router};
use oncegate::BoxError;
use oncegate::http::{Attempt, IdempotencyLayer, Principal, request_gate};
use oncegate::sqlite::SqliteStore;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::sleep;

use crate::bank::{Bank, Charge};

/// The time that a payment takes before and after the money moves.
const BEFORE_THE_CHARGE: Duration = Duration::from_millis(50);
const AFTER_THE_CHARGE: Duration = Duration::from_secs(1);
/// The time that a key waits for its owner after a crash. Longer in production: 30 s by default.
const LEASE: Duration = Duration::from_secs(1);
const DRAIN: Duration = Duration::from_secs(5);

#[derive(Debug, Deserialize)]
struct Payment {
    order: String,
    amount: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Receipt {
    pub(crate) order: String,
    pub(crate) reference: String,
    /// `true` once the charge of an attempt that had crashed was found.
    pub(crate) found_after_a_crash: bool,
}

fn bad_gateway(error: BoxError) -> (StatusCode, String) {
    (StatusCode::BAD_GATEWAY, error.to_string())
}

async fn pay(
    State(bank): State<Arc<Bank>>,
    Extension(attempt): Extension<Attempt>,
    Json(payment): Json<Payment>,
) -> Result<(StatusCode, Json<Receipt>), (StatusCode, String)> {
    let Payment { order, amount } = payment;
    // The same for every attempt of this key.
    let reference = attempt.idempotency_key("charge");
    sleep(BEFORE_THE_CHARGE).await;
    // An attempt that crashed may have charged: ask the bank before charging again.
    let found = attempt.recovered() && bank.find(&reference).map_err(bad_gateway)?.is_some();
    if !found {
        let charge = Charge {
            order: order.clone(),
            amount,
            reference: reference.clone(),
        };
        bank.charge(&charge).map_err(bad_gateway)?;
    }
    sleep(AFTER_THE_CHARGE).await;
    Ok((
        StatusCode::CREATED,
        Json(Receipt {
            order,
            reference,
            found_after_a_crash: found,
        }),
    ))
}

/// Serves until its standard input ends. Writes its address to the standard output.
pub(crate) async fn serve(folder: &Path) -> Result<(), BoxError> {
    let store = SqliteStore::open(folder.join("gate.db")).await?;
    let gate = request_gate("payments", store).lease(LEASE);
    // The principal comes from authentication; this service has a single client.
    let idempotency = IdempotencyLayer::new(gate, Principal::single_tenant());
    idempotency.open().await?;
    let app = Router::new()
        .route("/payments", post(pay))
        .with_state(Arc::new(Bank::open(&folder.join("statement"))?))
        .layer(idempotency.clone());

    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    writeln!(std::io::stdout(), "{}", listener.local_addr()?)?;
    axum::serve(listener, app)
        .with_graceful_shutdown(end_of_input())
        .await?;
    // The connections have ended; handlers whose clients had gone may still run.
    let left = idempotency.drain(DRAIN).await;
    if left > 0 {
        Err(format!("{left} payments were cut off").into())
    } else {
        Ok(())
    }
}

async fn end_of_input() {
    let (ended, input) = oneshot::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        while std::io::stdin()
            .lock()
            .read_line(&mut line)
            .is_ok_and(|bytes| bytes > 0)
        {}
        ended.send(())
    });
    _ = input.await;
}
