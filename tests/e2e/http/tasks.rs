//! Handlers whose clients go, that take long, or that lose their key; and requests that never get
//! so far.

use std::sync::Arc;
use std::time::Duration;

use oncegate::MemoryStore;
use oncegate_core::testing::fault::{FaultStore, Faults};
use oncegate_testkit::Sent;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::held::HeldStore;
use crate::world::{LIMIT, ORDER, World, headers, settled, told};

// invariant: client-disconnects
#[tokio::test]
async fn a_client_that_goes_away_ends_nothing() {
    let world = World::new().await;
    for (n, client) in [world.http1(), world.http2()].into_iter().enumerate() {
        let key = format!("k{n}");
        let sent_key = key.clone();
        let sent =
            tokio::spawn(async move { client.send(told(&sent_key, &headers("hold"))).await });
        world.work.started(n + 1).await;
        sent.abort();
        world.work.gone(n + 1).await;
    }
    assert_eq!(world.runs().len(), 2);
    world.work.open();
    world.work.finished(2).await;
    for key in ["k0", "k1"] {
        let answer = world.settled(key).await;
        assert!(answer.is_replayed(), "{answer:?}");
    }
    assert_eq!(world.runs(), [(1, false), (1, false)]);
}

// invariant: response-before-completed
#[tokio::test]
async fn a_response_leaves_only_after_its_completion() {
    for what in ["charge", "big", "endless", "fail"] {
        let store = Arc::new(MemoryStore::new());
        let held = HeldStore::endings(&store);
        let brief = Duration::from_millis(50);
        let world = World::over(
            store,
            held.clone(),
            |gate| gate,
            |layer| layer.settle_timeout(brief),
        )
        .await;
        let answer = world.told("k", what).await;
        assert_eq!(
            (answer.status.as_u16(), answer.problem().as_str()),
            (503, "outcome-unknown"),
            "{what}"
        );
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert_eq!(
            world.told("k", what).await.problem(),
            "in-progress",
            "{what}"
        );
        // The task has gone on all the while.
        held.open();
        let answer = world.settled("k").await;
        match what {
            "charge" => assert!(answer.is_replayed() && answer.status == 201),
            "fail" => assert_eq!(answer.problem(), "given-up"),
            _ => assert_eq!(answer.problem(), "response-not-kept"),
        }
        assert_eq!(world.runs().len(), 1, "{what}");
    }
}

#[tokio::test]
async fn a_request_that_lost_its_key_gets_the_winners_response() {
    let world = World::new().await;
    let client = world.http1();
    let loser = tokio::spawn(async move { client.send(told("k", &headers("hold"))).await });
    world.work.started(1).await;
    world.store.lose_everything();
    let winner = world.told("k", "charge").await;
    assert_eq!((winner.status.as_u16(), winner.is_replayed()), (201, false));
    world.work.open();
    let loser = loser.await.unwrap();
    assert_eq!((loser.is_replayed(), loser.body), (true, winner.body));
    assert_eq!(world.watched.total("complete_lost"), 1);
    assert_eq!(world.runs().len(), 2);
}

#[tokio::test]
async fn a_handler_that_runs_too_long_is_dropped_and_then_recovered() {
    let store = Arc::new(MemoryStore::new());
    let short = Duration::from_millis(200);
    let world = World::over(
        store.clone(),
        store,
        |gate| gate.lease(short).max_run(short),
        |layer| layer,
    )
    .await;
    let answer = world.told("k", "hold").await;
    assert_eq!(
        (answer.status.as_u16(), answer.problem().as_str()),
        (503, "outcome-unknown")
    );
    assert_eq!(world.settled("k").await.status, 201);
    assert_eq!(world.runs(), [(1, false), (2, true)]);
    assert_eq!(world.watched.get("handler_runs", "cancelled"), 1);
    assert_eq!(world.watched.get("extra_runs", "discarded"), 1);
}

// invariant: client-disconnects
#[tokio::test]
async fn a_drain_waits_for_handlers_whose_clients_have_gone() {
    let world = World::new().await;
    let client = world.http1();
    let sent = tokio::spawn(async move { client.send(told("k", &headers("hold"))).await });
    world.work.started(1).await;
    sent.abort();
    world.work.gone(1).await;
    let layer = world.layer.clone();
    let drained = tokio::spawn(async move { layer.drain(LIMIT).await });
    // Nothing new begins from then on.
    let refused = async { while world.post("other", ORDER).await.status != 503 {} };
    tokio::time::timeout(LIMIT, refused).await.unwrap();
    assert_eq!(world.post("other", ORDER).await.problem(), "overloaded");
    assert!(!drained.is_finished());
    world.work.open();
    assert_eq!(drained.await.unwrap(), 0);
    assert!(world.all_completed());
}

