//! Proxies that are killed while requests run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use oncegate_testing::judge_effects;
use oncegate_testkit::{HttpClient, LoopbackPort, Sent, until};

use super::answers::{RULES, SHORT_LEASE};
use super::{FROM_ANNE, LIMIT, Service, Stage};

// invariant: proxy-second-effect
#[tokio::test]
async fn a_proxy_that_is_killed_in_a_request_loses_nothing() {
    let service = Service::default();
    let server = service.start().await;
    let door = format!("{SHORT_LEASE}{RULES}");
    let stage = Stage::before(format!("http://{}", server.address()), &door);
    let mut proxy = stage.start().await;
    let address = proxy.address;
    let held = tokio::spawn(async move {
        let headers = [FROM_ANNE, &[("x-hold", "1")]].concat();
        let sent = Sent::post("/pay", "k", "{}").headers(&headers);
        HttpClient::http1(address).try_send(sent).await
    });
    service.until_seen(1).await;
    proxy.process.kill();
    assert!(held.await.unwrap().is_err());
    let proxy = stage.start().await;
    let done = proxy.pay_until_done("k", "{}").await;
    assert_eq!((done.status.as_u16(), done.is_replayed()), (201, false));
    assert!(proxy.pay("k", "{}").await.is_replayed());
    let attempts: Vec<String> = service
        .seen()
        .into_iter()
        .map(|seen| seen.attempt)
        .collect();
    assert_eq!(attempts[..2], ["1", "2; recovered"]);
}

/// Two proxies over one store, one of which is killed again and again: each payment is there, and a
/// second effect of a payment is marked as a second attempt after a kill.
// invariant: proxy-second-effect
#[tokio::test]
async fn proxies_that_are_killed_in_turn_repeat_nothing_unmarked() {
    const PAYMENTS: usize = 120;
    const KILLS: usize = 6;
    let service = Service::default();
    let server = service.start().await;
    let door = format!("{SHORT_LEASE}{RULES}");
    let stage = Stage::before(format!("http://{}", server.address()), &door);
    let ports = [LoopbackPort::reserve(), LoopbackPort::reserve()];
    let numbers = [ports[0].number(), ports[1].number()];
    let done = AtomicUsize::new(0);
    let mut proxies = Vec::new();
    for number in numbers {
        proxies.push(stage.start_at(number).await);
    }
    let paying = futures_util::future::join_all((0..8).map(|client| {
        let done = &done;
        async move {
            for payment in (client..PAYMENTS).step_by(8) {
                pay(&numbers, &format!("k{payment}")).await;
                done.fetch_add(1, Relaxed);
            }
        }
    }));
    let killing = async {
        for kill in 1..=KILLS {
            // Each kill comes in the middle of the work.
            let wanted = (PAYMENTS - 8) * kill / (KILLS + 1);
            until("payments between two kills", LIMIT, async || {
                let done = done.load(Relaxed);
                if done >= wanted {
                    Ok(())
                } else {
                    Err(format!("{done} of {wanted}"))
                }
            })
            .await;
            proxies[kill % 2].process.kill();
            proxies[kill % 2] = stage.start_at(numbers[kill % 2]).await;
        }
    };
    futures_util::future::join(paying, killing).await;
    let seen = service.seen();
    let wanted: BTreeSet<String> = (0..PAYMENTS).map(|payment| format!("k{payment}")).collect();
    let mut happened: BTreeMap<String, u64> = BTreeMap::new();
    let mut marked: BTreeMap<String, u64> = BTreeMap::new();
    for seen in seen {
        *happened.entry(seen.key.clone()).or_default() += 1;
        *marked.entry(seen.key).or_default() += u64::from(seen.attempt.ends_with("; recovered"));
    }
    let found = judge_effects(&wanted, &BTreeSet::new(), &happened, |key| {
        marked.get(key).copied().unwrap_or_default()
    });
    assert!(
        found.lost.is_empty() && found.unasked.is_empty(),
        "{found:?}"
    );
    assert_eq!(found.unexplained().count(), 0, "{found:?}\n{}", stage.log());
    // A kill can break off one request of each client.
    assert!(found.second_effects() <= (KILLS * 8) as u64, "{found:?}");
}

/// Repeats a payment at both proxies in turn, until one answers it.
async fn pay(ports: &[u16; 2], key: &str) {
    let mut next = 0;
    until("the payment to be done", LIMIT, async || {
        next += 1;
        let client = HttpClient::http1(([127, 0, 0, 1], ports[next % 2]).into());
        let sent = Sent::post("/pay", key, "{}").headers(FROM_ANNE);
        let answer = client.try_send(sent).await?;
        if answer.status == 201 {
            Ok(())
        } else {
            Err(format!("{answer:?}"))
        }
    })
    .await;
}
