//! Brokers that take tokens of an OAuth 2.0 server.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use oncegate::dead_letters::DeadLetters as _;
use oncegate::kafka::{KafkaSource, Needs, TopicReader, describe_topics, missing_rights};
use oncegate::source::{Source as _, SourceError};
use oncegate_testkit::{
    Certificates, LoopbackPort, Record, SecuredKafka, TokenFlaw, TokenServer, unique, until,
};

use crate::rotation::{produce_until, receive_all};
use crate::secured::letter;
use crate::stage::{
    CLOSE, LIMIT, QUICK, finish, finish_all, open, receive, until_committed, with, within,
};

const METHOD: &str = "sasl.oauthbearer.method";
pub(crate) const ENDPOINT: &str = "sasl.oauthbearer.token.endpoint.url";
pub(crate) const CLIENT_ID: &str = "sasl.oauthbearer.client.id";
pub(crate) const CLIENT_SECRET: &str = "sasl.oauthbearer.client.secret";
pub(crate) const SCOPE: &str = "sasl.oauthbearer.scope";

pub(crate) fn properties(
    tokens: &TokenServer,
    certificates: &Certificates,
) -> Vec<(String, String)> {
    let authority = certificates.file("ca.pem").display().to_string();
    let given = [
        ("security.protocol", "SASL_SSL"),
        ("ssl.ca.location", &*authority),
        ("sasl.mechanism", "OAUTHBEARER"),
        (METHOD, "oidc"),
        (ENDPOINT, &tokens.token_url()),
        (CLIENT_ID, TokenServer::CLIENT),
        (CLIENT_SECRET, TokenServer::SECRET),
    ];
    given
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
}

fn source(
    kafka: &SecuredKafka,
    group: &str,
    topic: &str,
    properties: &[(String, String)],
) -> KafkaSource {
    // The broker's first TLS connection takes its time on a busy machine.
    let source = KafkaSource::new(kafka.oauth(), group, [topic]).open_timeout(LIMIT);
    let properties = properties
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()));
    with(
        source,
        &properties.chain(QUICK.iter().copied()).collect::<Vec<_>>(),
    )
}

/// A broker that takes the tokens of a server.
pub(crate) struct WithTokens {
    pub(crate) certificates: Certificates,
    pub(crate) tokens: TokenServer,
    pub(crate) kafka: SecuredKafka,
}

/// How long a token is valid where that does not matter, in seconds.
const LONG: u64 = 3600;

impl WithTokens {
    pub(crate) async fn start() -> Self {
        let certificates = Certificates::for_names("IP:127.0.0.1");
        let tokens = TokenServer::start(LONG).await;
        let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
        Self {
            certificates,
            tokens,
            kafka,
        }
    }

    pub(crate) fn properties(&self) -> Vec<(String, String)> {
        properties(&self.tokens, &self.certificates)
    }
}

// invariant: tokens-end
#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_used_and_renewed_and_bad_ones_are_told() {
    let broker = WithTokens::start().await;
    whatever_is_wrong_names_the_property(&broker).await;
    a_refused_token_is_told_with_broker_words_and_properties(&broker).await;
    every_client_uses_tokens_and_their_renewal_loses_nothing(&broker).await;
    a_token_refused_later_is_told_until_the_next_good_one(&broker).await;
}

