//! `oncegate audit`, on a real broker and real stores.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use oncegate::core::store::Store;
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{Attempt, Consumer, Failure, Gate, Handler, Key, Message};
use oncegate_testkit::{Kafka, Postgres, Record, Redis, unique, until};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::{Answer, LIMIT, oncegate};

const ORDERS: u64 = 600;
const PARTITIONS: i32 = 3;

/// What is planted: orders with two effects, without one, and given up; those given up later have
/// one all the same.
const DOUBLED: [u64; 3] = [7, 8, 300];
const SILENT: [u64; 2] = [11, 12];
const GIVEN_UP: [u64; 2] = [20, 21];
const GIVEN_UP_WITH_EFFECT: u64 = 22;

#[derive(serde::Deserialize)]
struct Order {
    order_id: u64,
}

/// The downstream system: the idempotency keys of its effects, by order.
#[derive(Clone, Debug, Default)]
struct Bank(Arc<Mutex<Vec<(u64, String)>>>);

impl Handler for Bank {
    type Output = ();

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        let Order { order_id } = message.json()?;
        let times = match order_id {
            id if DOUBLED.contains(&id) => 2,
            id if SILENT.contains(&id) || GIVEN_UP.contains(&id) => 0,
            _ => 1,
        };
        let key = attempt.idempotency_key("charge");
        self.0
            .lock()
            .unwrap()
            .extend(std::iter::repeat_n((order_id, key), times));
        match order_id {
            id if GIVEN_UP.contains(&id) || id == GIVEN_UP_WITH_EFFECT => {
                Err(Failure::permanent("no account"))
            }
            _ => Ok(()),
        }
    }
}

