//! Lists of effects from commands and servers, configurations, and mistakes.

use std::net::SocketAddr;

use oncegate::sqlite::SqliteStore;
use oncegate_testkit::{Kafka, Postgres, Redis, unique};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::super::oncegate;
use super::{Consumed, ORDERS, count};

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
async fn a_postgresql_query_or_an_http_export_lists_the_effects() {
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
    let empty = "id,idempotency_key\n".to_owned();
    let broken = at(serve("500 Internal Server Error", empty).await);
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
    std::fs::write(&csv, "id,key\nvisa-of-alice,x\n").unwrap();
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
    let column = ["--effects-column", "key"];
    audit(brokers, &["--effects", csv])
        .await
        .ended(2)
        .says("--effects-column");
    audit(brokers, &column).await.ended(2);
    let both = ["--effects", csv, "--effects-command", "x"];
    audit(brokers, &[&both[..], &column].concat())
        .await
        .ended(2);
    audit(brokers, &[["--effects", "/no/such/file"], column].concat())
        .await
        .ended(65)
        .says("/no/such");
    let answer = audit(brokers, &["--effects", csv, "--effects-column", "none"]).await;
    answer.ended(65).says("none");
    assert!(!answer.err.contains("visa-of-alice"));
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
