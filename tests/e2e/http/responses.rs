//! What becomes of the key, by what the handler answers.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt as _;
use oncegate::MemoryStore;
use oncegate::core::record::{State, Token};
use oncegate::core::rules::Operation;
use oncegate::core::store::{Command, Store as _};
use oncegate::results::ObjectResults;
use oncegate_testkit::Sent;

use crate::world::{ORDER, World, headers, told};

#[tokio::test]
async fn what_another_attempt_may_change_is_not_kept() {
    let world = World::new().await;
    // About the caller or the moment: the request was not handled, and no attempt is used up.
    for (n, status) in ["401", "403", "409", "425", "429"].into_iter().enumerate() {
        let key = format!("k{n}");
        let before = world.runs().len();
        assert_eq!(world.told(&key, status).await.status.as_str(), status);
        let again = world.told(&key, "charge").await;
        assert_eq!(
            (again.status.as_u16(), again.is_replayed()),
            (201, false),
            "{status}"
        );
        assert_eq!(world.runs()[before..], [(1, false), (1, false)], "{status}");
    }
    // A failure: the attempt counts.
    for status in ["500", "502", "503", "panic", "retry"] {
        let before = world.runs().len();
        world.told(status, status).await;
        let again = world.told(status, "charge").await;
        assert_eq!(
            (again.status.as_u16(), again.is_replayed()),
            (201, false),
            "{status}"
        );
        assert_eq!(world.runs()[before..], [(1, false), (2, false)], "{status}");
    }
    // A result, good or bad.
    for status in ["200", "204", "302", "400", "404", "410", "422", "complete"] {
        let first = world.told(status, status).await;
        let again = world.told(status, "charge").await;
        assert!(again.is_replayed(), "{status}");
        assert_eq!(
            (again.status, &again.body),
            (first.status, &first.body),
            "{status}"
        );
    }
}

// invariant: dropped-by-time-limit
#[tokio::test]
async fn a_time_limit_inside_of_the_layer_leaves_the_outcome_unknown() {
    let store = Arc::new(MemoryStore::new());
    let short = Duration::from_millis(200);
    let world = World::over(
        store.clone(),
        store,
        |gate| gate.lease(short),
        |layer| layer,
    )
    .await;
    // The answers of a `TimeoutLayer`: its own, and the one for a server that has called another.
    for (number, status) in [408, 504].into_iter().enumerate() {
        let key = status.to_string();
        let before = world.runs().len();
        assert_eq!(world.told(&key, &key).await.status, status);
        assert_eq!(world.settled(&key).await.status, 201);
        let runs = &world.runs()[before..];
        assert_eq!(
            runs,
            [(1, false), (2, true)],
            "{status}: the dropped handler may have had its effect"
        );
        let counted = number as u64 + 1;
        assert_eq!(world.watched.get("handler_runs", "cancelled"), counted);
        assert_eq!(world.watched.get("extra_runs", "crash_takeover"), counted);
        assert_eq!(world.watched.get("answers", "outcome-unknown"), counted);
    }
}

#[tokio::test]
async fn a_change_of_protocols_is_not_replayed() {
    let world = World::new().await;
    let switched = world
        .http1()
        .begin(told("k", &headers("101")))
        .await
        .unwrap();
    assert_eq!(switched.status(), 101);
    let again = world.told("k", "charge").await;
    assert_eq!(
        (again.status.as_u16(), again.problem().as_str()),
        (409, "response-not-kept")
    );
    assert_eq!(world.runs().len(), 1);
}

/// Completes a record again, with `change` applied to its stored response, as a program in another
/// language might.
async fn rewrite(store: &MemoryStore, change: impl Fn(&str) -> String) {
    let [(key, record)] = &store.records()[..] else {
        panic!("one record")
    };
    let State::Completed { result, .. } = &record.state else {
        panic!("it is completed")
    };
    let result = change(std::str::from_utf8(result).unwrap()).into();
    let token = Token::from_bits(7);
    let retention = Duration::from_secs(3_600);
    let fingerprint = record.fingerprint;
    let operations = [
        Operation::Reopen {
            expected: record.clone(),
        },
        Operation::Claim {
            token,
            lease: retention,
            fingerprint,
            fenced: false,
            longest_lease: retention,
        },
        Operation::Complete {
            token,
            fingerprint,
            result,
            retention,
        },
    ];
    for operation in operations {
        let command = Command {
            key: key.clone(),
            operation,
        };
        for reply in store.execute(vec![command]).await {
            reply.unwrap();
        }
    }
}

