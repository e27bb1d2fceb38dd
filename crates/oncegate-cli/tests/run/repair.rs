//! `oncegate replay --run`: exactly what is missing runs, and after kills no effect is too many.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use oncegate::redis::RedisStore;
use oncegate::{Completion, Entry, Gate, Key, Message, Origin};
use oncegate_testkit::{Process, Record, process, until};
use serde_json::Value;

use super::{LIMIT, Stage, program};

mod kills;

/// The worker: notes order and idempotency key in the ledger. After an attempt without an outcome
/// it looks there first.
const WORKER: &str = r#"
ledger=$1
# Without its last byte, the message is cut: oncegate was killed while it wrote it.
read -r line || exit 75
id=${line#*\"order_id\":\"}; id=${id%%\"*}
if [ "$ONCEGATE_RECOVERED" = 1 ] && grep -q "$ONCEGATE_IDEMPOTENCY_KEY" "$ledger"; then exit 0; fi
[ "$id" = refused ] && exit 65
echo "$id $ONCEGATE_IDEMPOTENCY_KEY" >>"$ledger"
sleep 0.01
"#;

fn order(id: &str) -> Record {
    Record::new(format!("{{\"order_id\":\"{id}\",\"amount\":10}}\n")).key(id)
}

fn name(number: usize) -> String {
    format!("A-{number}")
}

/// The end of a command.
struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ended {
    fn with(&self, code: i32) -> &Self {
        assert_eq!(self.code, Some(code), "\n{}\n{}", self.out, self.err);
        self
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.out)
            .unwrap_or_else(|error| panic!("{error}: {}\n{}", self.out, self.err))
    }
}

impl Stage {
    /// A configuration with the worker above.
    fn write_configuration(&self) -> PathBuf {
        let worker = self.path("worker.sh");
        let path = self.path("oncegate.toml");
        std::fs::write(&worker, WORKER).unwrap();
        let Self {
            kafka,
            redis,
            topic,
            dead,
            scope,
            ..
        } = self;
        let text = format!(
            "version = 1\n[store]\nurl = \"{}\"\n[consumer.{scope}]\nkey = \"order_id\"\nlease = \"1s\"\n\
             source.kafka = {{ brokers = \"{}\", topics = [\"{topic}\"] }}\n\
             handler.command = [\"sh\", \"{}\", \"{}\"]\ndead_letters.kafka = \"{dead}\"\n",
            redis.url(),
            kafka.bootstrap(),
            worker.display(),
            self.path("ledger").display(),
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    fn replay_command(&self, more: &[&str]) -> std::process::Command {
        let mut command = process::bound_to_parent(program(), "KILL");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
            command.env_remove(name);
        }
        let path = self.write_configuration();
        command
            .args(["replay", "--config", path.to_str().unwrap()])
            .args(more);
        command
    }

    async fn replay(&self, more: &[&str]) -> Ended {
        let command = self.replay_command(more);
        let output = tokio::process::Command::from(command)
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(LIMIT, output)
            .await
            .expect("it ends in time")
            .expect("it runs");
        Ended {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).expect("the output is UTF-8"),
            err: String::from_utf8(output.stderr).expect("the output is UTF-8"),
        }
    }

    async fn repair(&self, more: &[&str]) -> Ended {
        self.replay(
            &[&self.repair_arguments(), more]
                .concat()
                .iter()
                .map(|s| &**s)
                .collect::<Vec<_>>(),
        )
        .await
    }

    fn repair_arguments(&self) -> [&'static str; 6] {
        ["--run", "--yes", "--why", "INC-73", "--by", "ada"]
    }

    /// The orders that the ledger has, with the number of effects.
    fn charged(&self) -> BTreeMap<String, usize> {
        let mut charged = BTreeMap::new();
        for (line, count) in self.effects() {
            *charged
                .entry(line.split(' ').next().unwrap().to_owned())
                .or_default() += count;
        }
        charged
    }

    /// The origins of the messages of each order, from the broker.
    async fn origins(&self) -> BTreeMap<String, BTreeSet<String>> {
        use rdkafka::Message as _;
        let mut origins: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for message in self.kafka.read_all(&self.topic).await {
            let id = String::from_utf8(message.key().unwrap().to_vec()).unwrap();
            let origin = format!(
                "{}/{}@{}",
                self.topic,
                message.partition(),
                message.offset()
            );
            origins.entry(id).or_default().insert(origin);
        }
        origins
    }

