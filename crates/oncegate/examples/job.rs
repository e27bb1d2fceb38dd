//! A cron tick that three replicas get at the same time: one of them makes the report, and the
//! others get it. `cargo run --example job`, without a server.

use std::sync::Arc;
use std::time::Duration;

use oncegate::prelude::*;
use oncegate::running::Done;

/// The work of a replica at each tick. The key is the job and the minute for which it was
/// scheduled, not the time at which the replica wakes.
async fn tick(gate: &Gate, replica: u32, minute: &str) -> anyhow::Result<()> {
    let job = Message::keyed("report", minute.to_owned());
    let report = gate
        .runner()
        // One that comes while another one works waits for its report.
        .wait(Duration::from_secs(10))
        .run(&job, async |attempt: Attempt| {
            println!("replica {replica} makes the report of {minute}");
            // Downstream systems that take such a key do their part once, too.
            let key = attempt.idempotency_key("send");
            tokio::time::sleep(Duration::from_millis(50)).await;
            Ok(format!("12 pages, sent with {} digits of a key", key.len()))
        })
        .await?;
    match report {
        Done::Now(report) => println!("replica {replica}: {report}"),
        Done::Before(report) => println!("replica {replica} was told: {report}"),
    }
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // Replicas in different processes share a store that they reach, such as Redis. A record must
    // outlive the latest of them.
    let store = Arc::new(MemoryStore::new());
    let gate = || {
        Gate::new("reports", Key::message_key(), Arc::clone(&store))
            .retention(Duration::from_secs(86_400))
    };
    let replicas = [gate(), gate(), gate()];
    for minute in ["02:00", "02:01"] {
        tokio::try_join!(
            tick(&replicas[0], 1, minute),
            tick(&replicas[1], 2, minute),
            tick(&replicas[2], 3, minute),
        )?;
    }
    Ok(())
}