#[tokio::test]
async fn a_foreign_record_is_replayed_without_connection_headers() {
    let world = World::new().await;
    let first = world.told("k", "charge").await;
    rewrite(&world.store, |stored| {
        let lines =
            "content-length: 3\r\ntransfer-encoding: chunked\r\nconnection: x-hop\r\nx-hop: 1\r\n";
        stored.replacen("content-type", &format!("{lines}content-type"), 1)
    })
    .await;
    let again = world.told("k", "charge").await;
    assert_eq!((again.is_replayed(), &again.body), (true, &first.body));
    assert_eq!(again.header("x-hop"), None);
    assert_eq!(again.header("location"), first.header("location"));
}

#[tokio::test]
async fn a_panic_is_a_failed_attempt() {
    let world = World::new().await;
    for client in [world.http1(), world.http2()] {
        let answer = client.send(told("k", &headers("panic"))).await;
        assert_eq!(
            (answer.status.as_u16(), answer.problem().as_str()),
            (500, "handler-panicked")
        );
    }
    assert_eq!(world.runs(), [(1, false), (2, false)]);
    assert_eq!(world.watched.get("handler_runs", "panicked"), 2);
}

#[tokio::test]
async fn used_up_attempts_are_the_end() {
    let world = World::with(|layer| layer.max_attempts(2)).await;
    assert_eq!(world.told("k", "500").await.body, "run 1");
    assert_eq!(world.told("k", "502").await.body, "run 2");
    for _ in 0..2 {
        let answer = world.told("k", "charge").await;
        assert_eq!(
            (answer.status.as_u16(), answer.problem().as_str()),
            (502, "attempts-exhausted")
        );
    }
    assert_eq!(world.runs().len(), 2);
    assert_eq!(world.told("given-up", "fail").await.body, "never");
    let answer = world.told("given-up", "charge").await;
    assert_eq!(
        (answer.status.as_u16(), answer.problem().as_str()),
        (410, "given-up")
    );
    assert_eq!(world.runs().len(), 3);
}

#[tokio::test]
async fn everything_is_kept_by_choice() {
    let world = World::with(|layer| layer.keep_everything()).await;
    for what in ["500", "429", "panic"] {
        let first = world.told(what, what).await;
        let again = world.told(what, "charge").await;
        assert!(again.is_replayed(), "{what}");
        assert_eq!(
            (again.status, &again.body),
            (first.status, &first.body),
            "{what}"
        );
    }
    assert_eq!(world.runs().len(), 3);
}

// invariant: second-run-of-request
#[tokio::test]
async fn a_response_that_is_too_large_is_streamed_once() {
    let world = World::new().await;
    for (key, client) in [("k1", world.http1()), ("k2", world.http2())] {
        let before = world.runs().len();
        assert_eq!(
            client.send(told(key, &headers("big"))).await.body.len(),
            100_000
        );
        let again = client.send(told(key, &headers("big"))).await;
        assert_eq!(
            (again.status.as_u16(), again.problem().as_str()),
            (409, "response-not-kept")
        );
        assert_eq!(again.header("retry-after"), None);
        assert_eq!(world.runs().len(), before + 1);
    }
    assert_eq!(world.watched.total("results_not_kept"), 2);
}

#[tokio::test]
async fn a_response_of_any_size_up_to_the_limit_is_kept() {
    let world = World::with(|layer| layer.max_response_bytes(1_000)).await;
    for size in [0, 1, 999, 1_000, 1_001] {
        let key = format!("k{size}");
        let body = "x".repeat(size);
        let sent = Sent::post("/charges", &key, &body).headers(&[("x-do", "echo")]);
        assert_eq!(world.http1().send(sent).await.body.len(), size);
        let again = world.http1().send(sent).await;
        if size <= 1_000 {
            assert_eq!((again.is_replayed(), again.body.len()), (true, size));
        } else {
            assert_eq!(again.problem(), "response-not-kept");
        }
    }
}

