//! Examines a store, topics and queues, and collects findings.

use std::fmt::Write as _;
use std::time::Duration;

use oncegate::core::key::Scope;
use oncegate::core::store::StoreError;
use oncegate::kafka::{self, MissingRight, Needs, TopicFacts};
use oncegate::source::{SourceError, Terms};
use serde::Serialize;

use crate::exit::{Exit, Problem};
use crate::output::{Table, counted, plain, span};
use crate::sources::kafka::{ENTITY_KEYS, LETTER_BYTES, Topics, VERSIONED_KEYS};
use crate::sources::{ConfiguredSource, LetterQueue};
use crate::stores::Opened;

/// A setting that weakens the promise.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Weakness {
    /// The consumer of a configuration that the finding is about; none when it is about all of
    /// them.
    #[serde(skip_serializing_if = "Option::is_none")]
    consumer: Option<String>,
    /// `store`, `kafka`, a topic or a queue.
    what: String,
    found: String,
    /// The change to make; empty where the finding says it.
    #[serde(skip_serializing_if = "String::is_empty")]
    fix: String,
    /// `true` if the server could not be reached.
    unreachable: bool,
}

/// The examined servers, topics and queues, and the findings.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// The names of what was examined, one line each.
    looked_at: Vec<String>,
    findings: Vec<Weakness>,
    /// The consumer that the next findings are about.
    #[serde(skip)]
    consumer: Option<String>,
}

/// A queue that is consumed, with its name.
pub(super) type NamedQueue = (String, Box<dyn ConfiguredSource>);

/// The questions about one consumer.
pub(crate) struct Questions {
    pub(crate) retention: Duration,
    pub(crate) lease: Duration,
    pub(crate) max_attempts: u32,
    pub(crate) kafka: Option<Topics>,
    /// A source of topics, which knows whether its group begins with their history.
    pub(crate) group: Option<Box<dyn ConfiguredSource>>,
    pub(crate) max_run: Duration,
    /// `true` if the broker's key of a message is its key.
    pub(crate) by_message_key: bool,
    /// A queue that is consumed, with its name.
    pub(crate) queue: Option<NamedQueue>,
    /// A dead-letter queue.
    pub(crate) letters: Option<Box<dyn LetterQueue>>,
}

impl Report {
    /// Sets the consumer that later findings are about.
    pub(crate) fn about(&mut self, consumer: &str) {
        self.consumer = Some(consumer.to_owned());
    }

    /// Later findings are about all consumers.
    pub(crate) fn about_all(&mut self) {
        self.consumer = None;
    }

    pub(crate) fn saw(&mut self, what: impl Into<String>) {
        self.looked_at.push(what.into());
    }

    /// Returns the exit code: success if there are no findings.
    pub(crate) fn exit(&self) -> Exit {
        match self.findings.as_slice() {
            [] => Exit::Yes,
            findings if findings.iter().any(|finding| finding.unreachable) => Exit::Unreachable,
            _ => Exit::No,
        }
    }

    pub(crate) fn finding(&mut self, what: &str, found: impl Into<String>, fix: impl Into<String>) {
        let what = what.to_owned();
        let found = found.into();
        let fix = fix.into();
        self.findings.push(Weakness {
            consumer: self.consumer.clone(),
            what,
            found,
            fix,
            unreachable: false,
        });
    }

    pub(super) fn unreachable(&mut self, what: &str, found: impl Into<String>) {
        let what = what.to_owned();
        let found = found.into();
        self.findings.push(Weakness {
            consumer: self.consumer.clone(),
            what,
            found,
            fix: String::new(),
            unreachable: true,
        });
    }

    /// Adds the finding that a server could not be reached or asked.
    pub(crate) fn problem(&mut self, what: &str, problem: &Problem) {
        match problem.exit() {
            Exit::Unreachable => self.unreachable(what, problem.to_string()),
            _ => self.finding(what, problem.to_string(), ""),
        }
    }

