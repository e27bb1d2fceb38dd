//! Reads connections and end offsets of partitions from the client's statistics.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::Deserialize;

use super::standing::LogEnd;

#[derive(Deserialize)]
struct Statistics<'a> {
    #[serde(borrow, default)]
    topics: HashMap<Cow<'a, str>, TopicStatistics>,
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

#[derive(Deserialize)]
struct TopicStatistics {
    #[serde(default)]
    partitions: HashMap<i32, PartitionStatistics>,
}

#[derive(Deserialize)]
struct PartitionStatistics {
    ls_offset: i64,
    next_offset: i64,
    #[serde(default)]
    fetchq_cnt: i64,
}

/// Calls `known` for each partition whose end is known. Returns whether the client is connected to any broker; `None`
/// when the statistics cannot be read, or name no broker.
pub(crate) fn each_end(json: &[u8], mut known: impl FnMut(&str, i32, LogEnd)) -> Option<bool> {
    let statistics: Statistics<'_> = match serde_json::from_slice(json) {
        Ok(statistics) => statistics,
        Err(error) => {
            tracing::debug!(%error, "cannot read the Kafka client's statistics");
            return None;
        }
    };
    for (topic, TopicStatistics { partitions }) in &statistics.topics {
        for (number, PartitionStatistics { ls_offset, next_offset, fetchq_cnt }) in partitions {
            // Offsets below zero are not known yet; the number -1 is not a partition.
            if *number >= 0 && *ls_offset >= 0 && *next_offset >= 0 {
                let queued = u64::try_from(*fetchq_cnt).unwrap_or_default();
                known(topic, *number, LogEnd { stable: *ls_offset, next: *next_offset, queued });
            }
        }
    }
    let connected = statistics.brokers.values().any(|broker| CONNECTED.contains(&&*broker.state));
    (!statistics.brokers.is_empty()).then_some(connected)
}

/// Returns how many responses the client has received from its brokers, closed connections included.
pub(crate) fn responses(json: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Total {
        rx: u64,
    }
    serde_json::from_slice(json).ok().map(|Total { rx }| rx)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_counted_over_all_brokers() {
        assert_eq!(responses(br#"{"name":"a","rx":17,"brokers":{"b":{"rx":3}},"topics":{}}"#), Some(17));
        assert_eq!(responses(b"{}"), None);
        assert_eq!(responses(b"none"), None);
    }

    fn ends(json: &str) -> Vec<(String, i32, LogEnd)> {
        let mut ends = Vec::new();
        each_end(json.as_bytes(), |topic, number, end| ends.push((topic.to_owned(), number, end)));
        ends
    }

    #[test]
    fn what_is_known_is_told_and_what_is_not_is_left_out() {
        let json = r#"{"name":"oncegate#consumer-1","topics":{"orders":{"topic":"orders","age":1,"partitions":{
            "0":{"partition":0,"ls_offset":120,"hi_offset":130,"next_offset":100,"fetchq_cnt":7},
            "1":{"partition":1,"ls_offset":-1001,"next_offset":-1001,"fetchq_cnt":0},
            "-1":{"partition":-1,"ls_offset":5,"next_offset":5,"fetchq_cnt":0}}}}}"#;
        assert_eq!(ends(json), [("orders".to_owned(), 0, LogEnd { stable: 120, next: 100, queued: 7 })]);
        assert!(ends("{}").is_empty() && ends("no statistics").is_empty());
    }

    #[test]
    fn a_client_is_connected_when_one_of_its_brokers_is() {
        let connected = |json: &str| each_end(json.as_bytes(), |_, _, _| ());
        let brokers = |first: &str, second: &str| {
            format!(
                r#"{{"brokers":{{"a:1/1":{{"nodeid":1,"state":"{first}"}},"b/2":{{"state":"{second}"}}}}}}"#
            )
        };
        assert_eq!(connected(&brokers("INIT", "UP")), Some(true));
        assert_eq!(connected(&brokers("TRY_CONNECT", "DOWN")), Some(false));
        assert_eq!(connected(&brokers("APIVERSION_QUERY", "CONNECT")), Some(false));
        assert_eq!((connected("{}"), connected("no statistics")), (None, None));
    }
}
