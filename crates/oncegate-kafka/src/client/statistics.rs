//! Reads connections, and what the client knows of partitions, from its statistics.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;

use crate::partitions::standing::{LogEnd, PartitionReport};

#[derive(Deserialize)]
struct Statistics<'a> {
    #[serde(borrow, default)]
    topics: HashMap<Cow<'a, str>, TopicStatistics<'a>>,
    #[serde(borrow, default)]
    brokers: HashMap<Cow<'a, str>, BrokerStatistics<'a>>,
}

#[derive(Deserialize)]
struct BrokerStatistics<'a> {
    #[serde(borrow, default)]
    state: Cow<'a, str>,
}

/// The states of a connection that carries requests.
const CONNECTED: &[&str] = &["UP", "UPDATE", "REAUTH"];

/// The states of a partition that the client has not begun to read, or reads no more.
const NOT_READ: &[&str] = &["none", "stopping", "stopped"];

#[derive(Deserialize)]
struct TopicStatistics<'a> {
    #[serde(borrow, default)]
    partitions: HashMap<i32, PartitionStatistics<'a>>,
}

#[derive(Deserialize)]
struct PartitionStatistics<'a> {
    ls_offset: i64,
    #[serde(default)]
    hi_offset: i64,
    next_offset: i64,
    #[serde(default)]
    fetchq_cnt: i64,
    #[serde(borrow, default)]
    fetch_state: Cow<'a, str>,
}

impl PartitionStatistics<'_> {
    fn report(&self) -> PartitionReport {
        // Offsets below zero are not known yet.
        let is_known = self.ls_offset >= 0 && self.next_offset >= 0;
        let queued = u64::try_from(self.fetchq_cnt).unwrap_or_default();
        let end = LogEnd {
            stable: self.ls_offset,
            last: self.hi_offset.max(self.ls_offset),
            next: self.next_offset,
            queued,
        };
        PartitionReport {
            end: is_known.then_some(end),
            has_begun: !NOT_READ.contains(&&*self.fetch_state),
        }
    }
}

/// Calls `tell` for each partition. Returns whether the client is connected to any broker; `None`
/// when the statistics cannot be read, or name no broker.
pub(crate) fn each_report(
    json: &[u8],
    mut tell: impl FnMut(&str, i32, PartitionReport),
) -> Option<bool> {
    let statistics: Statistics<'_> = match serde_json::from_slice(json) {
        Ok(statistics) => statistics,
        Err(error) => {
            tracing::debug!(%error, "cannot read the Kafka client's statistics");
            return None;
        }
    };
    for (topic, TopicStatistics { partitions }) in &statistics.topics {
        // The number -1 is not a partition.
        for (number, partition) in partitions.iter().filter(|(number, _)| **number >= 0) {
            tell(topic, *number, partition.report());
        }
    }
    let connected = statistics
        .brokers
        .values()
        .any(|broker| CONNECTED.contains(&&*broker.state));
    (!statistics.brokers.is_empty()).then_some(connected)
}

/// The facts about the client as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// The broker that has sent nothing for longest although it owes an answer, and for how long.
    pub(crate) silent: Option<(String, Duration)>,
    /// The number of responses that it has received from its brokers, closed connections included.
    pub(crate) responses: Option<u64>,
    /// `true` while it is a member of its group and no rebalance is under way.
    pub(crate) is_settled: bool,
}

/// Returns what the statistics say about the client as a whole.
pub(crate) fn summary(json: &[u8]) -> Summary {
    #[derive(Default, Deserialize)]
    struct ClientStatistics<'a> {
        #[serde(borrow, default)]
        brokers: HashMap<Cow<'a, str>, Answers<'a>>,
        rx: Option<u64>,
        #[serde(borrow)]
        cgrp: Option<GroupStatistics<'a>>,
    }
    #[derive(Deserialize)]
    struct GroupStatistics<'a> {
        #[serde(borrow, default)]
        join_state: Cow<'a, str>,
    }
    let client: ClientStatistics<'_> = serde_json::from_slice(json).unwrap_or_default();
    let is_settled = client
        .cgrp
        .is_some_and(|group| group.join_state == "steady");
    let silent = client.brokers.values().filter_map(Answers::silent);
    Summary {
        silent: silent.max_by_key(|(_, lasts)| *lasts),
        responses: client.rx,
        is_settled,
    }
}

/// The answers of a broker.
#[derive(Deserialize)]
struct Answers<'a> {
    #[serde(borrow, default)]
    nodename: Cow<'a, str>,
    #[serde(borrow, default)]
    source: Cow<'a, str>,
    #[serde(borrow, default)]
    state: Cow<'a, str>,
    /// The number of requests that wait for their answers.
    #[serde(default)]
    waitresp_cnt: u64,
    /// The time since anything came from the broker, in microseconds; negative before that.
    #[serde(default)]
    rxidle: i64,
}

