//! Selects dead letters.

use oncegate::Origin;
use oncegate::admin::Wanted;
use oncegate::admin::dead_letter_reader::StoredDeadLetter;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::dead_letters::{DeadLetter, DeadLetterCause};

use crate::parse::Moment;

/// Selects the dead letters that match every one of these filters.
///
/// A message that oncegate did not write has neither cause nor times: it matches only if no filter
/// is on these.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct FilterArgs {
    /// Only dead letters with this cause: bad_key, permanent, attempts_used_up, mismatch,
    /// not_handed_over, outcome_unknown; may be repeated
    #[arg(long = "cause", value_name = "WORD")]
    causes: Vec<DeadLetterCause>,

    /// Only dead letters whose reason contains this
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,

    /// Only dead letters of this scope; of a configuration with several consumers, that one is
    /// meant
    #[arg(long, value_name = "NAME")]
    scope: Option<Scope>,

    /// Only dead letters of this store key; may be repeated
    #[arg(long = "store-key", value_name = "SCOPE:DIGEST")]
    store_keys: Vec<StoreKey>,

    /// Only dead letters whose messages were consumed from this topic or queue
    #[arg(long, value_name = "NAME")]
    origin: Option<String>,

    /// Only dead letters given up at this time or later: 2026-11-21T10:00:00Z, or this long ago: 2h
    #[arg(long, value_name = "TIME")]
    since: Option<Moment>,

    /// Only dead letters given up before this time: 2026-11-21T10:00:00Z, or this long ago: 2h
    #[arg(long, value_name = "TIME")]
    until: Option<Moment>,

    /// Only the dead letter at this position, as list shows it: orders.dead/0@42; may be repeated
    #[arg(long = "at", value_name = "PLACE")]
    places: Vec<String>,
}

fn is_from(name: &str, origin: &Origin) -> bool {
    match origin {
        Origin::Kafka { topic, .. } => &**topic == name,
        Origin::Queue { queue, .. } => &**queue == name,
        _ => false,
    }
}

impl FilterArgs {
    pub(super) fn at(place: &str) -> Self {
        Self {
            places: vec![place.to_owned()],
            ..Self::default()
        }
    }

    /// The scope that is selected, which also is the consumer of a configuration.
    pub(super) fn scope(&self) -> Option<&str> {
        self.scope.as_ref().map(Scope::as_str)
    }

    /// The positions that are selected; all of them if there are none.
    pub(super) fn positions(&self) -> impl Iterator<Item = &str> {
        self.places.iter().map(String::as_str)
    }

    pub(super) fn judge(&self, stored: &StoredDeadLetter) -> Wanted {
        let place = stored.place.to_string();
        let origin = stored.message().origin();
        if !self.places.is_empty() && !self.places.contains(&place)
            || self
                .origin
                .as_deref()
                .is_some_and(|name| !is_from(name, origin))
        {
            return Wanted::No;
        }
        match stored.letter() {
            Some(letter) => self.judge_letter(letter),
            None if self.asks_for_reasons() => Wanted::No,
            None => Wanted::Yes,
        }
    }

    fn judge_letter(&self, letter: &DeadLetter) -> Wanted {
        let key = letter.key.as_deref();
        let matches = (self.causes.is_empty() || self.causes.contains(&letter.cause))
            && self
                .reason
                .as_deref()
                .is_none_or(|reason| letter.reason.contains(reason))
            && self
                .scope
                .as_ref()
                .is_none_or(|scope| scope.as_str() == letter.scope)
            && (self.store_keys.is_empty()
                || self.store_keys.iter().any(|one| Some(one.as_str()) == key))
            && self
                .since
                .as_ref()
                .is_none_or(|since| letter.failed_at >= since.time);
        match &self.until {
            _ if !matches => Wanted::No,
            // It may match tomorrow, with the same filter.
            Some(until) if letter.failed_at >= until.time => Wanted::NotNow,
            _ => Wanted::Yes,
        }
    }

    fn asks_for_reasons(&self) -> bool {
        !self.causes.is_empty()
            || self.reason.is_some()
            || self.scope.is_some()
            || !self.store_keys.is_empty()
            || self.since.is_some()
            || self.until.is_some()
    }

