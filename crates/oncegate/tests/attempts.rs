//! What uses up an attempt, and what does not.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

#[path = "runtime/list.rs"]
#[allow(dead_code, reason = "shared with the tests of the runtime")]
mod list;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use list::{Letters, List, Listed};
use oncegate::core::testing::fault::{FaultStore, Faults};
use oncegate::{Consumer, Failure, Gate, Key, MemoryStore, Message};

const LEASE: Duration = Duration::from_secs(1);
/// How many runs an outage cuts short: more than the message has attempts.
const OUTAGES: usize = 5;
const MAX_ATTEMPTS: u32 = 2;

#[tokio::test(start_paused = true)]
async fn an_outage_uses_up_no_attempt() {
    let store = Arc::new(FaultStore::new(Arc::new(MemoryStore::new()), Faults::default(), 1));
    let list = List::of("orders", [("", r#"{"id":1}"#.to_owned())]);
    let (letters, attempts) = (Arc::new(Letters::default()), Arc::new(Mutex::new(Vec::new())));
    let handler = {
        let (store, attempts) = (Arc::clone(&store), Arc::clone(&attempts));
        move |message: Message| {
            let (store, attempts) = (Arc::clone(&store), Arc::clone(&attempts));
            async move {
                let outages = {
                    let mut attempts = attempts.lock().unwrap();
                    attempts.push(message.attempt());
                    attempts.len()
                };
                if outages > OUTAGES {
                    return Ok(());
                }
                // No heartbeat comes through, so the run is told to stop; it gives up in good order.
                store.begin_outage();
                message.cancelled().await;
                store.end_outage();
                Err(Failure::retry("cut short"))
            }
        }
    };
    let gate = Gate::new("attempts", Key::json(["id"]), Arc::clone(&store)).lease(LEASE).simulated(7);
    let consumer = Consumer::new(Listed(Arc::clone(&list)), gate, handler)
        .max_attempts(MAX_ATTEMPTS)
        .dead_letters(Arc::clone(&letters));
    consumer.run_until(async { list.until_acked(1).await }).await.unwrap();
    assert_eq!(letters.causes(), [""; 0], "nothing was given up");
    assert_eq!(*attempts.lock().unwrap(), [1; OUTAGES + 1]);
}
