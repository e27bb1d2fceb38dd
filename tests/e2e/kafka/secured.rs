//! Brokers that demand TLS, a password and rights.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use oncegate::dead_letters::{DeadLetter, DeadLetterCause, DeadLetters};
use oncegate::kafka::{KafkaDeadLetters, KafkaSource, Needs, describe_topics, missing_rights};
use oncegate::message::{Message, Origin};
use oncegate::observe::Counters;
use oncegate::source::Source as _;
use oncegate_testkit::{Certificates, On, Record, Right, SecuredKafka, unique, until};

use crate::stage::{CLOSE, LIMIT, QUICK, finish, open, receive, with, within};

/// How to reach a broker: its address, and properties of librdkafka.
pub(crate) struct Access {
    brokers: String,
    properties: Vec<(String, String)>,
}

impl Access {
    fn new(brokers: String, properties: &[(&str, &str)]) -> Self {
        let properties = properties
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Self {
            brokers,
            properties: properties.collect(),
        }
    }

    /// TLS, believing in this authority.
    fn tls(kafka: &SecuredKafka, authority: &Certificates) -> Self {
        let authority = authority.file("ca.pem").display().to_string();
        Self::new(
            kafka.tls(),
            &[
                ("security.protocol", "ssl"),
                ("ssl.ca.location", &authority),
            ],
        )
    }

    /// The same with this certificate as the client's.
    fn mutual(kafka: &SecuredKafka, authority: &Certificates, client: &Certificates) -> Self {
        let mut access = Self::tls(kafka, authority);
        for (property, name) in [
            ("ssl.certificate.location", "server.pem"),
            ("ssl.key.location", "server.key"),
        ] {
            access
                .properties
                .push((property.to_owned(), client.file(name).display().to_string()));
        }
        access
    }

    /// A password over TLS.
    fn sasl(kafka: &SecuredKafka, authority: &Certificates, login: (&str, &str, &str)) -> Self {
        let (mechanism, user, password) = login;
        let authority = authority.file("ca.pem").display().to_string();
        let properties = [
            ("security.protocol", "sasl_ssl"),
            ("ssl.ca.location", &*authority),
            ("sasl.mechanism", mechanism),
            ("sasl.username", user),
            ("sasl.password", password),
        ];
        Self::new(kafka.sasl(), &properties)
    }

    /// A password by SCRAM for this user.
    pub(crate) fn user(kafka: &SecuredKafka, authority: &Certificates, user: &str) -> Self {
        Self::sasl(
            kafka,
            authority,
            ("SCRAM-SHA-256", user, SecuredKafka::PASSWORD),
        )
    }

    fn source(&self, topic: &str) -> KafkaSource {
        self.member(&unique("secured"), topic)
    }

    pub(crate) fn member(&self, group: &str, topic: &str) -> KafkaSource {
        let source = KafkaSource::new(&*self.brokers, group, [topic]);
        let source = source.commit_interval(Duration::from_millis(50));
        let properties = self
            .properties
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()));
        with(
            source,
            &properties.chain(QUICK.iter().copied()).collect::<Vec<_>>(),
        )
    }

    /// The error of a source that cannot be opened.
    async fn refusal(&self, topic: &str) -> String {
        refusal_of(&self.source(topic)).await
    }
}

async fn refusal_of(source: &KafkaSource) -> String {
    let refused = within("an answer", source.open(Arc::new(Counters::default()) as _)).await;
    refused.expect_err("it must be refused").to_string()
}

#[tokio::test]
async fn messages_are_consumed_by_tls_and_by_every_kind_of_password() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    let kafka = SecuredKafka::start(&certificates).await;
    let topic = kafka.new_topic("orders", 1).await;
    kafka.produce(&topic, [Record::new("one")]).await;
    let user = |mechanism| (mechanism, SecuredKafka::USER, SecuredKafka::PASSWORD);
    let all = [
        Access::tls(&kafka, &certificates),
        Access::sasl(&kafka, &certificates, user("PLAIN")),
        Access::sasl(&kafka, &certificates, user("SCRAM-SHA-256")),
        Access::sasl(&kafka, &certificates, user("SCRAM-SHA-512")),
    ];
    // All at once, as below: each waits for handshakes, and for its group.
    join_all(all.iter().map(async |access| {
        let source = access.source(&topic);
        open(&source).await;
        let mut received = receive(&source, 1).await;
        received.pop().expect("one").ack_handle.ack();
        source.close(CLOSE).await.expect("it commits and leaves");
        let facts = describe_topics(
            &access.brokers,
            std::slice::from_ref(&topic),
            &access.properties,
        )
        .await;
        let facts = facts.expect("the commands take the same properties");
        assert_eq!(
            (facts[0].partitions, &facts[0].settings_unknown),
            (1, &None)
        );
    }))
    .await;
}

