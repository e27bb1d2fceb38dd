//! Commits whose wait for a synchronous standby is cut short.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deadpool_postgres::{Manager, Pool};
use oncegate::postgres::{PostgresStore, PostgresTransaction};
use oncegate::{
    Attempt, Consumer, Failure, Gate, Key, Message, Transactional, TransactionalHandler,
};
use oncegate_core::key::StoreKey;
use oncegate_core::record::Token;
use oncegate_core::store::Store;
use oncegate_testkit::{Postgres, PostgresServer, unique};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, NoTls};

use crate::hand::{
    self, HELD, PATIENCE, apply, claim, complete, completed_with, granted_as, key, scope, token,
};

use crate::list::{List, Listed};

type SqlxTransaction = sqlx::Transaction<'static, sqlx::Postgres>;

const RESULT: &[u8] = b"the result";

/// The process that waits for a standby, if there is one that began its wait after `earlier`.
const WAITING: &str = "SELECT pid, query_start::text FROM pg_stat_activity WHERE wait_event = 'SyncRep' \
                       AND query_start > coalesce($1::text::timestamptz, '-infinity')";

/// A commit that waits for standbys, if any commit does.
const COMMIT: &str = "SELECT pg_logical_emit_message(true, 'test', ''::text)";

/// From now on commits wait for a standby that there is not.
async fn wait_for_no_standby(server: &Postgres, client: &Client) {
    set_standby(client, "absent").await;
    // Another process of the server makes it so.
    let start = Instant::now();
    loop {
        let witness = server.connection().await;
        let commit = tokio::spawn(async move { witness.batch_execute(COMMIT).await });
        while !commit.is_finished() {
            if let Some(row) = client.query_opt(WAITING, &[&None::<String>]).await.unwrap() {
                client
                    .query_one("SELECT pg_cancel_backend($1)", &[&row.get::<_, i32>(0)])
                    .await
                    .unwrap();
                return commit.await.unwrap().unwrap();
            }
        }
        assert!(
            start.elapsed() < PATIENCE,
            "no commit waits for the standby"
        );
    }
}

async fn set_standby(client: &Client, name: &str) {
    client
        .batch_execute(&format!(
            "ALTER SYSTEM SET synchronous_standby_names = '{name}'"
        ))
        .await
        .unwrap();
    client
        .batch_execute("SELECT pg_reload_conf()")
        .await
        .unwrap();
    let start = Instant::now();
    while client
        .query_one("SHOW synchronous_standby_names", &[])
        .await
        .unwrap()
        .get::<_, String>(0)
        != name
    {
        assert!(
            start.elapsed() < PATIENCE,
            "the server does not read its settings"
        );
        tokio::task::yield_now().await;
    }
}

