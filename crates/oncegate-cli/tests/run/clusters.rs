//! Two clusters of Kafka that have a topic of the same name, and one store for both.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use oncegate_testkit::{Kafka, KafkaBroker, Record, Redis, process, unique, until};

use super::{LIMIT, example};

/// A consumer in a file, whose records are in the Redis of all tests.
struct Consumer {
    dir: tempfile::TempDir,
    scope: String,
    topic: String,
    redis: String,
}

impl Consumer {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn effects(&self) -> usize {
        let ledger = std::fs::read_to_string(self.path("ledger"));
        ledger.unwrap_or_default().lines().count()
    }

    /// The configuration with the topic of this cluster, and these lines.
    fn at(&self, bootstrap: &str, more: &str) -> PathBuf {
        let config = format!(
            r#"version = 1
store = {{ url = {redis:?} }}
[status]
listen = "off"
[consumer.{scope}]
source = {{ kafka = {{ brokers = {bootstrap:?}, topics = [{topic:?}] }} }}
key = {{ json = ["order_id"] }}
handler = {{ exec = ["python3", {worker:?}, {ledger:?}] }}
{more}
"#,
            redis = self.redis,
            scope = self.scope,
            topic = self.topic,
            worker = example("python/worker_stdio.py"),
            ledger = self.path("ledger"),
        );
        let path = self.path("oncegate.toml");
        std::fs::write(&path, config).unwrap();
        path
    }

    /// Runs until there are so many effects.
    async fn runs(&self, config: &Path, effects: usize) {
        let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
        command.args(["run", "--config"]).arg(config);
        let log = self.path("log");
        let mut running = process::Process::spawn_logged("oncegate run", command, &log);
        until("effects", LIMIT, async || match self.effects() {
            found if found == effects => Ok(()),
            found => Err(format!(
                "{found}: {}",
                std::fs::read_to_string(&log).unwrap()
            )),
        })
        .await;
        running.signal("TERM");
        assert_eq!(running.end_within(LIMIT).await.code(), Some(0));
    }
}

fn oncegate(verb: &str, config: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command
        .arg(verb)
        .arg("--config")
        .arg(config)
        .output()
        .unwrap()
}

fn orders(count: usize) -> impl Iterator<Item = Record> {
    (0..count).map(|id| Record::new(format!(r#"{{"order_id":"A-{id}","amount":10}}"#)))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_of_one_name_in_another_cluster_is_refused() {
    let (here, there) = (Kafka::shared().await, KafkaBroker::start().await);
    let consumer = Consumer {
        dir: tempfile::tempdir().unwrap(),
        scope: unique("clusters"),
        topic: unique("orders"),
        redis: Redis::shared().await.url().to_owned(),
    };
    for cluster in [&here, &*there] {
        cluster.create_topic(&consumer.topic, 1).await;
        cluster.produce(&consumer.topic, orders(3)).await;
    }
    let config = consumer.at(here.bootstrap(), "");
    consumer.runs(&config, 3).await;

    // The same keys there are other orders, and no duplicates.
    let config = consumer.at(there.bootstrap(), "");
    let refused = oncegate("run", &config);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(78), "{said}");
    assert!(
        said.contains("same stream") && said.contains(&consumer.topic),
        "{said}"
    );
    let committed = there.committed_offsets(&consumer.scope, &consumer.topic);
    assert!(committed.await.is_empty(), "nothing was acknowledged");
    let examined = oncegate("doctor", &config);
    let found = String::from_utf8_lossy(&examined.stdout);
    assert!(found.contains("same stream"), "{found}");

    // Another route tells the two apart.
    let config = consumer.at(there.bootstrap(), "route = \"there\"");
    consumer.runs(&config, 6).await;

    // A mirror has the same orders, and a person has said so.
    let mirror = KafkaBroker::start().await;
    mirror.create_topic(&consumer.topic, 1).await;
    mirror.produce(&consumer.topic, orders(4)).await;
    let config = consumer.at(mirror.bootstrap(), "broker = \"same stream\"");
    consumer.runs(&config, 7).await;
}