#[tokio::test]
async fn whatever_is_wrong_is_said_by_the_name_of_the_property() {
    let (certificates, stranger) = (
        Certificates::for_names("IP:127.0.0.1"),
        Certificates::for_names("IP:127.0.0.1"),
    );
    let kafka = SecuredKafka::start(&certificates).await;
    let topic = kafka.new_topic("orders", 1).await;
    let login = |user, password| ("SCRAM-SHA-256", user, password);
    let (user, password) = (SecuredKafka::USER, SecuredKafka::PASSWORD);
    let wrong = [
        (Access::tls(&kafka, &stranger), "ssl.ca.location"),
        (
            Access::sasl(&kafka, &stranger, login(user, password)),
            "ssl.ca.location",
        ),
        (
            Access::sasl(&kafka, &certificates, login(user, "wrong")),
            "sasl.password",
        ),
        (
            Access::sasl(&kafka, &certificates, login("unknown-user", password)),
            "sasl.username",
        ),
        (
            Access::sasl(
                &kafka,
                &certificates,
                login(SecuredKafka::STRANGER, password),
            ),
            "topic",
        ),
        (
            Access::sasl(&kafka, &certificates, ("GSSAPI", user, password)),
            "sasl.mechanism",
        ),
        (
            Access::sasl(&kafka, &certificates, ("OAUTHBEARER", user, password)),
            "sasl.oauthbearer.method",
        ),
    ];
    join_all(wrong.iter().map(async |(access, named)| {
        let error = access.refusal(&topic).await;
        assert!(error.contains(named), "{named}: {error}");
        assert!(
            !error.contains(password) && !error.contains("wrong"),
            "{error}"
        );
    }))
    .await;
}

#[tokio::test]
async fn a_client_is_known_by_its_certificate_and_one_without_is_told() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    let lines = [
        "listener.name.ssl.ssl.client.auth=required",
        "super.users=User:ANONYMOUS;User:CN=server",
    ];
    let kafka = SecuredKafka::start_with(&certificates, &[], &lines).await;
    let topic = kafka.new_topic("orders", 1).await;
    kafka.produce(&topic, [Record::new("one")]).await;
    let known = Access::mutual(&kafka, &certificates, &certificates);
    let source = known.source(&topic);
    open(&source).await;
    finish(receive(&source, 1).await);
    source.close(CLOSE).await.expect("it commits and leaves");

    let stranger = Certificates::for_names("IP:127.0.0.1");
    let refused = [
        Access::tls(&kafka, &certificates),
        Access::mutual(&kafka, &certificates, &stranger),
    ];
    join_all(refused.iter().map(async |refused| {
        let error = refused.refusal(&topic).await;
        assert!(error.contains("ssl.certificate.location"), "{error}");
    }))
    .await;
    certificates.let_expire();
    let error = known.refusal(&topic).await;
    assert!(
        error.contains("ssl.certificate.location") && error.contains("must be valid today"),
        "{error}"
    );
}

// invariant: server-not-trusted
#[tokio::test]
async fn an_expired_certificate_of_the_brokers_is_told() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    certificates.let_expire();
    let kafka = SecuredKafka::start(&certificates).await;
    let topic = kafka.new_topic("orders", 1).await;
    let both = [
        Access::tls(&kafka, &certificates),
        Access::user(&kafka, &certificates, SecuredKafka::USER),
    ];
    join_all(both.iter().map(async |access| {
        let error = access.refusal(&topic).await;
        assert!(error.contains("certificate must be valid today"), "{error}");
    }))
    .await;
}