    fn source(&mut self, what: &str, error: &SourceError) {
        let text = Problem::caused(Exit::Unreachable, error).to_string();
        match std::error::Error::source(error) {
            Some(_) => self.unreachable(what, text),
            None => self.finding(what, text, ""),
        }
    }
}

impl Topics {
    /// Reports the rights that the consumer needs and this user lacks.
    async fn rights(&self, facts: &[TopicFacts], report: &mut Report) {
        let exists = |topic: &&String| {
            facts
                .iter()
                .any(|fact| fact.name == **topic && fact.partitions > 0)
        };
        let consumed: Vec<String> = self.consumed.iter().filter(exists).cloned().collect();
        let letters: Vec<String> = self.dead_letters.iter().filter(exists).cloned().collect();
        let mut needs = vec![(self.group.clone(), consumed, letters)];
        for (topic, _) in self.retries.iter().filter(|(topic, _)| exists(&topic)) {
            // Each retry topic is consumed in a group of its own.
            let group = self.group.as_ref().map(|group| format!("{group}.{topic}"));
            needs.push((group, vec![topic.clone()], vec![topic.clone()]));
        }
        for (group, read, write) in &needs {
            let needs = Needs::new(group.as_deref(), read, write);
            match kafka::missing_rights(&self.brokers, needs, &self.properties).await {
                Ok(missing) => missing.iter().for_each(|right| self.lacks(right, report)),
                Err(error) => report.source("kafka", &error),
            }
        }
    }

    fn lacks(&self, right: &MissingRight, report: &mut Report) {
        report.finding(
            "kafka",
            format!("the brokers do not grant this user {right}"),
            self.grant(right),
        );
    }

    fn grant(&self, right: &MissingRight) -> String {
        format!("grant it: {}", right.grant(&self.brokers))
    }
}

impl Report {
    /// Examines the store, if it could be opened. Returns it if it can be asked further.
    pub(crate) async fn store(&mut self, opened: Result<Opened, Problem>) -> Option<Opened> {
        let opened = match opened {
            Ok(opened) => opened,
            // The error names what to change, or reports that the server does not answer.
            Err(problem) => {
                self.problem("store", &problem);
                return None;
            }
        };
        match opened.store.check().await {
            Ok(checkup) => {
                let promise = checkup.survives.promise();
                self.saw(format!("{}: {promise}", checkup.store));
                checkup
                    .warnings
                    .into_iter()
                    .for_each(|warning| self.finding("store", warning, ""));
                return Some(opened);
            }
            Err(StoreError::Refused { reason }) => self.finding("store", &*reason, ""),
            Err(error) => self.unreachable("store", error.to_string()),
        }
        None
    }

    /// Tries whether this user may do in a scope of a Redis what a gate does there. The checkup of
    /// the other stores is about rights, too.
    pub(crate) async fn rights(&mut self, opened: &Opened, scope: &Scope) {
        let Some(redis) = &opened.redis else { return };
        if let Err(error) = redis.check_rights(scope).await {
            let fix = format!(
                "as an administrator: ACL SETUSER NAME {}",
                redis.acl_rules(scope)
            );
            self.finding("store", error.to_string(), fix);
        }
    }
}

impl Questions {
    /// Continues after every finding: one unreachable server does not mean that the others are.
    pub(crate) async fn ask(&self, report: &mut Report) {
        if let Some(topics) = &self.kafka {
            self.ask_kafka(topics, report).await;
        }
        // Its errors are those of the topics.
        if let Some(group) = &self.group
            && let Ok(warnings) = group.examine(&Terms::default()).await
        {
            warnings
                .into_iter()
                .for_each(|warning| report.finding("group", warning, ""));
        }
        if let Some((name, queue)) = &self.queue {
            self.ask_queue(name, &**queue, report).await;
        }
        if let Some(letters) = &self.letters {
            match letters.examine().await {
                Ok(warnings) => {
                    report.saw(format!("queue {}, of dead letters", letters.name()));
                    warnings
                        .into_iter()
                        .for_each(|warning| report.finding(letters.name(), warning, ""));
                }
                Err(error) => report.source(letters.name(), &error),
            }
        }
    }

