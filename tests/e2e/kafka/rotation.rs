//! Passwords and certificates that change under load.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use oncegate::dead_letters::DeadLetters;
use oncegate::kafka::{KafkaDeadLetters, KafkaSource};
use oncegate::observe::Counters;
use oncegate::source::Source as _;
use oncegate_testkit::{Certificates, On, Record, Right, SecuredKafka, unique, until};

use crate::secured::{Access, letter};
use crate::stage::{CLOSE, LIMIT, number, open, within};

/// Replaces a file by another, as a secret's volume does.
fn rewrite(path: &Path, content: impl AsRef<[u8]>) {
    let next = path.with_extension("next");
    std::fs::write(&next, content).expect("the folder can be written");
    std::fs::rename(&next, path).expect("the folder can be written");
}

/// Produces numbers until `over`, and returns how many.
pub(crate) async fn produce_until(kafka: &SecuredKafka, topic: &str, over: &AtomicBool) -> i32 {
    let mut count = 0_i32;
    while !over.load(Ordering::Relaxed) {
        let records = (count..count + 20).map(|n| Record::new(n.to_string()).partition(n % 3));
        kafka.produce(topic, records).await;
        count += 20;
    }
    count
}

/// Receives and acknowledges until the source is closed.
pub(crate) async fn receive_all(source: &KafkaSource, received: &Mutex<BTreeSet<usize>>) {
    while let Some(deliveries) = source.receive(100).await.expect("the source lives") {
        for delivery in deliveries {
            received
                .lock()
                .expect("no panic")
                .insert(number(&delivery.message));
            delivery.ack_handle.ack();
        }
    }
}

/// The clients of a source and of its dead letters.
struct Clients {
    counters: Arc<Counters>,
    letters: KafkaDeadLetters,
}

impl Clients {
    /// Waits until the source's has been replaced this many times, and a dead letter is written.
    async fn replaced(&self, times: u64) {
        until("another client", LIMIT, async || {
            match self.counters.get("members_replaced", "login") {
                count if count >= times => Ok(()),
                count => Err(format!("{count} so far")),
            }
        })
        .await;
        within("a dead letter", async {
            while let Err(error) = self.letters.send(&letter()).await {
                assert!(!error.to_string().contains("second"), "{error}");
            }
        })
        .await;
    }
}

/// Produces and consumes while `rotate` runs, and demands that every message is received.
async fn nothing_is_lost_while(
    rotate: impl Future<Output = ()>,
    kafka: &SecuredKafka,
    topic: &str,
    source: &KafkaSource,
) {
    let over = AtomicBool::new(false);
    let rotate = async {
        rotate.await;
        over.store(true, Ordering::Relaxed);
    };
    let received = Mutex::new(BTreeSet::new());
    let finish = async {
        let (count, ()) = tokio::join!(produce_until(kafka, topic, &over), rotate);
        assert!(count > 0);
        until("every message", LIMIT, async || {
            match received.lock().expect("no panic").len() {
                len if len == usize::try_from(count).expect("it is positive") => Ok(()),
                len => Err(format!("{len} of {count}")),
            }
        })
        .await;
        source.close(CLOSE).await.expect("it commits and leaves");
    };
    tokio::join!(finish, receive_all(source, &received));
}

