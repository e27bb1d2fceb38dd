//! `oncegate topics create` against a real broker.

use std::path::Path;

use oncegate_testkit::{
    Certificates, Kafka, RabbitMq, SecuredKafka, TokenFlaw, TokenServer, unique,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Answer, oncegate};

/// The properties of a configuration whose user logs in with tokens.
fn token_properties(certificates: &Certificates, tokens: &TokenServer) -> String {
    format!(
        r#""security.protocol" = "SASL_SSL", "ssl.ca.location" = "{}", "sasl.mechanism" = "OAUTHBEARER",
        "sasl.oauthbearer.method" = "oidc", "sasl.oauthbearer.token.endpoint.url" = "{}",
        "sasl.oauthbearer.client.id" = "{}", "sasl.oauthbearer.client.secret" = "{}""#,
        certificates.file("ca.pem").display(),
        tokens.token_url(),
        TokenServer::CLIENT,
        TokenServer::SECRET,
    )
    .replace('\n', " ")
}

async fn create_from(config: &Path, flags: &[&str]) -> Answer {
    let config = config.to_str().unwrap();
    let create = ["topics", "create", "--config", config];
    oncegate(&[&create[..], flags].concat(), b"").await
}

/// A configuration that names three topics, of which none exists.
struct Named {
    kafka: Kafka,
    dir: TempDir,
    source: String,
}

impl Named {
    async fn new() -> Self {
        let kafka = Kafka::shared().await;
        Self::at(kafka.bootstrap().to_owned(), kafka, "")
    }

    /// The same with the brokers at this address of the broker and with these properties.
    fn at(brokers: String, kafka: Kafka, properties: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = unique("topics");
        let text = format!(
            r#"version = 1
[store]
url = "sqlite:records.db"
[defaults]
key = {{ json = ["order_id"] }}
handler = {{ command = "true" }}
ordering = "unordered"
source = {{ kafka = {{ brokers = ["{brokers}"], topics = ["{source}"], retry_topics = {{ "{source}.retry.30s" = "30s" }}, properties = {{ {properties} }} }} }}
[consumer.billing]
dead_letters = {{ kafka = "{source}.dead" }}
[consumer.audit]
dead_letters = {{ kafka = "{source}.dead" }}
"#
        );
        std::fs::write(dir.path().join("oncegate.toml"), text).unwrap();
        Self { kafka, dir, source }
    }

    async fn create(&self, flags: &[&str]) -> Answer {
        let path = self.dir.path().join("oncegate.toml");
        create_from(&path, flags).await
    }

    /// The topics with their roles, states and partitions.
    async fn found(&self, flags: &[&str]) -> Vec<(String, String, Value)> {
        let answer = self.create(&[flags, &["--json"]].concat()).await;
        let document = answer.json();
        assert_eq!(document["schema"], "oncegate.topics/1");
        let topic = |topic: &Value| {
            let text = |name: &str| topic[name].as_str().unwrap().to_owned();
            assert!(text("topic").starts_with(&self.source));
            (text("role"), text("state"), topic["partitions"].clone())
        };
        document["topics"]
            .as_array()
            .unwrap()
            .iter()
            .map(topic)
            .collect()
    }
}

fn all(state: &str, partitions: &Value) -> Vec<(String, String, Value)> {
    ["source", "retry", "dead_letters"]
        .map(|role| (role.to_owned(), state.to_owned(), partitions.clone()))
        .into()
}

#[tokio::test]
async fn missing_topics_are_shown_then_created_then_left_alone() {
    let named = Named::new().await;
    let flags = ["--partitions", "3", "--replication-factor", "1"];
    let shown = named.create(&[&flags[..], &["--dry-run"]].concat()).await;
    let line = shown.ended(1).line(&format!("{}.dead:", named.source));
    assert_eq!(
        line,
        format!(
            "{}.dead: to create, 3 partitions, 1 replica (dead letters of audit)",
            named.source
        )
    );
    named
        .create(&flags)
        .await
        .ended(2)
        .says("add --yes to do it");
    assert_eq!(
        named.found(&[&flags[..], &["--dry-run"]].concat()).await,
        all("missing", &json!(3)),
        "nothing yet"
    );

    assert_eq!(
        named.found(&[&flags[..], &["--yes"]].concat()).await,
        all("created", &json!(3))
    );
    assert_eq!(
        named.kafka.end_offsets(&named.source).await.len(),
        3,
        "the broker has its partitions"
    );
    let again = named.create(&["--partitions", "9"]).await;
    let line = again.ended(0).line(&format!("{}:", named.source));
    assert_eq!(
        line,
        format!(
            "{}: exists, 3 partitions, 1 replica (consumed by audit)",
            named.source
        )
    );
}

