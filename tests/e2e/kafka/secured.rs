//! Brokers that demand TLS, a password and rights.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use oncegate::dead_letters::{DeadLetter, DeadLetterCause, DeadLetters};
use oncegate::kafka::{KafkaSource, Needs, describe_topics, missing_rights};
use oncegate::message::{Message, Origin};
use oncegate::observe::Counters;
use oncegate::source::Source as _;
use oncegate_testkit::{Certificates, On, Record, Right, SecuredKafka, unique, until};

use crate::stage::{CLOSE, LIMIT, QUICK, finish, open, receive, with, within};

/// How to reach a broker: its address, and properties of librdkafka.
pub(crate) struct Access {
    brokers: String,
    pub(crate) properties: Vec<(String, String)>,
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
    pub(crate) fn tls(kafka: &SecuredKafka, authority: &Certificates) -> Self {
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

    pub(crate) fn source(&self, topic: &str) -> KafkaSource {
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

/// Users with all rights, or all but one.
const USERS: [&str; 5] = ["whole", "no-group", "no-read", "no-describe", "no-write"];

// invariant: missing-right
#[tokio::test]
async fn logins_and_rights_are_used_and_wrong_ones_are_told() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    let kafka = SecuredKafka::start_with(&certificates, &USERS, &[]).await;
    messages_are_consumed_by_tls_and_by_every_kind_of_password(&kafka, &certificates).await;
    whatever_is_wrong_is_said_by_the_name_of_the_property(&kafka, &certificates).await;
    each_missing_right_is_an_error_at_start_with_its_command(&kafka, &certificates).await;
}

async fn messages_are_consumed_by_tls_and_by_every_kind_of_password(
    kafka: &SecuredKafka,
    certificates: &Certificates,
) {
    let topic = kafka.new_topic("orders", 1).await;
    kafka.produce(&topic, [Record::new("one")]).await;
    let user = |mechanism| (mechanism, SecuredKafka::USER, SecuredKafka::PASSWORD);
    let all = [
        Access::tls(kafka, certificates),
        Access::sasl(kafka, certificates, user("PLAIN")),
        Access::sasl(kafka, certificates, user("SCRAM-SHA-256")),
        Access::sasl(kafka, certificates, user("SCRAM-SHA-512")),
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

async fn whatever_is_wrong_is_said_by_the_name_of_the_property(
    kafka: &SecuredKafka,
    certificates: &Certificates,
) {
    let stranger = Certificates::for_names("IP:127.0.0.1");
    let topic = kafka.new_topic("orders", 1).await;
    let login = |user, password| ("SCRAM-SHA-256", user, password);
    let user = SecuredKafka::USER;
    let password = SecuredKafka::PASSWORD;
    let wrong = [
        (Access::tls(kafka, &stranger), "ssl.ca.location"),
        (
            Access::sasl(kafka, &stranger, login(user, password)),
            "ssl.ca.location",
        ),
        (
            Access::sasl(kafka, certificates, login(user, "wrong")),
            "sasl.password",
        ),
        (
            Access::sasl(kafka, certificates, login("unknown-user", password)),
            "sasl.username",
        ),
        (
            Access::sasl(kafka, certificates, login(SecuredKafka::STRANGER, password)),
            "topic",
        ),
        (
            Access::sasl(kafka, certificates, ("GSSAPI", user, password)),
            "sasl.mechanism",
        ),
        (
            Access::sasl(kafka, certificates, ("OAUTHBEARER", user, password)),
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

/// Grants each user its rights: all of them, or all but one.
async fn grant_all_but_one(kafka: &SecuredKafka, group: &str, topic: &str, dead: &str) {
    let all = [
        (Right::Read, On::Topic(topic)),
        (Right::Read, On::Group(group)),
        (Right::Write, On::Topic(dead)),
    ];
    let without = |user, left_out: usize| {
        let rights = all.iter().enumerate().filter(move |(n, _)| *n != left_out);
        rights.map(move |(_, (right, on))| (user, *right, *on))
    };
    let rights = without("no-read", 0)
        .chain(without("no-describe", 0))
        .chain(without("no-group", 1));
    let rights = rights.chain(without("no-write", 2)).chain([
        ("no-read", Right::Describe, On::Topic(topic)),
        ("no-write", Right::Describe, On::Topic(dead)),
    ]);
    kafka
        .grant(&rights.chain(without("whole", 9)).collect::<Vec<_>>())
        .await;
}

/// Waits until the brokers heed the rights of a user who has all of them.
async fn until_heeded(whole: &Access, group: &str, topic: &str, dead: &str) {
    let read = [topic.to_owned()];
    let write = [dead.to_owned()];
    until("the rights", LIMIT, async || {
        let needs = Needs::new(Some(group), &read, &write);
        let topics = [topic.to_owned(), dead.to_owned()];
        let facts = describe_topics(&whole.brokers, &topics, &whole.properties).await;
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
}

async fn each_missing_right_is_an_error_at_start_with_its_command(
    kafka: &SecuredKafka,
    certificates: &Certificates,
) {
    let topic = kafka.new_topic("orders", 2).await;
    let dead = kafka.new_topic("orders.dead", 1).await;
    let group = unique("billing");
    grant_all_but_one(kafka, &group, &topic, &dead).await;
    let whole = Access::user(kafka, certificates, "whole");
    until_heeded(&whole, &group, &topic, &dead).await;
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
            refusal_of(&Access::user(kafka, certificates, user).member(&group, &topic)).await;
        let command = format!("--operation {right} {on}");
        assert!(
            refusal.contains("kafka-acls.sh") && refusal.contains(&command),
            "{user}: {refusal}"
        );
    }))
    .await;
    let source = Access::user(kafka, certificates, "no-write").member(&group, &topic);
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
