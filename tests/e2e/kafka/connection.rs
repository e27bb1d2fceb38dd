//! A client that has lost its connections and makes none, though the brokers answer others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::OptionFuture;
use oncegate::source::Source;
use oncegate_testkit::{Kafka, KafkaBroker, unique, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::stage::{
    CLOSE, LIMIT, NEW, QUICK, finish, finish_if_ours, member, numbered, open, receive,
    until_committed,
};

/// What a proxy does with the connections of one client, which it knows by its name. The client
/// that asks for it has another name.
struct Way {
    victim: &'static str,
    is_closed: AtomicBool,
    cut: Notify,
}

impl Way {
    fn of(victim: &'static str) -> Arc<Self> {
        Arc::new(Self {
            victim,
            is_closed: AtomicBool::new(false),
            cut: Notify::new(),
        })
    }

    /// Cuts the victim's connections, and lets it make none until the proxy is open again.
    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.cut.notify_waiters();
    }

    fn open(&self) {
        self.is_closed.store(false, Ordering::SeqCst);
    }
}

/// A proxy before a broker.
async fn lead(ways: [Arc<Way>; 2], listener: TcpListener, broker: String) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let ways = ways.clone();
        let broker = broker.clone();
        connections.spawn(async move { connect(&ways, client, &broker).await });
    }
}

/// A client sends its name in its first request.
async fn connect(ways: &[Arc<Way>], mut client: TcpStream, broker: &str) -> std::io::Result<()> {
    let mut first = vec![0; 4_096];
    let read = client.read(&mut first).await?;
    let first = &first[..read];
    let says = |name: &str| {
        first
            .windows(name.len())
            .any(|window| window == name.as_bytes())
    };
    let way = ways.iter().find(|way| says(way.victim));
    // It exists before the look at the way, so that it sees every cut after that.
    let cut = OptionFuture::from(way.map(|way| way.cut.notified()));
    if way.is_some_and(|way| way.is_closed.load(Ordering::SeqCst)) {
        return Ok(());
    }
    let mut server = TcpStream::connect(broker).await?;
    server.write_all(first).await?;
    tokio::select! {
        copied = tokio::io::copy_bidirectional(&mut client, &mut server) => copied.map(drop),
        Some(()) = cut => Ok(()),
    }
}

async fn loses_its_connections(kafka: &Kafka, way: &Way, properties: &[(&str, &str)]) {
    let topic = kafka.new_topic("lost", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(100, 2)).await;
    let source = member(kafka, &group, &topic, properties);
    let source = source
        .property("client.id", way.victim)
        .property("statistics.interval.ms", "200");
    let source = source.property("reconnect.backoff.max.ms", "1000");
    let counters = open(&source).await;
    let mut received = receive(&source, 100).await;
    let unfinished = received.pop().expect("it was received");
    finish(received);

    way.close();
    let lost = async || match source.status().disconnected_for {
        Some(lasts) if lasts > Duration::ZERO => Ok(()),
        other => Err(format!("disconnected for {other:?}")),
    };
    until("the loss", LIMIT, lost).await;
    assert!(!source.status().others_connect, "not checked yet");
    // Finished while there is no connection: the commit waits.
    unfinished.ack_handle.ack();
    kafka.produce(&topic, numbered(100, 2)).await;
    let replaced = async || match counters.get("members_replaced", "disconnected") {
        0 => Err(format!("it is not replaced: {:?}", source.status())),
        _ => Ok(()),
    };
    until("another client", 3 * LIMIT, replaced).await;
    way.open();
    let ends = kafka.end_offsets(&topic).await;
    tokio::select! {
        () = until_committed(kafka, &group, &topic, &ends) => {}
        () = finish_all(&source) => {}
    }
    source.close(CLOSE).await.expect("closes");
}

/// Finishes whatever comes; what could not be committed comes again.
async fn finish_all(source: &dyn Source) {
    loop {
        for delivery in receive(source, 1).await {
            finish_if_ours(&delivery);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unconnected_client_is_replaced_when_brokers_answer() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let broker =
        KafkaBroker::start_with(&[&format!("advertised.listeners=PLAINTEXT://{address}")]).await;
    // Each waits out the same limits, so both lose their connections at once.
    let quick = Way::of("victim-quick");
    let new = Way::of("victim-new");
    let ways = [Arc::clone(&quick), Arc::clone(&new)];
    let leading = tokio::spawn(lead(ways, listener, broker.bootstrap().to_owned()));
    let kafka = Kafka::at(address.to_string());
    tokio::join!(
        loses_its_connections(&kafka, &quick, QUICK),
        loses_its_connections(&kafka, &new, NEW)
    );
    leading.abort();
}