// invariant: response-before-completed
#[tokio::test]
async fn a_response_without_end_is_recorded_before_its_first_byte() {
    // Server-sent events are known by their type; others by that they do not come to an end.
    for (what, patience) in [
        ("endless", Duration::from_secs(3_600)),
        ("drip", Duration::ZERO),
    ] {
        let world = World::with(|layer| layer.response_patience(patience)).await;
        for (n, client) in [world.http1(), world.http2()].iter().enumerate() {
            let key = format!("k{n}");
            let response = client.begin(told(&key, &headers(what))).await.unwrap();
            assert!(
                world.all_completed(),
                "the head has come, and nothing is recorded"
            );
            let mut body = response.into_body();
            assert!(
                !body
                    .frame()
                    .await
                    .unwrap()
                    .unwrap()
                    .into_data()
                    .unwrap()
                    .is_empty()
            );
            // It goes on; its repetition does not run.
            let again = client.send(told(&key, &headers(what))).await;
            assert_eq!(again.problem(), "response-not-kept", "{what}");
            assert_eq!(world.runs().len(), n + 1);
        }
        world.work.open();
    }
}

#[tokio::test]
async fn a_response_that_breaks_off_does_not_run_again() {
    let world = World::new().await;
    for (n, what) in ["break", "break-by-panic"].into_iter().enumerate() {
        let broken = world.http1().try_send(told(what, &headers(what))).await;
        assert!(broken.is_err(), "the client sees that it is broken: {what}");
        assert_eq!(
            world.told(what, "charge").await.problem(),
            "response-not-kept",
            "{what}"
        );
        assert_eq!(world.runs().len(), n + 1, "{what}");
    }
}

#[tokio::test]
async fn a_limit_of_responses_above_that_of_the_gate_is_refused() {
    let world = World::with(|layer| layer.max_response_bytes(64 * 1024 + 1)).await;
    let refused = world.layer.open().await.unwrap_err().to_string();
    assert!(refused.contains("max_result_bytes"), "{refused}");
    assert_eq!(world.post("k", ORDER).await.problem(), "misconfigured");
}

#[tokio::test]
async fn a_response_larger_than_the_gate_keeps_does_not_run_again() {
    let store = std::sync::Arc::new(oncegate::MemoryStore::new());
    let world = World::over(
        store.clone(),
        store,
        |gate| gate.max_result_bytes(100),
        |layer| layer,
    )
    .await;
    let first = world.post("k", ORDER).await;
    assert_eq!(first.status, 201);
    assert_eq!(world.post("k", ORDER).await.problem(), "response-not-kept");
    assert_eq!(world.runs().len(), 1);
}

#[tokio::test]
async fn a_response_too_large_for_a_record_is_in_the_result_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(MemoryStore::new());
    let results = ObjectResults::folder(folder.path()).unwrap();
    let world = World::over(
        Arc::clone(&store),
        store,
        |gate| gate.large_results(results).max_result_bytes(1_000),
        |layer| layer.max_response_bytes(1024 * 1024),
    )
    .await;
    let first = world.told("k", "big").await;
    let again = world.told("k", "charge").await;
    assert!(again.is_replayed() && first.body.len() == 100_000);
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    let [(_, record)] = &world.store.records()[..] else {
        panic!("one record")
    };
    assert!(
        matches!(&record.state, State::Completed { result, .. } if result.len() < 1_000),
        "{record:?}"
    );

    // What the result store has lost is not kept, and is not run again.
    std::fs::remove_dir_all(folder.path()).unwrap();
    let lost = world.told("k", "charge").await;
    assert_eq!(
        (lost.status.as_u16(), lost.problem().as_str()),
        (409, "response-not-kept")
    );
    assert_eq!(world.runs(), [(1, false)]);
    assert_eq!(world.watched.total("results_lost"), 1);
}
