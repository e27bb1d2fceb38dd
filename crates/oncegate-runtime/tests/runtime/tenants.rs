//! One tenant has much to do, and the others do not wait for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::{Attempt, Consumer, Field, Key, Message, TenantSource};
use tokio::time::sleep;

use super::list::Listed;
use super::{Bench, Gauge};

fn messages(tenant: &str, count: usize) -> Vec<(&'static str, String)> {
    (0..count)
        .map(|id| ("", format!(r#"{{"id":{id},"tenant":"{tenant}"}}"#)))
        .collect()
}

#[derive(serde::Deserialize)]
struct Order {
    tenant: String,
}

/// How many of each tenant ran at a time at the most, and in which order the handlers ended.
async fn run(bench: &Bench, limit: Option<u32>) -> (BTreeMap<String, usize>, Vec<String>) {
    type Seen = (BTreeMap<String, Arc<Gauge>>, Vec<String>);
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let noted = Arc::clone(&seen);
    let handler = move |message: Message, _: Attempt| {
        let noted = Arc::clone(&noted);
        async move {
            let Order { tenant } = message.json()?;
            let gauge = Arc::clone(noted.lock().unwrap().0.entry(tenant.clone()).or_default());
            gauge.through(sleep(Duration::from_secs(1))).await;
            noted.lock().unwrap().1.push(tenant);
            Ok(())
        }
    };
    let key = Key::json([Field::from("id")]).tenant(TenantSource::json("tenant"));
    let gate = oncegate::Gate::new("tenants", key, Arc::clone(&bench.store)).simulated(7);
    let consumer = Consumer::new(Listed(Arc::clone(&bench.list)), gate, handler)
        .dead_letters(Arc::clone(&bench.letters))
        .observer(Arc::clone(&bench.counters) as _)
        .concurrency(4);
    let consumer = match limit {
        Some(limit) => consumer.tenant_limit(limit),
        None => consumer,
    };
    bench.run(consumer, 44).await.unwrap();
    let (gauges, ended) = &*seen.lock().unwrap();
    let most = |(tenant, gauge): (&String, &Arc<Gauge>)| {
        (
            tenant.clone(),
            gauge.most.load(std::sync::atomic::Ordering::SeqCst),
        )
    };
    (gauges.iter().map(most).collect(), ended.clone())
}

fn crowd() -> Bench {
    Bench::of(messages("big", 40).into_iter().chain(messages("small", 4)))
}

// invariant: tenant-limit
#[tokio::test(start_paused = true)]
async fn a_tenant_runs_up_to_its_limit_while_the_others_go_on() {
    let (most, ended) = run(&crowd(), Some(3)).await;
    assert_eq!(most["big"], 3);
    let last_small = ended.iter().rposition(|tenant| tenant == "small").unwrap();
    assert!(
        last_small < 20,
        "the small tenant waited for the big one: {ended:?}"
    );
    assert_eq!(ended.len(), 44, "every message of every tenant is handled");
}

#[tokio::test(start_paused = true)]
async fn without_a_limit_the_first_come_have_everything() {
    let (most, ended) = run(&crowd(), None).await;
    assert_eq!(most["big"], 4);
    assert!(
        ended[..36].iter().all(|tenant| tenant == "big"),
        "{ended:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_limit_for_tenants_without_a_tenant_source_is_refused() {
    let bench = Bench::of([]);
    let consumer = bench
        .consumer(async |_: Message, _: Attempt| Ok(()))
        .tenant_limit(1);
    let error = consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("`tenant_limit`") && error.to_string().contains("Key::tenant"),
        "{error}"
    );
}