async fn every_client_uses_tokens_and_their_renewal_loses_nothing(broker: &WithTokens) {
    let WithTokens { tokens, kafka, .. } = broker;
    tokens.grant_for(15);
    let topic = kafka.new_topic("orders", 3).await;
    let dead = kafka.new_topic("dead", 1).await;
    let properties = broker.properties();
    let group = unique("tokens");
    let source = source(kafka, &group, &topic, &properties);
    let counters = open(&source).await;
    let letters = source.dead_letters(&*dead);
    letters.open().await.expect("it may write");

    let over = AtomicBool::new(false);
    let received = Mutex::new(BTreeSet::new());
    let renew = async {
        let before = tokens.granted();
        until("more tokens", LIMIT, async || {
            match tokens.granted() - before {
                3.. => Ok(()),
                more => Err(format!("{more} so far")),
            }
        })
        .await;
        within("a dead letter", letters.send(&letter()))
            .await
            .expect("the producer has a token of its own");
        over.store(true, Ordering::Relaxed);
    };
    let finish = async {
        let (count, ()) = tokio::join!(produce_until(kafka, &topic, &over), renew);
        let count = usize::try_from(count).expect("it is positive");
        until("every message", LIMIT, async || {
            match received.lock().expect("no panic").len() {
                len if len == count => Ok(()),
                len => Err(format!("{len} of {count}")),
            }
        })
        .await;
        until_committed(kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
        source.close(CLOSE).await.expect("it commits and leaves");
    };
    tokio::join!(finish, receive_all(&source, &received));
    assert_eq!(
        counters.total("members_replaced"),
        0,
        "a token is renewed without another client"
    );
    assert_eq!(kafka.end_offsets(&dead).await.values().sum::<i64>(), 1);

    commands_log_in(kafka, properties, topic, dead).await;
}

/// Demands that the clients of the commands log in with tokens, too.
async fn commands_log_in(
    kafka: &SecuredKafka,
    properties: Vec<(String, String)>,
    topic: String,
    dead: String,
) {
    let read = [topic];
    let write = [dead];
    let facts = describe_topics(&kafka.oauth(), &read, &properties)
        .await
        .expect("an answer");
    assert_eq!(
        (facts[0].partitions, &facts[0].settings_unknown),
        (3, &None)
    );
    let needs = Needs::new(Some("billing"), &read, &write);
    assert_eq!(
        missing_rights(&kafka.oauth(), needs, &properties)
            .await
            .expect("an answer"),
        []
    );
    let [dead] = write;
    let mut reader = TopicReader::open(kafka.oauth(), dead, properties)
        .await
        .expect("it opens");
    assert_eq!(
        reader
            .next_batch()
            .await
            .expect("it reads")
            .map(|batch| batch.len()),
        Some(1)
    );
}

async fn whatever_is_wrong_names_the_property(broker: &WithTokens) {
    let WithTokens { tokens, kafka, .. } = broker;
    let topic = kafka.new_topic("orders", 1).await;
    let error = async |changed: &str, value: &str| -> SourceError {
        let mut properties = broker.properties();
        properties
            .iter_mut()
            .filter(|(name, _)| name == changed)
            .for_each(|(_, given)| value.clone_into(given));
        let source = source(kafka, &unique("tokens"), &topic, &properties);
        within("an answer", source.check_topics())
            .await
            .expect_err("it must be refused")
    };
    let unused = LoopbackPort::reserve();
    let away = format!("http://{}/token", unused.address());
    let elsewhere = tokens.keys_url();
    let wrong = [
        (CLIENT_SECRET, "guessed", false),
        (CLIENT_ID, "another-service", false),
        (ENDPOINT, &*away, true),
        // It answers, but grants no tokens.
        (ENDPOINT, &*elsewhere, false),
    ];
    join_all(wrong.map(async |(changed, value, is_away)| {
        let error = error(changed, value).await;
        assert!(
            error.to_string().contains(changed),
            "{changed}={value}: {error}"
        );
        assert_eq!(error.is_away(), is_away, "{error}");
        assert!(
            !error.to_string().contains(TokenServer::SECRET)
                && !error.to_string().contains("guessed"),
            "{error}"
        );
    }))
    .await;
}

async fn a_refused_token_is_told_with_broker_words_and_properties(broker: &WithTokens) {
    let WithTokens { tokens, kafka, .. } = broker;
    let topic = kafka.new_topic("orders", 1).await;
    let dead = kafka.new_topic("dead", 1).await;
    let source = source(kafka, &unique("tokens"), &topic, &broker.properties());
    for flaw in [
        TokenFlaw::Expired,
        TokenFlaw::OtherAudience,
        TokenFlaw::OtherKey,
    ] {
        tokens.grant_with(Some(flaw));
        let checked = within("an answer", source.check_topics())
            .await
            .expect_err("it must be refused");
        let opened = within("an answer", source.dead_letters(&*dead).open()).await;
        for (error, is_away) in [
            (checked.to_string(), checked.is_away()),
            (opened.expect_err("it must be refused").to_string(), false),
        ] {
            assert!(
                error.contains("the brokers refuse the token") && error.contains(CLIENT_ID),
                "{flaw:?}: {error}"
            );
            assert!(
                error.contains(SCOPE) && error.contains("invalid_token"),
                "{flaw:?}: {error}"
            );
            assert!(
                !is_away && !error.contains(TokenServer::SECRET),
                "{flaw:?}: {error}"
            );
        }
    }
    tokens.grant_with(None);
    within("an answer", source.check_topics())
        .await
        .expect("a good token is accepted");
}

/// Its connections must log in again every two seconds, with the last token that was granted.
async fn a_token_refused_later_is_told_until_the_next_good_one(broker: &WithTokens) {
    let WithTokens { tokens, kafka, .. } = broker;
    tokens.grant_for(5);
    let topic = kafka.new_topic("orders", 1).await;
    let group = unique("tokens");
    let source = source(kafka, &group, &topic, &broker.properties());
    open(&source).await;
    kafka.produce(&topic, [Record::new("0")]).await;
    finish(receive(&source, 1).await);
    tokens.grant_with(Some(TokenFlaw::OtherKey));
    until("the refusal in the status", LIMIT, async || {
        let failures = source.status().failures;
        let told = failures
            .iter()
            .find(|failure| failure.operation == "login" && failure.stops_delivery);
        let told = told.map(|failure| &failure.error);
        match told {
            Some(error)
                if error.contains("the brokers refuse the token") && error.contains(SCOPE) =>
            {
                Ok(())
            }
            _ => Err(format!("{failures:?}")),
        }
    })
    .await;
    // On a busy machine, a token for five seconds may be over before a commit is answered.
    tokens.grant_for(LONG);
    tokens.grant_with(None);
    kafka.produce(&topic, [Record::new("1")]).await;
    // Meanwhile the group may have ended the member's session, so the message may come a second
    // time.
    let both = BTreeMap::from([(0, 2)]);
    tokio::select! {
        () = until_committed(kafka, &group, &topic, &both) => {}
        () = finish_all(&source) => {}
    }
    until("the end of the refusal in the status", LIMIT, async || {
        let failures = source.status().failures;
        if failures.is_empty() {
            Ok(())
        } else {
            Err(format!("{failures:?}"))
        }
    })
    .await;
    within("the end", source.close(CLOSE))
        .await
        .expect("it commits and leaves");
}
