//! A service for the tests that kill it: keeps its responses in the transactions of its payments.

#[path = "../../http/teller.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod teller;

use std::sync::Arc;
use std::time::Duration;

use oncegate::BoxError;
use oncegate_testkit::Ledger;

use teller::{Database, service};

const LEASE: Duration = Duration::from_millis(900);

/// Arguments: the database (a URL of PostgreSQL, or a path), the scope, the ledger's path. Writes
/// its address to the standard output. A request stops for ever at the point that its header
/// `x-hold` names.
#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, scope, ledger] = arguments.as_slice() else {
        return Err("http_teller URL SCOPE LEDGER".into());
    };
    let ledger = Arc::new(Ledger::open(ledger));
    let pass: teller::Pass = Arc::new(move |headers, point| {
        let holds = headers.get("x-hold").is_some_and(|hold| hold == point);
        ledger.append(point);
        Box::pin(async move {
            if holds {
                std::future::pending::<()>().await;
            }
        })
    });
    let app = service(&Database::open(url).await?, scope, LEASE, pass, |gate| gate).await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}
