//! Commands that take from a configuration what no flag says.

mod folder;

use std::path::Path;

use oncegate::core::store::Store as _;
use oncegate::sqlite::SqliteStore;
use oncegate::{Completion, Entry, Gate, Key, Message, Origin};
use oncegate_testkit::{Kafka, RedisServer, unique};
use tempfile::TempDir;

use super::dead_letters::{OnKafka, OnSqs, numbers};
use super::shop::Shop;
use super::{Answer, command, ended, oncegate, oncegate_with};

const CREDENTIALS: [(&str, &str); 2] = [
    ("AWS_ACCESS_KEY_ID", "none"),
    ("AWS_SECRET_ACCESS_KEY", "none"),
];
const ORDER: &[u8] = br#"{"order_id":1}"#;

/// A folder with an `oncegate.toml` of this text.
struct Beside {
    dir: TempDir,
    file: String,
}

impl Beside {
    fn new(text: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("oncegate.toml");
        std::fs::write(&file, text).unwrap();
        Self {
            file: file.to_str().unwrap().to_owned(),
            dir,
        }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Runs the command in the folder.
    async fn oncegate(&self, arguments: &[&str], input: &[u8]) -> Answer {
        let mut command = command(arguments);
        command.current_dir(self.path());
        ended(command, input).await
    }
}

/// A consumer with this source.
fn consumer(scope: &str, source: &str, dead_letters: &str) -> String {
    format!(
        "[consumer.{scope}]\nkey = \"order_id\"\nhandler = {{ command = \"true\" }}\n\
         source = {{ {source} }}\ndead_letters = {{ {dead_letters} }}\n"
    )
}

fn billing() -> String {
    let source = "kafka = { brokers = \"127.0.0.1:1\", topics = [\"orders\"] }";
    format!(
        "[store]\nurl = \"sqlite:once.db\"\n{}",
        consumer("billing", source, "kafka = \"orders.dead\"")
    )
}

/// Completes order 1 in the store of [`billing`].
async fn completed(folder: &Path) -> String {
    let store = SqliteStore::open(folder.join("once.db")).await.unwrap();
    let gate = Gate::new("billing", Key::json(["order_id"]), store);
    let order = Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(ORDER.to_vec().into()),
    );
    let Entry::Granted(lease) = gate.enter(&order).await.unwrap() else {
        panic!("not granted")
    };
    let key = lease.store_key().to_string();
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    key
}

#[tokio::test]
async fn a_record_is_found_by_the_configuration_alone() {
    let beside = Beside::new(&billing());
    let key = completed(beside.path()).await;
    let digest = key.split_once(':').unwrap().1;
    let file = beside.file.as_str();
    let by_payload = oncegate(&["inspect", "--config", file], ORDER).await;
    assert_eq!(by_payload.ended(0).line("state"), "state completed");
    assert_eq!(by_payload.line("key"), format!("key {key}"));
    for more in [["--digest", digest], ["--store-key", &key]] {
        let found = oncegate(&[&["inspect", "--config", file], &more[..]].concat(), b"").await;
        assert_eq!(found.ended(0).line("state"), "state completed");
    }
    let named = oncegate_with(&["inspect"], &[("ONCEGATE_CONFIG", file)], ORDER).await;
    assert_eq!(named.ended(0).line("state"), "state completed");
    // As `run`, and not where a flag names another store.
    let found = beside.oncegate(&["inspect"], ORDER).await;
    found.ended(0).says("settings come from oncegate.toml");
    beside
        .oncegate(&["inspect", "--store", "sqlite:once.db"], ORDER)
        .await
        .ended(2)
        .says("--config");

    let change = ["--yes", "--why", "x", "--journal"];
    let journal = beside.path().join("journal.jsonl");
    let reset = [
        &["reset", "--config", file][..],
        &change,
        &[journal.to_str().unwrap()],
    ]
    .concat();
    assert_eq!(
        oncegate(&reset, ORDER).await.ended(0).line("state"),
        "state completed"
    );
    let reopened = oncegate(&["inspect", "--config", file], ORDER).await;
    assert!(
        reopened
            .ended(0)
            .line("state")
            .starts_with("state released"),
        "{reopened:?}"
    );
}

