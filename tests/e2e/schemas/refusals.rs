//! Schemas that a registry refuses, or that nothing can be done with: the message that names one is
//! a bad payload, and holds up nothing behind it. And a registry that knows a schema late.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use oncegate::core::key::{CompiledKey, Key, KeyInput, Scope};
use oncegate::schema::{Registry, SchemaFormat};
use oncegate_testkit::{HttpServer, SchemaRegistry};

use super::python;

/// Within this time, a schema that cannot be had holds up nothing any more.
const SOON: Duration = Duration::from_secs(30);

fn reading(url: &str) -> CompiledKey {
    let format = Arc::new(SchemaFormat::registry(Registry::new(url)).unwrap());
    let key = Key::json(["order_id"]).format(format);
    key.compile(&Scope::new("billing").unwrap()).unwrap()
}

fn framed(id: u32, body: &[u8]) -> Vec<u8> {
    [&[0_u8][..], &id.to_be_bytes(), body].concat()
}

/// Prepares a message. Returns the kind of its error, or nothing when it has a key.
async fn kind(key: &CompiledKey, payload: &[u8]) -> Option<&'static str> {
    let input = KeyInput::payload(payload);
    let begun = Instant::now();
    key.prepare(&input).await.unwrap();
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    key.derive("orders", &input).err().map(|error| error.kind())
}

#[tokio::test]
async fn what_a_real_registry_does_not_give_is_a_bad_payload() {
    let registry = SchemaRegistry::start().await;
    let lines = python("register.py", &[&registry.url()]).await;
    let ids: HashMap<String, u32> = serde_json::from_str(&lines[0]).unwrap();
    let key = reading(&registry.url());
    // Of GUIDs, this registry answers "not found" with a code of its own.
    assert_eq!(kind(&key, &[1; 24]).await, Some("unusable_schema"));
    // It has ended the process.
    let deep = framed(ids["deep"], b"\x02\x02\x0a\x01x");
    assert_eq!(kind(&key, &deep).await, Some("unusable_schema"));
    let money = framed(ids["money"], b"\0\x0a\x03A-7\x12\x05\x0a\x03EUR");
    assert_eq!(kind(&key, &money).await, None);
    assert_eq!(kind(&key, &framed(ids["order"], b"\x06A-7")).await, None);
}

#[tokio::test]
async fn an_id_that_cannot_exist_is_not_asked_for() {
    let key = reading("http://127.0.0.1:1");
    for id in [1 << 31, u32::MAX] {
        assert_eq!(kind(&key, &framed(id, b"")).await, Some("unknown_schema"));
    }
    let known = framed(i32::MAX.cast_unsigned(), b"");
    key.prepare(&KeyInput::payload(&known)).await.unwrap_err();
}

/// A registry that answers as its function says, which is given the path.
async fn fake(answer: impl Fn(&str) -> Response + Send + Sync + 'static) -> (HttpServer, String) {
    let answer = Arc::new(answer);
    let router = Router::new().fallback(move |request: Request| {
        let answer = answer(request.uri().path());
        async { answer }
    });
    let server = HttpServer::start(router).await;
    let url = format!("http://{}", server.address());
    (server, url)
}

fn refuse(status: u16, code: u32) -> Response {
    let status = StatusCode::from_u16(status).unwrap();
    (
        status,
        format!(r#"{{"error_code": {code}, "message": "no"}}"#),
    )
        .into_response()
}

fn types() -> Response {
    r#"["AVRO", "PROTOBUF", "JSON"]"#.into_response()
}

fn schema(references: &[(&str, u32)]) -> Response {
    let references: Vec<_> = references
        .iter()
        .map(|(subject, version)| {
            serde_json::json!({"name": subject, "subject": subject, "version": version})
        })
        .collect();
    let schema =
        r#"{"type": "record", "name": "A", "fields": [{"name": "order_id", "type": "string"}]}"#;
    serde_json::json!({ "schema": schema, "references": references })
        .to_string()
        .into_response()
}

#[tokio::test]
async fn what_a_registry_refuses_while_it_answers_is_a_bad_payload() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let (_server, url) = fake(move |path| {
        count.fetch_add(1, SeqCst);
        match path.strip_prefix("/schemas/ids/").unwrap_or(path) {
            "/schemas/types" => types(),
            "1" | "/subjects/good/versions/1" => schema(&[]),
            "2" => refuse(400, 42),
            "3" => refuse(500, 50_001),
            "4" => refuse(403, 40_301),
            "5" => "no JSON".into_response(),
            "6" => " ".repeat(5 * 1024 * 1024).into_response(),
            "7" => schema(&[("circle-a", 1)]),
            "/subjects/circle-a/versions/1" => schema(&[("circle-b", 1)]),
            "/subjects/circle-b/versions/1" => schema(&[("circle-a", 1)]),
            "8" => schema(&[("chain0", 1)]),
            chain if chain.starts_with("/subjects/chain") => {
                let at = chain.trim_start_matches("/subjects/chain");
                let next: u32 = at.trim_end_matches("/versions/1").parse().unwrap();
                schema(&[(format!("chain{}", next + 1).as_str(), 1)])
            }
            "9" => schema(&[("refused", 1)]),
            "/subjects/refused/versions/1" => refuse(422, 42_202),
            "10" => schema(&[("good", 1), ("good", 1)]),
            _ => refuse(404, 40_403),
        }
    })
    .await;
    let key = reading(&url);
    assert_eq!(kind(&key, &framed(1, b"\x06A-7")).await, None);
    for id in 2..=9 {
        let before = asked.load(SeqCst);
        let payload = framed(id, b"\x06A-7");
        assert_eq!(kind(&key, &payload).await, Some("unusable_schema"), "{id}");
        let questions = asked.load(SeqCst) - before;
        assert!(
            questions < if id == 8 { 1_010 } else { 10 },
            "{id}: {questions}"
        );
        // It is not asked again for each message.
        let before = asked.load(SeqCst);
        assert_eq!(kind(&key, &payload).await, Some("unusable_schema"), "{id}");
        assert_eq!(asked.load(SeqCst), before, "{id}");
    }
    assert_eq!(kind(&key, &framed(10, b"\x06A-7")).await, None);
}

