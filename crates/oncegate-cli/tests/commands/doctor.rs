//! `oncegate doctor`, on real servers that are set well and badly.

mod consumers;
mod queues;

use oncegate::core::store::Store as _;
use oncegate::postgres::PostgresStore;
use oncegate_testkit::{
    Certificates, Kafka, On, PostgresServer, Redis, RedisServer, Right, SecuredKafka, TokenFlaw,
    TokenServer, unique, until,
};

use super::{Answer, oncegate_with};

async fn doctor(store: &str, more: &[&str]) -> Answer {
    let credentials = [
        ("AWS_ACCESS_KEY_ID", "none"),
        ("AWS_SECRET_ACCESS_KEY", "none"),
    ];
    let arguments = [
        &["doctor", "--store", store, "--json", "--timeout", "50s"][..],
        more,
    ]
    .concat();
    oncegate_with(&arguments, &credentials, b"").await
}

/// What was found of one thing.
fn findings(answer: &Answer, what: &str) -> Vec<String> {
    let json = answer.json();
    let findings = json["findings"].as_array().expect("a list");
    let of = findings.iter().filter(|finding| finding["what"] == what);
    of.map(|finding| format!("{} {}", finding["found"], finding["fix"]))
        .collect()
}

fn says(findings: &[String], words: &str) -> bool {
    findings.iter().any(|finding| finding.contains(words))
}

#[tokio::test]
async fn each_finding_of_a_topic_comes_with_its_fix() {
    let kafka = Kafka::shared().await;
    let redis = Redis::shared().await;
    let topic = kafka.new_topic("orders", 1).await;
    let dead = kafka.new_topic("dead", 1).await;
    let absent = unique("absent");
    let brokers = ["--brokers", kafka.bootstrap(), "--topic", &topic];
    let answer = doctor(
        redis.url(),
        &[&brokers[..], &["--dead-letters", &dead]].concat(),
    )
    .await;
    let of_topic = findings(answer.ended(1), &topic);
    assert!(
        says(&of_topic, "min.insync.replicas=2") && !says(&of_topic, "runs them again"),
        "{of_topic:?}"
    );
    let of_dead = findings(&answer, &dead);
    assert!(
        says(&of_dead, "raise its `max.message.bytes`"),
        "{of_dead:?}"
    );
    assert_eq!(answer.json()["schema"], "oncegate.doctor/1");

    // The broker's default is seven days.
    let more = ["--retention", "1d", "--topic", &absent];
    let answer = doctor(redis.url(), &[&brokers[..], &more].concat()).await;
    let of_topic = findings(answer.ended(1), &topic);
    assert!(
        says(&of_topic, "raise the gate's `retention` to 7 d 0 h"),
        "{of_topic:?}"
    );
    assert!(
        says(&findings(&answer, &absent), "no such topic"),
        "{answer:?}"
    );
    assert!(
        says(&findings(&answer, "kafka"), "--dead-letters"),
        "{answer:?}"
    );
}

#[tokio::test]
async fn an_unsafe_store_is_found_and_an_absent_one_hides_no_finding() {
    let evicting = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let answer = doctor(evicting.url(), &[]).await;
    assert!(
        says(&findings(answer.ended(1), "store"), "noeviction"),
        "{answer:?}"
    );
    let forgetful = RedisServer::start_with(&["--appendonly", "no", "--save", ""]).await;
    let answer = doctor(forgetful.url(), &[]).await;
    assert!(
        says(&findings(answer.ended(1), "store"), "appendonly"),
        "{answer:?}"
    );

    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("orders", 1).await;
    let answer = doctor(
        "redis://:secret@127.0.0.1:1",
        &["--brokers", kafka.bootstrap(), "--topic", &topic],
    )
    .await;
    let json = answer.ended(69).json();
    assert_eq!(
        (
            &json["findings"][0]["what"],
            &json["findings"][0]["unreachable"]
        ),
        (&"store".into(), &true.into())
    );
    assert!(
        !findings(&answer, &topic).is_empty() && !answer.out.contains("secret"),
        "{answer:?}"
    );
}

#[tokio::test]
async fn every_weakness_of_a_store_is_found_at_once() {
    let weak =
        RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru", "--appendonly", "no"]).await;
    let found = findings(doctor(weak.url(), &[]).await.ended(1), "store");
    assert!(
        says(&found, "noeviction") && says(&found, "appendonly") && says(&found, "replica"),
        "{found:?}"
    );
}

