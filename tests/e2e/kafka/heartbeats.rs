//! Answers to heartbeats that never come.

use std::time::Duration;

use oncegate::kafka::KafkaSource;
use oncegate::source::Source as _;
use oncegate_testkit::{Kafka, KafkaBroker, unique, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::stage::{CLOSE, LIMIT, NEW, member, open};

/// How long the group waits for a member that should give partitions away, before it drops it.
const POLL_INTERVAL: &str = "30000";
/// How long the broker's answers are lost: several times as long as a heartbeat waits for one.
const SILENT_FOR: Duration = Duration::from_secs(3);

/// A proxy before a broker. While it is `silent`, what the broker says on the connections that were
/// there before is lost.
async fn lead(listener: TcpListener, broker: String, silent: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let broker = broker.clone();
        let silent = silent.clone();
        connections.spawn(connect(client, broker, silent));
    }
}

async fn connect(
    client: TcpStream,
    broker: String,
    mut silent: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let was_there = !*silent.borrow();
    let server = TcpStream::connect(broker).await?;
    let (mut asks, mut hears) = client.into_split();
    let (mut says, mut answers) = server.into_split();
    let answering = async {
        let mut bytes = vec![0; 64 * 1024];
        loop {
            let read = says.read(&mut bytes).await?;
            if read == 0 {
                return Ok::<(), std::io::Error>(());
            }
            if was_there {
                _ = silent.wait_for(|silent| !silent).await;
            }
            hears.write_all(&bytes[..read]).await?;
        }
    };
    tokio::select! {
        copied = tokio::io::copy(&mut asks, &mut answers) => copied.map(drop),
        answered = answering => answered,
    }
}

/// Whether the source has so many partitions.
fn has(source: &KafkaSource, count: usize) -> Result<(), String> {
    let has = source.status().partitions.len();
    if has == count {
        Ok(())
    } else {
        Err(format!("it has {has}"))
    }
}

/// The first member is not told to give a partition away, and librdkafka asks for no whole answer
/// after one that was lost. It keeps its partitions, and messages of them, until the group drops
/// it.
#[tokio::test(flavor = "multi_thread")]
async fn a_rebalance_survives_a_lost_answer_to_a_heartbeat() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let settings = [
        format!("advertised.listeners=PLAINTEXT://{address}"),
        "group.consumer.session.timeout.ms=20000".to_owned(),
        "group.consumer.heartbeat.interval.ms=500".to_owned(),
    ];
    let broker = KafkaBroker::start_with(&settings.each_ref().map(String::as_str)).await;
    let (silence, silent) = watch::channel(false);
    let leading = tokio::spawn(lead(listener, broker.bootstrap().to_owned(), silent));
    let kafka = Kafka::at(address.to_string());
    let topic = kafka.new_topic("heartbeats", 2).await;
    let group = unique("group");
    let first = member(&kafka, &group, &topic, NEW).property("max.poll.interval.ms", POLL_INTERVAL);
    open(&first).await;
    until("all partitions", LIMIT, async || has(&first, 2)).await;

    silence.send_replace(true);
    let second = member(&kafka, &group, &topic, NEW);
    open(&second).await;
    tokio::time::sleep(SILENT_FOR).await;
    silence.send_replace(false);
    until("a share", LIMIT, async || has(&second, 1)).await;
    for source in [&first, &second] {
        source.close(CLOSE).await.expect("closes");
    }
    leading.abort();
}
