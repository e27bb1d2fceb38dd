//! Dead letters by groups and searches, and the last ones that were read.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::fields::{Fields, query, shown};
use super::{Letter, Letters};
use crate::unix_ms;

/// The most snapshots that are kept.
const SNAPSHOTS_MOST: usize = 4;
/// The longest kind of a reason, in bytes.
const KIND_MAX_BYTES: usize = 200;
/// The time after which a redrive needs another count, in milliseconds: 10 minutes.
const COUNT_LASTS_MS: u64 = 600_000;

/// The dead letters of a scope, as they were at one time.
#[derive(Debug)]
pub(super) struct Snapshot {
    /// A number that no other one has.
    pub(super) id: u64,
    pub(super) scope: String,
    pub(super) at_unix_ms: u64,
    pub(super) read: Letters,
    /// The operator's stamp before they were read.
    stamp: u64,
}

/// The last dead letters that were read, the newest at the end.
#[derive(Debug, Default)]
pub(super) struct Snapshots(Mutex<(u64, VecDeque<Arc<Snapshot>>)>);

impl Snapshots {
    /// Keeps what was read after the operator had this stamp, in the place of what was read of the
    /// scope before.
    pub(super) fn keep(&self, scope: &str, stamp: u64, read: Letters) {
        let mut kept = self.0.lock();
        let (last_id, snapshots) = &mut *kept;
        *last_id += 1;
        snapshots.retain(|snapshot| snapshot.scope != scope);
        let surplus = (snapshots.len() + 1).saturating_sub(SNAPSHOTS_MOST);
        snapshots.drain(..surplus);
        snapshots.push_back(Arc::new(Snapshot {
            id: *last_id,
            scope: scope.to_owned(),
            at_unix_ms: unix_ms(),
            read,
            stamp,
        }));
    }

    /// Returns the dead letters of a scope, unless a redrive has begun or ended since they were
    /// read.
    pub(super) fn current(&self, scope: &str, stamp: u64) -> Option<Arc<Snapshot>> {
        let kept = self.0.lock();
        let found = kept.1.iter().find(|snapshot| snapshot.scope == scope);
        found.filter(|snapshot| snapshot.stamp == stamp).cloned()
    }

    /// Returns the same if it is the snapshot that a person has counted, not long ago.
    pub(super) fn counted(&self, scope: &str, stamp: u64, id: &str) -> Option<Arc<Snapshot>> {
        self.current(scope, stamp).filter(|snapshot| {
            snapshot.id.to_string() == id
                && unix_ms().saturating_sub(snapshot.at_unix_ms) < COUNT_LASTS_MS
        })
    }
}

/// A search for dead letters: they match every part of it that is given.
#[derive(Debug, Default)]
pub(super) struct Search {
    pub(super) cause: String,
    /// The kind of the reason, as a group has it.
    pub(super) kind: String,
    /// A part of the reason.
    pub(super) reason: String,
    /// A part of the origin.
    pub(super) origin: String,
    /// A part of the key.
    pub(super) key: String,
    /// The first and the last day or time, as RFC 3339 begins: `2026-11-21`, `2026-11-21T10:30`.
    pub(super) since: String,
    pub(super) until: String,
    /// One position.
    pub(super) at: String,
    /// Also those about which something was done.
    pub(super) all: bool,
}

impl Search {
    pub(super) fn of(fields: &Fields) -> Self {
        Self {
            cause: fields.get("cause").to_owned(),
            kind: fields.get("kind").to_owned(),
            reason: fields.get("reason").to_owned(),
            origin: fields.get("origin").to_owned(),
            key: fields.get("key").to_owned(),
            since: fields.get("since").to_owned(),
            until: fields.get("until").to_owned(),
            at: fields.get("at").to_owned(),
            all: !fields.get("all").is_empty(),
        }
    }

