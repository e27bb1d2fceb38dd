//! What a key needs from elsewhere does not come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use async_trait::async_trait;
use oncegate::core::key::{DocumentPlace, Format, KeyError, KeySource, PrepareError, Wanted};
use oncegate::{Attempt, Gate, Key, Message};

use super::{Bench, LEASE, numbered};

/// A format of JSON documents whose registry is away.
#[derive(Debug)]
struct Registered {
    is_away: AtomicBool,
}

#[async_trait]
impl Format for Registered {
    fn document<'m>(
        &self,
        message: &'m dyn KeySource,
        _: Wanted<'_>,
        _: usize,
        _: &mut Vec<u8>,
    ) -> Result<DocumentPlace<'m>, KeyError> {
        if self.is_away.load(SeqCst) {
            return Err(KeyError::NotPrepared);
        }
        Ok(DocumentPlace::Borrowed(
            message.payload().unwrap_or_default(),
        ))
    }

    async fn prepare(&self, _: &(dyn KeySource + Sync), _: usize) -> Result<(), PrepareError> {
        if !self.is_away.load(SeqCst) {
            return Ok(());
        }
        // Its connections hang, now and then.
        tokio::time::sleep(LEASE).await;
        let what = "the registry does not answer".to_owned();
        Err(PrepareError { what })
    }
}

// invariant: registry-away
#[tokio::test(start_paused = true)]
async fn a_registry_that_is_away_holds_up_its_own_route() {
    const MESSAGES: usize = 20;
    let bench = Bench::of(numbered(MESSAGES));
    for id in 0..MESSAGES {
        let payload = format!(r#"{{"id":{id}}}"#);
        bench.list.push("refunds", "", payload);
    }
    let registry = Arc::new(Registered {
        is_away: AtomicBool::new(true),
    });
    let format = Arc::clone(&registry) as Arc<dyn Format>;
    let gate = Gate::new(
        "runtime",
        Key::json(["id"]).format(format),
        Arc::clone(&bench.store),
    )
    .lease(LEASE)
    .simulated(7);
    let succeed = async |_: Message, _: Attempt| Ok(());
    let consumer =
        bench
            .consumer_behind(gate, succeed)
            .route("refunds", bench.gate("refunds"), succeed);
    let monitor = consumer.monitor();
    let list = Arc::clone(&bench.list);
    let watched = async {
        list.until_acked(MESSAGES).await;
        let first = i64::try_from(MESSAGES).unwrap();
        assert!(
            list.acked().iter().all(|place| *place >= first),
            "{:?}",
            list.acked()
        );
        while !monitor
            .health()
            .to_string()
            .contains("the registry does not answer")
        {
            tokio::time::sleep(LEASE).await;
        }
        registry.is_away.store(false, SeqCst);
        list.until_acked(2 * MESSAGES).await;
        assert!(monitor.health().is_ready(), "{}", monitor.health());
    };
    consumer.run_until(watched).await.unwrap();
    let order: Vec<_> = bench.list.acked();
    let orders: Vec<_> = (0..i64::try_from(MESSAGES).unwrap()).collect();
    assert_eq!(order[MESSAGES..], orders, "in their order");
}