    /// The filter as text; equal filters have equal text.
    pub(super) fn words(&self) -> String {
        let mut words = Vec::new();
        let mut add = |name: &str, mut values: Vec<String>| {
            values.sort();
            values.dedup();
            words.extend(values.into_iter().map(|value| format!("{name}={value}")));
        };
        add(
            "cause",
            self.causes
                .iter()
                .map(|cause| cause.as_str().to_owned())
                .collect(),
        );
        add("reason", self.reason.iter().cloned().collect());
        add(
            "scope",
            self.scope.iter().map(ToString::to_string).collect(),
        );
        add(
            "key",
            self.store_keys.iter().map(ToString::to_string).collect(),
        );
        add("origin", self.origin.iter().cloned().collect());
        add(
            "since",
            self.since
                .iter()
                .map(|moment| moment.text.clone())
                .collect(),
        );
        add(
            "until",
            self.until
                .iter()
                .map(|moment| moment.text.clone())
                .collect(),
        );
        add("at", self.places.clone());
        words.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use oncegate::Message;
    use oncegate::admin::dead_letter_reader::Letter;

    use std::time::{Duration, SystemTime};

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        filter: FilterArgs,
    }

    fn filter(words: &str) -> FilterArgs {
        Cli::try_parse_from(std::iter::once("x").chain(words.split_whitespace()))
            .unwrap()
            .filter
    }

    fn origin(topic: &str, offset: i64) -> Origin {
        Origin::Kafka {
            topic: topic.into(),
            partition: 0,
            offset,
        }
    }

    fn letter(failed_ago: Duration) -> StoredDeadLetter {
        let failed_at = SystemTime::now() - failed_ago;
        let letter = DeadLetter {
            message: Message::new("orders", origin("orders", 7), None),
            scope: "billing".to_owned(),
            key: Some("billing:eMT5oSC2v1zTz8Nw5IO50A".to_owned()),
            cause: DeadLetterCause::Permanent,
            reason: "no such account".to_owned(),
            attempts: 1,
            first_failed_at: None,
            failed_at,
        };
        StoredDeadLetter {
            place: origin("dead", 3),
            what: Letter::Known(letter),
        }
    }

    #[test]
    fn every_filter_must_pass() {
        let letter = letter(Duration::from_secs(3_600));
        for yes in [
            "",
            "--cause permanent --cause mismatch",
            "--reason account --scope billing --origin orders --at dead/0@3 --at dead/0@4",
            "--store-key billing:eMT5oSC2v1zTz8Nw5IO50A --since 2h --until 30m",
            "--since 2020-01-01T00:00:00Z",
        ] {
            assert_eq!(filter(yes).judge(&letter), Wanted::Yes, "{yes}");
        }
        for no in [
            "--cause mismatch",
            "--reason absent",
            "--scope refunds",
            "--origin refunds",
            "--at dead/0@4",
            "--since 30m",
            "--store-key billing:UPt7KTwTETF9dZLHdE-MbA",
            "--cause mismatch --until 2h",
        ] {
            assert_eq!(filter(no).judge(&letter), Wanted::No, "{no}");
        }
        assert_eq!(filter("--until 2h").judge(&letter), Wanted::NotNow);
    }

    #[test]
    fn a_letter_without_a_reason_matches_only_without_a_filter() {
        let message = Message::new("dead", origin("dead", 3), None);
        let foreign = StoredDeadLetter {
            place: origin("dead", 3),
            what: Letter::Foreign(message),
        };
        assert_eq!(filter("--at dead/0@3").judge(&foreign), Wanted::Yes);
        assert_eq!(filter("--cause permanent").judge(&foreign), Wanted::No);
        assert_eq!(filter("--since 2h").judge(&foreign), Wanted::No);
    }

    #[test]
    fn the_same_filter_has_the_same_words() {
        assert_eq!(
            filter("--cause permanent --cause bad_key").words(),
            filter("--cause bad_key --cause permanent").words()
        );
        let words = filter("--since 2h --scope a").words();
        assert_eq!(words, "scope=a since=2h");
        assert_eq!(filter("").words(), "");
    }
}
