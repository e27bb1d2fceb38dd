//! A message whose partition goes to another consumer and comes back.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::admin::Reopened;
use oncegate::core::store::Store as _;
use oncegate::{Attempt, Failure, Message};
use tokio::time::{Instant, sleep};

use super::{Bench, numbered};

#[tokio::test(start_paused = true)]
async fn a_message_that_comes_back_waits_for_no_old_delivery() {
    let bench = Bench::of(numbered(1));
    let begun = Arc::new(Mutex::new(Vec::new()));
    let runs = Arc::clone(&begun);
    let handler = move |message: Message, _: Attempt| {
        runs.lock().unwrap().push(message);
        async { Err::<(), _>(Failure::later(Duration::from_secs(1_800), "closed")) }
    };
    let list = Arc::clone(&bench.list);
    let consumer = bench.consumer(handler);
    let watched = async {
        while begun.lock().unwrap().is_empty() {
            sleep(Duration::from_millis(10)).await;
        }
        let first = begun.lock().unwrap()[0].clone();
        list.take_away(&first);
        // The other consumer handles it.
        let [(key, _)] = &bench.store.records()[..] else {
            panic!("one record")
        };
        let expected = bench
            .store
            .read(vec![key.clone()])
            .await
            .remove(0)
            .unwrap()
            .unwrap()
            .record;
        let opened = oncegate::admin::reopen(&*bench.store, key, &expected)
            .await
            .unwrap();
        assert_eq!(opened, Reopened::Opened);
        bench.complete_elsewhere().await;
        let before = Instant::now();
        list.push_again(&first);
        list.until_acked(1).await;
        assert!(
            before.elapsed() < Duration::from_secs(60),
            "it waited for {:?}",
            before.elapsed()
        );
    };
    consumer.run_until(watched).await.unwrap();
    assert_eq!(
        begun.lock().unwrap().len(),
        1,
        "the answer is the other consumer's"
    );
}
