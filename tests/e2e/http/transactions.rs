//! Responses that are kept in the transaction of their payment, in PostgreSQL and in an SQLite
//! file.

use std::sync::Arc;
use std::time::Duration;

use oncegate::core::key::StoreKey;
use oncegate::core::record::{State, Token};
use oncegate::core::rules::{Operation, ReleaseCause};
use oncegate::core::store::Command;
use oncegate_testkit::{
    HttpAnswer, HttpClient, HttpServer, Ledger, Postgres, Sent, Watched, unique, until,
};
use tempfile::TempDir;
use tokio::sync::watch;

use crate::kill::{Service, until_written};
use crate::teller::{Database, Pass, service};
use crate::world::{LIMIT, settled};

const LEASE: Duration = Duration::from_secs(30);

/// A service over a database of its own.
struct Teller {
    database: Database,
    server: HttpServer,
    watched: Arc<Watched>,
    /// How many requests have begun.
    begun: Arc<watch::Sender<usize>>,
    /// Whether those may go on that have the header `x-hold`.
    open: Arc<watch::Sender<bool>>,
    _folder: TempDir,
}

/// Where a database of its own is: a URL of PostgreSQL, or a file in the folder.
async fn place(kind: &str, folder: &TempDir) -> String {
    match kind {
        "postgres" => Postgres::shared().await.database().await.url().to_owned(),
        _ => folder.path().join("payments.db").display().to_string(),
    }
}

const KINDS: [&str; 2] = ["postgres", "sqlite"];