    /// Every order that was charged was announced in the journal, whatever was killed.
    async fn each_charge_is_in_the_journal(&self) {
        let journal: BTreeSet<String> = self
            .replayed()
            .iter()
            .map(|entry| entry["origin"].as_str().unwrap().to_owned())
            .collect();
        let origins = self.origins().await;
        let charged = self.charged();
        assert!(!charged.is_empty(), "nothing was charged");
        let unannounced: Vec<&String> = charged
            .keys()
            .filter(|id| origins[*id].is_disjoint(&journal))
            .collect();
        assert!(
            unannounced.is_empty(),
            "charged without an entry in the journal: {unannounced:?}"
        );
        // The other way round: what the journal has was to run.
        let expected: BTreeSet<&String> = origins.values().flatten().collect();
        assert!(
            journal.iter().all(|origin| expected.contains(origin)),
            "{journal:?}"
        );
    }

    /// The entries of the operator's journal about runs.
    fn replayed(&self) -> Vec<Value> {
        let text =
            std::fs::read_to_string(self.path("state/oncegate/journal.jsonl")).unwrap_or_default();
        let entries = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        entries
            .filter(|entry| entry["event"] == "replayed")
            .collect()
    }

    async fn gate(&self) -> Gate {
        let store = RedisStore::connect(self.redis.url())
            .await
            .expect("connects");
        Gate::new(&*self.scope, Key::json(["order_id"]), store)
    }

    /// Completes these orders, as a consumer does.
    async fn complete(&self, ids: impl IntoIterator<Item = String>) {
        let gate = self.gate().await;
        for id in ids {
            let payload = format!("{{\"order_id\":\"{id}\"}}");
            let message = Message::new(
                &*self.topic,
                Origin::Other("test".into()),
                Some(payload.into()),
            );
            let Entry::Granted(lease) = gate.enter(&message).await.unwrap() else {
                panic!("{id} is new")
            };
            assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
        }
    }

    async fn acknowledge_all(&self) {
        for (partition, end) in self.kafka.end_offsets(&self.topic).await {
            self.kafka
                .commit(&self.scope, &self.topic, partition, end)
                .await;
        }
    }
}

#[tokio::test]
async fn exactly_what_is_missing_runs_and_each_run_is_in_the_journal() {
    let stage = Stage::with([]).await;
    const ORDERS: usize = 60;
    let all = || (0..ORDERS).map(name);
    let twice: Vec<Record> = all().chain(all()).map(|id| order(&id)).collect();
    stage.kafka.produce(&stage.topic, twice).await;
    stage
        .kafka
        .produce(
            &stage.topic,
            [order("refused"), Record::new("{").key("bad")],
        )
        .await;
    stage
        .complete(all().filter(|id| id.ends_with('7') || id.ends_with('8')))
        .await;
    stage.acknowledge_all().await;
    // The consumer group has not seen this one: it will be delivered to it.
    stage.kafka.produce(&stage.topic, [order("later")]).await;
    const MISSING: usize = ORDERS - 12;

    nothing_runs_without_a_confirmation(&stage).await;

    let journal = stage.path("state/oncegate/journal.jsonl");
    let journal = ["--journal", journal.to_str().unwrap(), "--json"];
    let some = stage
        .repair(&[&journal[..], &["--limit", "10", "--rate", "100"]].concat())
        .await;
    let document = some.with(1).json();
    assert_eq!(
        (&document["schema"], &document["complete"]),
        (&"oncegate.replay.run/1".into(), &false.into())
    );
    assert_eq!(
        (&document["delivered"], &document["missing"]),
        (&10.into(), &(2 * MISSING + 1).into())
    );

    let rest = stage.repair(&journal).await;
    let document = rest.with(1).json();
    assert_eq!(
        (&document["complete"], &document["dead_letters"]),
        (&true.into(), &1.into()),
        "{document}"
    );
    let charged = stage.charged();
    let missing = all().filter(|id| !id.ends_with('7') && !id.ends_with('8'));
    assert_eq!(charged, missing.map(|id| (id, 1)).collect());
    assert_eq!(
        stage.letters().await.len(),
        1,
        "the one that the worker refuses"
    );

    let replayed = stage.replayed();
    assert_eq!(replayed.len(), MISSING + 1);
    assert!(replayed.iter().all(|entry| {
        entry["by"] == "ada"
            && entry["reason"] == "INC-73"
            && entry["origin"].as_str().unwrap().starts_with(&stage.topic)
    }));
    let keys: BTreeSet<&str> = replayed
        .iter()
        .map(|entry| entry["key"].as_str().unwrap())
        .collect();
    assert_eq!(keys.len(), MISSING + 1, "one entry for each");

    // Now nothing is missing, whatever is asked.
    let nothing = stage.repair(&journal).await;
    assert_eq!(nothing.with(0).json()["missing"], 0);
    assert_eq!(stage.charged().len(), MISSING);
}