impl Answers<'_> {
    /// Returns the broker and the time for which it has sent nothing, if it owes an answer. The
    /// coordinator of the group, which is a connection of its own, may let a member wait.
    fn silent(&self) -> Option<(String, Duration)> {
        let owes = self.waitresp_cnt > 0 && self.source != "logical";
        let idle = u64::try_from(self.rxidle).ok()?;
        let is_silent = owes && CONNECTED.contains(&&*self.state);
        is_silent.then(|| (self.nodename.to_string(), Duration::from_micros(idle)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_counted_over_all_brokers() {
        let json = br#"{"name":"a","rx":17,"brokers":{"b":{"rx":3}},"topics":{}}"#;
        assert_eq!(
            summary(json),
            Summary {
                responses: Some(17),
                ..Summary::default()
            }
        );
        assert_eq!(summary(b"{}"), Summary::default());
        assert_eq!(summary(b"none"), Summary::default());
    }

    #[test]
    fn a_member_is_settled_when_no_rebalance_is_under_way() {
        let settled = |state: &str| {
            let json = format!(r#"{{"rx":1,"cgrp":{{"state":"up","join_state":"{state}"}}}}"#);
            summary(json.as_bytes()).is_settled
        };
        assert!(settled("steady"));
        assert!(!settled("wait-join") && !settled("init"));
    }

    #[test]
    fn a_broker_that_owes_an_answer_and_sends_nothing_is_silent() {
        let silent = |source: &str, waits: u64, idle: i64| {
            let json = format!(
                r#"{{"brokers":{{"a:1/1":{{"nodename":"a:1","source":"{source}","state":"UP","waitresp_cnt":{waits},
                "rxidle":{idle}}},"b:1/2":{{"nodename":"b:1","source":"learned","state":"UP","waitresp_cnt":1,
                "rxidle":1000}}}}}}"#
            );
            summary(json.as_bytes()).silent
        };
        let named = |name: &str, millis| Some((name.to_owned(), Duration::from_millis(millis)));
        assert_eq!(silent("learned", 1, 20_000_000), named("a:1", 20_000));
        for other in [
            silent("learned", 0, 20_000_000),
            silent("logical", 1, 20_000_000),
            silent("learned", 1, -1),
        ] {
            assert_eq!(
                other,
                named("b:1", 1),
                "the other one has just sent something"
            );
        }
    }

    fn reports(json: &str) -> Vec<(i32, PartitionReport)> {
        let mut reports = Vec::new();
        each_report(json.as_bytes(), |topic, number, report| {
            assert_eq!(topic, "orders");
            reports.push((number, report));
        });
        reports.sort_by_key(|(number, _)| *number);
        reports
    }

    #[test]
    fn what_is_known_is_told_and_what_is_not_is_left_out() {
        let json = r#"{"name":"oncegate#consumer-1","topics":{"orders":{"topic":"orders","age":1,"partitions":{
            "0":{"partition":0,"fetch_state":"active","ls_offset":120,"hi_offset":130,"next_offset":100,"fetchq_cnt":7},
            "1":{"partition":1,"fetch_state":"none","ls_offset":-1001,"next_offset":-1001,"fetchq_cnt":0},
            "2":{"partition":2,"fetch_state":"offset-query","ls_offset":-1001,"next_offset":-1001,"fetchq_cnt":0},
            "3":{"partition":3,"fetch_state":"stopped","ls_offset":9,"next_offset":9,"fetchq_cnt":0},
            "-1":{"partition":-1,"fetch_state":"none","ls_offset":5,"next_offset":5,"fetchq_cnt":0}}}}}"#;
        let end = |stable, last, next, queued| {
            Some(LogEnd {
                stable,
                last,
                next,
                queued,
            })
        };
        let expected = [
            (end(120, 130, 100, 7), true),
            (None, false),
            (None, true),
            (end(9, 9, 9, 0), false),
        ];
        let expected = expected.map(|(end, has_begun)| PartitionReport { end, has_begun });
        assert_eq!(reports(json), (0..).zip(expected).collect::<Vec<_>>());
        assert!(reports("{}").is_empty() && reports("no statistics").is_empty());
    }

    #[test]
    fn a_client_is_connected_when_one_of_its_brokers_is() {
        let connected = |json: &str| each_report(json.as_bytes(), |_, _, _| ());
        let brokers = |first: &str, second: &str| {
            format!(
                r#"{{"brokers":{{"a:1/1":{{"nodeid":1,"state":"{first}"}},"b/2":{{"state":"{second}"}}}}}}"#
            )
        };
        assert_eq!(connected(&brokers("INIT", "UP")), Some(true));
        assert_eq!(connected(&brokers("TRY_CONNECT", "DOWN")), Some(false));
        assert_eq!(
            connected(&brokers("APIVERSION_QUERY", "CONNECT")),
            Some(false)
        );
        assert_eq!((connected("{}"), connected("no statistics")), (None, None));
    }
}
