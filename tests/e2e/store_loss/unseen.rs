//! Losses that the scope's descriptor does not show: only records that a process knows to be there show them.

// invariant (all tests): run-after-loss

use oncegate::Completion;
use redis::aio::MultiplexedConnection;

use super::*;

/// The sequence number of the scope in the store.
async fn sequence(store: &dyn Store, scope: &Scope) -> u64 {
    let text = store.descriptor(scope).await.unwrap().expect("the scope is open");
    oncegate::core::store::ScopeDescriptor::parse(scope, &text).unwrap().sequence
}

/// Completes one payment after another, whatever happens to the store, until a claim is refused. Returns why.
async fn complete_until_refused(gate: Gate, completed: Arc<AtomicU64>) -> String {
    loop {
        let id = completed.load(Relaxed);
        match gate.enter(&payment(id)).await {
            Ok(Entry::Granted(lease)) => {
                // What the other server makes of it counts as well.
                drop(lease.complete(&()).await);
                completed.fetch_add(1, Relaxed);
            }
            Ok(_) => drop(completed.fetch_add(1, Relaxed)),
            Err(GateError::Store(error)) if error.class() == "refused" => return error.to_string(),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_lagged_for_a_moment_is_noticed_by_a_process_that_never_pauses() {
    let (mut primary, payments) = (PostgresServer::start().await, Payments::new().await);
    let direct = PostgresStore::connect(primary.url()).await.unwrap();
    direct.create_schema().await.unwrap();
    let standby = PostgresServer::standby_of(&primary).await;
    let front = Proxy::before_address(address(primary.url())).await;
    let url = primary.url().replace(&address(primary.url()), &front.address().to_string());
    let gate = payments.gate(PostgresStore::connect(&url).await.unwrap(), OnStoreLoss::Halt);
    gate.open().await.unwrap();
    caught_up(&primary, &standby).await;
    let completed = Arc::new(AtomicU64::new(0));
    let working = tokio::spawn(complete_until_refused(gate, Arc::clone(&completed)));
    // The lag is shorter than the time between two sequence numbers: it begins just after the process has raised its own.
    let started_at = sequence(&direct, &payments.scope).await;
    until("the sequence number to rise", LIMIT, async || match sequence(&direct, &payments.scope).await {
        same if same == started_at => Err(format!("{same}")),
        _ => Ok(()),
    })
    .await;
    let witness = standby.connection().await;
    witness.batch_execute("ALTER SYSTEM SET primary_conninfo = ''").await.unwrap();
    witness.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let before = completed.load(Relaxed);
    until("the standby to follow no more", LIMIT, async || {
        let followed = "SELECT count(*) FROM pg_stat_wal_receiver";
        let receivers: i64 = witness.query_one(followed, &[]).await.unwrap().get(0);
        if receivers == 0 { Ok(()) } else { Err("it does".to_owned()) }
    })
    .await;
    until_completed(&completed, before + 100).await;
    primary.kill();
    witness.batch_execute("SELECT pg_promote()").await.unwrap();
    front.point_at_address(address(standby.url()));

    let refused = working.await.unwrap();
    assert!(refused.contains("accept-loss"), "{refused}");
}

async fn until_completed(completed: &AtomicU64, count: u64) {
    until("payments to be completed", LIMIT, async || match completed.load(Relaxed) {
        number if number >= count => Ok(()),
        number => Err(format!("{number} are")),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_only_answers_duplicates_notices_that_a_record_which_answered_one_is_gone() {
    let (server, payments) = (RedisServer::start().await, Payments::new().await);
    let connect = async || RedisStore::connect(server.url()).await.unwrap();
    let mut redis = server.connection().await;
    let all = format!("{}:*", payments.scope);
    let keys = async |redis: &mut MultiplexedConnection| -> Vec<String> {
        redis::cmd("KEYS").arg(&all).query_async(redis).await.unwrap()
    };
    let first = payments.gate(connect().await, OnStoreLoss::Halt);
    first.open().await.unwrap();
    let before = keys(&mut redis).await;
    let Ok(Entry::Granted(lease)) = first.enter(&payment(1)).await else { panic!("it is new") };
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    drop(first);
    let after = keys(&mut redis).await;
    let record = after.iter().find(|key| !before.contains(key)).expect("the record");

    let answering = payments.gate(connect().await, OnStoreLoss::Halt);
    answering.open().await.unwrap();
    assert!(matches!(answering.enter(&payment(1)).await, Ok(Entry::Completed(_))));
    // Nothing but a check for losses reads the record again.
    let mut idle_seconds = 0_u64;
    until("a check to read the record", LIMIT, async || {
        let now = redis::cmd("OBJECT").arg("IDLETIME").arg(record).query_async(&mut redis).await.unwrap();
        let before = std::mem::replace(&mut idle_seconds, now);
        if now < before { Ok(()) } else { Err(format!("unread for {now} s")) }
    })
    .await;
    let deleted: u64 = redis::cmd("DEL").arg(record).query_async(&mut redis).await.unwrap();
    assert_eq!(deleted, 1);
    assert!(until_refused(&answering, 1_000_000).await.contains("a completed record is missing"));
}
