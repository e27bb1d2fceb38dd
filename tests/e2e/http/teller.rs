//! A service that keeps its responses in the transactions of its payments: for the tests, and for
//! the process that they kill.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Response, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::post;
use axum::{Extension, Router};
use deadpool_postgres::{Manager, Pool};
use oncegate::core::store::Store;
use oncegate::http::{Body, IdempotencyLayer, Principal, ResponseCommit, request_gate};
use oncegate::postgres::PostgresStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{BoxError, Gate};
use tokio_postgres::NoTls;

/// Payments without an account violate the constraint when they are committed.
const TABLES: &str = "\
CREATE TABLE IF NOT EXISTS accounts (id INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS payments (
    order_id TEXT NOT NULL,
    account  INTEGER NOT NULL REFERENCES accounts DEFERRABLE INITIALLY DEFERRED
);
INSERT INTO accounts VALUES (1) ON CONFLICT DO NOTHING;
";

/// What happens in a request, in this order: `begun`, `committed`, `leaving`. The future returns
/// when it may go on.
pub(crate) type Pass = Arc<
    dyn Fn(&HeaderMap, &'static str) -> futures_util::future::BoxFuture<'static, ()> + Send + Sync,
>;

/// The database of payments and records.
#[derive(Clone)]
pub(crate) enum Database {
    Postgres { store: PostgresStore, pool: Pool },
    Sqlite(SqliteStore),
}

impl Database {
    /// Opens `postgres://…`, or a file, and creates the tables.
    pub(crate) async fn open(url: &str) -> Result<Self, BoxError> {
        if !url.starts_with("postgres") {
            let store = SqliteStore::open(url).await?;
            store.open_connection()?.execute_batch(TABLES)?;
            return Ok(Self::Sqlite(store));
        }
        let store = PostgresStore::connect(url).await?;
        store.create_schema().await?;
        let pool = Pool::builder(Manager::new(url.parse()?, NoTls)).build()?;
        pool.get().await?.batch_execute(TABLES).await?;
        Ok(Self::Postgres { store, pool })
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Postgres { store, .. } => Arc::new(store.clone()),
            Self::Sqlite(store) => Arc::new(store.clone()),
        }
    }

    /// Writes the payment and `response` in one transaction. `None` rolls it back instead.
    async fn pay(
        &self,
        order: String,
        account: i32,
        commit: ResponseCommit,
        response: Option<Response<String>>,
    ) -> Result<Response<Body>, BoxError> {
        let rolled_back = || {
            (StatusCode::INTERNAL_SERVER_ERROR, "rolled back")
                .into_response()
                .map(|_| Body::empty())
        };
        match self {
            Self::Postgres { pool, .. } => {
                let mut client = pool.get().await?;
                let transaction = client.transaction().await?;
                let insert = "INSERT INTO payments (order_id, account) VALUES ($1, $2)";
                transaction.execute(insert, &[&order, &account]).await?;
                let Some(response) = response else {
                    transaction.rollback().await?;
                    return Ok(rolled_back());
                };
                Ok(commit.commit_with(transaction, response).await?)
            }
            Self::Sqlite(store) => {
                let store = store.clone();
                let paying = tokio::task::spawn_blocking(move || {
                    let mut connection = store.open_connection()?;
                    connection.pragma_update(None, "foreign_keys", true)?;
                    let transaction = connection
                        .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
                    transaction.execute(
                        "INSERT INTO payments (order_id, account) VALUES (?1, ?2)",
                        (&order, account),
                    )?;
                    let Some(response) = response else {
                        transaction.rollback()?;
                        return Ok(rolled_back());
                    };
                    Ok::<_, BoxError>(commit.blocking_commit_with(transaction, response)?)
                });
                paying.await?
            }
        }
    }

    /// The payments of an order.
    pub(crate) async fn payments(&self, order: &str) -> Result<i64, BoxError> {
        match self {
            Self::Postgres { pool, .. } => {
                let count = "SELECT count(*) FROM payments WHERE order_id = $1";
                Ok(pool.get().await?.query_one(count, &[&order]).await?.get(0))
            }
            Self::Sqlite(store) => {
                let count = "SELECT count(*) FROM payments WHERE order_id = ?1";
                Ok(store
                    .open_connection()?
                    .query_row(count, [order], |row| row.get(0))?)
            }
        }
    }
}

/// Pays as the header `x-do` says: `pay`, `roll-back`, `violate` a constraint at the commit, or
/// `turn` into an error after the commit.
async fn pay(
    State((database, pass)): State<(Database, Pass)>,
    Extension(commit): Extension<ResponseCommit>,
    headers: HeaderMap,
    order: String,
) -> Response<Body> {
    pass(&headers, "begun").await;
    let what = headers
        .get("x-do")
        .map_or("pay", |what| what.to_str().unwrap_or_default());
    let account = if what == "violate" { 0 } else { 1 };
    let response = Response::builder()
        .status(StatusCode::CREATED)
        .header("content-type", "text/plain")
        .header("set-cookie", "session=secret")
        .body(format!(
            "paid {order} in attempt {}\r\n\0",
            commit.attempt().number()
        ));
    let response = (what != "roll-back").then(|| response.unwrap_or_default());
    let paid = database.pay(order, account, commit, response).await;
    pass(&headers, "committed").await;
    let status = |status: StatusCode| {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = status;
        response
    };
    match paid {
        Ok(_) if what == "turn" => status(StatusCode::INTERNAL_SERVER_ERROR),
        Ok(response) => response,
        // A handler that hides what has failed: the record decides all the same.
        Err(_) => status(StatusCode::OK),
    }
}

/// Outside of the layer.
async fn leave(
    State((_, pass)): State<(Database, Pass)>,
    request: Request,
    next: Next,
) -> axum::response::Response {
    let headers = request.headers().clone();
    let response = next.run(request).await;
    pass(&headers, "leaving").await;
    response
}

/// The service over a gate with this lease.
pub(crate) async fn service(
    database: &Database,
    scope: &str,
    lease: Duration,
    pass: Pass,
    gate: impl FnOnce(Gate) -> Gate,
) -> Result<Router, BoxError> {
    let gate = gate(request_gate(scope, database.store()).lease(lease));
    let layer = IdempotencyLayer::new(gate, Principal::single_tenant());
    layer.open().await?;
    let state = (database.clone(), pass);
    Ok(Router::new()
        .route("/payments", post(pay))
        .with_state(state.clone())
        .layer(layer)
        .layer(from_fn_with_state(state, leave)))
}