#[tokio::test]
async fn a_drain_waits_for_a_request_that_is_being_claimed() {
    let store = Arc::new(MemoryStore::new());
    let held = HeldStore::claims(&store);
    let world = World::over(
        store,
        held.clone(),
        |gate| gate,
        |layer| layer.claim_timeout(LIMIT),
    )
    .await;
    let client = world.http1();
    let sent = tokio::spawn(async move { client.send(told("k", &headers("charge"))).await });
    held.seen().await;
    let layer = world.layer.clone();
    let drained = tokio::spawn(async move { layer.drain(LIMIT).await });
    let refused = async {
        // What came before the drain waits for its claim.
        let other = world.http1();
        while tokio::time::timeout(
            Duration::from_millis(20),
            other.send(told("l", &headers("charge"))),
        )
        .await
        .is_err()
        {}
    };
    tokio::time::timeout(LIMIT, refused).await.unwrap();
    assert!(!drained.is_finished());
    held.open();
    assert_eq!(drained.await.unwrap(), 0);
    assert_eq!(sent.await.unwrap().status, 201);
    assert!(world.all_completed());
}

#[tokio::test]
async fn a_drain_cuts_off_what_does_not_end() {
    let store = Arc::new(MemoryStore::new());
    let short = Duration::from_millis(200);
    let world = World::over(
        Arc::clone(&store),
        Arc::clone(&store),
        |gate| gate.lease(short),
        |layer| layer,
    )
    .await;
    let client = world.http1();
    let sent = tokio::spawn(async move { client.send(told("k", &headers("hold"))).await });
    world.work.started(1).await;
    assert_eq!(world.layer.drain(Duration::ZERO).await, 1);
    assert_eq!(sent.await.unwrap().problem(), "outcome-unknown");
    let successor = World::over(
        Arc::clone(&store),
        store,
        |gate| gate.lease(short),
        |layer| layer,
    )
    .await;
    assert_eq!(successor.settled("k").await.status, 201);
    assert_eq!(successor.runs(), [(2, true)]);
}

#[tokio::test]
async fn a_request_that_keeps_ending_its_process_is_given_up_unrun() {
    let store = Arc::new(MemoryStore::new());
    let short = Duration::from_millis(200);
    for attempt in 1..=2 {
        let world = World::over(
            Arc::clone(&store),
            Arc::clone(&store),
            |gate| gate.lease(short),
            |layer| layer,
        )
        .await;
        let client = world.http1();
        let sent = tokio::spawn(async move { settled(&client, told("k", &headers("hold"))).await });
        world.work.started(1).await;
        world.layer.drain(Duration::ZERO).await;
        sent.abort();
        assert_eq!(world.runs(), [(attempt, attempt > 1)]);
    }
    let world = World::over(
        Arc::clone(&store),
        store,
        |gate| gate.lease(short),
        |layer| layer.max_attempts(2),
    )
    .await;
    let answer = world.settled("k").await;
    assert_eq!(
        (answer.status.as_u16(), answer.problem().as_str()),
        (500, "attempts-exhausted")
    );
    assert_eq!(world.runs(), []);
}

#[tokio::test]
async fn a_handler_that_stops_in_a_store_outage_uses_up_no_attempt() {
    let store = Arc::new(MemoryStore::new());
    let faulty = Arc::new(FaultStore::new(
        Arc::clone(&store) as _,
        Faults::default(),
        1,
    ));
    let short = Duration::from_millis(500);
    let world = World::over(
        store,
        Arc::clone(&faulty),
        |gate| gate.lease(short),
        |layer| layer,
    )
    .await;
    let client = world.http1();
    let sent = tokio::spawn(async move { client.send(told("k", &headers("obey"))).await });
    world.work.started(1).await;
    faulty.begin_outage();
    assert_eq!(sent.await.unwrap().status, 500);
    faulty.end_outage();
    world.released().await;
    assert_eq!(world.settled("k").await.status, 201);
    assert_eq!(world.runs(), [(1, false), (1, false)]);
}

#[tokio::test]
async fn a_handler_gets_keys_for_downstream_and_a_fencing_token() {
    let store = Arc::new(MemoryStore::new());
    let world = World::over(store.clone(), store, |gate| gate.fenced(), |layer| layer).await;
    let mut told = Vec::new();
    for user in ["one", "one", "two"] {
        let headers = [
            ("content-type", "application/json"),
            ("x-do", "tell"),
            ("x-user", user),
        ];
        let answer = world
            .http1()
            .send(Sent::post("/charges", "k", ORDER).headers(&headers))
            .await;
        let text = String::from_utf8(answer.body.to_vec()).unwrap();
        let (key, fencing_token) = text.split_once(' ').unwrap();
        told.push((key.to_owned(), fencing_token.parse::<u64>().unwrap()));
    }
    assert_eq!(told[0].0, told[1].0, "two attempts of one request");
    assert_ne!(told[0].0, told[2].0, "the same key of another caller");
    assert!(told[0].1 < told[1].1, "the fencing token grows: {told:?}");
}