async fn nothing_runs_without_a_confirmation(stage: &Stage) {
    stage.replay(&["--run", "--yes"]).await.with(2);
    let refused = stage
        .replay(&["--run", "--why", "INC-73", "--journal", "/dev/null"])
        .await;
    assert!(refused.with(2).err.contains("--yes"), "{}", refused.err);
    for altered in [
        ["--store", "redis://127.0.0.1:1"],
        ["--key", "amount"],
        ["--property", "a=b"],
    ] {
        let ended = stage.repair(&altered).await;
        assert!(ended.with(2).err.contains(altered[0]), "{}", ended.err);
    }
    assert!(
        stage.charged().is_empty(),
        "nothing runs without a confirmation"
    );
}

/// A redriven message keeps its first route, so its record is that of the first topic.
#[tokio::test]
async fn a_redriven_message_is_recognised_by_the_route_in_its_header() {
    let stage = Stage::with([]).await;
    stage.complete([name(1)]).await;
    let first_route = stage.topic.clone();
    let stage = Stage {
        topic: stage.kafka.new_topic("run-redriven", 1).await,
        ..stage
    };
    stage
        .kafka
        .produce(
            &stage.topic,
            [order(&name(1)).header("oncegate-route", first_route)],
        )
        .await;
    stage.acknowledge_all().await;
    assert_eq!(
        stage.replay(&["--json"]).await.with(1).json()["without_record"],
        1
    );
    assert_eq!(
        stage
            .replay(&["--json", "--routes-from-headers"])
            .await
            .with(0)
            .json()["completed"],
        1
    );
    let journal = stage.path("journal.jsonl");
    let journal = [
        "--journal",
        journal.to_str().unwrap(),
        "--json",
        "--routes-from-headers",
    ];
    assert_eq!(stage.repair(&journal).await.with(0).json()["missing"], 0);
    assert!(stage.charged().is_empty());
}

/// SIGTERM: what has started ends, and the same command continues.
#[tokio::test]
async fn a_stopped_replay_lets_running_work_end_and_can_continue() {
    let stage = Stage::with([]).await;
    const ORDERS: usize = 200;
    stage
        .kafka
        .produce(
            &stage.topic,
            (0..ORDERS).map(|n| order(&name(n))).collect::<Vec<_>>(),
        )
        .await;
    let journal = stage.path("state/oncegate/journal.jsonl");
    let journal = ["--journal", journal.to_str().unwrap()];
    let arguments = [&stage.repair_arguments()[..], &["--rate", "50"], &journal].concat();
    let log = stage.path("oncegate.log");
    let mut first =
        Process::spawn_logged("oncegate replay", stage.replay_command(&arguments), &log);
    until_charged(&stage, 5).await;
    first.signal("TERM");
    assert_eq!(
        first.end_within(LIMIT).await.code(),
        Some(130),
        "{}",
        stage.log()
    );
    assert!(
        stage.log().contains("the same command continues"),
        "{}",
        stage.log()
    );
    let charged = stage.charged();
    assert!(charged.len() < ORDERS && charged.values().all(|count| *count == 1));
    assert_eq!(
        stage.replayed().len(),
        charged.len(),
        "what was begun has ended"
    );

    stage.repair(&journal).await.with(0);
    assert_eq!(stage.charged(), (0..ORDERS).map(|n| (name(n), 1)).collect());
    assert_eq!(stage.replayed().len(), ORDERS);
}

async fn until_charged(stage: &Stage, most: usize) {
    until("some effects", LIMIT, async || {
        let charged = stage.charged().len();
        if charged >= most {
            Ok(())
        } else {
            Err(format!("{charged} of {most}\n{}", stage.log()))
        }
    })
    .await;
}
