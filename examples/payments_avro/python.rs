//! The programs in Python: the producer, with another implementation of Avro, and a worker that
//! gets JSON.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_testkit::schema_python;
use serde_json::json;

use super::{Place, billing};

/// The time without an acknowledgement after which something is wrong.
const STUCK_AFTER: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Writes the payments to the topic in Avro, the first half with an older schema.
pub(crate) fn produce(
    bootstrap: &str,
    registry: &str,
    topic: &str,
    payments: &[String],
) -> Result<(), BoxError> {
    let mut producer = Command::new(schema_python())
        .arg(here().join("produce.py"))
        .args([bootstrap, registry, topic])
        .stdin(Stdio::piped())
        .spawn()?;
    let mut input = producer.stdin.take().ok_or("the producer has no input")?;
    for payment in payments {
        writeln!(input, "{payment}")?;
    }
    drop(input);
    let status = producer.wait()?;
    status
        .success()
        .then_some(())
        .ok_or_else(|| format!("the producer has failed: {status}").into())
}

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("payments_avro")
}

/// A Python worker under `oncegate run`: the one that the manual shows. It knows nothing of Avro.
pub(crate) struct PythonWorker {
    oncegate: PathBuf,
    scope: String,
    ledger: PathBuf,
}

impl PythonWorker {
    pub(crate) fn new(place: &Place<'_>, run: &str, oncegate: PathBuf) -> Result<Self, BoxError> {
        let ledger = place.folder.join("python.ledger");
        fs::write(&ledger, "")?;
        Ok(Self {
            oncegate,
            scope: format!("{run}-python"),
            ledger,
        })
    }

    /// Consumes the whole topic in a new group. Returns the orders that were charged.
    pub(crate) fn consume(
        &self,
        place: &Place<'_>,
        pass: &str,
        bar: &ProgressBar,
    ) -> Result<Vec<String>, BoxError> {
        let group = format!("{}-{pass}", self.scope);
        let before = self.charged()?.len();
        let config = place.folder.join(format!("{pass}.toml"));
        fs::write(&config, self.config(place, &group)?)?;
        let mut running = Running(
            Command::new(&self.oncegate)
                .args(["run", "--listen", "off", "--config"])
                .arg(&config)
                .stdout(Stdio::null())
                .stderr(fs::File::create(place.folder.join(format!("{pass}.log")))?)
                .spawn()?,
        );
        let asker = place.broker.asker(&group)?;
        let mut lag = None;
        let mut moved_at = Instant::now();
        while lag != Some(0) {
            // A question that fails is asked again; that nothing moves any more is noticed all the
            // same.
            if let Ok(left) = place.broker.lag(&asker, place.topic)
                && lag != Some(left)
            {
                lag = Some(left);
                moved_at = Instant::now();
            }
            bar.set_position((self.charged()?.len() - before) as u64);
            if moved_at.elapsed() > STUCK_AFTER || running.0.try_wait()?.is_some() {
                let log = fs::read_to_string(place.folder.join(format!("{pass}.log")))?;
                return Err(format!("`oncegate run` does not go on:\n{log}").into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        // Everything is acknowledged, so it may be killed.
        drop(running);
        Ok(self.charged()?.split_off(before))
    }

    fn config(&self, place: &Place<'_>, group: &str) -> Result<String, BoxError> {
        let store = if place.store.contains("://") {
            place.store.to_owned()
        } else {
            format!("sqlite:{}", place.store)
        };
        let reader = place.folder.join("payment.avsc");
        fs::write(&reader, billing::READER)?;
        let worker = Path::new(env!("CARGO_MANIFEST_DIR")).join("workers/python/worker_stdio.py");
        let brokers = json!([place.broker.bootstrap()]);
        let topics = json!([place.topic]);
        let group = json!(group);
        let registry = json!(place.registry);
        let reader = json!(reader);
        let handler = json!(["python3", worker, self.ledger]);
        Ok(format!(
            r#"
version = 1

[store]
url = {store}

[consumer.{scope}]
source = {{ kafka = {{ brokers = {brokers}, topics = {topics}, group = {group} }} }}
key = {{ json = ["order_id", {{ path = "amount", as = "decimal" }}] }}
format = {{ registry = {registry}, reader = {reader}, deliver = "json" }}
handler = {{ exec = {handler}, workers = 2 }}
"#,
            store = json!(store),
            scope = self.scope,
        ))
    }

    /// The orders that were charged so far, one line each.
    fn charged(&self) -> Result<Vec<String>, BoxError> {
        Ok(fs::read_to_string(&self.ledger)?
            .lines()
            .map(str::to_owned)
            .collect())
    }
}

/// The program `oncegate` that was built with this one, or else the one that is installed.
pub(crate) fn oncegate() -> Result<PathBuf, BoxError> {
    let this = std::env::current_exe()?;
    let built = this
        .parent()
        .and_then(Path::parent)
        .map(|folder| folder.join("oncegate"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&path).map(|folder| folder.join("oncegate"));
    let found = built
        .into_iter()
        .chain(installed)
        .find(|program| program.is_file());
    found.ok_or_else(|| {
        "there is no program `oncegate`: `cargo build -p oncegate-cli` makes it".into()
    })
}

/// A process that is killed when this value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}
