//! A payment service behind `Idempotency-Key`, which shows by itself that no repetition charges
//! twice:
//!
//! ```sh
//! cargo run --example payments_http
//! ```
//!
//! A hundred equal requests at once, a client that hangs up, a key with another body, and a service
//! that is killed after the money has moved. It needs no server: the records are in a SQLite file.
//! The exit code is 0 only if every order was charged once and every client got the receipt of that
//! charge.

mod bank;
mod client;
mod service;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use clap::Parser;
use oncegate::BoxError;
use oncegate_examples::show::exit_code;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::sleep;

use bank::Bank;
use client::Service;
use service::Receipt;

const EQUAL_REQUESTS: usize = 100;
const AMOUNT: u64 = 10;
/// The longest wait for the bank.
const LIMIT: Duration = Duration::from_secs(30);

/// Shows that a payment service behind `Idempotency-Key` charges each order once.
#[derive(Debug, Parser)]
struct Arguments {
    /// Prints one JSON document instead of lines.
    #[arg(long)]
    json: bool,
    /// Runs the service itself, with its files in this folder.
    #[arg(long, value_name = "FOLDER", hide = true)]
    serve: Option<PathBuf>,
}

/// A scene: what was tried, and whether it went as expected.
#[derive(Debug, Serialize)]
struct Scene {
    name: &'static str,
    holds: bool,
    charges: usize,
    seen: String,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    exit_code(match &arguments.serve {
        Some(folder) => service::serve(folder).await.map(|()| true),
        None => show(arguments.json).await,
    })
}

async fn show(json: bool) -> Result<bool, BoxError> {
    let folder = tempfile::tempdir()?;
    let bank = Bank::open(&folder.path().join("statement"))?;
    let service = Service::start(folder.path())?;
    let mut scenes = vec![
        a_hundred_at_once(&service, &bank).await?,
        a_client_that_hangs_up(&service, &bank).await?,
        another_body(&service, &bank).await?,
    ];
    let (scene, service) = a_crash(service, folder.path(), &bank).await?;
    scenes.push(scene);
    scenes.push(after_the_crash(&service, &bank).await?);
    let stopped_well = service.stop()?;

    let holds = stopped_well && scenes.iter().all(|scene| scene.holds);
    if json {
        println!("{}", serde_json::to_string_pretty(&scenes)?);
    } else {
        for Scene {
            name,
            holds,
            charges,
            seen,
        } in &scenes
        {
            println!(
                "{} {name}: {charges} charge; {seen}",
                if *holds { "ok  " } else { "FAIL" }
            );
        }
        println!(
            "{}",
            if holds {
                "Every order was charged once."
            } else {
                "It does not hold."
            }
        );
    }
    Ok(holds)
}

async fn a_hundred_at_once(service: &Service, bank: &Bank) -> Result<Scene, BoxError> {
    let mut clients = JoinSet::new();
    for _ in 0..EQUAL_REQUESTS {
        let client = service.client.clone();
        clients.spawn(async move { client.pay_surely("key-1", "order-1", AMOUNT).await });
    }
    let answers = clients
        .join_all()
        .await
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    let first = answers.first().ok_or("no answers")?;
    let equal = answers
        .iter()
        .all(|a| a.status == StatusCode::CREATED && a.body == first.body);
    let replayed = answers.iter().filter(|answer| answer.is_replayed()).count();
    let charges = bank.charges("order-1")?;
    Ok(Scene {
        name: "a hundred equal requests at once",
        holds: equal && charges == 1 && replayed == EQUAL_REQUESTS - 1,
        charges,
        seen: format!(
            "{} receipts, {replayed} of them replayed, all equal: {equal}",
            answers.len()
        ),
    })
}

async fn a_client_that_hangs_up(service: &Service, bank: &Bank) -> Result<Scene, BoxError> {
    let client = service.client.clone();
    let sent = tokio::spawn(async move { client.pay("key-2", "order-2", AMOUNT).await });
    until_charged(bank, "order-2").await?;
    // It loses its patience before the receipt comes, and its connection with it.
    sent.abort();
    let hung_up = sent.await.is_err();
    let answer = service
        .client
        .pay_surely("key-2", "order-2", AMOUNT)
        .await?;
    let charges = bank.charges("order-2")?;
    Ok(Scene {
        name: "a client that hangs up and comes back",
        holds: hung_up && charges == 1 && answer.is_replayed(),
        charges,
        seen: format!(
            "hung up: {hung_up}; then {}, replayed: {}",
            answer.status,
            answer.is_replayed()
        ),
    })
}

async fn until_charged(bank: &Bank, order: &str) -> Result<(), BoxError> {
    let deadline = Instant::now() + LIMIT;
    while bank.charges(order)? == 0 {
        if Instant::now() > deadline {
            return Err(format!("{order} was not charged in time").into());
        }
        sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

async fn another_body(service: &Service, bank: &Bank) -> Result<Scene, BoxError> {
    let answer = service.client.pay("key-1", "order-1", AMOUNT + 1).await?;
    let charges = bank.charges("order-1")?;
    Ok(Scene {
        name: "the same key with another amount",
        holds: answer.status == StatusCode::UNPROCESSABLE_ENTITY && charges == 1,
        charges,
        seen: answer.status.to_string(),
    })
}

/// Kills the service after the charge and before its record is completed.
async fn a_crash(
    service: Service,
    folder: &Path,
    bank: &Bank,
) -> Result<(Scene, Service), BoxError> {
    let client = service.client.clone();
    let sent = tokio::spawn(async move { client.pay("key-3", "order-3", AMOUNT).await });
    until_charged(bank, "order-3").await?;
    service.kill()?;
    let no_answer = sent.await?.is_err();
    let service = Service::start(folder)?;
    let answer = service
        .client
        .pay_surely("key-3", "order-3", AMOUNT)
        .await?;
    let receipt: Receipt = serde_json::from_str(&answer.body)?;
    let charges = bank.charges("order-3")?;
    let scene = Scene {
        name: "a service killed after the charge, and a retry",
        holds: no_answer
            && charges == 1
            && receipt.found_after_a_crash
            && receipt.order == "order-3",
        charges,
        seen: format!(
            "{}, found after a crash: {}",
            answer.status, receipt.found_after_a_crash
        ),
    };
    Ok((scene, service))
}

async fn after_the_crash(service: &Service, bank: &Bank) -> Result<Scene, BoxError> {
    let answer = service.client.pay("key-1", "order-1", AMOUNT).await?;
    let charges = bank.charges("order-1")?;
    Ok(Scene {
        name: "the first request again, at the new process",
        holds: answer.status == StatusCode::CREATED && answer.is_replayed() && charges == 1,
        charges,
        seen: format!("{}, replayed: {}", answer.status, answer.is_replayed()),
    })
}