    /// The fields, as a query has them.
    pub(super) fn fields(&self) -> [(&'static str, &str); 9] {
        [
            ("cause", &self.cause),
            ("kind", &self.kind),
            ("reason", &self.reason),
            ("origin", &self.origin),
            ("key", &self.key),
            ("since", &self.since),
            ("until", &self.until),
            ("at", &self.at),
            ("all", if self.all { "yes" } else { "" }),
        ]
    }

    /// The query of a link to this search in a scope.
    pub(super) fn query(&self, scope: &str) -> String {
        let mut fields = vec![("scope", scope)];
        fields.extend(self.fields());
        query(&fields)
    }

    pub(super) fn matches(&self, letter: &Letter) -> bool {
        let failed_at = letter.failed_at_ms.map(rfc3339).unwrap_or_default();
        (self.all || letter.is_open)
            && (self.cause.is_empty() || self.cause == letter.cause)
            && (self.kind.is_empty() || self.kind == kind(&letter.reason))
            && letter.reason.contains(&self.reason)
            && letter.origin.contains(&self.origin)
            && letter
                .key
                .as_deref()
                .unwrap_or_default()
                .contains(&self.key)
            && (self.since.is_empty() || *failed_at >= *self.since)
            // The last minute or day as a whole: it begins as the limit does.
            && (self.until.is_empty()
                || !failed_at.is_empty()
                    && (*failed_at <= *self.until || failed_at.starts_with(&self.until)))
            && (self.at.is_empty() || self.at == letter.at)
    }

    /// The dead letters that match.
    pub(super) fn of_letters<'a>(&'a self, letters: &'a [Letter]) -> Vec<&'a Letter> {
        letters.iter().filter(|one| self.matches(one)).collect()
    }

    /// The positions of those that a redrive is for: the matching ones that are open, or the one
    /// that is named.
    pub(super) fn places(&self, letters: &[Letter]) -> BTreeSet<String> {
        let matching = self.of_letters(letters).into_iter();
        let wanted = matching.filter(|letter| letter.is_open || self.at == letter.at);
        wanted.map(|letter| letter.at.clone()).collect()
    }
}

/// Dead letters with one cause and one kind of reason.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Group<'a> {
    pub(super) cause: &'a str,
    pub(super) kind: String,
    pub(super) count: usize,
    pub(super) open: usize,
    /// The reason of the first one.
    pub(super) example: &'a str,
    /// The times of the first and the last one, in milliseconds since the Unix epoch.
    pub(super) first_ms: Option<u64>,
    pub(super) last_ms: Option<u64>,
}

/// Groups dead letters, the largest group first.
pub(super) fn groups<'a>(letters: &[&'a Letter]) -> Vec<Group<'a>> {
    let mut groups: BTreeMap<(&str, String), Group<'_>> = BTreeMap::new();
    for letter in letters {
        let kind = kind(&letter.reason);
        let group = groups
            .entry((&letter.cause, kind.clone()))
            .or_insert_with(|| Group {
                cause: &letter.cause,
                kind,
                count: 0,
                open: 0,
                example: &letter.reason,
                first_ms: None,
                last_ms: None,
            });
        group.count += 1;
        group.open += usize::from(letter.is_open);
        let times = [group.first_ms, letter.failed_at_ms].into_iter().flatten();
        group.first_ms = times.min();
        group.last_ms = group.last_ms.max(letter.failed_at_ms);
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by_key(|group| Reverse(group.count));
    groups
}

/// Returns the kind of a reason: its words, with `#` for each one that has a digit. So `order 7 is
/// locked` and `order 8 is locked` are of one kind.
pub(super) fn kind(reason: &str) -> String {
    let line = shown(reason.lines().next().unwrap_or_default());
    let mut kind = String::new();
    let mut rest = line.as_str();
    while let Some(first) = rest.chars().next().filter(|_| kind.len() < KIND_MAX_BYTES) {
        let is_word = first.is_alphanumeric();
        let end = rest
            .find(|c: char| c.is_alphanumeric() != is_word)
            .unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        if part.bytes().any(|byte| byte.is_ascii_digit()) {
            kind.push('#');
        } else {
            kind.push_str(part);
        }
        rest = after;
    }
    let end = kind.floor_char_boundary(KIND_MAX_BYTES);
    kind.truncate(end);
    kind
}

