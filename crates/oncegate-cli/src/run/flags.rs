//! Settings of one consumer as flags, with the same names, defaults and forms as in a file.

use crate::args::{KEY_FORMS, KEY_HELP};
use crate::config::table::meaning;
use crate::config::{Path, Setting};
use crate::sources::SourceKind;

/// The settings that one consumer needs, and those that are set most often. --set sets all others.
// A flag without a comment of its own has the documentation of its setting.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Settings of the consumer (docs/CONFIGURATION.md)")]
pub(crate) struct Flags {
    /// The consumer that the flags apply to: its name is the scope of its keys [default: the only
    /// one of the file]
    #[arg(long, value_name = "NAME")]
    scope: Option<String>,

    /// store.url
    #[arg(long, value_name = "URL")]
    store: Option<String>,

    /// The kind of the source; --set has the settings that no flag has [default: kafka, or sqs with
    /// --queue]
    #[arg(long, value_name = "SOURCE")]
    source: Option<SourceKind>,

    /// Addresses of Kafka, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT")]
    brokers: Option<String>,

    /// A topic; several with commas
    #[arg(long = "topic", value_name = "NAME")]
    topics: Option<String>,

    /// The consumer group [default: the scope]
    #[arg(long, value_name = "NAME")]
    group: Option<String>,

    /// The queue, instead of topics, by its name; one of SQS also by its URL
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,

    /// The address of another SQS server
    #[arg(long, value_name = "URL")]
    endpoint_url: Option<String>,

    #[arg(long, value_name = "SPEC", help = KEY_HELP, long_help = KEY_FORMS)]
    key: Option<String>,

    /// What else must be equal besides the key: payload, payload-except:sent_at, or raw
    #[arg(long, value_name = "SPEC")]
    fingerprint: Option<String>,

    /// A worker behind HTTP: http://127.0.0.1:8080/handle, https://worker/handle or
    /// unix:/path/of/socket
    #[arg(long, value_name = "URL")]
    handler: Option<String>,

    /// A worker on standard streams
    #[arg(long, value_name = "COMMAND")]
    handler_exec: Option<String>,

    /// A program to start for each message
    #[arg(long, value_name = "COMMAND")]
    handler_command: Option<String>,

    #[arg(long, value_name = "COUNT", help = meaning("handler.workers"))]
    workers: Option<String>,

    #[arg(long, value_name = "TIME", help = meaning("handler.timeout"))]
    timeout: Option<String>,

    /// The topic for dead letters; with --queue the queue for them, with --source stdin the file
    #[arg(long, value_name = "NAME")]
    dead_letters: Option<String>,

    #[arg(long, value_name = "TIME", help = meaning("lease"))]
    lease: Option<String>,

    #[arg(long, value_name = "TIME", help = meaning("retention"))]
    retention: Option<String>,

    #[arg(long, value_name = "FILE", help = meaning("journal"))]
    journal: Option<String>,

    #[arg(long, value_name = "COUNT", help = meaning("concurrency"))]
    concurrency: Option<String>,

    /// Hand the worker up to this many messages at a time; --concurrency then counts batches
    #[arg(long, value_name = "COUNT")]
    batch_messages: Option<String>,

    /// A topic in which messages wait for a later retry, with the wait: orders.retry.30s=30s; may
    /// be repeated
    #[arg(long = "retry-topic", value_name = "NAME=TIME", value_parser = crate::parse::pair)]
    retry_topics: Vec<(String, String)>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = crate::parse::pair)]
    properties: Vec<(String, String)>,

    /// The address of the status page: 127.0.0.1:9464, or off
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,

    /// Any other setting of the consumer by its path, such as ordering=partition or
    /// handler.ready_url=URL, and any of the configuration, such as store.response_timeout=2s; may
    /// be repeated
    #[arg(long = "set", value_name = "PATH=VALUE", value_parser = crate::parse::pair)]
    any: Vec<(String, String)>,
}

/// The tables of `source.kafka` with names that may contain dots.
const NAMED: [&str; 2] = ["properties", "retry_topics"];

/// The names at the top of a configuration.
const TABLES: [&str; 8] = [
    "version", "store", "defaults", "consumer", "outbox", "door", "serve", "status",
];

/// The default consumer: the only one of the file, if there is exactly one.
const UNNAMED: &str = "default";

impl Flags {
    /// The consumer that the flags are about, if they name it.
    pub(crate) fn scope(&self) -> Option<&str> {
        self.scope.as_deref()
    }

    /// Returns whether a flag sets something of the consumer that `--scope` names.
    pub(crate) fn are_about_a_consumer(&self) -> bool {
        let settings = self.settings(&[]);
        settings.iter().any(|setting| {
            let mut path = setting.path.iter().map(String::as_str);
            path.next() == Some("consumer") && path.next() == Some(UNNAMED)
        })
    }

