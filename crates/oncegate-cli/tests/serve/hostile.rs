//! Requests that are made to confuse: two readers that see different requests, sizes without end,
//! keys that are none. The proxy answers or closes, and goes on.

use oncegate_testkit::{Sent, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::raw::{Act, RawService, exchange};
use super::{FROM_ANNE, LIMIT, Stage};
use crate::answers::RULES;

const HEAD: &str = "POST /pay HTTP/1.1\r\nhost: shop\r\nx-user-id: anne\r\n";

/// The bytes that are sent, and the beginnings of answers that are allowed; an empty one is a
/// connection that is closed.
#[expect(clippy::too_many_lines, reason = "a table")]
fn refused() -> Vec<(String, &'static [&'static str])> {
    const BAD: &[&str] = &["HTTP/1.1 400 ", ""];
    let keyed = |rest: &str| format!("{HEAD}idempotency-key: k\r\n{rest}");
    let long = "k".repeat(300);
    vec![
        // Two lengths, or a length that is none.
        (
            keyed("content-length: 2\r\ncontent-length: 3\r\n\r\n{} "),
            BAD,
        ),
        (keyed("content-length: 2, 3\r\n\r\n{} "), BAD),
        (keyed("content-length: +2\r\n\r\n{}"), BAD),
        (keyed("content-length: -1\r\n\r\n{}"), BAD),
        (keyed("content-length: 99999999999999999999\r\n\r\n{}"), BAD),
        // Codings that end elsewhere.
        (
            keyed("transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
            BAD,
        ),
        (keyed("transfer-encoding: xchunked\r\n\r\n0\r\n\r\n"), BAD),
        (
            keyed("transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
            BAD,
        ),
        (
            keyed("transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n"),
            BAD,
        ),
        (
            keyed("transfer-encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n"),
            BAD,
        ),
        // Names and values that are none.
        (keyed("content-length : 2\r\n\r\n{}"), BAD),
        (keyed("x-a: b\0c\r\ncontent-length: 0\r\n\r\n"), BAD),
        (keyed("x\u{1}: b\r\ncontent-length: 0\r\n\r\n"), BAD),
        (keyed(" folded: b\r\ncontent-length: 0\r\n\r\n"), BAD),
        // Keys that are none, or several.
        (
            keyed("idempotency-key: other\r\ncontent-length: 0\r\n\r\n"),
            BAD,
        ),
        (
            keyed("x-idempotency-key: other\r\ncontent-length: 0\r\n\r\n"),
            BAD,
        ),
        (
            format!("{HEAD}idempotency-key: a,b\r\ncontent-length: 0\r\n\r\n"),
            BAD,
        ),
        (
            format!("{HEAD}idempotency-key: \"a\r\ncontent-length: 0\r\n\r\n"),
            BAD,
        ),
        (
            format!("{HEAD}idempotency-key: {long}\r\ncontent-length: 0\r\n\r\n"),
            BAD,
        ),
        (
            format!("{HEAD}idempotency-key:  \r\ncontent-length: 0\r\n\r\n"),
            BAD,
        ),
        (format!("{HEAD}content-length: 0\r\n\r\n"), BAD),
        // Two callers.
        (
            keyed("x-user-id: bert\r\ncontent-length: 0\r\n\r\n"),
            &["HTTP/1.1 401 "],
        ),
        // Sizes.
        (keyed("content-length: 2000000\r\n\r\n"), &["HTTP/1.1 413 "]),
        (
            keyed(&format!("x-a: {}\r\n\r\n", "a".repeat(200_000))),
            &["HTTP/1.1 431 ", ""],
        ),
        (
            keyed(&format!("{}\r\n", "x-a: b\r\n".repeat(500))),
            &["HTTP/1.1 431 ", ""],
        ),
        (
            format!("POST /{} HTTP/1.1\r\nhost: a\r\n\r\n", "a".repeat(200_000)),
            &["HTTP/1.1 414 ", "HTTP/1.1 431 ", ""],
        ),
        // No HTTP.
        ("POST /pay\r\n\r\n".to_owned(), BAD),
        ("\u{16}\u{3}\u{1}\0\0".to_owned(), BAD),
        (
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnothing of HTTP/2".to_owned(),
            &["\0", ""],
        ),
        (
            "CONNECT elsewhere:443 HTTP/1.1\r\nhost: elsewhere:443\r\n\r\n".to_owned(),
            &["HTTP/1.1 405 "],
        ),
    ]
}

// invariant: proxy-smuggling
#[tokio::test]
async fn what_confuses_does_not_reach_the_service() {
    let service = RawService::start(|_| Act::Answer).await;
    let stage = Stage::before(service.url(), RULES);
    let mut proxy = stage.start().await;
    for (sent, allowed) in refused() {
        let answer = exchange(proxy.address, sent.as_bytes())
            .await
            .unwrap_or_default();
        let shown: String = sent.chars().take(200).collect();
        assert!(
            allowed.iter().any(|beginning| match *beginning {
                "" => answer.is_empty(),
                beginning => answer.starts_with(beginning),
            }),
            "{shown:?}: {answer:?}"
        );
        // No second request was found in what followed.
        assert!(
            answer.matches("HTTP/1.1 ").count() <= 1,
            "{shown:?}: {answer:?}"
        );
    }
    assert!(
        service.heads.lock().is_empty(),
        "{:?}",
        service.heads.lock()
    );
    assert!(proxy.process.try_wait().is_none(), "{}", stage.log());
    assert_eq!(proxy.pay("k", "{}").await.status, 201);
    assert!(!stage.log().contains("panic"), "{}", stage.log());
}

/// `Connection` takes headers out. Those by which a service knows its caller stay.
// invariant: proxy-smuggling
#[tokio::test]
async fn no_client_takes_out_what_the_service_trusts() {
    let service = RawService::start(|_| Act::Answer).await;
    let stage = Stage::before(service.url(), RULES);
    let proxy = stage.start().await;
    let sent = format!(
        "{HEAD}idempotency-key: k\r\ncookie: a=b\r\nx-own: 1\r\n\
         connection: close, X-User-Id, cookie, host, idempotency-key, x-own\r\ncontent-length: 2\r\n\r\n{{}}"
    );
    let mut stream = TcpStream::connect(proxy.address).await.unwrap();
    stream.write_all(sent.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    let heads = service.heads.lock().clone();
    let head = format!("{heads:?}").to_ascii_lowercase();
    for kept in ["x-user-id", "cookie", "shop", "idempotency-key"] {
        assert!(head.contains(kept), "{kept}: {head}");
    }
    assert!(!head.contains("x-own"), "{head}");
}

/// A length beside a coding is the classic way to have two readers see two requests.
// invariant: proxy-smuggling
#[tokio::test]
async fn a_length_beside_a_coding_is_one_request_or_none() {
    let service = RawService::start(|_| Act::Answer).await;
    let stage = Stage::before(service.url(), RULES);
    let proxy = stage.start().await;
    let inner = "POST /pay HTTP/1.1\r\nhost: shop\r\nx-user-id: anne\r\nidempotency-key: smuggled\r\ncontent-length: 0\r\n\r\n";
    let length = inner.len() + 5;
    let path = |path: &str| HEAD.replace("/pay", path);
    for at in ["/pay", "/x"] {
        for (number, lines) in [
            format!("content-length: {length}\r\ntransfer-encoding: chunked\r\n"),
            format!("transfer-encoding: chunked\r\ncontent-length: {length}\r\n"),
        ]
        .iter()
        .enumerate()
        {
            let key = format!("idempotency-key: k{number}\r\n");
            let sent = format!("{}{key}{lines}\r\n0\r\n\r\n{inner}", path(at));
            exchange(proxy.address, sent.as_bytes()).await;
        }
    }
    // What stands behind the end of the chunks is the client's next request, if anything: for the
    // proxy itself and not for the service, which gets one head for each request that it answers.
    for head in service.heads.lock().iter() {
        let lower = head.to_lowercase();
        let framed = [
            lower.contains("content-length:"),
            lower.contains("transfer-encoding:"),
        ];
        assert_ne!(framed, [true, true], "{head}");
        assert_eq!(lower.matches("http/1.1\r\n").count(), 1, "{head}");
    }
    let keys = service.header("idempotency-key");
    let smuggled = keys.iter().filter(|key| *key == "smuggled").count();
    assert!(smuggled <= 1, "{keys:?}");
}

/// Bodies that come slowly or never hold no lease and reach nothing.
#[tokio::test]
async fn a_body_that_does_not_come_is_refused_in_time() {
    let service = RawService::start(|_| Act::Answer).await;
    let door = format!("request_timeout = \"100ms\"\n{RULES}");
    let stage = Stage::before(service.url(), &door);
    let proxy = stage.start().await;
    let mut stream = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    let head = format!("{HEAD}idempotency-key: k\r\ncontent-length: 10\r\n\r\n{{");
    tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes())
        .await
        .unwrap();
    let mut answer = Vec::new();
    tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut answer)
        .await
        .unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(service.heads.lock().is_empty());
    // Nothing is held: one whose body comes in time is handled.
    until("a body to come in time", LIMIT, async || {
        let sent = Sent::post("/pay", "k", "{}").headers(FROM_ANNE);
        let answer = proxy.client().try_send(sent).await?;
        match answer.status.as_u16() {
            201 => Ok(()),
            408 => Err("408".to_owned()),
            _ => panic!("{answer:?}"),
        }
    })
    .await;
    assert_eq!(service.heads.lock().len(), 1);
}

/// Clients that say nothing lose their connections, so others get in.
#[tokio::test]
async fn silent_connections_do_not_keep_others_out() {
    let service = RawService::start(|_| Act::Answer).await;
    let mut stage = Stage::before(service.url(), RULES);
    stage.serve = "max_connections = 2, head_timeout = \"200ms\"".to_owned();
    let proxy = stage.start().await;
    let mut silent = Vec::new();
    for beginning in ["", "P", "POST /pay HTTP/1.1\r\nx-a: "] {
        let mut stream = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
        let sent = tokio::io::AsyncWriteExt::write_all(&mut stream, beginning.as_bytes()).await;
        sent.unwrap();
        silent.push(stream);
    }
    until("a connection for a payment", LIMIT, async || {
        let sent = Sent::post("/pay", "k", "{}").headers(FROM_ANNE);
        let answer = proxy.client().try_send(sent).await?;
        assert_eq!(answer.status, 201);
        Ok(())
    })
    .await;
    for mut stream in silent {
        let mut rest = Vec::new();
        // The proxy closes each of them.
        let _ = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut rest).await;
    }
}

// invariant: proxy-smuggling
#[tokio::test]
async fn random_bytes_never_end_the_proxy() {
    let service = RawService::start(|_| Act::Answer).await;
    let stage = Stage::before(service.url(), RULES);
    let mut proxy = stage.start().await;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let whole = format!(
        "{HEAD}idempotency-key: \"k\"\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"
    );
    for _ in 0..300 {
        let mut bytes = whole.clone().into_bytes();
        for _ in 0..rng.usize(1..4) {
            let place = rng.usize(..bytes.len());
            match rng.u8(..3) {
                0 => bytes[place] = rng.u8(..),
                1 if bytes.len() > 1 => drop(bytes.remove(place)),
                _ => bytes.truncate(place.max(1)),
            }
        }
        exchange(proxy.address, &bytes).await;
    }
    assert!(proxy.process.try_wait().is_none(), "{}", stage.log());
    assert!(!stage.log().contains("panic"), "{}", stage.log());
    assert_eq!(proxy.pay("at-the-end", "{}").await.status, 201);
}