fn order(id: u64) -> Record {
    Record::new(format!(r#"{{"order_id":{id},"amount":10}}"#)).key(id.to_string())
}

/// A topic that was consumed, with its dead letters and its effects.
struct Consumed {
    kafka: Kafka,
    topic: String,
    dead: String,
    scope: String,
    store: String,
    bank: Bank,
    dir: TempDir,
}

impl Consumed {
    async fn by(store: impl Store + 'static, url: String) -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("audit", PARTITIONS).await;
        let dead = kafka.new_topic("audit-dead", 1).await;
        let scope = unique("audit");
        let bank = Bank::default();
        let this = Self {
            kafka,
            topic,
            dead,
            scope,
            store: url,
            bank,
            dir: tempfile::tempdir().unwrap(),
        };
        // A third of the orders come twice.
        this.produce((0..ORDERS).chain(0..ORDERS / 3).map(order))
            .await;
        this.produce([Record::new("{").key("bad")]).await;
        this.consume(store).await;
        this
    }

    async fn in_redis() -> Self {
        let redis = Redis::shared().await;
        let store = RedisStore::connect(redis.url()).await.expect("connects");
        Self::by(store, redis.url().to_owned()).await
    }

    async fn produce(&self, records: impl IntoIterator<Item = Record, IntoIter: Send> + Send) {
        self.kafka.produce(&self.topic, records).await;
    }

    /// Consumes the whole topic, as the group that has the name of the scope.
    async fn consume(&self, store: impl Store + 'static) {
        let source = KafkaSource::new(self.kafka.bootstrap(), &*self.scope, [&*self.topic]);
        let gate = Gate::new(&*self.scope, Key::json(["order_id"]), store);
        let dead_letters = source.dead_letters(&*self.dead);
        let consumer = Consumer::new(source, gate, self.bank.clone()).dead_letters(dead_letters);
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async move { drop(stopped.await) }));
        let wanted = self.kafka.end_offsets(&self.topic).await;
        until("the whole topic to be committed", LIMIT, async || {
            let committed = self.kafka.committed_offsets(&self.scope, &self.topic).await;
            if committed == wanted {
                Ok(())
            } else {
                Err(format!("{committed:?} of {wanted:?}"))
            }
        })
        .await;
        drop(stop);
        running.await.unwrap().expect("the consumer ends well");
    }

    /// Adds messages, and commits past them although no consumer has seen them.
    async fn lose(&self, ids: impl IntoIterator<Item = u64>) {
        self.produce(ids.into_iter().map(order).collect::<Vec<_>>())
            .await;
        for (partition, end) in self.kafka.end_offsets(&self.topic).await {
            self.kafka
                .commit(&self.scope, &self.topic, partition, end)
                .await;
        }
    }

    /// The export of the bank, as a CSV file.
    fn export(&self, more: &[&str]) -> PathBuf {
        let path = self.dir.path().join("effects.csv");
        let mut text = "id,\"note\",key\n".to_owned();
        for (order, key) in &*self.bank.0.lock().unwrap() {
            text.push_str(&format!("{order},\"a \"\"note\"\", of\n4111\",{key}\n"));
        }
        more.iter()
            .for_each(|key| text.push_str(&format!("0,,{key}\n")));
        std::fs::write(&path, text).unwrap();
        path
    }

    async fn audit(&self, more: &[&str]) -> Answer {
        let Self {
            kafka,
            topic,
            scope,
            store,
            dead,
            ..
        } = self;
        let fixed = [
            "audit",
            "--brokers",
            kafka.bootstrap(),
            "--topic",
            topic,
            "--store",
            store,
        ];
        let fixed = [
            &fixed[..],
            &[
                "--scope",
                scope,
                "--key",
                "order_id",
                "--dead-letters",
                dead,
            ],
        ]
        .concat();
        oncegate(&[&fixed, more].concat(), b"").await
    }

    /// With the effects of the bank.
    async fn audit_effects(&self, more_effects: &[&str], more: &[&str]) -> Answer {
        let path = self.export(more_effects);
        let effects = [
            "--effects",
            path.to_str().unwrap(),
            "--effects-column",
            "key",
            "--step",
            "charge",
        ];
        self.audit(&[&effects, more].concat()).await
    }

    /// The origin of the first message of an order.
    async fn origin(&self, id: u64) -> String {
        use rdkafka::Message as _;
        let wanted = id.to_string();
        let messages = self.kafka.read_all(&self.topic).await;
        let of = messages
            .iter()
            .filter(|message| message.key() == Some(wanted.as_bytes()));
        let first = of
            .map(|message| (message.partition(), message.offset()))
            .min()
            .unwrap();
        format!("{}/{}@{}", self.topic, first.0, first.1)
    }
}

fn count(document: &Value, name: &str) -> u64 {
    document[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name}: {document}"))
}

/// The origins of the findings, by their kind.
fn found(document: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for finding in document["findings"].as_array().unwrap() {
        let text = |name: &str| finding[name].as_str().unwrap().to_owned();
        found
            .entry(text("verdict"))
            .or_default()
            .insert(text("origin"));
    }
    found
}

