//! Relative paths in a file of settings are relative to the folder of that file: a service that is
//! started from another folder must not find, or make, other files.

use std::path::{self, Path, PathBuf};

use oncegate_worker::Program;
use toml::{Table, Value};

/// Settings that are paths, wherever they stand. Secrets and dead letters in a file are both
/// `file`.
const PATHS: [&str; 9] = [
    "avro",
    "file",
    "journal",
    "large_results",
    "protobuf",
    "reader",
    "tls_certificate",
    "tls_key",
    "tls_root",
];

/// Properties of librdkafka that are paths.
const PROPERTIES: [&str; 6] = [
    "https.ca.location",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.crl.location",
    "ssl.key.location",
    "ssl.keystore.location",
];

/// The value of `ssl.ca.location` for which librdkafka looks in the usual places.
const PROBE: &str = "probe";

/// The table whose names are not those of settings.
const TOPICS: &str = "retry_topics";

/// The folder that relative paths in `file` begin in. `None` for a pipe, which is in none.
pub(super) fn folder(file: &Path) -> Option<PathBuf> {
    let is_file = std::fs::metadata(file).is_ok_and(|facts| facts.is_file());
    path::absolute(file)
        .ok()
        .filter(|_| is_file)?
        .parent()
        .map(Path::to_owned)
}

/// Makes the relative paths in this table absolute.
pub(super) fn resolve(table: &mut Table, folder: &Path) {
    for (name, value) in table {
        match value {
            Value::String(text) if PATHS.contains(&name.as_str()) => *text = within(folder, text),
            Value::String(text) if PROPERTIES.contains(&name.as_str()) && text != PROBE => {
                *text = within(folder, text);
            }
            // Its names are those of topics.
            Value::Table(_) if name == TOPICS => {}
            Value::Table(inner) => {
                if name == "store"
                    && let Some(Value::String(url)) = inner.get_mut("url")
                    && let Some(file) = crate::stores::file_of(url)
                {
                    *url = format!("sqlite:{}", within(folder, &file.to_string_lossy()));
                }
                if name == "handler" {
                    find_worker(inner, folder);
                }
                resolve(inner, folder);
            }
            _ => {}
        }
    }
}

/// Names the file of a worker that is beside the file of settings and not in the working
/// directory.
fn find_worker(handler: &mut Table, folder: &Path) {
    for kind in ["exec", "command"] {
        let Some(program) = handler.get_mut(kind) else {
            continue;
        };
        let given = match &*program {
            Value::String(text) => Some(Program::Shell(text.clone())),
            Value::Array(words) => words
                .iter()
                .map(|word| word.as_str().map(str::to_owned))
                .collect::<Option<_>>()
                .map(Program::Words),
            _ => None,
        };
        if let Some(Program::Words(words)) = given.and_then(|given| given.beside(folder)) {
            *program = Value::from(words);
        }
    }
}

fn within(folder: &Path, path: &str) -> String {
    if path.is_empty() {
        String::new()
    } else {
        folder.join(path).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_file_is_the_one_beside_the_file_of_settings() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("worker.py"), "").unwrap();
        let text = r#"
            [consumer.a.handler]
            exec = "python3 worker.py"
            [consumer.b.handler]
            command = ["python3", "worker.py", "x"]
            [consumer.c.handler]
            command = "python3 elsewhere.py"
        "#;
        let mut table: Table = toml::from_str(text).unwrap();
        resolve(&mut table, dir.path());
        let consumers = table["consumer"].as_table().unwrap();
        let script = dir.path().join("worker.py");
        for (name, kind, place) in [("a", "exec", 1), ("b", "command", 1)] {
            let words = consumers[name]["handler"][kind].as_array().unwrap();
            assert_eq!(words[place].as_str(), script.to_str(), "{name}");
        }
        assert_eq!(
            consumers["c"]["handler"]["command"].as_str(),
            Some("python3 elsewhere.py")
        );
    }

    #[test]
    fn paths_are_those_beside_the_file() {
        let text = r#"
            [store]
            url = "sqlite:once.db"
            password = { file = "secret" }
            journal = true
            [consumer.billing]
            journal = "journal.jsonl"
            large_results = "/var/results"
            handler = { http = "unix:/run/worker", token = { env = "file" } }
            dead_letters = { file = "../dead.jsonl" }
            [consumer.billing.source.kafka]
            retry_topics = { journal = "30s" }
            [consumer.billing.source.kafka.properties]
            "ssl.ca.location" = "probe"
            "ssl.key.location" = "key.pem"
            "sasl.password" = { file = "sasl" }
        "#;
        let mut table: Table = toml::from_str(text).unwrap();
        resolve(&mut table, Path::new("/etc/oncegate"));
        let shown = table.to_string();
        for expected in [
            r#"url = "sqlite:/etc/oncegate/once.db""#,
            r#"file = "/etc/oncegate/secret""#,
            "journal = true",
            r#"journal = "30s""#,
            r#"journal = "/etc/oncegate/journal.jsonl""#,
            r#"large_results = "/var/results""#,
            r#"http = "unix:/run/worker""#,
            r#"env = "file""#,
            r#"file = "/etc/oncegate/../dead.jsonl""#,
            r#""ssl.ca.location" = "probe""#,
            r#""ssl.key.location" = "/etc/oncegate/key.pem""#,
            r#"file = "/etc/oncegate/sasl""#,
        ] {
            assert!(shown.contains(expected), "{expected}: {shown}");
        }
        for url in [
            "redis://cache:6379",
            "127.0.0.1:6379",
            "sqlite:/var/once.db",
        ] {
            let mut table: Table = toml::from_str(&format!("[store]\nurl = {url:?}")).unwrap();
            resolve(&mut table, Path::new("/etc"));
            assert_eq!(table["store"]["url"].as_str(), Some(url));
        }
    }
}