#[tokio::test]
async fn flags_win_over_the_configuration_of_a_record() {
    let beside = Beside::new(&billing());
    completed(beside.path()).await;
    let inspect = async |more: &[&str]| {
        oncegate(
            &[&["inspect", "--config", &beside.file], more].concat(),
            ORDER,
        )
        .await
    };
    inspect(&["--store", "sqlite:/no/such/file.db"])
        .await
        .ended(69)
        .says("/no/such/file.db");
    inspect(&["--key", "card"])
        .await
        .ended(78)
        .says("order_id")
        .says("card");
    assert_eq!(
        inspect(&["--route", "refunds"])
            .await
            .ended(1)
            .line("state"),
        "state absent"
    );
    inspect(&["--scope", "refunds"])
        .await
        .ended(78)
        .says("no consumer `refunds`")
        .says("billing");
}

#[tokio::test]
async fn a_configuration_that_does_not_say_it_is_an_error() {
    let two = billing() + &consumer("refunds", "stdin = {}", "file = \"dead.jsonl\"");
    let topics = billing().replace("[\"orders\"]", "[\"orders\", \"returns\"]");
    let spelt = billing().replace("url = ", "ulr = ");
    let cases: [(&str, &[&str], [&str; 2]); 6] = [
        (&two, &["inspect"], ["which consumer", "billing, refunds"]),
        (
            &two,
            &["dead-letters", "list"],
            ["which consumer", "billing, refunds"],
        ),
        (
            &two,
            &["dead-letters", "list", "--scope", "refunds"],
            ["refunds: ", "dead.jsonl"],
        ),
        (
            &two,
            &["worker-test", "--scope", "shop"],
            ["no consumer `shop`", "billing, refunds"],
        ),
        (&topics, &["inspect"], ["--route", "orders, returns"]),
        (&spelt, &["doctor"], ["did you mean `url`", "has errors"]),
    ];
    for (text, arguments, says) in cases {
        let beside = Beside::new(text);
        let named = oncegate(&[arguments, &["--config", &beside.file]].concat(), ORDER).await;
        for answer in [named, beside.oncegate(arguments, ORDER).await] {
            answer.ended(78).says(says[0]).says(says[1]);
        }
    }
    // Which of them a flag about the source is about must be said.
    let beside = Beside::new(&two);
    let doctor = ["doctor", "--config", &beside.file, "--group", "x"];
    oncegate(&doctor, b"")
        .await
        .ended(78)
        .says("which consumer");
    for arguments in [
        &["doctor"][..],
        &["inspect"],
        &["reset", "--dry-run"],
        &["dead-letters", "list"],
        &["worker-test"],
    ] {
        oncegate(arguments, ORDER).await.ended(2).says("--config");
        let missing = [arguments, &["--config", "/no/such/file.toml"]].concat();
        oncegate(&missing, ORDER)
            .await
            .ended(78)
            .says("/no/such/file.toml");
    }
}

fn kafka_source(kafka: &Kafka, topic: &str) -> String {
    format!(
        "kafka = {{ brokers = \"{}\", topics = [\"{topic}\"] }}",
        kafka.bootstrap()
    )
}