    async fn ask_kafka(&self, topics: &Topics, report: &mut Report) {
        let Topics {
            brokers,
            properties,
            consumed,
            retries,
            ..
        } = topics;
        let dead = topics.dead_letters.as_deref();
        let names = consumed
            .iter()
            .chain(retries.iter().map(|(topic, _)| topic))
            .chain(&topics.dead_letters);
        let names: Vec<String> = names.cloned().collect();
        let facts = match kafka::describe_topics(brokers, &names, properties).await {
            Ok(facts) => facts,
            Err(error) => return report.source("kafka", &error),
        };
        let messages = facts.iter().filter(|fact| consumed.contains(&fact.name));
        let largest = messages.filter_map(|fact| fact.max_message_bytes).max();
        for fact in &facts {
            // The brokers tell nothing of a topic without this right.
            if fact.hidden {
                topics.lacks(&MissingRight::on_topic("DESCRIBE", &fact.name), report);
                continue;
            }
            if fact.partitions == 0 {
                report.finding(
                    &fact.name,
                    "there is no such topic",
                    "create it, or correct its name",
                );
                continue;
            }
            report.saw(format!(
                "topic {}: {}, {}, kept {}",
                fact.name,
                counted(fact.partitions as u64, "partition"),
                counted(fact.replicas as u64, "replica"),
                fact.retention
                    .map_or("for ever".to_owned(), |retention| format!(
                        "for {}",
                        span(retention)
                    )),
            ));
            if let Some(why) = &fact.settings_unknown {
                let found = format!("its settings cannot be read: {why}");
                let fix = if fact.settings_hidden {
                    topics.grant(&MissingRight::on_topic("DESCRIBE_CONFIGS", &fact.name))
                } else {
                    String::new()
                };
                report.finding(&fact.name, found, fix);
            }
            durability(fact, report);
            match retries.iter().find(|(topic, _)| *topic == fact.name) {
                Some((_, wait)) => retries_last(fact, *wait, largest, report),
                None if Some(&*fact.name) == dead => self.dead_letters(fact, largest, report),
                None => self.replayable(fact, report),
            }
        }
        topics.rights(&facts, report).await;
        if let (None, Some(fix), false) = (dead, topics.without_dead_letters, consumed.is_empty()) {
            let found = "no dead-letter topic is named: a consumer without one stops at the first message that it must give up";
            report.finding("kafka", found, fix);
        }
    }

    /// Messages must not outlive their records.
    fn replayable(&self, fact: &TopicFacts, report: &mut Report) {
        if fact.compacted && self.by_message_key {
            report.finding(&fact.name, ENTITY_KEYS, VERSIONED_KEYS);
        }
        let records = span(self.retention);
        match fact.retention {
            _ if fact.settings_unknown.is_some() => {}
            _ if fact.compacted => report.finding(
                &fact.name,
                format!("it is compacted: the last message of each key stays for ever, and its record for {records}. A replay after that runs it again"),
                "use a new scope for a replay after that time, or replay only what is younger",
            ),
            None => report.finding(
                &fact.name,
                format!("it keeps messages for ever, and records are kept for {records}: a replay of older ones runs them again"),
                raise_retention("the longest replay"),
            ),
            Some(topic) if topic > self.retention => report.finding(
                &fact.name,
                format!(
                    "it keeps messages for {}, and records are kept for {records}: a replay of older ones runs them again",
                    span(topic)
                ),
                raise_retention(&span(topic)),
            ),
            Some(_) => {}
        }
    }

