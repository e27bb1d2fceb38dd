//! Faults of the service and of the store: an unknown outcome stays unknown, and a request that was
//! never read is repeated at once.

use std::sync::atomic::Ordering::Relaxed;

use oncegate_testkit::{LoopbackPort, Proxy as FaultProxy, ProxyMode, Redis, Sent, until};

use super::answers::{LONG_LEASE, RULES, SHORT_LEASE};
use super::raw::{Act, RawService};
use super::{FROM_ANNE, LIMIT, Service, Stage};

/// A service that breaks off has perhaps charged: the next attempt is told so, after the lease.
// invariant: proxy-unknown
#[tokio::test]
async fn a_request_that_was_read_is_unknown_and_the_next_is_marked() {
    for act in [Act::Close, Act::Stall] {
        let service = RawService::start(move |number| if number == 0 { act } else { Act::Answer });
        let service = service.await;
        let timeout = if act == Act::Stall { "2s" } else { "1m" };
        let door = format!("timeout = \"{timeout}\"\n{SHORT_LEASE}{RULES}");
        let stage = Stage::before(service.url(), &door);
        let proxy = stage.start().await;
        let unknown = proxy.pay("k", "{}").await;
        let expected = if act == Act::Close {
            "upstream-broken"
        } else {
            "upstream-too-slow"
        };
        assert_eq!(unknown.problem(), expected);
        assert!(unknown.header("retry-after").is_some());
        let done = proxy.pay_until_done("k", "{}").await;
        assert_eq!((done.status.as_u16(), done.is_replayed()), (201, false));
        let attempts = service.header("oncegate-attempt");
        assert_eq!(attempts[..2], ["1", "2; recovered"]);
        let downstream = service.header("oncegate-key");
        assert!(!downstream[0].is_empty() && downstream[0] == downstream[1]);
        assert!(proxy.pay("k", "{}").await.is_replayed());
        assert_eq!(service.heads.lock().len(), attempts.len());
    }
}

#[tokio::test]
async fn the_statuses_of_gateways_are_unknown() {
    let service = Service::default();
    let server = service.start().await;
    for (lease, is_over) in [(LONG_LEASE, false), (SHORT_LEASE, true)] {
        let door = format!("{lease}{RULES}");
        let stage = Stage::before(format!("http://{}", server.address()), &door);
        let proxy = stage.start().await;
        for status in ["502", "503", "504"] {
            let headers = [FROM_ANNE, &[("x-status", status)]].concat();
            let sent = Sent::post("/pay", status, "{}").headers(&headers);
            assert_eq!(proxy.client().send(sent).await.status.as_str(), status);
            if is_over {
                assert_eq!(proxy.pay_until_done(status, "{}").await.status, 201);
                assert_eq!(service.seen().last().unwrap().attempt, "2; recovered");
            } else {
                assert_eq!(proxy.pay(status, "{}").await.problem(), "in-progress");
            }
        }
    }
}

/// A service that says itself that it has failed is asked again at once.
#[tokio::test]
async fn a_failure_of_the_service_is_repeated_at_once() {
    let service = Service::default();
    let server = service.start().await;
    let door = format!("{LONG_LEASE}{RULES}");
    let stage = Stage::before(format!("http://{}", server.address()), &door);
    let proxy = stage.start().await;
    let headers = [FROM_ANNE, &[("x-status", "500")]].concat();
    let sent = Sent::post("/pay", "k", "{}").headers(&headers);
    assert_eq!(proxy.client().send(sent).await.status, 500);
    assert_eq!(proxy.pay("k", "{}").await.status, 201);
    assert_eq!(service.seen().last().unwrap().attempt, "2");
}

// invariant: proxy-unknown
#[tokio::test]
async fn a_service_that_cannot_be_reached_has_read_nothing() {
    let port = LoopbackPort::reserve();
    let door = format!("{LONG_LEASE}{RULES}");
    let stage = Stage::before(format!("http://{}", port.address()), &door);
    let proxy = stage.start().await;
    for _ in 0..12 {
        let refused = proxy.pay("k", "{}").await;
        assert_eq!(refused.problem(), "upstream-unreachable");
    }
    let service = RawService::start_at(&port.address(), |_| Act::Answer).await;
    let done = proxy.pay("k", "{}").await;
    assert_eq!((done.status.as_u16(), done.is_replayed()), (201, false));
    // More than `max_attempts` failures have not used up an attempt.
    assert_eq!(service.header("oncegate-attempt"), ["1"]);
}

/// Some services close each connection behind its answer and do not say so, as uvicorn and Node do
/// after a while: a request that is sent meanwhile would be unknown, for a lease each time.
// invariant: proxy-unknown
#[tokio::test]
async fn a_service_that_closes_its_connections_costs_no_lease() {
    let service = RawService::start(|_| Act::AnswerAndClose).await;
    let door = format!("{LONG_LEASE}{RULES}");
    let stage = Stage::before(service.url(), &door);
    let proxy = stage.start().await;
    for number in 0..200 {
        let paid = proxy.pay(&format!("k{number}"), "{}").await;
        assert_eq!(paid.status, 201, "{number}: {paid:?}");
    }
    assert_eq!(service.heads.lock().len(), 200);
    assert_eq!(service.connections.load(Relaxed), 200);
}

/// The status has come, so the service has decided; no repetition gets its body.
#[tokio::test]
async fn a_response_that_breaks_off_is_done_and_not_kept() {
    let service = RawService::start(|_| Act::Break).await;
    let stage = Stage::before(service.url(), RULES);
    let proxy = stage.start().await;
    let sent = || Sent::post("/pay", "k", "{}").headers(FROM_ANNE);
    assert!(proxy.client().try_send(sent()).await.is_err());
    assert_eq!(
        proxy.client().send(sent()).await.problem(),
        "response-not-kept"
    );
    assert_eq!(service.heads.lock().len(), 1);
}

#[tokio::test]
async fn without_its_store_the_proxy_refuses_what_it_holds() {
    let service = Service::default();
    let server = service.start().await;
    let redis = Redis::shared().await;
    let between = FaultProxy::before(&redis).await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    let stage = stage.in_redis(between.url());
    let proxy = stage.start().await;
    assert_eq!(proxy.pay("k", "{}").await.status, 201);
    between.set(ProxyMode::Refuse);
    let refused = proxy.pay("other", "{}").await;
    assert_eq!(
        (refused.status.as_u16(), &*refused.problem()),
        (503, "store-unavailable")
    );
    assert_eq!(proxy.pay("k", "{}").await.problem(), "store-unavailable");
    let passed = Sent::post("/x", "k", "{}").headers(FROM_ANNE);
    assert_eq!(proxy.client().send(passed).await.status, 201);
    assert_eq!(service.counts(), [("k".to_owned(), 2)].into());
    between.set(ProxyMode::Pass);
    until("the store to be used again", LIMIT, async || {
        let answer = proxy.pay("k", "{}").await;
        if answer.is_replayed() {
            Ok(())
        } else {
            Err(format!("{answer:?}"))
        }
    })
    .await;
}