// invariant: audit-finds-what-was-planted
#[tokio::test]
async fn what_is_lost_and_what_happened_twice_is_found_by_position_and_key() {
    let consumed = Consumed::in_redis().await;
    let lost = [ORDERS, ORDERS + 1, ORDERS + 2];
    consumed.lose(lost).await;
    // Not acknowledged, so not lost.
    consumed.produce([order(ORDERS + 3)]).await;
    let stranger = "8e03978e-40d5-83e8-bc93-6894a57f9324";
    let answer = consumed
        .audit_effects(&[stranger, "4111"], &["--json"])
        .await;
    let document = answer.ended(1).json();
    assert_eq!(
        (&document["schema"], &document["passed"]),
        (&"oncegate.audit/1".into(), &false.into())
    );
    let counted = [
        "lost",
        "doubled",
        "without_effect",
        "unexplained",
        "overdue",
        "unreadable",
        "in_flight",
    ];
    assert_eq!(
        counted.map(|name| count(&document, name)),
        [3, 3, 2, 3, 0, 0, 1],
        "{document}"
    );
    assert_eq!(
        count(&document, "messages"),
        ORDERS + ORDERS / 3 + 1 + 3 + 1
    );
    assert_eq!(count(&document, "events"), ORDERS + 1 + 3 + 1);
    // Two that were given up, and the message without a key.
    assert_eq!(
        (
            count(&document, "dead_lettered"),
            count(&document, "dead_letters")
        ),
        (3, 4)
    );
    assert_eq!(count(&document, "ok"), ORDERS - 3 - 2 - 3);

    let found = found(&document);
    let expected = async |ids: &[u64]| {
        let mut origins = BTreeSet::new();
        for id in ids {
            origins.insert(consumed.origin(*id).await);
        }
        origins
    };
    assert_eq!(found["lost"], expected(&lost).await);
    assert_eq!(found["doubled"], expected(&DOUBLED).await);
    assert_eq!(found["without_effect"], expected(&SILENT).await);
    let unexplained = &found["unexplained"];
    assert!(
        unexplained.contains(&consumed.origin(GIVEN_UP_WITH_EFFECT).await)
            && unexplained.len() == 3
    );

    // Keys are those of the store and of the bank.
    let bank: BTreeMap<u64, String> = consumed.bank.0.lock().unwrap().iter().cloned().collect();
    let doubled = document["findings"].as_array().unwrap().iter();
    let doubled = doubled.filter(|finding| finding["verdict"] == "doubled");
    let keys: BTreeSet<&str> = doubled
        .map(|finding| finding["idempotency_key"].as_str().unwrap())
        .collect();
    assert_eq!(keys, DOUBLED.iter().map(|id| bank[id].as_str()).collect());
    assert!(
        !answer.out.contains("4111") && !answer.err.contains("4111"),
        "nothing of a payload is shown"
    );
}

#[tokio::test]
async fn a_topic_in_which_all_is_well_passes() {
    let consumed = Consumed::in_redis().await;
    let answer = consumed.audit(&[]).await;
    assert_eq!(answer.ended(0).line("ok"), format!("ok {}", ORDERS - 3));
    assert_eq!(answer.line("dead-lettered"), "dead-lettered 4");
    assert_eq!(answer.line("Nothing"), "Nothing was found.");
    assert!(
        !answer.out.contains("doubled"),
        "without a list of effects, none is judged"
    );

    // A window has fewer messages, and then effects of others are unexplained.
    let end = consumed.kafka.end_offsets(&consumed.topic).await[&1];
    let window = [
        "--partition",
        "1",
        "--from-offset",
        "5",
        "--to-offset",
        "15",
    ];
    assert_eq!(
        consumed.audit(&window).await.ended(0).line("messages"),
        "messages 10"
    );
    let later = consumed.audit(&["--since", "2100-01-01T00:00:00Z"]).await;
    assert_eq!(later.ended(0).line("messages"), "messages 0");
    assert!(
        later.line("The window").contains("nothing was compared"),
        "{later:?}"
    );
    let before = consumed
        .audit(&["--until", "2100-01-01T00:00:00Z", "--partition", "1"])
        .await;
    assert_eq!(before.ended(0).line("messages"), format!("messages {end}"));
    let echo = format!("echo {}", "8e03978e-40d5-83e8-bc93-6894a57f9324");
    let none = [
        "--since",
        "2100-01-01T00:00:00Z",
        "--effects-command",
        &echo,
    ];
    consumed.audit(&none).await.ended(1);
    let allowed = consumed
        .audit(&[&none[..], &["--allow-unexplained"]].concat())
        .await;
    assert!(
        allowed
            .ended(0)
            .out
            .contains("1 unexplained, which is allowed"),
        "{allowed:?}"
    );
    assert!(
        allowed
            .out
            .contains("effect 1  8e03978e-40d5-83e8-bc93-6894a57f9324"),
        "{allowed:?}"
    );
}