// invariant: rotation-under-load
#[tokio::test(flavor = "multi_thread")]
async fn a_password_and_certificate_changed_under_load_lose_nothing() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    // Connections must log in again after this time, so those with a former password end.
    let again = "listener.name.sasl_ssl.scram-sha-256.connections.max.reauth.ms=2000";
    let kafka = SecuredKafka::start_with(&certificates, &[], &[again]).await;
    let topic = kafka.new_topic("orders", 3).await;
    let dead = kafka.new_topic("dead", 1).await;
    let dir = tempfile::tempdir().expect("a folder");
    let password = dir.path().join("password");
    let authority = dir.path().join("ca.pem");
    std::fs::write(&password, SecuredKafka::PASSWORD).expect("the folder can be written");
    std::fs::write(&authority, certificates.authority()).expect("the folder can be written");

    let mut access = Access::user(&kafka, &certificates, SecuredKafka::USER);
    access
        .properties
        .retain(|(name, _)| name != "sasl.password" && name != "ssl.ca.location");
    access.properties.push((
        "ssl.ca.location".to_owned(),
        authority.display().to_string(),
    ));
    let source = Arc::new(
        access
            .source(&topic)
            .property_file("sasl.password", &password),
    );
    let counters = open(&source).await;
    let letters = source.dead_letters(&*dead);
    letters.open().await.expect("it may write");

    let clients = Clients { counters, letters };
    let rotate = async {
        // First at the broker, where connections with the former password end before the file has
        // the new one.
        kafka.set_password("second-password").await;
        until("a refused login", LIMIT, async || {
            match clients.counters.get("source_errors", "login") {
                0 => Err("none yet".to_owned()),
                _ => Ok(()),
            }
        })
        .await;
        rewrite(&password, "second-password\n");
        clients.replaced(1).await;
        // First in the file, so the broker does not accept it yet.
        rewrite(&password, "third-password");
        kafka.set_password("third-password").await;
        clients.replaced(2).await;
        // An authority more.
        let next = Certificates::for_names("IP:127.0.0.1");
        rewrite(
            &authority,
            [certificates.authority(), next.authority()].concat(),
        );
        clients.replaced(3).await;
    };
    nothing_is_lost_while(rotate, &kafka, &topic, &source).await;
    assert!(
        kafka.end_offsets(&dead).await.values().sum::<i64>() >= 3,
        "every dead letter was written"
    );
}

// invariant: rotation-under-load
#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_that_changes_under_load_loses_nothing() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    certificates.for_client("next");
    let lines = [
        "listener.name.ssl.ssl.client.auth=required",
        "super.users=User:ANONYMOUS;User:CN=server",
    ];
    let kafka = SecuredKafka::start_with(&certificates, &[], &lines).await;
    let topic = kafka.new_topic("orders", 3).await;
    let dead = kafka.new_topic("dead", 1).await;
    let dir = tempfile::tempdir().expect("a folder");
    let certificate = dir.path().join("client.pem");
    let key = dir.path().join("client.key");
    let change_to = |name: &str| {
        for (file, kind) in [(&certificate, "pem"), (&key, "key")] {
            let made = std::fs::read(certificates.file(&format!("{name}.{kind}")))
                .expect("it was just made");
            rewrite(file, made);
        }
    };
    change_to("server");
    let mut access = Access::tls(&kafka, &certificates);
    for (property, file) in [
        ("ssl.certificate.location", &certificate),
        ("ssl.key.location", &key),
    ] {
        access
            .properties
            .push((property.to_owned(), file.display().to_string()));
    }
    let group = unique("secured");
    let source = Arc::new(access.member(&group, &topic));
    let counters = open(&source).await;
    let letters = source.dead_letters(&*dead);
    letters.open().await.expect("it may write");

    let clients = Clients { counters, letters };
    let rotate = async {
        // The broker knows the name of this one, and gives it no rights yet: the former one goes
        // on.
        change_to("next");
        let rights = [
            ("CN=next", Right::Read, On::Topic(&topic)),
            ("CN=next", Right::Read, On::Group(&group)),
            ("CN=next", Right::Write, On::Topic(&dead)),
        ];
        kafka.grant(&rights).await;
        clients.replaced(1).await;
        // The usual case: another key and certificate for the same name.
        certificates.for_client("server");
        change_to("server");
        clients.replaced(2).await;
    };
    nothing_is_lost_while(rotate, &kafka, &topic, &source).await;
    assert!(
        kafka.end_offsets(&dead).await.values().sum::<i64>() >= 2,
        "every dead letter was written"
    );
}