/// Runs `oncegate doctor`, which finds a dead-letter topic that is too small for its messages.
#[tokio::test]
async fn created_topics_take_dead_letters_of_the_largest_messages() {
    let named = Named::new().await;
    named.create(&["--yes"]).await.ended(0);
    let path = named.dir.path().join("oncegate.toml");
    let checked = oncegate(&["doctor", "--config", path.to_str().unwrap()], b"").await;
    assert!(
        !checked.out.contains("max.message.bytes"),
        "{}",
        checked.out
    );
    assert!(
        checked
            .out
            .contains(&format!("topic {}.dead", named.source)),
        "{}",
        checked.out
    );
    assert!(!checked.out.contains("\\n"), "{}", checked.out);
}

#[tokio::test]
async fn a_token_login_creates_topics_and_a_wrong_token_is_one_error() {
    let certificates = Certificates::for_names("IP:127.0.0.1");
    let tokens = TokenServer::start(60).await;
    let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
    let properties = token_properties(&certificates, &tokens);
    let named = Named::at(kafka.oauth(), Kafka::at(kafka.bootstrap()), &properties);
    assert_eq!(
        named.found(&["--partitions", "3", "--yes"]).await,
        all("created", &json!(3))
    );
    assert_eq!(
        named.kafka.end_offsets(&named.source).await.len(),
        3,
        "the broker has its partitions"
    );
    assert_eq!(named.found(&[]).await, all("exists", &json!(3)));
    tokens.grant_with(Some(TokenFlaw::OtherKey));
    let refused = named.create(&["--yes"]).await;
    refused.ended(78).says("the brokers refuse the token");
    assert!(!refused.err.contains(TokenServer::SECRET), "{refused:?}");
}

#[tokio::test]
async fn source_topics_can_be_excepted_and_refused_topics_are_named() {
    let named = Named::new().await;
    let refused = named
        .create(&["--except-sources", "--yes", "--replication-factor", "500"])
        .await;
    refused
        .ended(78)
        .says("not all topics and queues were created");
    assert!(
        refused
            .out
            .contains(&format!("topic {}.dead was not created", named.source)),
        "{}",
        refused.out
    );
    let created = named.found(&["--except-sources", "--yes"]).await;
    let roles: Vec<_> = created
        .iter()
        .map(|(role, state, _)| (role.as_str(), state.as_str()))
        .collect();
    assert_eq!(
        roles,
        [("retry", "created"), ("dead_letters", "created")],
        "with the broker's own numbers"
    );
}

#[tokio::test]
async fn a_configuration_without_topics_or_without_a_broker_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("billing");
    oncegate(
        &["init", folder.to_str().unwrap(), "--language", "bash"],
        b"",
    )
    .await
    .ended(0);
    let path = folder.join("oncegate.toml");
    let answer = create_from(&path, &[]).await;
    answer.ended(78).says("names no topic");
}

#[tokio::test]
async fn missing_queues_become_quorum_queues_and_are_then_left_alone() {
    let rabbit = RabbitMq::shared().await;
    let dir = tempfile::tempdir().unwrap();
    let queue = unique("queues");
    let consumer = |user: &str| {
        format!(
            r#"version = 1
[store]
url = "sqlite:records.db"
[consumer.billing]
key = {{ json = ["order_id"] }}
handler = {{ command = "true" }}
source = {{ amqp = {{ url = "amqp://{user}:guest@{}/%2f", queue = "{queue}" }} }}
dead_letters = {{ amqp = "{queue}.dead" }}
"#,
            rabbit.address()
        )
    };
    let path = dir.path().join("oncegate.toml");
    std::fs::write(&path, consumer("guest")).unwrap();
    let create = async |flags: &[&str]| create_from(&path, flags).await;
    let line = create(&["--dry-run"])
        .await
        .ended(1)
        .line(&format!("{queue}.dead:"));
    assert_eq!(
        line,
        format!("{queue}.dead: to create, a quorum queue (dead letters of billing)")
    );
    let created = create(&["--yes"]).await;
    assert_eq!(
        created.ended(0).line(&format!("created {queue}.dead")),
        format!("created {queue}.dead")
    );
    assert_eq!(created.err, "", "a queue that is missing is no error here");
    // Before RabbitMQ 4, -1 is a number: the first return of a message would be one too many.
    let limit = Value::Null;
    for name in [queue.clone(), format!("{queue}.dead")] {
        let described = rabbit
            .manage("GET", &format!("/api/queues/%2F/{name}"), "")
            .await;
        let described: Value = serde_json::from_slice(&described.body).unwrap();
        assert_eq!(
            (&described["type"], &described["durable"]),
            (&json!("quorum"), &json!(true))
        );
        assert_eq!(described["arguments"]["x-delivery-limit"], limit, "{name}");
    }
    let again = create(&["--yes"]).await;
    assert_eq!(
        again.ended(0).line(&format!("{queue}:")),
        format!("{queue}: exists (consumed by billing)")
    );
    // A user without the right.
    let user = rabbit.new_user("^$", ".*", ".*").await;
    let text = consumer(&user).replace(&queue, &unique("queues"));
    std::fs::write(&path, text).unwrap();
    let refused = create(&["--yes"]).await;
    assert!(
        refused
            .ended(78)
            .out
            .contains("grant the permission `configure`"),
        "{refused:?}"
    );
}
