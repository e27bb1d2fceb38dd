//! What no rule names streams through, in both directions.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::routing::{any, post};
use futures_util::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use oncegate_testkit::{HttpServer, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::answers::RULES;
use super::{LIMIT, Service, Stage};

const PIECE_BYTES: usize = 64 * 1024;
const PIECES: usize = 4_096;

/// How much memory a process has had at most, in KiB.
fn peak_kib(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let words = line.unwrap().split_whitespace().next();
    words.unwrap().parse().unwrap()
}

fn pieces() -> impl futures_util::Stream<Item = Result<Bytes, Infallible>> + Send {
    let piece = Bytes::from(vec![7; PIECE_BYTES]);
    stream::iter((0..PIECES).map(move |_| Ok(piece.clone())))
}

/// A quarter of a gigabyte each way, and the proxy holds next to nothing of it.
// invariant: proxy-holds-little
#[tokio::test]
async fn large_bodies_stream_through_in_little_memory() {
    let count = |request: Request| async move {
        let mut body = request.into_body().into_data_stream();
        let mut bytes = 0;
        while let Some(piece) = body.next().await {
            bytes += piece.unwrap().len();
        }
        bytes.to_string()
    };
    let app = Router::new()
        .route("/up", post(count))
        .route("/down", any(|| async { Body::from_stream(pieces()) }));
    let server = HttpServer::start(app).await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    let proxy = stage.start().await;
    let before_kib = peak_kib(proxy.process.id());
    let client: Client<_, Body> = Client::builder(TokioExecutor::new()).build_http();
    let at = |path: &str| format!("http://{}{path}", proxy.address);
    let up = hyper::Request::post(at("/up")).body(Body::from_stream(pieces()));
    let answer = client.request(up.unwrap()).await.unwrap();
    let counted = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(counted, (PIECES * PIECE_BYTES).to_string());
    let down = hyper::Request::get(at("/down")).body(Body::empty());
    let mut body = client.request(down.unwrap()).await.unwrap().into_body();
    let mut bytes = 0;
    while let Some(frame) = body.frame().await {
        bytes += frame.unwrap().into_data().unwrap().len();
    }
    assert_eq!(bytes, PIECES * PIECE_BYTES);
    let grown_kib = peak_kib(proxy.process.id()) - before_kib;
    assert!(grown_kib < 64 * 1024, "{grown_kib} KiB");
}

/// The service answers each piece when it comes, before the request has ended.
#[tokio::test]
async fn a_request_and_its_response_flow_at_the_same_time() {
    let echo = |request: Request| async move { Body::new(request.into_body()) };
    let server = HttpServer::start(Router::new().route("/echo", post(echo))).await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    let proxy = stage.start().await;
    let (pieces, sent) = mpsc::channel::<Bytes>(1);
    let sent = stream::unfold(sent, |mut sent| async {
        let piece = sent.recv().await?;
        Some((Ok::<_, Infallible>(Frame::data(piece)), sent))
    });
    let body = StreamBody::new(Box::pin(sent));
    let client: Client<_, _> = Client::builder(TokioExecutor::new()).build_http();
    let request = hyper::Request::post(format!("http://{}/echo", proxy.address)).body(body);
    pieces.send(Bytes::from_static(b"0")).await.unwrap();
    let mut answer = client.request(request.unwrap()).await.unwrap().into_body();
    for number in 0..5 {
        let piece = answer.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(piece, number.to_string());
        pieces
            .send(Bytes::from((number + 1).to_string()))
            .await
            .unwrap();
    }
    drop(pieces);
    assert_eq!(answer.collect().await.unwrap().to_bytes(), "5");
}

/// As a WebSocket begins.
#[tokio::test]
async fn a_connection_may_change_its_protocol() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let service = format!("http://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = head_of(&mut stream).await;
        assert!(head.to_lowercase().contains("upgrade: websocket"), "{head}");
        let agreed = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: x\r\n\r\n";
        stream.write_all(agreed.as_bytes()).await.unwrap();
        let mut word = [0; 5];
        stream.read_exact(&mut word).await.unwrap();
        stream.write_all(&word).await.unwrap();
        // Until the other side has ended.
        assert_eq!(stream.read(&mut word).await.unwrap(), 0);
    });
    let stage = Stage::before(service, RULES);
    let proxy = stage.start().await;
    let mut client = TcpStream::connect(proxy.address).await.unwrap();
    let asked = "GET /chat HTTP/1.1\r\nhost: shop\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n\r\n";
    client.write_all(asked.as_bytes()).await.unwrap();
    let agreed = head_of(&mut client).await.to_lowercase();
    assert!(
        agreed.starts_with("http/1.1 101 ") && agreed.contains("sec-websocket-accept: x"),
        "{agreed}"
    );
    client.write_all(b"hello").await.unwrap();
    let mut word = [0; 5];
    client.read_exact(&mut word).await.unwrap();
    assert_eq!(&word, b"hello");
    drop(client);
    serving.await.unwrap();
}

async fn head_of(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// A client that waits for 100 gets it, whether its request is held or not.
#[tokio::test]
async fn a_client_may_wait_before_it_sends_its_body() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    let proxy = stage.start().await;
    for path in ["/pay", "/x"] {
        let mut client = TcpStream::connect(proxy.address).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: shop\r\nx-user-id: anne\r\nidempotency-key: k\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        );
        client.write_all(head.as_bytes()).await.unwrap();
        assert!(head_of(&mut client).await.starts_with("HTTP/1.1 100 "));
        client.write_all(b"{}").await.unwrap();
        assert!(head_of(&mut client).await.starts_with("HTTP/1.1 201 "));
    }
    // One that would be refused gets no 100, and sends no body.
    let mut client = TcpStream::connect(proxy.address).await.unwrap();
    let head = "POST /pay HTTP/1.1\r\nhost: shop\r\nx-user-id: anne\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    assert!(head_of(&mut client).await.starts_with("HTTP/1.1 400 "));
    assert_eq!(service.seen().len(), 2);
}

/// A client that breaks off its own request is no fault of the service, and leaves no lease.
#[tokio::test]
async fn a_client_that_breaks_off_is_no_failure_of_the_service() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    let proxy = stage.start().await;
    for path in ["/pay", "/x"] {
        break_off(proxy.address, path).await;
    }
    until("the client to be missed", LIMIT, async || {
        if stage.log().contains("a client has broken off its request") {
            Ok(())
        } else {
            Err(stage.log())
        }
    })
    .await;
    assert_eq!(proxy.pay("k", "{}").await.status, 201);
    let log = stage.log();
    assert!(!log.contains("did not answer"), "{log}");
    let seen = service.seen();
    let paid: Vec<&str> = seen
        .iter()
        .filter(|seen| seen.path == "/pay")
        .map(|seen| &*seen.attempt)
        .collect();
    assert_eq!(paid, ["1"], "{seen:?}");
}

/// Sends a part of a body, and leaves when the proxy has read it.
async fn break_off(address: SocketAddr, path: &str) {
    let mut client = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: shop\r\nx-user-id: anne\r\nidempotency-key: k\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    client.write_all(head.as_bytes()).await.unwrap();
    // Now the body is read.
    assert!(head_of(&mut client).await.starts_with("HTTP/1.1 100 "));
    client.write_all(b"5\r\n{\"a\":").await.unwrap();
    client.shutdown().await.unwrap();
    let mut answer = Vec::new();
    // The proxy closes the connection, with an answer or without.
    let _ = client.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 400 "),
        "{answer}"
    );
}
