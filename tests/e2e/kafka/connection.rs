//! A client that has lost its connections and makes none, though the brokers answer others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate::source::Source;
use oncegate_testkit::{Kafka, KafkaBroker, unique, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::stage::{
    CLOSE, LIMIT, NEW, QUICK, finish, finish_if_ours, member, numbered, open, receive, until_committed,
};

/// How the client under test is named; the one that asks for it has a name of its own.
const VICTIM: &str = "victim";

/// A proxy before a broker, which can be closed to the victim.
#[derive(Clone, Default)]
struct Way {
    is_closed: Arc<AtomicBool>,
    cut: Arc<Notify>,
}

impl Way {
    /// Cuts the victim's connections, and lets it make none until the proxy is open again.
    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.cut.notify_waiters();
    }

    fn open(&self) {
        self.is_closed.store(false, Ordering::SeqCst);
    }

    async fn lead(self, listener: TcpListener, broker: String) {
        let mut connections = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            let (way, broker) = (self.clone(), broker.clone());
            connections.spawn(async move { way.connect(client, &broker).await });
        }
    }

    /// A client sends its name in its first request.
    async fn connect(&self, mut client: TcpStream, broker: &str) -> std::io::Result<()> {
        let mut first = vec![0; 4_096];
        let read = client.read(&mut first).await?;
        let first = &first[..read];
        let says = |name: &str| first.windows(name.len()).any(|window| window == name.as_bytes());
        let (is_victim, cut) = (says(VICTIM), self.cut.notified());
        if is_victim && self.is_closed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut server = TcpStream::connect(broker).await?;
        server.write_all(first).await?;
        let copied = tokio::io::copy_bidirectional(&mut client, &mut server);
        tokio::select! {
            copied = copied => copied.map(drop),
            () = cut, if is_victim => Ok(()),
        }
    }
}

async fn loses_its_connections(kafka: &Kafka, way: &Way, properties: &[(&str, &str)]) {
    let (topic, group) = (kafka.new_topic("lost", 2).await, unique("group"));
    kafka.produce(&topic, numbered(100, 2)).await;
    let source = member(kafka, &group, &topic, properties);
    let source = source.property("client.id", VICTIM).property("statistics.interval.ms", "200");
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
async fn a_client_that_connects_to_nobody_is_replaced_when_the_brokers_answer_others() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let broker = KafkaBroker::start_with(&[&format!("advertised.listeners=PLAINTEXT://{address}")]).await;
    let way = Way::default();
    let leading = tokio::spawn(way.clone().lead(listener, broker.bootstrap().to_owned()));
    let kafka = Kafka::at(address.to_string());
    loses_its_connections(&kafka, &way, QUICK).await;
    loses_its_connections(&kafka, &way, NEW).await;
    leading.abort();
}