    fn dead_letters(&self, fact: &TopicFacts, largest: Option<u64>, report: &mut Report) {
        let short = fact
            .retention
            .is_some_and(|retention| retention < self.retention);
        if short {
            report.finding(
                &fact.name,
                format!(
                    "it keeps dead letters for less than the records of their messages ({})",
                    span(self.retention)
                ),
                "raise its `retention.ms`: what is gone cannot be redriven",
            );
        }
        is_not_compacted(fact, "dead letters", report);
        takes_the_largest(fact, "a dead letter", largest, report);
    }

    async fn ask_queue(&self, name: &str, source: &dyn ConfiguredSource, report: &mut Report) {
        let terms = Terms {
            max_attempts: self.max_attempts,
            lease: self.lease,
            retention: self.retention,
            max_run: self.max_run,
            ..Terms::default()
        };
        match source.examine(&terms).await {
            Ok(warnings) => {
                report.looked_at.push(format!("queue {name}"));
                warnings
                    .into_iter()
                    .for_each(|warning| report.finding(name, warning, ""));
            }
            Err(error) => report.source(name, &error),
        }
    }
}

/// Messages, and dead letters, must survive a broker.
fn raise_retention(at_least: &str) -> String {
    format!("raise the gate's `retention` to {at_least}, or lower the topic's `retention.ms`")
}

fn durability(fact: &TopicFacts, report: &mut Report) {
    match (fact.replicas, fact.min_insync_replicas) {
        (1, _) => report.finding(
            &fact.name,
            "it has one replica: data that this broker loses is lost",
            "three replicas and `min.insync.replicas=2`",
        ),
        (_, Some(1)) => report.finding(
            &fact.name,
            "a message counts as written when one broker has it, whatever the number of replicas",
            "set `min.insync.replicas=2`",
        ),
        _ => {}
    }
}

/// A retry topic must keep a message until it is due.
fn retries_last(fact: &TopicFacts, wait: Duration, largest: Option<u64>, report: &mut Report) {
    if fact
        .retention
        .is_some_and(|retention| retention <= wait * 2)
    {
        let found = format!(
            "messages wait there for {}, and it keeps them for hardly longer: a message that is deleted before its retry is lost",
            span(wait)
        );
        report.finding(
            &fact.name,
            found,
            "raise its `retention.ms` to a day and more: a retry may be held up for as long as its consumers",
        );
    }
    is_not_compacted(fact, "messages that wait", report);
    takes_the_largest(fact, "a message that waits", largest, report);
}

/// Compaction must not replace one message by another.
fn is_not_compacted(fact: &TopicFacts, of_two: &str, report: &mut Report) {
    if fact.compacted {
        let found = format!("it is compacted: of two {of_two} with one key the first is lost");
        report.finding(&fact.name, found, "set `cleanup.policy=delete`");
    }
}

/// A message written there has a few more headers than the consumed one.
fn takes_the_largest(fact: &TopicFacts, what: &str, largest: Option<u64>, report: &mut Report) {
    if let (Some(own), Some(largest)) = (fact.max_message_bytes, largest)
        && own < largest + LETTER_BYTES
    {
        let fix = format!(
            "raise its `max.message.bytes` to {} or more",
            largest + LETTER_BYTES
        );
        let found = format!(
            "{what} is a little larger than what was consumed: the topics take {largest} bytes, it takes {own}"
        );
        report.finding(&fact.name, found, fix);
    }
}

impl Report {
    /// The report as text.
    pub(crate) fn text(&self) -> String {
        let mut table = Table::default();
        self.looked_at
            .iter()
            .for_each(|what| table.text("found", what));
        table.number("findings", self.findings.len() as u64);
        let mut text = table.render();
        for Weakness {
            consumer,
            what,
            found,
            fix,
            ..
        } in &self.findings
        {
            let whose = consumer
                .as_ref()
                .map(|consumer| format!("{consumer}: "))
                .unwrap_or_default();
            // Writing to a string cannot fail.
            let _ = writeln!(text, "\n{}{}: {}", plain(&whose), plain(what), plain(found));
            if !fix.is_empty() {
                let _ = writeln!(text, "  fix: {}", plain(fix));
            }
        }
        text
    }
}