#[tokio::test]
async fn dead_letters_of_a_topic_are_those_of_the_configuration() {
    let given_up = OnKafka::new().await;
    let OnKafka {
        shop,
        kafka,
        topic,
        dead,
        ..
    } = &given_up;
    let own = consumer(
        &shop.scope,
        &kafka_source(kafka, topic),
        &format!("kafka = \"{dead}\""),
    );
    let beside = Beside::new(&format!("[store]\nurl = \"{}\"\n{own}", shop.redis.url()));
    let file = beside.file.as_str();
    let list = oncegate(&["dead-letters", "list", "--config", file, "--json"], b"")
        .await
        .ended(0)
        .json();
    assert_eq!(numbers(&list, ["seen", "matching"]), [10, 10]);
    assert_eq!(list["place"], dead.as_str());
    let at = list["letters"][0]["at"].as_str().unwrap();
    oncegate(&["dead-letters", "show", "--config", file, at], b"")
        .await
        .ended(0);
    let other = kafka.new_topic("dead", 1).await;
    let flags = ["--config", file, "--topic", &other, "--json"];
    let empty = oncegate(&[&["dead-letters", "list"], &flags[..]].concat(), b"").await;
    assert_eq!(numbers(&empty.ended(0).json(), ["seen"]), [0]);
    assert_eq!(empty.json()["place"], other.as_str());

    given_up.shop.mend();
    let journal = shop.journal_path();
    let redrive = [
        "dead-letters",
        "redrive",
        "--yes",
        "--why",
        "x",
        "--journal",
        journal.to_str().unwrap(),
    ];
    let sent = beside
        .oncegate(&[&redrive[..], &["--json"]].concat(), b"")
        .await
        .ended(0)
        .json();
    assert_eq!(numbers(&sent, ["wanted", "sent", "reopened"]), [10, 10, 10]);
    given_up.consume(10).await;
    assert!(
        shop.sales().values().all(|sold| *sold == 1),
        "{:?}",
        shop.sales()
    );
    // Another store by a flag is another store.
    let elsewhere = format!("sqlite:{}", beside.path().join("none.db").display());
    let flags = ["--config", file, "--store", &elsewhere, "--no-progress"];
    oncegate(&[&redrive[..], &flags].concat(), b"")
        .await
        .ended(69)
        .says("none.db");

    let dead = format!("kafka = \"{}\"", unique("dead"));
    let two = own + &consumer("refunds", &kafka_source(kafka, &other), &dead);
    of_two_consumers_that_of_the_scope_is_meant(shop, &two, at).await;
}

async fn of_two_consumers_that_of_the_scope_is_meant(shop: &Shop, two: &str, at: &str) {
    let two = Beside::new(&format!("[store]\nurl = \"{}\"\n{two}", shop.redis.url()));
    for (verb, more) in [("list", &["--json"][..]), ("show", &[at])] {
        let verb = ["dead-letters", verb, "--config", &two.file];
        oncegate(&[&verb[..], more].concat(), b"")
            .await
            .ended(78)
            .says("which consumer");
        oncegate(&[&verb[..], more, &["--scope", &shop.scope]].concat(), b"")
            .await
            .ended(0);
    }
}

#[tokio::test]
async fn dead_letters_of_a_queue_are_those_of_the_configuration() {
    let given_up = OnSqs::new().await;
    let OnSqs {
        shop,
        sqs,
        queue,
        dead,
    } = &given_up;
    let source = format!(
        "sqs = {{ queue = \"{}\", endpoint_url = \"{}\" }}",
        queue.name(),
        sqs.endpoint()
    );
    let own = consumer(&shop.scope, &source, &format!("sqs = \"{}\"", dead.name()));
    let beside = Beside::new(&format!("[store]\nurl = \"{}\"\n{own}", shop.redis.url()));
    let list = ["dead-letters", "list", "--config", &beside.file, "--json"];
    oncegate_with(&list, &CREDENTIALS, b"")
        .await
        .ended(2)
        .says("--use-up-a-receive");
    let look = [&list[..], &["--use-up-a-receive"]].concat();
    let seen = oncegate_with(&look, &CREDENTIALS, b"")
        .await
        .ended(0)
        .json();
    assert_eq!(numbers(&seen, ["seen", "matching"]), [10, 10]);
}

/// The findings of `doctor`: the consumer, the thing and the text of each.
fn found(answer: &Answer) -> Vec<[String; 3]> {
    let document = answer.json();
    let findings = document["findings"].as_array().unwrap().iter();
    findings
        .map(|finding| {
            ["consumer", "what", "found"]
                .map(|name| finding[name].as_str().unwrap_or_default().to_owned())
        })
        .collect()
}

fn says(answer: &Answer, consumer: &str, what: &str, words: &str) -> bool {
    found(answer)
        .iter()
        .any(|[whose, of, text]| whose == consumer && of == what && text.contains(words))
}

async fn open_with_another_key(server: &RedisServer) {
    let store = oncegate::redis::RedisStore::connect(server.url())
        .await
        .unwrap();
    store.check().await.unwrap();
    Gate::new("billing", Key::json(["id"]), store)
        .open()
        .await
        .unwrap();
}