#[tokio::test]
async fn no_more_handlers_run_than_allowed() {
    let world = World::with(|layer| layer.max_in_flight(1)).await;
    let client = world.http2();
    let first = tokio::spawn(async move { client.send(told("first", &headers("hold"))).await });
    world.work.started(1).await;
    let claims = world.watched.total("claims");
    let answer = world.told("second", "charge").await;
    assert_eq!(
        (answer.status.as_u16(), answer.problem().as_str()),
        (503, "overloaded")
    );
    assert_eq!(
        world.watched.total("claims"),
        claims,
        "what cannot run is not claimed"
    );
    world.work.open();
    assert_eq!(first.await.unwrap().status, 201);
    assert_eq!(world.settled("second").await.status, 201);
    assert_eq!(world.runs().len(), 2);
}

/// Writes to the server by hand, and returns the first line of each answer.
async fn by_hand(world: &World, head: &str, body: &str) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(world.server.address()).await.unwrap();
    let head =
        format!("POST /charges HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\n{head}\r\n\r\n{body}");
    stream.write_all(head.as_bytes()).await.unwrap();
    let line = first_line(&mut stream).await;
    (stream, line)
}

async fn first_line(stream: &mut TcpStream) -> String {
    let mut read = Vec::new();
    while !read.ends_with(b"\r\n") {
        match stream.read_u8().await {
            Ok(byte) => read.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(read).unwrap().trim_end().to_owned()
}

#[tokio::test]
async fn a_body_is_read_before_the_claim() {
    let world = World::with(|layer| layer.request_timeout(Duration::from_millis(200))).await;
    let (_stream, line) = by_hand(&world, "content-length: 10", "12345").await;
    assert_eq!(line, "HTTP/1.1 408 Request Timeout");
    let (_stream, line) = by_hand(&world, "content-length: 2000000", "").await;
    assert_eq!(line, "HTTP/1.1 413 Payload Too Large");
    let chunk = format!("{:x}\r\n{}\r\n", 1_048_577, "x".repeat(1_048_577));
    let (_stream, line) = by_hand(&world, "transfer-encoding: chunked", &chunk).await;
    assert_eq!(line, "HTTP/1.1 413 Payload Too Large");
    let mut stream = TcpStream::connect(world.server.address()).await.unwrap();
    let head =
        b"POST /charges HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\ncontent-length: 10\r\n\r\n123";
    stream.write_all(head).await.unwrap();
    stream.shutdown().await.unwrap();
    let line = first_line(&mut stream).await;
    assert!(
        matches!(line.as_str(), "" | "HTTP/1.1 400 Bad Request"),
        "{line}"
    );
    assert_eq!((world.watched.total("claims"), world.runs().len()), (0, 0));
}

#[tokio::test]
async fn a_client_learns_that_its_connection_is_closed() {
    let world = World::new().await;
    for (head, expected) in [
        (
            "x-user: unauthenticated\r\ncontent-length: 9",
            "HTTP/1.1 401 Unauthorized",
        ),
        ("content-length: 2000000", "HTTP/1.1 413 Payload Too Large"),
    ] {
        let (mut stream, line) = by_hand(&world, head, "").await;
        assert_eq!(line, expected);
        let mut headers = Vec::new();
        while let Some(header) =
            Some(first_line(&mut stream).await).filter(|header| !header.is_empty())
        {
            headers.push(header.to_ascii_lowercase());
        }
        assert!(
            headers.contains(&"connection: close".to_owned()),
            "{headers:?}"
        );
    }
    // Here the body has come, and the connection stays.
    let (_stream, line) = by_hand(&world, "x-user: unauthenticated\r\ncontent-length: 0", "").await;
    assert_eq!(line, "HTTP/1.1 401 Unauthorized");
}

#[tokio::test]
async fn a_client_that_asks_before_it_sends_is_told_to_go_on() {
    let world = World::new().await;
    let (mut stream, line) = by_hand(&world, "content-length: 2\r\nexpect: 100-continue", "").await;
    assert_eq!(line, "HTTP/1.1 100 Continue");
    assert_eq!(first_line(&mut stream).await, "");
    stream.write_all(b"{}").await.unwrap();
    assert_eq!(first_line(&mut stream).await, "HTTP/1.1 201 Created");
}

#[tokio::test]
async fn the_largest_body_is_a_choice() {
    let world = World::with(|layer| layer.max_request_bytes(10)).await;
    for (size, status) in [(10, 201), (11, 413)] {
        let body = "1".repeat(size);
        let key = format!("k{size}");
        assert_eq!(
            world
                .http2()
                .send(Sent::post("/charges", &key, &body))
                .await
                .status
                .as_u16(),
            status
        );
    }
}