    /// The given settings, each with its flag and its path. `known` are the consumers of the file.
    pub(crate) fn settings(&self, known: &[String]) -> Vec<Setting> {
        let consumer = match (&self.scope, known) {
            (Some(scope), _) => scope.clone(),
            (None, [only]) => only.clone(),
            (None, _) => UNNAMED.to_owned(),
        };
        let whole = [
            ("--store", ["store", "url"], &self.store),
            ("--listen", ["status", "listen"], &self.listen),
        ];
        let whole = whole.into_iter().filter_map(|(flag, path, value)| {
            Some(Setting {
                flag: flag.to_owned(),
                path: path.map(str::to_owned).into(),
                value: value.clone()?,
            })
        });
        let properties = named(&consumer, "--property", "properties", &self.properties);
        let retry_topics = named(
            &consumer,
            "--retry-topic",
            "retry_topics",
            &self.retry_topics,
        );
        let any = self.any.iter().map(|(path, value)| Setting {
            flag: format!("--set {path}"),
            path: of(&consumer, parts(path)),
            value: value.clone(),
        });
        whole
            .chain(self.of_messages(&consumer))
            .chain(self.of_handler(&consumer))
            .chain(self.of_runs(&consumer))
            .chain(properties)
            .chain(retry_topics)
            .chain(any)
            .collect()
    }

    /// The settings of the source, and of what identifies its messages.
    fn of_messages(&self, consumer: &str) -> Vec<Setting> {
        // First, so that the other flags are about what is in the table.
        let table = self.source.map(|_| "{}".to_owned());
        let named = self.source.map_or("", SourceKind::table);
        let queues = self.source.unwrap_or(SourceKind::Sqs).table();
        let given: [(&str, &[&str], &Option<String>); 8] = [
            ("--source", &["source", named], &table),
            ("--brokers", &["source", "kafka", "brokers"], &self.brokers),
            ("--topic", &["source", "kafka", "topics"], &self.topics),
            ("--group", &["source", "kafka", "group"], &self.group),
            ("--queue", &["source", queues, "queue"], &self.queue),
            (
                "--endpoint-url",
                &["source", "sqs", "endpoint_url"],
                &self.endpoint_url,
            ),
            ("--key", &["key"], &self.key),
            ("--fingerprint", &["fingerprint"], &self.fingerprint),
        ];
        settings(consumer, &given)
    }

    fn of_handler(&self, consumer: &str) -> Vec<Setting> {
        let given: [(&str, &[&str], &Option<String>); 5] = [
            ("--handler", &["handler", "http"], &self.handler),
            ("--handler-exec", &["handler", "exec"], &self.handler_exec),
            (
                "--handler-command",
                &["handler", "command"],
                &self.handler_command,
            ),
            ("--workers", &["handler", "workers"], &self.workers),
            ("--timeout", &["handler", "timeout"], &self.timeout),
        ];
        settings(consumer, &given)
    }

    /// The settings of dead letters, records, retries and the order of runs.
    fn of_runs(&self, consumer: &str) -> Vec<Setting> {
        let usual = if self.queue.is_some() {
            SourceKind::Sqs
        } else {
            SourceKind::Kafka
        };
        let letters = self.source.unwrap_or(usual).letters();
        let given: [(&str, &[&str], &Option<String>); 6] = [
            (
                "--dead-letters",
                &["dead_letters", letters],
                &self.dead_letters,
            ),
            ("--lease", &["lease"], &self.lease),
            ("--retention", &["retention"], &self.retention),
            ("--journal", &["journal"], &self.journal),
            ("--concurrency", &["concurrency"], &self.concurrency),
            (
                "--batch-messages",
                &["batch", "messages"],
                &self.batch_messages,
            ),
        ];
        settings(consumer, &given)
    }
}

fn settings(consumer: &str, given: &[(&str, &[&str], &Option<String>)]) -> Vec<Setting> {
    given
        .iter()
        .filter_map(|(flag, path, value)| {
            Setting::of_consumer(consumer, flag, path, value.as_ref())
        })
        .collect()
}

/// The settings of a table of `source.kafka`, one for each pair.
fn named(consumer: &str, flag: &str, table: &str, pairs: &[(String, String)]) -> Vec<Setting> {
    pairs
        .iter()
        .map(|(name, value)| Setting {
            flag: format!("{flag} {name}"),
            path: ["consumer", consumer, "source", "kafka", table, name]
                .map(str::to_owned)
                .into(),
            value: value.clone(),
        })
        .collect()
}