#[tokio::test]
async fn the_same_in_sqlite_with_the_output_of_a_command() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("once.db");
    let url = file.to_str().unwrap().to_owned();
    let consumed = Consumed::by(SqliteStore::open(&file).await.expect("opens"), url).await;
    consumed.lose([ORDERS]).await;
    let path = dir.path().join("keys");
    let keys: Vec<String> = consumed
        .bank
        .0
        .lock()
        .unwrap()
        .iter()
        .map(|(_, key)| key.clone())
        .collect();
    std::fs::write(&path, keys.join("\n")).unwrap();
    let command = format!("cat '{}' | tr a-f A-F", path.display());
    let answer = consumed
        .audit(&["--effects-command", &command, "--step", "charge", "--json"])
        .await;
    let document = answer.ended(1).json();
    let counted = ["lost", "doubled", "without_effect", "unexplained"];
    assert_eq!(
        counted.map(|name| count(&document, name)),
        [1, 3, 2, 1],
        "{document}"
    );
}

/// The command after `--effects-command` of the line of docs/AUDIT.md that calls this program.
fn documented(program: &str) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/AUDIT.md");
    let page = std::fs::read_to_string(page).unwrap();
    let line = page
        .lines()
        .find_map(|line| line.split_once(&format!("--effects-command '{program} ")));
    let command = line
        .and_then(|(_, rest)| rest.split_once('\''))
        .expect("the line is documented")
        .0;
    format!("{program} {command}")
}

/// Answers every request of an HTTP client with this.
async fn serve(status: &'static str, body: String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                if stream.read_buf(&mut request).await.unwrap() == 0 {
                    break;
                }
            }
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            stream.write_all((head + &body).as_bytes()).await.unwrap();
        }
    });
    address
}

/// The lines of docs/AUDIT.md, with the names of the servers replaced.
#[tokio::test]
async fn a_query_of_postgresql_and_an_export_by_http_are_lists_of_effects() {
    let consumed = Consumed::in_redis().await;
    consumed.lose([ORDERS]).await;
    let keys: Vec<String> = consumed
        .bank
        .0
        .lock()
        .unwrap()
        .iter()
        .map(|(_, key)| key.clone())
        .collect();
    let counted = ["lost", "doubled", "without_effect", "unexplained"];
    let audit = async |command: &str, more: &[&str]| {
        let effects = ["--effects-command", command, "--step", "charge", "--json"];
        consumed.audit(&[&effects, more].concat()).await
    };

    let database = Postgres::shared().await.database().await;
    let client = database.connection().await;
    client
        .batch_execute("CREATE TABLE charges (id bigserial, idempotency_key text)")
        .await
        .unwrap();
    let rows = "INSERT INTO charges (idempotency_key) SELECT unnest($1::text[])";
    client.execute(rows, &[&keys]).await.unwrap();
    let psql = documented("psql");
    let query = psql.strip_suffix(" shop").expect("the database is shop");
    let document = audit(&format!("{query} '{}'", database.url()), &[])
        .await
        .ended(1)
        .json();
    assert_eq!(
        counted.map(|name| count(&document, name)),
        [1, 3, 2, 1],
        "{document}"
    );
    let refused = audit(
        &format!(
            "{} '{}'",
            query.replace("charges", "payments"),
            database.url()
        ),
        &[],
    )
    .await;
    refused.ended(69).says("exit status: 1");

    let export = keys
        .iter()
        .fold("id,idempotency_key\n".to_owned(), |csv, key| {
            csv + "1," + key + "\n"
        });
    let curl = documented("curl");
    let column = ["--effects-column", "idempotency_key"];
    let at =
        |address: SocketAddr| curl.replace("https://bank.example", &format!("http://{address}"));
    let exported = audit(&at(serve("200 OK", export).await), &column)
        .await
        .ended(1)
        .json();
    assert_eq!(
        counted.map(|name| count(&exported, name)),
        [1, 3, 2, 1],
        "{exported}"
    );
    // An error page is no list without effects.
    let broken = at(serve(
        "500 Internal Server Error",
        "id,idempotency_key\n".to_owned(),
    )
    .await);
    audit(&broken, &column)
        .await
        .ended(69)
        .says("exit status: 22");
}