#[tokio::test]
async fn doctor_says_that_a_message_key_names_an_entity() {
    let kafka = Kafka::shared().await;
    let topic = unique("entities");
    kafka.create_compacted_topic(&topic).await;
    let settings = consumer("billing", &kafka_source(&kafka, &topic), "kafka = \"dead\"");
    let settings = settings.replace("\"order_id\"", "\"message-key\"");
    let beside = Beside::new(&format!("[store]\nurl = \"sqlite:r.db\"\n{settings}"));
    let doctor = beside.oncegate(&["doctor", "--json"], b"").await;
    assert!(
        says(doctor.ended(1), "billing", &topic, "each later change"),
        "{doctor:?}"
    );
}

#[tokio::test]
async fn doctor_examines_the_consumers_of_a_configuration() {
    let kafka = Kafka::shared().await;
    let server = RedisServer::start().await;
    let topic = kafka.new_topic("orders", 1).await;
    let absent = unique("absent");
    let dead = format!("kafka = \"{absent}-dead\"");
    let two = consumer("billing", &kafka_source(&kafka, &topic), &dead)
        + &consumer("refunds", &kafka_source(&kafka, &absent), &dead);
    let beside = Beside::new(&format!("[store]\nurl = \"{}\"\n{two}", server.url()));
    let doctor = async |more: &[&str]| {
        let fixed = [
            "doctor",
            "--config",
            &beside.file,
            "--json",
            "--timeout",
            "50s",
        ];
        oncegate(&[&fixed[..], more].concat(), b"").await
    };
    let all = doctor(&[]).await;
    assert!(
        says(all.ended(1), "billing", &topic, "one replica"),
        "{all:?}"
    );
    assert!(says(&all, "refunds", &absent, "no such topic"), "{all:?}");
    assert!(
        says(&all, "billing", &format!("{absent}-dead"), "no such topic"),
        "{all:?}"
    );
    assert!(says(&all, "", "store", "allow_no_replica"), "{all:?}");
    let one = doctor(&["--scope", "billing", "--allow-no-replica"]).await;
    assert!(
        found(one.ended(1))
            .iter()
            .all(|[whose, ..]| whose == "billing"),
        "{one:?}"
    );

    // Flags go before the file.
    let flags = [
        "--scope",
        "billing",
        "--topic",
        &absent,
        "--dead-letters",
        &topic,
        "--retention",
        "30d",
    ];
    let answer = doctor(&flags).await;
    assert!(
        says(answer.ended(1), "billing", &absent, "no such topic"),
        "{answer:?}"
    );
    assert!(
        says(&answer, "billing", &topic, "less than the records"),
        "{answer:?}"
    );
    let away = doctor(&["--store", "redis://:secret@127.0.0.1:1"]).await;
    assert!(
        !away.ended(69).out.contains("secret") && says(&away, "billing", &topic, "one replica"),
        "{away:?}"
    );

    // The descriptor of a scope is compared, too.
    open_with_another_key(&server).await;
    assert!(says(
        &doctor(&[]).await,
        "billing",
        "key",
        "another key specification"
    ));
}

#[tokio::test]
async fn a_worker_of_a_configuration_is_tested() {
    let script = r#"test \"$ONCEGATE_ROUTE\" = orders && test -z \"$SHOP_PASSWORD\" && grep -q order_id || exit 65"#;
    let text = billing()
        .replace(
            "\"sqlite:once.db\"",
            "\"redis://127.0.0.1:1\"\npassword = { env = \"SHOP_PASSWORD\" }",
        )
        .replace("command = \"true\"", &format!("command = \"{script}\""));
    let beside = Beside::new(&text);
    let secret = [("SHOP_PASSWORD", "hunter2")];
    let test = async |more: &[&str]| {
        oncegate_with(
            &[&["worker-test", "--config", &beside.file], more].concat(),
            &secret,
            ORDER,
        )
        .await
    };
    test(&[]).await.ended(0);
    assert!(
        test(&["--handler-command", "false"])
            .await
            .ended(1)
            .out
            .contains("FAILED  completes")
    );
    test(&["--ready-url", "http://127.0.0.1:1/"])
        .await
        .ended(2)
        .says("--ready-url")
        .says("--handler");
    // The route and the environment are those of the consumer.
    let alone = [
        "worker-test",
        "--handler-command",
        "test \"$ONCEGATE_ROUTE\" = orders",
    ];
    oncegate(&alone, ORDER).await.ended(1);
}