// invariant: missing-right
#[tokio::test]
async fn each_missing_right_is_one_error_at_the_start_with_the_command_that_grants_it() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    let users = ["whole", "no-group", "no-read", "no-describe", "no-write"];
    let kafka = SecuredKafka::start_with(&certificates, &users, &[]).await;
    let (topic, dead) = (
        kafka.new_topic("orders", 2).await,
        kafka.new_topic("orders.dead", 1).await,
    );
    let group = unique("billing");
    let all = [
        (Right::Read, On::Topic(&topic)),
        (Right::Read, On::Group(&group)),
        (Right::Write, On::Topic(&dead)),
    ];
    let without = |user, left_out: usize| {
        let rights = all.iter().enumerate().filter(move |(n, _)| *n != left_out);
        rights.map(move |(_, (right, on))| (user, *right, *on))
    };
    let rights = without("no-read", 0)
        .chain(without("no-describe", 0))
        .chain(without("no-group", 1));
    let rights = rights.chain(without("no-write", 2)).chain([
        ("no-read", Right::Describe, On::Topic(&topic)),
        ("no-write", Right::Describe, On::Topic(&dead)),
    ]);
    kafka
        .grant(&rights.chain(without("whole", 9)).collect::<Vec<_>>())
        .await;

    let whole = Access::user(&kafka, &certificates, "whole");
    let (read, write) = ([topic.clone()], [dead.clone()]);
    until("the rights", LIMIT, async || {
        let needs = Needs::new(Some(&group), &read, &write);
        let facts = describe_topics(
            &whole.brokers,
            &[topic.clone(), dead.clone()],
            &whole.properties,
        )
        .await;
        if facts
            .expect("an answer")
            .iter()
            .any(|fact| fact.partitions == 0)
        {
            return Err("the topics are hidden".to_owned());
        }
        let missing = missing_rights(&whole.brokers, needs, &whole.properties)
            .await
            .expect("an answer");
        if missing.is_empty() {
            Ok(())
        } else {
            Err(format!("{missing:?}"))
        }
    })
    .await;
    let source = whole.member(&group, &topic);
    open(&source).await;
    source
        .dead_letters(&*dead)
        .open()
        .await
        .expect("it may write");
    source.close(CLOSE).await.expect("it leaves");

    let missing = [
        ("no-group", "READ", format!("--group {group}")),
        ("no-read", "READ", format!("--topic {topic}")),
        ("no-describe", "DESCRIBE", format!("--topic {topic}")),
    ];
    join_all(missing.iter().map(async |(user, right, on)| {
        let refusal =
            refusal_of(&Access::user(&kafka, &certificates, user).member(&group, &topic)).await;
        let command = format!("--operation {right} {on}");
        assert!(
            refusal.contains("kafka-acls.sh") && refusal.contains(&command),
            "{user}: {refusal}"
        );
    }))
    .await;
    let source = Access::user(&kafka, &certificates, "no-write").member(&group, &topic);
    let refusal = source
        .dead_letters(&*dead)
        .open()
        .await
        .expect_err("it may not write")
        .to_string();
    assert!(
        refusal.contains(&format!("--operation WRITE --topic {dead}")),
        "{refusal}"
    );
    assert_eq!(
        kafka.end_offsets(&dead).await.values().sum::<i64>(),
        0,
        "nothing was written to find out"
    );
}

pub(crate) fn letter() -> DeadLetter {
    DeadLetter {
        message: Message::new("orders", Origin::Other("test".into()), None),
        scope: "billing".to_owned(),
        key: None,
        cause: DeadLetterCause::Permanent,
        reason: String::new(),
        attempts: 1,
        first_failed_at: None,
        failed_at: SystemTime::now(),
    }
}

/// Replaces a file by another, as a secret's volume does.
fn rewrite(path: &Path, content: impl AsRef<[u8]>) {
    let next = path.with_extension("next");
    std::fs::write(&next, content).expect("the folder can be written");
    std::fs::rename(&next, path).expect("the folder can be written");
}

/// Produces numbers until `over`, and returns how many.
async fn produce_until(kafka: &SecuredKafka, topic: &str, over: &AtomicBool) -> i32 {
    let mut count = 0_i32;
    while !over.load(Ordering::Relaxed) {
        let records = (count..count + 20).map(|n| Record::new(n.to_string()).partition(n % 3));
        kafka.produce(topic, records).await;
        count += 20;
    }
    count
}

/// Receives and acknowledges until the source is closed.
async fn receive_all(source: &KafkaSource, received: &Mutex<BTreeSet<usize>>) {
    while let Some(deliveries) = source.receive(100).await.expect("the source lives") {
        for delivery in deliveries {
            received
                .lock()
                .expect("no panic")
                .insert(crate::stage::number(&delivery.message));
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
async fn a_password_and_a_certificate_that_change_under_load_lose_nothing() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    // Connections must log in again after this time, so those with a former password end.
    let again = "listener.name.sasl_ssl.scram-sha-256.connections.max.reauth.ms=2000";
    let kafka = SecuredKafka::start_with(&certificates, &[], &[again]).await;
    let (topic, dead) = (
        kafka.new_topic("orders", 3).await,
        kafka.new_topic("dead", 1).await,
    );
    let dir = tempfile::tempdir().expect("a folder");
    let (password, authority) = (dir.path().join("password"), dir.path().join("ca.pem"));
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
    let (topic, dead) = (
        kafka.new_topic("orders", 3).await,
        kafka.new_topic("dead", 1).await,
    );
    let dir = tempfile::tempdir().expect("a folder");
    let (certificate, key) = (dir.path().join("client.pem"), dir.path().join("client.key"));
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
