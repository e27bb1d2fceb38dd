//! Brokers that take tokens of an OAuth 2.0 server.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use oncegate::dead_letters::DeadLetters as _;
use oncegate::kafka::{
    KafkaSource, Needs, TopicCreation, TopicPlan, TopicReader, committed_offsets, create_topics,
    describe_topics, missing_rights, remove_topics,
};
use oncegate::source::{Source as _, SourceError};
use oncegate_testkit::{
    Certificates, LoopbackPort, On, Record, Right, SecuredKafka, TokenFlaw, TokenServer, unique,
    until,
};

use crate::secured::letter;
use crate::stage::{
    CLOSE, LIMIT, QUICK, finish, finish_all, number, open, receive, until_committed, with, within,
};

const METHOD: &str = "sasl.oauthbearer.method";
const ENDPOINT: &str = "sasl.oauthbearer.token.endpoint.url";
const CLIENT_ID: &str = "sasl.oauthbearer.client.id";
const CLIENT_SECRET: &str = "sasl.oauthbearer.client.secret";
const SCOPE: &str = "sasl.oauthbearer.scope";

fn properties(tokens: &TokenServer, certificates: &Certificates) -> Vec<(String, String)> {
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

// invariant: tokens-end
#[tokio::test(flavor = "multi_thread")]
async fn every_client_logs_in_with_tokens_and_their_renewal_under_load_loses_nothing() {
    let (certificates, tokens) = (
        Certificates::for_names("IP:127.0.0.1"),
        TokenServer::start(15).await,
    );
    let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
    let (topic, dead) = (
        kafka.new_topic("orders", 3).await,
        kafka.new_topic("dead", 1).await,
    );
    let properties = properties(&tokens, &certificates);
    let group = unique("tokens");
    let source = source(&kafka, &group, &topic, &properties);
    let counters = open(&source).await;
    let letters = source.dead_letters(&*dead);
    letters.open().await.expect("it may write");

    let (over, received) = (AtomicBool::new(false), Mutex::new(BTreeSet::new()));
    let produce = async {
        let mut count = 0_i32;
        while !over.load(Ordering::Relaxed) {
            kafka
                .produce(
                    &topic,
                    (count..count + 20).map(|n| Record::new(n.to_string()).partition(n % 3)),
                )
                .await;
            count += 20;
        }
        usize::try_from(count).expect("it is positive")
    };
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
    let consume = async {
        while let Some(deliveries) = source.receive(100).await.expect("the source lives") {
            for delivery in deliveries {
                received
                    .lock()
                    .expect("no panic")
                    .insert(number(&delivery.message));
                delivery.ack_handle.ack();
            }
        }
    };
    let finish = async {
        let (count, ()) = tokio::join!(produce, renew);
        until("every message", LIMIT, async || {
            match received.lock().expect("no panic").len() {
                len if len == count => Ok(()),
                len => Err(format!("{len} of {count}")),
            }
        })
        .await;
        until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
        source.close(CLOSE).await.expect("it commits and leaves");
    };
    tokio::join!(finish, consume);
    assert_eq!(
        counters.total("members_replaced"),
        0,
        "a token is renewed without another client"
    );
    assert_eq!(kafka.end_offsets(&dead).await.values().sum::<i64>(), 1);

    // The clients of the commands.
    let facts = describe_topics(&kafka.oauth(), std::slice::from_ref(&topic), &properties)
        .await
        .expect("an answer");
    assert_eq!(
        (facts[0].partitions, &facts[0].settings_unknown),
        (3, &None)
    );
    let (read, write) = ([topic.clone()], [dead.clone()]);
    let needs = Needs::new(Some("billing"), &read, &write);
    assert_eq!(
        missing_rights(&kafka.oauth(), needs, &properties)
            .await
            .expect("an answer"),
        []
    );
    let mut reader = TopicReader::open(kafka.oauth(), &*dead, properties)
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

#[tokio::test(flavor = "multi_thread")]
async fn topics_and_groups_are_created_described_and_removed_with_tokens() {
    let (certificates, tokens) = (
        Certificates::for_names("IP:127.0.0.1"),
        TokenServer::start(60).await,
    );
    let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
    let (brokers, properties) = (kafka.oauth(), properties(&tokens, &certificates));
    let (small, large, refused) = (unique("small"), unique("large"), unique("refused"));
    let plans = [
        TopicPlan::new(&small),
        TopicPlan::new(&large).partitions(3).replication_factor(1),
        TopicPlan::new(&refused).replication_factor(500),
    ];
    let created = create_topics(&brokers, &plans, &properties)
        .await
        .expect("an answer");
    assert!(
        matches!(&*created, [TopicCreation::Created, TopicCreation::Created, TopicCreation::Refused(error)]
            if error.to_string().contains(&refused)),
        "{created:?}"
    );
    let again = create_topics(&brokers, plans.get(..2).expect("three"), &properties)
        .await
        .expect("an answer");
    assert!(
        matches!(&*again, [TopicCreation::Existed, TopicCreation::Existed]),
        "{again:?}"
    );

    let topics = [small.clone(), large.clone()];
    let partitions = async || -> Vec<usize> {
        let facts = describe_topics(&brokers, &topics, &properties)
            .await
            .expect("an answer");
        facts.iter().map(|fact| fact.partitions).collect()
    };
    let until_there_are = async |expected: [usize; 2]| {
        until("the partitions", LIMIT, async || match partitions().await {
            found if found == expected => Ok(()),
            found => Err(format!("{found:?}")),
        })
        .await;
    };
    until_there_are([1, 3]).await;
    let facts = describe_topics(&brokers, &topics, &properties)
        .await
        .expect("an answer");
    let by_library = describe_topics(kafka.bootstrap(), &topics, &[])
        .await
        .expect("an answer");
    assert_eq!(facts, by_library, "both clients see the same");
    assert!(
        facts
            .iter()
            .all(|fact| fact.settings_unknown.is_none() && fact.retention.is_some()),
        "{facts:?}"
    );

    let group = unique("group");
    let member = with(
        KafkaSource::new(&*brokers, &*group, [&*large]).open_timeout(LIMIT),
        QUICK,
    );
    let member = properties
        .iter()
        .fold(member, |member, (name, value)| member.property(name, value));
    open(&member).await;
    kafka.produce(&large, [Record::new("0").partition(0)]).await;
    finish(receive(&member, 1).await);
    // The topics are gone then, too: a request for both is not undone.
    let error = remove_topics(&brokers, &[], std::slice::from_ref(&group), &properties).await;
    assert!(
        error
            .expect_err("it has a member")
            .to_string()
            .contains(&group)
    );
    member.close(CLOSE).await.expect("it commits and leaves");
    let offsets = async || {
        committed_offsets(&brokers, &group, &large, &properties)
            .await
            .expect("an answer")
    };
    assert_eq!(offsets().await.values().collect::<Vec<_>>(), [&1]);
    until("the group to be empty", LIMIT, async || {
        let removed = remove_topics(&brokers, &[], std::slice::from_ref(&group), &properties).await;
        removed.map_err(|error| error.to_string())
    })
    .await;
    assert!(offsets().await.is_empty(), "the offsets are gone");
    for _ in 0..2 {
        remove_topics(&brokers, &topics, std::slice::from_ref(&group), &properties)
            .await
            .expect("they are gone");
    }
    until_there_are([0, 0]).await;
}

// invariant: missing-right
#[tokio::test]
async fn a_right_that_the_user_of_a_token_lacks_is_no_refused_login() {
    let (certificates, tokens) = (
        Certificates::for_names("IP:127.0.0.1"),
        TokenServer::start(60).await,
    );
    let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
    let (topic, properties) = (
        kafka.new_topic("orders", 2).await,
        properties(&tokens, &certificates),
    );
    tokens.grant_to(SecuredKafka::STRANGER);
    kafka
        .grant(&[(SecuredKafka::STRANGER, Right::Describe, On::Topic(&topic))])
        .await;
    let described = async || {
        let facts =
            describe_topics(&kafka.oauth(), std::slice::from_ref(&topic), &properties).await;
        facts.expect("an answer").pop().expect("one")
    };
    until("the right to be heeded", LIMIT, async || {
        match described().await.partitions {
            2 => Ok(()),
            found => Err(format!("{found} partitions")),
        }
    })
    .await;
    let fact = described().await;
    assert!(
        fact.settings_hidden && fact.settings_unknown.is_some() && !fact.hidden,
        "{fact:?}"
    );
    let plan = TopicPlan::new(unique("forbidden"));
    let created = create_topics(&kafka.oauth(), &[plan], &properties)
        .await
        .expect("an answer");
    assert!(
        matches!(&*created, [TopicCreation::Refused(_)]),
        "{created:?}"
    );
    let removed = remove_topics(
        &kafka.oauth(),
        std::slice::from_ref(&topic),
        &[],
        &properties,
    )
    .await;
    assert!(
        removed
            .expect_err("it may not")
            .to_string()
            .contains(&topic)
    );
    assert_eq!(described().await.partitions, 2, "it is still there");
}

#[tokio::test]
async fn whatever_is_wrong_with_a_login_of_an_administrator_is_one_error_with_the_property() {
    let (certificates, other) = (
        Certificates::for_names("IP:127.0.0.1"),
        Certificates::for_names("IP:127.0.0.1"),
    );
    let tokens = TokenServer::start(60).await;
    let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
    let plan = [TopicPlan::new(unique("never"))];
    let error = async |brokers: String, changed: &str, value: &str| -> SourceError {
        let mut properties = properties(&tokens, &certificates);
        properties.retain(|(name, _)| name != changed);
        properties.push((changed.to_owned(), value.to_owned()));
        let topics = ["any".to_owned()];
        let (created, removed) = tokio::join!(
            within("an answer", create_topics(&brokers, &plan, &properties)),
            within(
                "an answer",
                remove_topics(&brokers, &topics, &[], &properties)
            )
        );
        let (created, removed) = (
            created.expect_err("it is refused"),
            removed.expect_err("it is refused"),
        );
        let verb =
            |error: &SourceError| error.to_string().replace("create topics", "remove topics");
        assert_eq!(verb(&created), removed.to_string());
        assert!(
            !created.to_string().contains(TokenServer::SECRET),
            "{created}"
        );
        created
    };
    for flaw in [
        TokenFlaw::Expired,
        TokenFlaw::OtherAudience,
        TokenFlaw::OtherKey,
    ] {
        tokens.grant_with(Some(flaw));
        let error = error(kafka.oauth(), "client.id", "any").await.to_string();
        assert!(
            error.contains("the brokers refuse the token") && error.contains(CLIENT_ID),
            "{flaw:?}: {error}"
        );
        assert!(
            error.contains(SCOPE) && error.contains("invalid_token"),
            "{flaw:?}: {error}"
        );
    }
    tokens.grant_with(None);
    let (unused, authority) = (
        LoopbackPort::reserve(),
        other.file("ca.pem").display().to_string(),
    );
    let away = format!("http://{}/token", unused.address());
    let (right, without_tokens) = (kafka.oauth(), kafka.sasl());
    let unused = unused.address();
    let wrong = [
        (&right, CLIENT_SECRET, "guessed", CLIENT_SECRET),
        (&right, ENDPOINT, &*away, ENDPOINT),
        (&right, "ssl.ca.location", &*authority, "ssl.ca.location"),
        (
            &right,
            "security.protocol",
            "SASL_PLAINTEXT",
            "security.protocol",
        ),
        (
            &right,
            "ssl.keystore.location",
            "/any",
            "ssl.keystore.location",
        ),
        (&right, "no.such.property", "any", "no.such.property"),
        (&without_tokens, "client.id", "any", "sasl.mechanism"),
        (&unused, "client.id", "any", "has answered"),
    ];
    join_all(wrong.map(async |(brokers, changed, value, named)| {
        let error = error(brokers.clone(), changed, value).await.to_string();
        assert!(
            error.contains(named),
            "{brokers} {changed}={value}: {error}"
        );
    }))
    .await;
}

#[tokio::test]
async fn whatever_is_wrong_with_a_token_is_said_by_the_name_of_the_property() {
    let (certificates, tokens) = (
        Certificates::for_names("IP:127.0.0.1"),
        TokenServer::start(60).await,
    );
    let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
    let topic = kafka.new_topic("orders", 1).await;
    let error = async |changed: &str, value: &str| -> SourceError {
        let mut properties = properties(&tokens, &certificates);
        properties
            .iter_mut()
            .filter(|(name, _)| name == changed)
            .for_each(|(_, given)| value.clone_into(given));
        let source = source(&kafka, &unique("tokens"), &topic, &properties);
        within("an answer", source.check_topics())
            .await
            .expect_err("it must be refused")
    };
    let unused = LoopbackPort::reserve();
    let (away, elsewhere) = (
        format!("http://{}/token", unused.address()),
        tokens.keys_url(),
    );
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

#[tokio::test]
async fn a_token_that_the_brokers_refuse_is_told_in_their_words_and_with_the_properties() {
    let (certificates, tokens) = (
        Certificates::for_names("IP:127.0.0.1"),
        TokenServer::start(60).await,
    );
    let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
    let (topic, dead) = (
        kafka.new_topic("orders", 1).await,
        kafka.new_topic("dead", 1).await,
    );
    let source = source(
        &kafka,
        &unique("tokens"),
        &topic,
        &properties(&tokens, &certificates),
    );
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
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_the_brokers_refuse_later_is_told_and_the_next_good_one_ends_it() {
    let (certificates, tokens) = (
        Certificates::for_names("IP:127.0.0.1"),
        TokenServer::start(5).await,
    );
    let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
    let (topic, group) = (kafka.new_topic("orders", 1).await, unique("tokens"));
    let source = source(&kafka, &group, &topic, &properties(&tokens, &certificates));
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
    tokens.grant_for(3600);
    tokens.grant_with(None);
    kafka.produce(&topic, [Record::new("1")]).await;
    // Meanwhile the group may have ended the member's session, so the message may come a second
    // time.
    let both = BTreeMap::from([(0, 2)]);
    tokio::select! {
        () = until_committed(&kafka, &group, &topic, &both) => {}
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