#[tokio::test]
async fn a_redis_without_a_replica_can_be_accepted() {
    let server = RedisServer::start().await;
    let found = findings(doctor(server.url(), &[]).await.ended(1), "store");
    assert!(
        found.len() == 1 && says(&found, "accept it with `allow_no_replica`"),
        "{found:?}"
    );
    let answer = doctor(server.url(), &["--allow-no-replica"]).await;
    assert_eq!(findings(answer.ended(0), "store"), [""; 0]);
}

#[tokio::test]
async fn memory_that_will_run_short_is_found_before_it_does() {
    let server = RedisServer::start_with(&["--maxmemory", "64mb"]).await;
    let answer = doctor(server.url(), &["--allow-no-replica"]).await;
    let idle = &answer.ended(0).out;
    assert!(
        idle.contains("of 64.0 MiB used") && idle.contains("so no forecast"),
        "{idle}"
    );
    let growing = async {
        for n in 0_u64.. {
            server
                .command(&["SET", &n.to_string(), "record", "EX", "3600"])
                .await;
        }
    };
    let answer = tokio::select! {
        answer = doctor(server.url(), &["--allow-no-replica"]) => answer,
        () = growing => unreachable!("it goes on for ever"),
    };
    let found = findings(answer.ended(1), "store");
    assert!(
        says(&found, "with a retention of 7 d 0 h") && says(&found, "raise maxmemory"),
        "{found:?}"
    );
}

#[tokio::test]
async fn calls_of_ours_in_the_slow_log_are_found() {
    // Its slow log is off.
    let fast = RedisServer::start_with(&["--slowlog-log-slower-than", "-1"]).await;
    let scope = unique("billing");
    let flags = ["--allow-no-replica", "--scope", &scope];
    let answer = doctor(fast.url(), &flags).await;
    assert!(
        answer
            .ended(0)
            .out
            .contains("no script of oncegate in its slow log"),
        "{answer:?}"
    );
    let slow = RedisServer::start_with(&["--slowlog-log-slower-than", "0"]).await;
    let answer = doctor(slow.url(), &flags).await;
    let found = findings(answer.ended(1), "store");
    assert!(
        says(&found, "calls of oncegate's scripts") && says(&found, "SLOWLOG GET"),
        "{found:?}"
    );
    // A user without the right is told what is missing, and that is no finding.
    slow.command(&[
        "ACL", "SETUSER", "billing", "on", ">right", "~*", "+@all", "-slowlog",
    ])
    .await;
    let url = slow.url().replace("redis://", "redis://billing:right@");
    let answer = doctor(&url, &flags).await;
    assert!(answer.ended(0).out.contains("+slowlog|get"), "{answer:?}");
}

/// The broker takes a moment to heed the rights that it has given.
async fn until_rights_are_heeded(config: &str, topic: &str) -> Answer {
    until(
        "the rights to be heeded",
        std::time::Duration::from_secs(60),
        async || {
            let answer = oncegate_with(&["doctor", "--config", config, "--json"], &[], b"").await;
            let found = answer.json()["findings"].to_string();
            if found.contains(&format!("READ --topic {topic}")) {
                Ok(answer)
            } else {
                Err(found)
            }
        },
    )
    .await
}