impl Teller {
    async fn start(kind: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&place(kind, &folder).await).await.unwrap();
        let begun = Arc::new(watch::Sender::new(0));
        let open = Arc::new(watch::Sender::new(false));
        let count = Arc::clone(&begun);
        let gate = Arc::clone(&open);
        let pass: Pass = Arc::new(move |headers, point| {
            if point == "begun" {
                count.send_modify(|count| *count += 1);
            }
            let holds = headers.get("x-hold").is_some_and(|hold| hold == point);
            let mut open = gate.subscribe();
            Box::pin(async move {
                if holds {
                    open.wait_for(|open| *open).await.unwrap();
                }
            })
        });
        let watched = Watched::new();
        let observer = Arc::clone(&watched);
        let app = service(&database, "payments", LEASE, pass, |gate| {
            gate.observer(observer as _)
        })
        .await
        .unwrap();
        let server = HttpServer::start(app).await;
        Self {
            database,
            server,
            watched,
            begun,
            open,
            _folder: folder,
        }
    }

    fn client(&self) -> HttpClient {
        HttpClient::http1(self.server.address())
    }

    async fn post(&self, key: &str, what: &str) -> HttpAnswer {
        self.client()
            .send(Sent::post("/payments", key, key).headers(&[("x-do", what)]))
            .await
    }

    /// Begins a request that holds at its beginning, in a task.
    async fn hold(&self, key: &'static str) -> tokio::task::JoinHandle<HttpAnswer> {
        let client = self.client();
        let mut begun = self.begun.subscribe();
        let before = *begun.borrow();
        let held = tokio::spawn(async move {
            client
                .send(Sent::post("/payments", key, key).headers(&[("x-hold", "begun")]))
                .await
        });
        let has_begun = begun.wait_for(|count| *count > before);
        tokio::time::timeout(LIMIT, has_begun)
            .await
            .expect("in time")
            .unwrap();
        held
    }

    async fn payments(&self, order: &str) -> i64 {
        self.database.payments(order).await.unwrap()
    }

    /// The key of the only record, from the table itself.
    async fn record_key(&self) -> StoreKey {
        let key: String = match &self.database {
            Database::Postgres { pool, .. } => pool
                .get()
                .await
                .unwrap()
                .query_one("SELECT key FROM oncegate_records", &[])
                .await
                .unwrap()
                .get(0),
            Database::Sqlite(store) => {
                let connection = store.open_connection().unwrap();
                connection
                    .query_row("SELECT key FROM records", [], |row| row.get(0))
                    .unwrap()
            }
        };
        key.parse().unwrap()
    }

    async fn state(&self, key: &StoreKey) -> State {
        let read = self
            .database
            .store()
            .read(vec![key.clone()])
            .await
            .remove(0);
        read.unwrap().unwrap().record.state
    }

    /// Lets the lease of the record pass, and claims it for another owner.
    async fn take_over(&self, key: &StoreKey, token: Token) {
        let store = self.database.store();
        let snapshot = store
            .read(vec![key.clone()])
            .await
            .remove(0)
            .unwrap()
            .unwrap();
        until("the record to be taken over", LIMIT, async || {
            match &self.database {
                Database::Postgres { store, .. } => {
                    store.pass(&[(key.clone(), LEASE * 2)]).await.unwrap();
                }
                Database::Sqlite(store) => store.pass(key, LEASE * 2).await.unwrap(),
            }
            let claim = Operation::Claim {
                token,
                lease: LEASE,
                fingerprint: snapshot.record.fingerprint,
                fenced: false,
                longest_lease: Duration::MAX,
            };
            store
                .execute_one(Command {
                    key: key.clone(),
                    operation: claim,
                })
                .await
                .unwrap();
            match self.state(key).await {
                State::Pending { token: owner, .. } if owner == token => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }
}

fn assert_same(first: &HttpAnswer, replayed: &HttpAnswer) {
    assert!(!first.is_replayed() && replayed.is_replayed());
    assert_eq!(
        (first.status, &first.body),
        (replayed.status, &replayed.body)
    );
    for header in ["content-type", "idempotency-expires"] {
        assert_eq!(first.header(header), replayed.header(header), "{header}");
    }
    assert!(first.header("set-cookie").is_some() && replayed.header("set-cookie").is_none());
}

// invariant: http-transaction
#[tokio::test]
async fn a_committed_response_is_replayed_bytewise_with_one_payment() {
    for kind in KINDS {
        let teller = Teller::start(kind).await;
        let first = teller.post("A-1", "pay").await;
        assert_eq!(
            (first.status.as_u16(), &*first.body),
            (201, &b"paid A-1 in attempt 1\r\n\0"[..]),
            "{kind}"
        );
        let again = teller.post("A-1", "pay").await;
        assert_same(&first, &again);
        assert_eq!(teller.payments("A-1").await, 1, "{kind}");
        assert_eq!(
            (
                teller.watched.get("completions", ""),
                teller.watched.total("extra_runs")
            ),
            (1, 0),
            "{kind}"
        );
    }
}

// invariant: http-transaction
#[tokio::test]
async fn the_client_gets_what_was_committed_not_what_was_returned() {
    for kind in KINDS {
        let teller = Teller::start(kind).await;
        let first = teller.post("A-1", "turn").await;
        assert_eq!(first.status, 201, "{kind}");
        assert_same(&first, &teller.post("A-1", "turn").await);
        assert_eq!(teller.payments("A-1").await, 1, "{kind}");
    }
}

// invariant: http-transaction
#[tokio::test]
async fn a_rollback_keeps_nothing_and_the_retry_runs() {
    for kind in KINDS {
        let teller = Teller::start(kind).await;
        let rolled_back = teller.post("A-1", "roll-back").await;
        assert_eq!(
            (rolled_back.status.as_u16(), teller.payments("A-1").await),
            (500, 0),
            "{kind}"
        );
        // The handler says 200; the commit was refused by the database.
        let refused = teller.post("A-2", "violate").await;
        assert_eq!(
            (refused.status.as_u16(), refused.problem()),
            (503, "not-committed".to_owned()),
            "{kind}"
        );
        assert_eq!(teller.payments("A-2").await, 0, "{kind}");
        for order in ["A-1", "A-2"] {
            let paid = settled(&teller.client(), Sent::post("/payments", order, order)).await;
            assert_eq!(
                (paid.status.as_u16(), paid.is_replayed()),
                (201, false),
                "{kind}"
            );
            assert_eq!(
                &*paid.body,
                format!("paid {order} in attempt 2\r\n\0").as_bytes(),
                "{kind}"
            );
            assert_same(&paid, &teller.post(order, "pay").await);
            assert_eq!(teller.payments(order).await, 1, "{kind}");
        }
    }
}

// invariant: http-transaction
#[tokio::test]
async fn an_owner_without_its_lease_commits_no_payment_or_response() {
    for kind in KINDS {
        let teller = Teller::start(kind).await;
        let held = teller.hold("A-1").await;
        let key = teller.record_key().await;
        let other = Token::from_bits(7);
        teller.take_over(&key, other).await;
        teller.open.send_replace(true);
        let answer = held.await.unwrap();
        // 409: the other owner runs; 503: this one was cancelled first.
        assert!(
            [409, 503].contains(&answer.status.as_u16()),
            "{kind}: {}",
            answer.status
        );
        assert_eq!(teller.payments("A-1").await, 0, "{kind}");
        assert!(
            matches!(teller.state(&key).await, State::Pending { token, .. } if token == other),
            "{kind}"
        );
        let release = Operation::Release {
            token: other,
            delay: Duration::ZERO,
            end: ReleaseCause::Interrupted,
            reason: "told to".to_owned(),
        };
        teller
            .database
            .store()
            .execute_one(Command {
                key,
                operation: release,
            })
            .await
            .unwrap();
        let paid = settled(&teller.client(), Sent::post("/payments", "A-1", "A-1")).await;
        assert_eq!(
            (paid.status.as_u16(), teller.payments("A-1").await),
            (201, 1),
            "{kind}"
        );
    }
}

// invariant: http-transaction
#[tokio::test]
async fn of_requests_at_once_one_pays_and_all_get_its_response() {
    const REQUESTS: usize = 16;
    for kind in KINDS {
        let teller = Teller::start(kind).await;
        let held = teller.hold("A-1").await;
        let busy = teller.post("A-1", "pay").await;
        assert_eq!(
            (busy.status.as_u16(), busy.problem()),
            (409, "in-progress".to_owned()),
            "{kind}"
        );
        let asking: Vec<_> = (0..REQUESTS)
            .map(|_| {
                let client = teller.client();
                tokio::spawn(async move {
                    settled(&client, Sent::post("/payments", "A-1", "A-1")).await
                })
            })
            .collect();
        teller.open.send_replace(true);
        let first = held.await.unwrap();
        assert_eq!(
            (first.status.as_u16(), first.is_replayed()),
            (201, false),
            "{kind}"
        );
        for asked in asking {
            assert_same(&first, &asked.await.unwrap());
        }
        assert_eq!(teller.payments("A-1").await, 1, "{kind}");
    }
}

/// Kills the service where a request holds, and sends the request to another one. Returns its
/// answer.
async fn killed_at(kind: &str, hold: &'static str) -> HttpAnswer {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path().join("ledger"));
    let url = place(kind, &folder).await;
    let arguments = [
        url.clone(),
        unique("http-teller"),
        ledger.path().display().to_string(),
    ];
    let mut service = Service::start_program(env!("CARGO_BIN_EXE_http_teller"), &arguments, false);
    let client = service.client.clone();
    let sent = tokio::spawn(async move {
        client
            .try_send(Sent::post("/payments", "A-1", "A-1").headers(&[("x-hold", hold)]))
            .await
    });
    until_written(&ledger, hold).await;
    service.process.kill();
    assert!(
        sent.await.unwrap().is_err(),
        "no response comes out of a killed process"
    );

    let service = Service::start_program(env!("CARGO_BIN_EXE_http_teller"), &arguments, false);
    let answer = settled(&service.client, Sent::post("/payments", "A-1", "A-1")).await;
    assert_eq!(answer.status, 201, "{kind} {hold}");
    let payments = Database::open(&url)
        .await
        .unwrap()
        .payments("A-1")
        .await
        .unwrap();
    assert_eq!(payments, 1, "{kind} {hold}");
    answer
}

// invariant: http-transaction
#[tokio::test]
async fn after_a_kill_there_is_one_payment_with_its_own_response() {
    for kind in KINDS {
        let before = killed_at(kind, "begun").await;
        assert_eq!(
            (&*before.body, before.is_replayed()),
            (&b"paid A-1 in attempt 2\r\n\0"[..], false),
            "{kind}"
        );
        for hold in ["committed", "leaving"] {
            let after = killed_at(kind, hold).await;
            assert_eq!(
                (&*after.body, after.is_replayed()),
                (&b"paid A-1 in attempt 1\r\n\0"[..], true),
                "{kind} {hold}"
            );
        }
    }
}
