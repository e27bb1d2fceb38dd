//! Clocks that are wrong: those of machines, and that of answers.

// invariant (all tests): store-time-bounds

use std::time::Duration;

use oncegate_core::rules::{Operation, Verdict};
use oncegate_core::store::StoreError;
use oncegate_dynamodb::DynamoDbStore;
use oncegate_servers::DynamoDbServer;

use super::faults::Stage;
use super::{
    APPLIED, apply, builder, claim, complete, granted, new_key, new_table, new_token, verdict,
};

/// A store whose machine's wall clock is wrong by so many seconds.
async fn with_wall(server: &DynamoDbServer, table: &str, seconds: i64) -> DynamoDbStore {
    let store = builder(&server.endpoint(), table).wall_clock_off_by(seconds);
    store.connect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_wrong_by_minutes_takes_no_lease_over() {
    let server = DynamoDbServer::start().await;
    let right = new_table(&server.endpoint()).await;
    for seconds in [-240, 240] {
        let wrong = with_wall(&server, right.table(), seconds).await;
        for (owner, other) in [(&right, &wrong), (&wrong, &right)] {
            let key = new_key();
            let token = new_token();
            let operation = Operation::Claim {
                token,
                lease: Duration::from_secs(60),
                fingerprint: None,
                fenced: false,
                longest_lease: Duration::from_secs(60),
            };
            granted(apply(owner, &key, operation).await);
            let busy = verdict(apply(other, &key, claim(new_token())).await);
            let Verdict::Busy { retry_in } = busy else {
                panic!("{seconds} s: {busy:?}");
            };
            // By the machines' clocks it would be minutes more, or over already.
            assert!(
                retry_in <= Duration::from_secs(120),
                "{seconds} s: {retry_in:?}"
            );
            let completed = apply(owner, &key, complete(token, "done")).await;
            assert_eq!(completed.unwrap(), APPLIED);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_differ_by_more_than_a_signature_may_are_refused() {
    let server = DynamoDbServer::start().await;
    let right = new_table(&server.endpoint()).await;
    for seconds in [-600, 600] {
        let wrong = with_wall(&server, right.table(), seconds).await;
        refuses(&wrong).await;
        let warnings = oncegate_core::store::Store::check(&wrong)
            .await
            .unwrap()
            .warnings;
        assert!(
            warnings.iter().any(|one| one.contains("clock")),
            "{warnings:?}"
        );
    }
}

/// A proxy that lies about the time would make a process take over leases that are alive.
#[tokio::test(flavor = "multi_thread")]
async fn answers_that_are_wrong_by_minutes_take_no_lease_over() {
    let stage = Stage::set().await;
    let right = new_table(&stage.server.endpoint()).await;
    for seconds in [-600, 600] {
        stage.proxy.move_dates(seconds);
        let misled = builder(&stage.proxy.endpoint(), right.table());
        let misled = misled.connect().await.unwrap();
        let key = new_key();
        let token = new_token();
        granted(apply(&right, &key, claim(token)).await);
        refuses(&misled).await;
        let completed = apply(&right, &key, complete(token, "done")).await;
        assert_eq!(completed.unwrap(), APPLIED);
        // Its answers are right again: so is it.
        stage.proxy.move_dates(0);
        super::until("the store to know the time again", async || {
            match apply(&misled, &new_key(), claim(new_token())).await {
                Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        })
        .await;
    }
}

async fn refuses(store: &DynamoDbStore) {
    match apply(store, &new_key(), claim(new_token())).await {
        Err(StoreError::Refused { reason }) => assert!(reason.contains("clock"), "{reason}"),
        other => panic!("{other:?}"),
    }
}