#[tokio::test]
async fn a_registry_that_refuses_everything_is_an_outage() {
    for (status, code) in [
        (500, 50_001),
        (403, 40_301),
        (401, 401),
        (429, 429),
        (400, 42),
    ] {
        let (_server, url) = fake(move |path| match path {
            "/schemas/types" if status != 400 => types(),
            _ => refuse(status, code),
        })
        .await;
        let payload = framed(1, b"\x06A-7");
        let error = reading(&url).prepare(&KeyInput::payload(&payload)).await;
        let error = error.unwrap_err();
        assert!(
            error.what.contains(&status.to_string()),
            "{status}: {error}"
        );
    }
    // Another server than a registry, which answers everything.
    let (_server, url) = fake(|_| "<html></html>".into_response()).await;
    let payload = framed(1, b"\x06A-7");
    reading(&url)
        .prepare(&KeyInput::payload(&payload))
        .await
        .unwrap_err();
}

#[tokio::test]
async fn an_id_that_a_follower_learns_late_is_waited_for() {
    let begun = Instant::now();
    let late = Duration::from_secs(4);
    let (_server, url) = fake(move |path| match path {
        "/schemas/ids/7" if begun.elapsed() > late => schema(&[]),
        _ => refuse(404, 40_403),
    })
    .await;
    let key = reading(&url);
    assert_eq!(kind(&key, &framed(7, b"\x06A-7")).await, None);
    assert!(begun.elapsed() > late);

    // After a wait in vain, the ids that do not exist hold up little, and are asked for again.
    assert_eq!(kind(&key, &framed(8, b"")).await, Some("unknown_schema"));
    let begun = Instant::now();
    for id in 100..104 {
        assert_eq!(kind(&key, &framed(id, b"")).await, Some("unknown_schema"));
    }
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn an_unknown_id_is_known_within_seconds_of_its_registration() {
    let is_registered = Arc::new(AtomicUsize::new(0));
    let registered = Arc::clone(&is_registered);
    let (_server, url) = fake(move |path| match path {
        "/schemas/ids/7" if registered.load(SeqCst) > 0 => schema(&[("late", 1)]),
        "/subjects/late/versions/1" if registered.load(SeqCst) > 1 => schema(&[]),
        _ => refuse(404, 40_402),
    })
    .await;
    let key = reading(&url);
    let payload = framed(7, b"\x06A-7");
    for (stage, expected) in [
        (0, Some("unknown_schema")),
        (1, Some("unusable_schema")),
        (2, None),
    ] {
        is_registered.store(stage, SeqCst);
        let changed = async || match kind(&key, &payload).await {
            found if found == expected => Ok(()),
            found => Err(format!("{found:?}")),
        };
        oncegate_testkit::until("the new answer", SOON, changed).await;
    }
}

#[tokio::test]
async fn a_login_in_the_address_is_used_and_never_shown() {
    let (_server, url) = fake(|_| refuse(404, 40_403)).await;
    let with_login = url.replace("http://", "http://svc:s3cr%65t@");
    let format = SchemaFormat::registry(Registry::new(&with_login)).unwrap();
    assert!(!format!("{format:?}").contains("s3cr"));
    assert!(!format!("{:?}", Registry::new(&with_login)).contains("s3cr"));
    drop(format);

    let seen: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
    let noted = Arc::clone(&seen);
    let router = Router::new().fallback(move |request: Request| {
        let login = request.headers().get("authorization");
        let login = login.map(|login| login.to_str().unwrap().to_owned());
        noted.lock().unwrap().push(login.unwrap_or_default());
        async { refuse(401, 401) }
    });
    let server = HttpServer::start(router).await;
    let url = format!("http://svc:s3cr%65t@{}", server.address());
    let error = reading(&url)
        .prepare(&KeyInput::payload(&framed(1, b"")))
        .await
        .unwrap_err();
    assert!(!error.what.contains("s3cr"), "{error}");
    // svc:s3cret
    assert_eq!(*seen.lock().unwrap(), ["Basic c3ZjOnMzY3JldA=="]);
}