/// Returns a time as RFC 3339 writes it, in UTC.
pub(super) fn rfc3339(unix_ms: u64) -> String {
    let time = std::time::UNIX_EPOCH.checked_add(std::time::Duration::from_millis(unix_ms));
    // The year 9999 ends here.
    let time = time.filter(|_| unix_ms < 253_402_300_800_000);
    time.map(|time| humantime::format_rfc3339_seconds(time).to_string())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(number: u64, cause: &str, reason: &str) -> Letter {
        Letter {
            at: format!("dead/0@{number}"),
            cause: cause.to_owned(),
            reason: reason.to_owned(),
            origin: format!("orders/0@{number}"),
            key: Some(format!("billing:{number}")),
            failed_at_ms: Some(1_700_000_000_000 + number * 60_000),
            state: "open".to_owned(),
            is_open: true,
            ..Letter::default()
        }
    }

    fn letters() -> Vec<Letter> {
        let locked = (0..60).map(|n| letter(n, "permanent", &format!("ledger {n} is locked")));
        let unknown =
            (60..105).map(|n| letter(n, "permanent", &format!("no such account: DE{n}X")));
        locked.chain(unknown).collect()
    }

    #[test]
    fn reasons_that_differ_in_numbers_are_of_one_kind() {
        for (reason, expected) in [
            ("ledger 7 is locked", "ledger # is locked"),
            ("no such account: DE89X", "no such account: #"),
            ("at 2026-11-21T10:00:00Z\nsecond line", "at #-#-#:#:#"),
            ("<b>x</b>", "<b>x</b>"),
            ("", ""),
        ] {
            assert_eq!(kind(reason), expected);
        }
        assert!(kind(&"ä ".repeat(1_000)).len() <= KIND_MAX_BYTES);
        assert!(kind(&"ä".repeat(1_000)).len() <= KIND_MAX_BYTES);
    }

    #[test]
    fn groups_have_counts_and_times_and_select_their_letters() {
        let mut all = letters();
        all[3].is_open = false;
        let refs: Vec<&Letter> = all.iter().collect();
        let groups = groups(&refs);
        let counts: Vec<_> = groups
            .iter()
            .map(|group| (group.kind.as_str(), group.count, group.open))
            .collect();
        assert_eq!(
            counts,
            [
                ("ledger # is locked", 60, 59),
                ("no such account: #", 45, 45)
            ]
        );
        assert_eq!(
            (groups[1].first_ms, groups[1].last_ms),
            (all[60].failed_at_ms, all[104].failed_at_ms)
        );
        let search = Search {
            cause: "permanent".to_owned(),
            kind: groups[0].kind.clone(),
            ..Search::default()
        };
        let places = search.places(&all);
        assert_eq!(places.len(), 59);
        assert!(!places.contains("dead/0@3") && !places.contains("dead/0@60"));
    }

    #[test]
    fn a_search_is_by_reason_origin_key_time_and_place() {
        let all = letters();
        let count = |query: &str| {
            Search::of(&Fields::of(query.as_bytes()))
                .of_letters(&all)
                .len()
        };
        assert_eq!(count(""), 105);
        assert_eq!(count("reason=account"), 45);
        assert_eq!(count("origin=orders%2F0%407"), 1 + 10);
        assert_eq!(count("key=billing:104"), 1);
        assert_eq!(count("at=dead/0@5"), 1);
        assert_eq!(count("cause=mismatch"), 0);
        // The first one was given up at 22:13:20.
        assert_eq!(count("since=2023-11-14T22:14"), 104);
        assert_eq!(count("until=2023-11-14T22:14"), 2);
        assert_eq!(count("since=2023-11-15&until=2023-11-16"), 0);
        assert_eq!(count("until=2023-11-14"), 105);
    }

    #[test]
    fn what_was_done_is_found_only_when_asked_for() {
        let mut all = letters();
        all[5].is_open = false;
        let count = |query: &str| {
            let search = Search::of(&Fields::of(query.as_bytes()));
            (search.of_letters(&all).len(), search.places(&all).len())
        };
        assert_eq!(count(""), (104, 104));
        assert_eq!(count("all=yes"), (105, 104));
        assert_eq!(count("all=yes&at=dead/0@5"), (1, 1), "it was named");
    }

    #[test]
    fn letters_from_before_a_redrive_are_not_shown() {
        let snapshots = Snapshots::default();
        snapshots.keep("billing", 1, Letters::default());
        snapshots.keep("refunds", 1, Letters::default());
        let id = snapshots.current("billing", 1).unwrap().id.to_string();
        assert!(snapshots.counted("billing", 1, &id).is_some());
        assert!(snapshots.counted("refunds", 1, &id).is_none());
        assert!(snapshots.current("billing", 2).is_none());
        assert!(snapshots.counted("billing", 2, &id).is_none());
        snapshots.keep("billing", 2, Letters::default());
        assert!(snapshots.current("billing", 2).is_some());
        assert!(
            snapshots.counted("billing", 2, &id).is_none(),
            "it was read again"
        );
        for n in 0..10 {
            snapshots.keep(&n.to_string(), 2, Letters::default());
        }
        assert!(snapshots.current("billing", 2).is_none(), "four are kept");
    }
}
