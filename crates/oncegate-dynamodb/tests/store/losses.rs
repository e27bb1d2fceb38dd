//! Tables that have lost their records: gates notice it, and halt.

// invariant (all tests): run-after-loss

use oncegate_core::key::{Key, Scope};
use oncegate_core::store::Store;
use oncegate_dynamodb::DynamoDbStore;
use oncegate_runtime::{Entry, Gate, GateError, Message, Origin};
use oncegate_servers::{DynamoDbServer, unique};

use super::{client, new_table, until};

fn payment(id: u64) -> Message {
    let payload = format!(r#"{{"id":{id}}}"#);
    let origin = Origin::Other("test".into());
    Message::new("loss", origin, Some(payload.into()))
}

async fn complete(gate: &Gate, id: u64) {
    match gate.enter(&payment(id)).await.unwrap() {
        Entry::Granted(lease) => drop(lease.complete(&()).await),
        other => panic!("{other:?}"),
    }
}

async fn until_refused(gate: &Gate, id: u64) -> String {
    until("the claim to be refused", async || {
        match gate.enter(&payment(id)).await {
            Err(GateError::Store(error)) if error.class() == "refused" => Ok(error.to_string()),
            Ok(Entry::Granted(lease)) => {
                let why = "the loss is not noticed yet";
                lease.release(std::time::Duration::ZERO, false, why).await;
                Err("granted".to_owned())
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

fn gate(scope: &str, store: &DynamoDbStore) -> Gate {
    Gate::new(scope, Key::json(["id"]), store.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_was_made_again_is_noticed() {
    let server = DynamoDbServer::start().await;
    let store = new_table(&server.endpoint()).await;
    let scope = unique("loss");
    let running = gate(&scope, &store);
    running.open().await.unwrap();
    complete(&running, 1).await;
    let delete = client(&server.endpoint());
    let delete = delete.delete_table().table_name(store.table());
    delete.send().await.unwrap();
    store.create_table().await.unwrap();
    let why = until_refused(&running, 1_000_000).await;
    assert!(why.contains("oncegate accept loss"), "{why}");
    // A process that starts later is halted, too: the payment does not run again.
    let late = gate(&scope, &store);
    late.open().await.unwrap();
    assert!(matches!(
        late.enter(&payment(1)).await,
        Err(GateError::Store(_))
    ));
}

/// A table that was restored to a point in time has an earlier sequence number.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_an_earlier_time_is_noticed() {
    let server = DynamoDbServer::start().await;
    let store = new_table(&server.endpoint()).await;
    let scope = unique("loss");
    let running = gate(&scope, &store);
    running.open().await.unwrap();
    let named = Scope::new(&scope).unwrap();
    let earlier = store.descriptor(&named).await.unwrap().unwrap();
    // A process tells an earlier number by the one that its check before the last has seen.
    for id in [1, 2] {
        let before = store.descriptor(&named).await.unwrap();
        complete(&running, id).await;
        until("the sequence number to rise", async || {
            let now = store.descriptor(&named).await.unwrap();
            if now == before {
                Err(format!("{now:?}"))
            } else {
                Ok(())
            }
        })
        .await;
    }
    store.remove(&named, &[]).await.unwrap();
    store.describe(&named, None, &earlier).await.unwrap();
    let why = until_refused(&running, 1_000_000).await;
    assert!(why.contains("oncegate accept loss"), "{why}");
}