#[tokio::test]
async fn the_consumer_of_a_configuration_is_audited() {
    let consumed = Consumed::in_redis().await;
    let Consumed {
        kafka,
        topic,
        scope,
        store,
        dead,
        ..
    } = &consumed;
    let config = format!(
        "version = 1\n[store]\nurl = \"{store}\"\n[consumer.{scope}]\nkey = \"order_id\"\n\
         source.kafka = {{ brokers = \"{}\", topics = [\"{topic}\"] }}\n\
         handler.command = \"true\"\ndead_letters.kafka = \"{dead}\"\n",
        kafka.bootstrap()
    );
    let path = consumed.dir.path().join("oncegate.toml");
    std::fs::write(&path, config).unwrap();
    let path = path.to_str().unwrap();
    for command in ["audit", "replay"] {
        let answer = oncegate(&[command, "--config", path], b"").await;
        let code = if command == "audit" { 0 } else { 1 };
        assert_eq!(
            answer.ended(code).line("messages"),
            format!("messages {}", ORDERS + ORDERS / 3 + 1)
        );
        oncegate(&[command, "--config", path, "--scope", "other"], b"")
            .await
            .ended(78)
            .says("other");
        oncegate(&[command, "--config", path, "--topic", "other"], b"")
            .await
            .ended(78)
            .says("other");
    }
    assert_eq!(
        oncegate(&["audit", "--config", path], b"")
            .await
            .line("dead-lettered"),
        "dead-lettered 4",
        "the dead letters are those of the configuration"
    );
}

#[tokio::test]
async fn mistakes_are_reported_with_their_exit_codes() {
    let redis = Redis::shared().await;
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("audit", 1).await;
    let dir = tempfile::tempdir().unwrap();
    let csv = dir.path().join("effects.csv");
    std::fs::write(&csv, "id,key\n4111,x\n").unwrap();
    let csv = csv.to_str().unwrap();
    let audit = async |brokers: &str, more: &[&str]| {
        let fixed = [
            "audit",
            "--brokers",
            brokers,
            "--topic",
            &topic,
            "--store",
            redis.url(),
        ];
        let fixed = [&fixed[..], &["--scope", "billing", "--key", "id"]].concat();
        oncegate(&[&fixed, more].concat(), b"").await
    };
    let brokers = kafka.bootstrap();
    audit(brokers, &["--effects", csv])
        .await
        .ended(2)
        .says("--effects-column");
    audit(brokers, &["--effects-column", "key"]).await.ended(2);
    audit(
        brokers,
        &[
            "--effects",
            csv,
            "--effects-column",
            "key",
            "--effects-command",
            "x",
        ],
    )
    .await
    .ended(2);
    audit(
        brokers,
        &["--effects", "/no/such/file", "--effects-column", "key"],
    )
    .await
    .ended(65)
    .says("/no/such");
    let answer = audit(brokers, &["--effects", csv, "--effects-column", "none"]).await;
    answer.ended(65).says("none");
    assert!(!answer.err.contains("4111"));
    audit(brokers, &["--effects-command", "echo; exit 3"])
        .await
        .ended(69)
        .says("exit status: 3");
    audit(brokers, &["--dead-letters", &unique("none")])
        .await
        .ended(78)
        .says("none-");
    audit(brokers, &["--partition", "7"])
        .await
        .ended(78)
        .says("7");
    audit("127.0.0.1:1", &[])
        .await
        .ended(69)
        .says("127.0.0.1:1");
    audit("127.0.0.1:1", &["--timeout", "100ms"])
        .await
        .ended(75)
        .says("--timeout");
    // An empty topic has nothing to find; its group has committed nothing.
    audit(brokers, &[])
        .await
        .ended(0)
        .says("has committed nothing");
}
