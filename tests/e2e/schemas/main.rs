//! Keys of Avro, Protobuf and JSON Schema, with a real registry, by the serialisers of another
//! implementation.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod documents;
mod hostile;
mod outage;
mod refusals;
mod registry;

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use oncegate_testkit::{Kafka, process, schema_python};
use tokio::process::Command;

/// Nothing here takes this long; what does has failed.
const LIMIT: Duration = Duration::from_secs(240);

fn script(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("schemas")
        .join(name)
}

/// Runs a script and returns the lines that it prints.
async fn python(name: &str, arguments: &[&str]) -> Vec<String> {
    let mut command = Command::from(process::bound_to_parent(schema_python(), "KILL"));
    command
        .arg(script(name))
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = tokio::time::timeout(LIMIT, command.output())
        .await
        .expect("it ends in time")
        .unwrap();
    assert!(
        output.status.success(),
        "{name} {arguments:?}: {}",
        output.status
    );
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}

/// Writes orders to a topic. Returns the JSON of each.
async fn produce(
    kafka: &Kafka,
    registry: &str,
    topic: &str,
    kind: &str,
    first: u32,
    count: u32,
) -> Vec<String> {
    let first = first.to_string();
    let count = count.to_string();
    python(
        "produce.py",
        &[kafka.bootstrap(), registry, topic, kind, &first, &count],
    )
    .await
}
