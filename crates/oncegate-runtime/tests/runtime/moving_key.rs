//! A key that is being moved between the servers of its store.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use oncegate::core::key::StoreKey;
use oncegate::core::rules::Reply;
use oncegate::core::store::StoreWrapper;
use oncegate::core::store::{Command, Store, StoreError};
use oncegate::{Attempt, Gate, Key, MemoryStore, Message};

use super::{Bench, LEASE, numbered};

/// A store whose first key is being moved.
#[derive(Debug)]
struct Moving {
    inner: MemoryStore,
    moves: AtomicBool,
    key: OnceLock<StoreKey>,
}

#[async_trait]
impl StoreWrapper for Moving {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let mut replies = Vec::new();
        for command in commands {
            let is_moving = self.moves.load(SeqCst)
                && *self.key.get_or_init(|| command.key.clone()) == command.key;
            replies.push(if is_moving {
                let reason = "the key is being moved between nodes".into();
                Err(StoreError::KeyUnavailable {
                    key: command.key,
                    reason,
                })
            } else {
                self.inner.execute_one(command).await
            });
        }
        replies
    }
}

// invariant: outage-of-one-key
#[tokio::test(start_paused = true)]
async fn a_key_that_is_being_moved_holds_up_no_other() {
    let bench = Bench::of(numbered(20));
    let store = Arc::new(Moving {
        inner: MemoryStore::new(),
        moves: AtomicBool::new(true),
        key: OnceLock::new(),
    });
    let gate = Gate::new("runtime", Key::json(["id"]), Arc::clone(&store))
        .lease(LEASE)
        .simulated(7);
    let consumer = bench.consumer_behind(gate, async |_: Message, _: Attempt| Ok(()));
    let monitor = consumer.monitor();
    let list = Arc::clone(&bench.list);
    let watched = async {
        list.until_acked(19).await;
        assert!(monitor.health().is_ready(), "{}", monitor.health());
        // A move takes seconds. One that broke off is told.
        let mut looks = 0;
        while !monitor.health().to_string().contains("cannot be read") {
            looks += 1;
            assert!(looks < 100, "{}", monitor.health());
            tokio::time::sleep(LEASE).await;
        }
        store.moves.store(false, SeqCst);
        list.until_acked(20).await;
    };
    consumer.run_until(watched).await.unwrap();
}
