//! A queue of RabbitMQ, and a configuration in a file.

use std::path::PathBuf;
use std::process::{Command, Output};

use oncegate_testkit::{Process, QueueKind, RabbitMq, RabbitQueue, Redis, process, unique, until};
use tempfile::TempDir;

use super::{LIMIT, example};

/// A queue with its dead letters, and the configuration of its consumer.
struct Stage {
    queue: RabbitQueue,
    dead: RabbitQueue,
    dir: TempDir,
}

impl Stage {
    async fn new() -> Self {
        let rabbit = RabbitMq::shared().await;
        let redis = Redis::shared().await;
        let queue = rabbit.new_queue("run", QueueKind::Quorum).await;
        let dead = rabbit.new_queue("run-dead", QueueKind::Quorum).await;
        let stage = Self {
            queue,
            dead,
            dir: tempfile::tempdir().unwrap(),
        };
        let config = format!(
            r#"version = 1
[store]
url = {url:?}
[status]
listen = "off"
[defaults]
lease = "2s"
concurrency = 4
[consumer.{scope}]
source = {{ amqp = {{ url = "amqp://guest@{address}/%2f", password = {{ env = "RABBIT_PASSWORD" }}, queue = {queue:?}, management = {management:?} }} }}
key = {{ json = ["order_id"] }}
handler = {{ exec = ["python3", {worker:?}, {ledger:?}], workers = 2 }}
dead_letters = {{ amqp = {dead:?} }}
"#,
            url = redis.url(),
            scope = unique("run"),
            address = rabbit.address(),
            management = rabbit.management_url(),
            queue = stage.queue.name(),
            dead = stage.dead.name(),
            worker = example("python/worker_stdio.py"),
            ledger = stage.path("ledger"),
        );
        std::fs::write(stage.config(), config).unwrap();
        stage
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn config(&self) -> PathBuf {
        self.path("oncegate.toml")
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn start(&self) -> Process {
        let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
        command
            .args(["run", "--config"])
            .arg(self.config())
            .env("RABBIT_PASSWORD", "guest");
        Process::spawn_logged("oncegate run", command, &self.path("log"))
    }

    async fn stop(&self, mut running: Process) {
        running.signal("TERM");
        assert_eq!(
            running.end_within(LIMIT).await.code(),
            Some(0),
            "{}",
            self.read("log")
        );
    }

    async fn until_effects(&self, count: usize) {
        until("effects", LIMIT, async || {
            match self.read("ledger").lines().count() {
                effects if effects == count => Ok(()),
                effects => Err(format!("{effects} of {count}: {}", self.read("log"))),
            }
        })
        .await;
    }

    /// A command about the configuration; flags come last.
    fn oncegate(&self, verbs: &[&str], flags: &[&str]) -> Answer {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command
            .args(verbs)
            .arg("--config")
            .arg(self.config())
            .args(flags)
            .env("RABBIT_PASSWORD", "guest");
        Answer(command.output().unwrap())
    }

    /// The configuration is checked alone, with this text in place of that.
    fn checked(&self, from: &str, to: &str) -> Answer {
        self.altered("check", from, to)
    }

    /// Runs a command with the configuration, with this text in place of that.
    fn altered(&self, verb: &str, from: &str, to: &str) -> Answer {
        let text = self.read("oncegate.toml");
        assert!(text.contains(from), "{from:?} is not in {text}");
        let file = self.path("other.toml");
        std::fs::write(&file, text.replace(from, to)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command
            .args([verb, "--config"])
            .arg(&file)
            .env("RABBIT_PASSWORD", "guest");
        Answer(command.output().unwrap())
    }
}

#[derive(Debug)]
struct Answer(Output);

impl Answer {
    fn ended(self, code: i32) -> Self {
        assert_eq!(self.0.status.code(), Some(code), "{}", self.text());
        self
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&[&self.0.stdout[..], &self.0.stderr].concat()).into_owned()
    }

    fn says(self, words: &str) -> Self {
        assert!(
            self.text().contains(words),
            "{words:?} is missing in {}",
            self.text()
        );
        self
    }
}

fn orders(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|n| format!(r#"{{"order_id":"A-{n}"}}"#))
}

#[tokio::test]
async fn a_rabbitmq_queue_is_consumed_and_repeats_have_no_effect() {
    let stage = Stage::new().await;
    stage
        .queue
        .send(orders(30).chain(["{not json".to_owned()]))
        .await;
    let running = stage.start();
    stage.until_effects(30).await;
    // Each is sent again, and one that is new comes last.
    stage.queue.send(orders(31)).await;
    stage.until_effects(31).await;
    stage.dead.until_ready(1).await;
    stage.stop(running).await;
    assert_eq!(
        stage.queue.ready().await,
        0,
        "all are acknowledged: {}",
        stage.read("log")
    );
    let mut effects: Vec<String> = stage.read("ledger").lines().map(str::to_owned).collect();
    effects.sort();
    effects.dedup();
    assert_eq!(effects.len(), 31);
}

#[tokio::test]
async fn commands_find_the_broker_of_the_configuration() {
    let stage = Stage::new().await;
    stage.queue.send(["{not json".to_owned()]).await;
    let running = stage.start();
    stage.dead.until_ready(1).await;
    stage.stop(running).await;

    let doctor = stage.oncegate(&["doctor"], &[]);
    assert!(
        matches!(doctor.0.status.code(), Some(0 | 1)),
        "{}",
        doctor.text()
    );
    doctor.says(stage.queue.name()).says(stage.dead.name());
    let list = stage
        .oncegate(&["dead-letters", "list"], &["--json"])
        .ended(0);
    let list: serde_json::Value = serde_json::from_slice(&list.0.stdout).unwrap();
    assert_eq!(
        (&list["seen"], &list["place"]),
        (&1.into(), &stage.dead.name().into()),
        "{list}"
    );
    let at = list["letters"][0]["at"].as_str().unwrap().to_owned();
    stage
        .oncegate(&["dead-letters", "show", &at], &["--payload"])
        .ended(0)
        .says("{not json");
    stage
        .oncegate(&["dead-letters", "show", "orders/0@3"], &[])
        .ended(2)
        .says("#ID");
    let journal = stage.path("journal");
    let flags = [
        "--yes",
        "--why",
        "a test",
        "--without-records",
        "--journal",
        journal.to_str().unwrap(),
    ];
    stage
        .oncegate(&["dead-letters", "redrive"], &flags)
        .ended(0);
    stage.queue.until_ready(1).await;
    assert_eq!(stage.dead.ready().await, 0);
}

#[tokio::test]
async fn what_is_wrong_with_a_queue_of_rabbitmq_is_said_by_check() {
    let stage = Stage::new().await;
    let queue = stage.queue.name();
    let dead = stage.dead.name();
    let letters = format!("amqp = {dead:?}");
    stage.checked(queue, queue).ended(0);
    stage
        .checked("guest@", "guest:guest@")
        .ended(1)
        .says("the URL contains a password as well");
    stage
        .checked("amqp://guest", "http://guest")
        .ended(1)
        .says("amqp://user:password@host");
    stage
        .checked(&letters, "kafka = \"dead\"")
        .ended(1)
        .says("a queue of the same broker");
    stage
        .checked(&letters, &format!("amqp = {queue:?}"))
        .ended(1)
        .says("every letter would come back");
    stage
        .checked("management", "tls_key = \"k\", management")
        .ended(1)
        .says("belong together");
    let examined = stage.altered("doctor", queue, queue);
    assert!(examined.text().contains(queue), "{}", examined.text());
    let absent = stage.altered("doctor", queue, "nowhere");
    assert_ne!(absent.0.status.code(), Some(0));
    absent.says("nowhere");
}

#[tokio::test]
async fn a_queue_of_one_name_in_another_virtual_host_is_refused() {
    let stage = Stage::new().await;
    let rabbit = RabbitMq::shared().await;
    let vhost = unique("us");
    rabbit
        .manage("PUT", &format!("/api/vhosts/{vhost}"), "{}")
        .await;
    let rights = r#"{"configure":".*","write":".*","read":".*"}"#;
    let path = format!("/api/permissions/{vhost}/guest");
    rabbit.manage("PUT", &path, rights).await;
    for queue in [&stage.queue, &stage.dead] {
        let path = format!("/api/queues/{vhost}/{}", queue.name());
        let quorum = r#"{"durable":true,"arguments":{"x-queue-type":"quorum"}}"#;
        rabbit.manage("PUT", &path, quorum).await;
    }
    let uri = format!("amqp://guest:guest@{}/{vhost}", rabbit.address());
    let other = RabbitQueue::of(uri, stage.queue.name().to_owned());
    stage.queue.send(orders(3)).await;
    other.send(orders(3)).await;
    let running = stage.start();
    stage.until_effects(3).await;
    stage.stop(running).await;

    let refused = stage.altered("run", "%2f", &vhost).ended(78);
    for words in [
        "same stream",
        &vhost,
        "virtual host `/`",
        stage.queue.name(),
    ] {
        assert!(refused.text().contains(words), "{}", refused.text());
    }
    assert_eq!(other.ready().await, 3, "nothing was acknowledged");
    stage.altered("doctor", "%2f", &vhost).says("same stream");

    // Another route tells the two apart.
    let text = stage.read("oncegate.toml").replace("%2f", &vhost);
    let text = text.replace("key = {", "route = \"us\"\nkey = {");
    std::fs::write(stage.config(), text).unwrap();
    let running = stage.start();
    stage.until_effects(6).await;
    stage.stop(running).await;
    rabbit
        .manage("DELETE", &format!("/api/vhosts/{vhost}"), "")
        .await;
}