/// Waits until a session that began its commit after `earlier` waits for a standby. `call` must not
/// be answered before.
async fn waiting<T>(
    client: &Client,
    earlier: Option<String>,
    call: &JoinHandle<T>,
) -> (i32, String) {
    let start = Instant::now();
    loop {
        if let Some(row) = client.query_opt(WAITING, &[&earlier]).await.unwrap() {
            return (row.get(0), row.get(1));
        }
        assert!(
            !call.is_finished(),
            "it was answered although no standby has the commit"
        );
        assert!(start.elapsed() < PATIENCE, "nothing waits for the standby");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn pool(postgres: &Postgres) -> Pool {
    let manager = Manager::new(postgres.url().parse().unwrap(), NoTls);
    Pool::builder(manager).max_size(10).build().unwrap()
}

/// A store over a pool of the caller's.
async fn pooled(postgres: &Postgres) -> Arc<PostgresStore> {
    let store = PostgresStore::from_pool(pool(postgres))
        .response_timeout(PATIENCE)
        .without_purge();
    Arc::new(store.connect().await.unwrap())
}

/// A server, a store on it, and another client.
async fn server() -> (PostgresServer, Arc<PostgresStore>, Client) {
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let client = server.connection().await;
    (server, store, client)
}

fn completing(store: &Arc<PostgresStore>, key: &StoreKey, owner: Token) -> JoinHandle<()> {
    let store = Arc::clone(store);
    let key = key.clone();
    tokio::spawn(async move {
        assert_eq!(
            apply(&*store, &key, complete(owner, RESULT)).await.unwrap(),
            HELD
        );
    })
}

// invariant: standby-missing
#[tokio::test]
async fn a_cut_wait_answers_no_completion_before_a_standby_has_it() {
    let (server, opened, client) = server().await;
    for store in [opened, pooled(&server).await] {
        let key = key(&scope(), 1);
        let owner = token();
        assert!(granted_as(
            1,
            &apply(&*store, &key, claim(owner)).await.unwrap()
        ));
        wait_for_no_standby(&server, &client).await;
        let call = completing(&store, &key, owner);
        let (pid, began) = waiting(&client, None, &call).await;
        client
            .query_one("SELECT pg_cancel_backend($1)", &[&pid])
            .await
            .unwrap();
        // It is on this server, and nowhere else: the store waits again.
        waiting(&client, Some(began), &call).await;
        set_standby(&client, "").await;
        call.await.unwrap();
    }
}

// invariant: standby-missing
#[tokio::test]
async fn what_is_found_settled_is_answered_once_a_standby_has_it() {
    let (server, store, client) = server().await;
    let key = key(&scope(), 1);
    let owner = token();
    assert!(granted_as(
        1,
        &apply(&*store, &key, claim(owner)).await.unwrap()
    ));
    assert_eq!(
        apply(&*store, &key, complete(owner, RESULT)).await.unwrap(),
        HELD
    );
    for question in ["read", "claim", "repeat"] {
        wait_for_no_standby(&server, &client).await;
        // A new session knows the server's new settings; one that was open may learn them a little
        // later.
        let store = PostgresStore::builder(server.url())
            .response_timeout(PATIENCE)
            .without_purge();
        let store = store.connect().await.unwrap();
        let key = key.clone();
        let call = tokio::spawn(async move {
            match question {
                "read" => assert!(store.read(vec![key]).await.remove(0).unwrap().is_some()),
                "claim" => {
                    let reply = apply(&store, &key, claim(token())).await.unwrap();
                    assert!(completed_with(RESULT, &reply), "{reply:?}");
                }
                _ => assert_eq!(
                    apply(&store, &key, complete(owner, RESULT)).await.unwrap(),
                    HELD
                ),
            }
        });
        waiting(&client, None, &call).await;
        set_standby(&client, "").await;
        call.await.unwrap();
    }
}

/// Works in the transaction that it is given, which it ends when its session waits for standbys.
#[derive(Clone, Default)]
struct Pay {
    begun: Arc<Notify>,
    may_end: Arc<Notify>,
}

const STANDBYS: &str = "SELECT current_setting('synchronous_standby_names')";

impl TransactionalHandler<PostgresTransaction> for Pay {
    type Output = ();

    async fn handle(
        &self,
        _: &Message,
        _: &Attempt,
        pay: &mut PostgresTransaction,
    ) -> Result<(), Failure> {
        self.begun.notify_one();
        self.may_end.notified().await;
        while pay
            .query_one(STANDBYS, &[])
            .await?
            .get::<_, String>(0)
            .is_empty()
        {
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}

impl TransactionalHandler<SqlxTransaction> for Pay {
    type Output = ();

    async fn handle(
        &self,
        _: &Message,
        _: &Attempt,
        pay: &mut SqlxTransaction,
    ) -> Result<(), Failure> {
        self.begun.notify_one();
        self.may_end.notified().await;
        while sqlx::query_scalar::<_, String>(STANDBYS)
            .fetch_one(&mut **pay)
            .await?
            .is_empty()
        {
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}

/// Runs a transaction of a handler whose commit has no standby, and cuts two waits short.
async fn cut_twice(
    server: &Postgres,
    store: &Arc<PostgresStore>,
    pay: &Pay,
    payments: Transactional,
) {
    let client = server.connection().await;
    let list = List::of("payments", [("", r#"{"id":1}"#.to_owned())]);
    let gate = Gate::new(unique("t"), Key::json(["id"]), Arc::clone(store)).lease(PATIENCE);
    let consumer = Consumer::new(Listed(Arc::clone(&list)), gate, payments);
    let stop = Arc::clone(&list);
    let call = tokio::spawn(async move {
        consumer
            .run_until(async move { stop.until_acked(1).await })
            .await
    });
    pay.begun.notified().await;
    wait_for_no_standby(server, &client).await;
    pay.may_end.notify_one();
    let mut earlier = None;
    for _ in 0..2 {
        let (pid, began) = waiting(&client, earlier, &call).await;
        client
            .query_one("SELECT pg_cancel_backend($1)", &[&pid])
            .await
            .unwrap();
        earlier = Some(began);
    }
    // The effect is on this server, and nowhere else.
    waiting(&client, earlier, &call).await;
    assert!(list.acked().is_empty());
    set_standby(&client, "").await;
    call.await.unwrap().unwrap();
}

// invariant: standby-missing
#[tokio::test]
async fn cut_waits_ack_no_transaction_before_a_standby_has_it() {
    let (server, store, _) = server().await;
    let own = store.transactions().unwrap();
    let pooled = store.transactions_of(pool(&server));
    for transactions in [own, pooled] {
        let pay = Pay::default();
        cut_twice(
            &server,
            &store,
            &pay,
            Transactional::new(transactions, pay.clone()),
        )
        .await;
    }
}

// invariant: standby-missing
#[tokio::test]
async fn cut_waits_ack_no_sqlx_transaction_before_a_standby_has_it() {
    let (server, store, _) = server().await;
    let pay = Pay::default();
    let pool = sqlx::PgPool::connect(server.url()).await.unwrap();
    let payments = Transactional::new(store.sqlx_transactions(pool), pay.clone());
    cut_twice(&server, &store, &pay, payments).await;
}
