//! Requests of administration with tokens.

use futures_util::future::join_all;
use oncegate::kafka::{
    KafkaSource, TopicCreation, TopicPlan, committed_offsets, create_topics, describe_topics,
    remove_topics,
};
use oncegate::source::Source as _;
use oncegate_testkit::{
    Certificates, LoopbackPort, On, Record, Right, SecuredKafka, TokenFlaw, TokenServer, unique,
    until,
};

use crate::oauth::{CLIENT_ID, CLIENT_SECRET, ENDPOINT, SCOPE, WithTokens};
use crate::stage::{CLOSE, LIMIT, QUICK, finish, open, receive, with, within};

/// Creates two topics, once.
async fn create(brokers: &str, properties: &[(String, String)], small: &str, large: &str) {
    let refused = unique("refused");
    let plans = [
        TopicPlan::new(small),
        TopicPlan::new(large).partitions(3).replication_factor(1),
        TopicPlan::new(&refused).replication_factor(500),
    ];
    let created = create_topics(brokers, &plans, properties)
        .await
        .expect("an answer");
    assert!(
        matches!(&*created, [TopicCreation::Created, TopicCreation::Created, TopicCreation::Refused(error)]
            if error.to_string().contains(&refused)),
        "{created:?}"
    );
    let again = create_topics(brokers, plans.get(..2).expect("three"), properties)
        .await
        .expect("an answer");
    assert!(
        matches!(&*again, [TopicCreation::Existed, TopicCreation::Existed]),
        "{again:?}"
    );
}

/// Removes a group of this topic, which has a member at first. Returns its name.
async fn remove_group(
    kafka: &SecuredKafka,
    properties: &[(String, String)],
    topic: &str,
) -> String {
    let brokers = kafka.oauth();
    let group = unique("group");
    let member = with(
        KafkaSource::new(&*brokers, &*group, [topic]).open_timeout(LIMIT),
        QUICK,
    );
    let member = properties
        .iter()
        .fold(member, |member, (name, value)| member.property(name, value));
    open(&member).await;
    kafka.produce(topic, [Record::new("0").partition(0)]).await;
    finish(receive(&member, 1).await);
    // The topics are gone then, too: a request for both is not undone.
    let error = remove_topics(&brokers, &[], std::slice::from_ref(&group), properties).await;
    assert!(
        error
            .expect_err("it has a member")
            .to_string()
            .contains(&group)
    );
    member.close(CLOSE).await.expect("it commits and leaves");
    let offsets = async || {
        committed_offsets(&brokers, &group, topic, properties)
            .await
            .expect("an answer")
    };
    assert_eq!(offsets().await.values().collect::<Vec<_>>(), [&1]);
    until("the group to be empty", LIMIT, async || {
        let removed = remove_topics(&brokers, &[], std::slice::from_ref(&group), properties).await;
        removed.map_err(|error| error.to_string())
    })
    .await;
    assert!(offsets().await.is_empty(), "the offsets are gone");
    group
}

// invariant: missing-right
#[tokio::test(flavor = "multi_thread")]
async fn an_administrator_logs_in_with_tokens() {
    let broker = WithTokens::start().await;
    tokens_create_describe_and_remove_topics_and_groups(&broker).await;
    a_wrong_login_is_one_error_with_the_property(&broker).await;
    a_right_that_the_user_of_a_token_lacks_is_no_refused_login(&broker).await;
}

async fn tokens_create_describe_and_remove_topics_and_groups(broker: &WithTokens) {
    let kafka = &broker.kafka;
    let brokers = kafka.oauth();
    let properties = broker.properties();
    let small = unique("small");
    let large = unique("large");
    create(&brokers, &properties, &small, &large).await;
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

    let group = remove_group(kafka, &properties, &large).await;
    for _ in 0..2 {
        remove_topics(&brokers, &topics, std::slice::from_ref(&group), &properties)
            .await
            .expect("they are gone");
    }
    until_there_are([0, 0]).await;
}

async fn a_right_that_the_user_of_a_token_lacks_is_no_refused_login(broker: &WithTokens) {
    let WithTokens { tokens, kafka, .. } = broker;
    let topic = kafka.new_topic("orders", 2).await;
    let properties = broker.properties();
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

/// The error of an administrator with one property that is changed. It is the same for all
/// requests.
async fn refusal(
    properties: &[(String, String)],
    brokers: &str,
    changed: &str,
    value: &str,
) -> String {
    let mut properties = properties.to_vec();
    properties.retain(|(name, _)| name != changed);
    properties.push((changed.to_owned(), value.to_owned()));
    let plan = [TopicPlan::new(unique("never"))];
    let topics = ["any".to_owned()];
    let (created, removed) = tokio::join!(
        within("an answer", create_topics(brokers, &plan, &properties)),
        within(
            "an answer",
            remove_topics(brokers, &topics, &[], &properties)
        )
    );
    let created = created.expect_err("it is refused").to_string();
    let removed = removed.expect_err("it is refused").to_string();
    assert_eq!(created.replace("create topics", "remove topics"), removed);
    assert!(!created.contains(TokenServer::SECRET), "{created}");
    created
}

async fn a_wrong_login_is_one_error_with_the_property(broker: &WithTokens) {
    let WithTokens { tokens, kafka, .. } = broker;
    let other = Certificates::for_names("IP:127.0.0.1");
    let properties = broker.properties();
    for flaw in [
        TokenFlaw::Expired,
        TokenFlaw::OtherAudience,
        TokenFlaw::OtherKey,
    ] {
        tokens.grant_with(Some(flaw));
        let error = refusal(&properties, &kafka.oauth(), "client.id", "any").await;
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
    let unused = LoopbackPort::reserve();
    let authority = other.file("ca.pem").display().to_string();
    let away = format!("http://{}/token", unused.address());
    let right = kafka.oauth();
    let without_tokens = kafka.sasl();
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
        let error = refusal(&properties, brokers, changed, value).await;
        assert!(
            error.contains(named),
            "{brokers} {changed}={value}: {error}"
        );
    }))
    .await;
}