/// The path in the configuration: one that begins with none of its tables is a setting of the
/// consumer.
fn of(consumer: &str, path: Path) -> Path {
    if path
        .first()
        .is_some_and(|first| TABLES.contains(&first.as_str()))
    {
        return path;
    }
    [&["consumer".to_owned(), consumer.to_owned()][..], &path].concat()
}

/// Splits `consumer."a.b".lease` at its dots. A quoted part keeps its dots, and so does the name of
/// a property of librdkafka or of a retry topic, which is the last part.
pub(crate) fn parts(path: &str) -> Path {
    let mut parts = vec![String::new()];
    let mut quoted = false;
    for c in path.chars() {
        let named = matches!(parts.as_slice(), [.., kafka, table, _] if kafka == "kafka" && NAMED.contains(&table.as_str()));
        match c {
            '"' => quoted = !quoted,
            '.' if !quoted && !named => parts.push(String::new()),
            c => parts.last_mut().into_iter().for_each(|part| part.push(c)),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn paths_have_dots_between_their_parts() {
        assert_eq!(
            parts("consumer.billing.lease"),
            ["consumer", "billing", "lease"]
        );
        assert_eq!(
            parts("consumer.\"a.b\".lease"),
            ["consumer", "a.b", "lease"]
        );
        let of_kafka = ["consumer", "billing", "source", "kafka"];
        for (path, [table, name]) in [
            (
                "properties.session.timeout.ms",
                ["properties", "session.timeout.ms"],
            ),
            (
                "properties.\"session.timeout.ms\"",
                ["properties", "session.timeout.ms"],
            ),
            (
                "retry_topics.orders.retry.30s",
                ["retry_topics", "orders.retry.30s"],
            ),
        ] {
            let path = parts(&format!("consumer.billing.source.kafka.{path}"));
            assert_eq!(path, [&of_kafka[..], &[table, name]].concat());
        }
        assert_eq!(
            parts("consumer.properties.lease"),
            ["consumer", "properties", "lease"]
        );
    }

    #[test]
    fn every_flag_has_a_help() {
        let command = <Flags as clap::Args>::augment_args(clap::Command::new("run"));
        for flag in command.get_arguments() {
            let help = flag.get_help().map(ToString::to_string);
            assert!(help.is_some_and(|help| !help.is_empty()), "{flag}");
        }
    }

    #[test]
    fn flags_are_about_the_only_consumer_of_the_file() {
        let flags = Flags {
            lease: Some("1m".to_owned()),
            ..Flags::default()
        };
        let path = |known: &[String]| flags.settings(known).remove(0).path;
        assert_eq!(
            path(&["billing".to_owned()]),
            ["consumer", "billing", "lease"]
        );
        assert_eq!(path(&[]), ["consumer", "default", "lease"]);
    }

    #[test]
    fn each_source_has_the_flags_of_its_own_table() {
        for kind in SourceKind::value_variants() {
            let flags = Flags {
                source: Some(*kind),
                queue: Some("orders".to_owned()),
                dead_letters: Some("dead".to_owned()),
                ..Flags::default()
            };
            let settings = flags.settings(&[]).into_iter();
            let paths: Vec<String> = settings
                .map(|setting| setting.path[2..].join("."))
                .collect();
            let table = kind.table();
            for path in [
                format!("source.{table}"),
                format!("source.{table}.queue"),
                format!("dead_letters.{}", kind.letters()),
            ] {
                assert!(paths.contains(&path), "{path} is not in {paths:?}");
            }
        }
    }

    #[test]
    fn a_path_without_a_table_is_about_the_consumer() {
        let flags = Flags {
            any: [
                ("handler.ready_url", "http://127.0.0.1:1/"),
                ("store.response_timeout", "2s"),
                ("consumer.mail.lease", "1m"),
            ]
            .map(|(path, value)| (path.to_owned(), value.to_owned()))
            .into(),
            ..Flags::default()
        };
        let paths: Vec<String> = flags
            .settings(&["billing".to_owned()])
            .into_iter()
            .map(|setting| setting.path.join("."))
            .collect();
        assert_eq!(
            paths,
            [
                "consumer.billing.handler.ready_url",
                "store.response_timeout",
                "consumer.mail.lease"
            ]
        );
    }

    #[test]
    fn the_tables_are_those_of_the_configuration() {
        let schema = schemars::schema_for!(crate::config::shape::Config);
        let tables = schema.as_value()["properties"].as_object().unwrap();
        for table in tables.keys() {
            assert!(TABLES.contains(&table.as_str()), "{table}");
        }
        assert_eq!(tables.len(), TABLES.len());
    }
}