#[tokio::test]
async fn missing_rights_are_found_with_the_commands_that_grant_them() {
    let redis = RedisServer::start().await;
    // All that a consumer needs but `set`.
    let rules = "ACL SETUSER billing on >right ~billing:* -@all +evalsha +script|load +get +pttl +pexpire +pexpiretime +time +info";
    redis.command(&rules.split(' ').collect::<Vec<_>>()).await;

    let certificates = Certificates::for_names("IP:127.0.0.1");
    let kafka = SecuredKafka::start(&certificates).await;
    let topic = kafka.new_topic("orders", 1).await;
    let hidden = kafka.new_topic("hidden", 1).await;
    let dead = kafka.new_topic("dead", 1).await;
    let stranger = SecuredKafka::STRANGER;
    kafka
        .grant(&[
            (stranger, Right::Describe, On::Topic(&topic)),
            (stranger, Right::Describe, On::Topic(&dead)),
            (stranger, Right::Read, On::Group("billing")),
        ])
        .await;
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("oncegate.toml");
    let password = dir.path().join("password");
    std::fs::write(&password, SecuredKafka::PASSWORD).unwrap();
    let text = format!(
        r#"
version = 1
[store]
url = "redis://billing:right@127.0.0.1:{}"
[consumer.billing]
key = {{ json = ["id"] }}
handler = {{ http = "http://127.0.0.1:1" }}
dead_letters = {{ kafka = "{dead}" }}
source = {{ kafka = {{ brokers = ["{}"], topics = ["{topic}", "{hidden}"], properties = {{ "security.protocol" = "SASL_SSL", "ssl.ca.location" = "{}", "sasl.mechanism" = "SCRAM-SHA-256", "sasl.username" = "{stranger}", "sasl.password" = {{ file = "{}" }} }} }} }}
"#,
        redis.port(),
        kafka.sasl(),
        certificates.file("ca.pem").display(),
        password.display(),
    );
    std::fs::write(&config, text).unwrap();
    let config = config.display().to_string();
    let answer = until_rights_are_heeded(&config, &topic).await;
    let json = answer.ended(1).json();
    let all: Vec<String> = json["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(ToString::to_string)
        .collect();
    for grant in [
        format!("--operation READ --topic {topic}"),
        format!("--operation DESCRIBE --topic {hidden}"),
        format!("--operation WRITE --topic {dead}"),
        format!("--operation DESCRIBECONFIGS --topic {topic}"),
        "ACL SETUSER NAME ~billing:* -@all".to_owned(),
    ] {
        assert!(
            all.iter().any(|finding| finding.contains(&grant)),
            "{grant}: {all:#?}"
        );
    }
    assert!(
        !all.iter().any(|finding| finding.contains("--group")),
        "that right is there: {all:#?}"
    );
    assert!(
        !answer.out.contains(SecuredKafka::PASSWORD),
        "{}",
        answer.out
    );
}

#[tokio::test]
async fn a_token_login_sees_topic_settings_and_a_missing_right() {
    let redis = Redis::shared().await;
    let certificates = Certificates::for_names("IP:127.0.0.1");
    let tokens = TokenServer::start(60).await;
    let kafka = SecuredKafka::start_with_tokens(&certificates, &tokens).await;
    let topic = kafka.new_topic("orders", 1).await;
    let brokers = kafka.oauth();
    let authority = certificates.file("ca.pem").display().to_string();
    let properties = [
        "security.protocol=SASL_SSL",
        &format!("ssl.ca.location={authority}"),
        "sasl.mechanism=OAUTHBEARER",
        "sasl.oauthbearer.method=oidc",
        &format!("sasl.oauthbearer.token.endpoint.url={}", tokens.token_url()),
        &format!("sasl.oauthbearer.client.id={}", TokenServer::CLIENT),
        &format!("sasl.oauthbearer.client.secret={}", TokenServer::SECRET),
    ];
    let mut arguments = vec![
        "--brokers",
        &brokers,
        "--topic",
        &topic,
        "--group",
        "billing",
        "--retention",
        "1d",
    ];
    properties
        .iter()
        .for_each(|property| arguments.extend(["--property", property]));
    // Shorter than the broker's default of seven days.
    let of_topic = findings(doctor(redis.url(), &arguments).await.ended(1), &topic);
    assert!(
        says(&of_topic, "raise the gate's `retention` to 7 d 0 h"),
        "{of_topic:?}"
    );
    assert!(!says(&of_topic, "cannot be read"), "{of_topic:?}");

    let stranger = SecuredKafka::STRANGER;
    tokens.grant_to(stranger);
    kafka
        .grant(&[
            (stranger, Right::Describe, On::Topic(&topic)),
            (stranger, Right::Read, On::Group("billing")),
        ])
        .await;
    until(
        "the rights to be heeded",
        std::time::Duration::from_secs(60),
        async || {
            let of_topic = findings(&doctor(redis.url(), &arguments).await, &topic);
            if says(&of_topic, "cannot be read") {
                Ok(())
            } else {
                Err(format!("{of_topic:?}"))
            }
        },
    )
    .await;
    let answer = doctor(redis.url(), &arguments).await;
    for grant in ["DESCRIBECONFIGS", "READ"] {
        let command = format!("--operation {grant} --topic {topic}");
        assert!(answer.out.contains(&command), "{command}: {answer:?}");
    }

    tokens.grant_with(Some(TokenFlaw::OtherKey));
    let answer = doctor(redis.url(), &arguments).await;
    let of_kafka = findings(&answer, "kafka");
    assert!(
        says(&of_kafka, "the brokers refuse the token"),
        "{answer:?}"
    );
    assert!(!answer.out.contains(TokenServer::SECRET), "{answer:?}");
}

/// The rights of Redis are by scope, so the command needs it to try them.
#[tokio::test]
async fn a_missing_right_in_redis_is_found_in_the_scope_that_is_named() {
    let redis = RedisServer::start().await;
    let may = "+evalsha +script|load +get +pttl +pexpire +pexpiretime +time +info";
    let all = "billing:right";
    let user = async |more: &str| {
        let rules = format!("ACL SETUSER billing reset on >right ~billing:* -@all {may} {more}");
        redis
            .command(&rules.split_whitespace().collect::<Vec<_>>())
            .await;
    };
    let url = format!("redis://{all}@127.0.0.1:{}", redis.port());
    let found = async |more: &[&str]| {
        let answer = doctor(&url, &[&["--allow-no-replica"], more].concat()).await;
        findings(&answer, "store")
    };
    user("").await;
    assert_eq!(found(&[]).await, [""; 0], "no scope is known");
    let lacking = found(&["--scope", "billing"]).await;
    assert!(
        says(&lacking, "lacks rights") && says(&lacking, "ACL SETUSER NAME ~billing:* -@all"),
        "{lacking:?}"
    );
    user("+set").await;
    assert_eq!(found(&["--scope", "billing"]).await, [""; 0]);
    assert!(
        says(&found(&["--scope", "orders"]).await, "~orders:*"),
        "another scope has other keys"
    );
}

#[tokio::test]
async fn a_missing_postgresql_right_is_found_with_its_statement() {
    let server = PostgresServer::start().await;
    let owner = PostgresStore::connect(server.url()).await.unwrap();
    owner.create_schema().await.unwrap();
    let admin = server.connection().await;
    admin
        .batch_execute("CREATE ROLE billing LOGIN")
        .await
        .unwrap();
    let run = async |sql: &str| admin.batch_execute(sql).await.unwrap();
    run(&PostgresStore::grant_sql("billing")).await;
    let url = server.url_as("billing");
    let found = async || -> Vec<String> {
        let json = doctor(&url, &[]).await.json();
        let all = json["findings"].as_array().unwrap().iter();
        all.map(|finding| finding["found"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(found().await, [""; 0]);

    for (right, table, all) in [
        ("SELECT", "oncegate_schema", true),
        ("UPDATE", "oncegate_schema", true),
        ("SELECT", "oncegate_records", true),
        ("DELETE", "oncegate_records", true),
        ("UPDATE", "oncegate_descriptors", true),
        ("INSERT", "oncegate_sessions", false),
        ("UPDATE", "oncegate_outbox", false),
        ("DELETE", "oncegate_outbox_leaders", false),
    ] {
        run(&format!("REVOKE {right} ON {table} FROM billing")).await;
        let found = found().await;
        assert_eq!(found.len(), 1, "{right} on {table}: {found:?}");
        let named = if all {
            format!("{right} on {table}")
        } else {
            format!("GRANT {right} ON {table}")
        };
        assert!(
            says(&found, &named) && says(&found, "GRANT"),
            "{named}: {found:?}"
        );
        // A consumer that needs no such table may run.
        let refused = PostgresStore::connect(&url)
            .await
            .unwrap()
            .check()
            .await
            .is_err();
        assert_eq!(refused, all, "{right} on {table}");
        // The statement that the finding ends with is the whole repair.
        let grant = found[0].split_once("owner: ").unwrap().1;
        run(grant).await;
    }
    assert_eq!(found().await, [""; 0], "every right was given back");

    // Tables in a schema that the role may not use are not missing.
    run("CREATE SCHEMA once; ALTER ROLE billing SET search_path = once").await;
    let there = format!("{}?options=-csearch_path%3Donce", server.url());
    PostgresStore::connect(&there)
        .await
        .unwrap()
        .create_schema()
        .await
        .unwrap();
    assert!(says(
        &found().await,
        r#"GRANT USAGE ON SCHEMA "once" TO "billing";"#
    ));
}
