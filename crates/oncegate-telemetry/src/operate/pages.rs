//! The pages, as HTML. Every text of others becomes a text node or an attribute, which `maud`
//! escapes.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use oncegate_runtime::health::{Health, ScopePause, Status};

use super::fields::shown;
use super::letters::{Group, Search, Snapshot, groups, rfc3339};
use super::session::Session;
use super::{Letter, LetterDetail, LetterPlace, RedriveReport};

/// The style of all pages.
pub(crate) const STYLE: &str = include_str!("../page.css");

/// The most letters on a page of a list.
const LETTERS_SHOWN: usize = 100;
/// The most groups that are shown.
const GROUPS_SHOWN: usize = 200;
/// The cause of letters whose effects may have happened.
const OUTCOME_UNKNOWN: &str = "outcome_unknown";
/// The most characters of a reason in a list.
const REASON_SHOWN: usize = 300;

fn frame(title: &str, session: Option<&Session>, content: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) " – oncegate" }
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "oncegate" }
                    nav {
                        a href="." { "Status" } " "
                        a href="operate" { "Operate" } " "
                        a href="metrics" { "Metrics" }
                    }
                    @if let Some(session) = session {
                        form method="post" action="sign-out" {
                            (secret(session))
                            span.quiet { (shown(&session.name)) " " }
                            button { "Sign out" }
                        }
                    }
                }
                main { (content) }
            }
        }
    }
}

/// The hidden field without which no form does anything.
fn secret(session: &Session) -> Markup {
    html! { input type="hidden" name="secret" value=(session.secret); }
}

/// A page that only says something.
pub(super) fn notice(session: Option<&Session>, title: &str, text: &str) -> Markup {
    let content = html! {
        h2 { (title) }
        p { (shown(text)) }
        p { a href="operate" { "Back" } }
    };
    frame(title, session, &content)
}

pub(super) fn sign_in(trouble: Option<&str>) -> Markup {
    let content = html! {
        h2 { "Sign in to operate" }
        @if let Some(trouble) = trouble { p.bad role="alert" { (shown(trouble)) } }
        form.stack method="post" action="sign-in" {
            label { "Your name, for the journal"
                input name="name" required maxlength="64" autocomplete="username"; }
            label { "Token" input name="token" type="password" required autocomplete="current-password"; }
            button { "Sign in" }
        }
    };
    frame("Sign in", None, &content)
}

/// The state of the consumers and what waits, for a page without its script.
pub(crate) fn summary(statuses: &[Status]) -> Markup {
    html! {
        @if statuses.is_empty() { p.quiet { "No consumer runs in this process." } }
        @for status in statuses { (state(status)) }
    }
}

fn state(status: &Status) -> Markup {
    let health = Health::of(status);
    let judgement = match (
        health.is_live(),
        health.is_ready(),
        health.reasons().is_empty(),
    ) {
        (false, ..) => ("stalled", "bad"),
        (true, false, _) => ("not ready", "warn"),
        (true, true, false) => ("degraded", "warn"),
        (true, true, true) => ("healthy", "good"),
    };
    let waits = status.waits();
    html! {
        h2 { (shown(&status.name)) " " span.pill.(judgement.1) { (judgement.0) } }
        @if !health.reasons().is_empty() {
            ul { @for reason in health.reasons() { li.warn { (shown(&reason.to_string())) } } }
        }
        p.quiet {
            (status.messages.in_flight) " messages in flight; "
            (status.permits.total.saturating_sub(status.permits.free)) " of "
            (status.permits.total) " handlers run; " (status.messages.parked) " messages are parked"
        }
        div.table {
            h3 { "Why it waits" }
            @if waits.is_empty() { span.quiet { "nothing waits for longer than usual" } }
            ul { @for wait in &waits { li { (shown(wait)) } } }
        }
    }
}

/// Everything that the overview shows.
pub(super) struct Overview<'a> {
    pub(super) session: &'a Session,
    pub(super) statuses: &'a [Status],
    pub(super) places: &'a [LetterPlace],
    pub(super) redrives: &'a [RedriveReport],
    /// The scopes with their pauses.
    pub(super) scopes: &'a [(String, Option<ScopePause>)],
}

pub(super) fn overview(overview: &Overview<'_>) -> Markup {
    let session = overview.session;
    let content = html! {
        (summary(overview.statuses))
        h2 { "Pause and resume" }
        @for (scope, pause) in overview.scopes { (pause_form(session, scope, pause.as_ref())) }
        h2 { "Dead letters" }
        @for place in overview.places { (read_form(session, place)) }
        (redrives(session, overview.redrives))
    };
    frame("Operate", Some(session), &content)
}

fn pause_form(session: &Session, scope: &str, pause: Option<&ScopePause>) -> Markup {
    let action = if pause.is_some() { "resume" } else { "pause" };
    html! {
        form.table method="post" action=(action) {
            (secret(session))
            input type="hidden" name="scope" value=(scope);
            h3 { (shown(scope)) }
            @if let Some(pause) = pause { p.warn { "It is " (shown(&pause.to_string())) } }
            label { "Why " input name="why" required maxlength="500"; }
            @if pause.is_some() {
                button { "Resume all its consumers" }
            } @else {
                button { "Pause all its consumers" }
            }
            p.quiet { "In every process, within seconds; what runs ends. The same as a command: "
                code { "oncegate " (action) " --scope " (shown(scope)) " --why …" } }
        }
    }
}

fn read_form(session: &Session, place: &LetterPlace) -> Markup {
    html! {
        form.table method="post" action="read-letters" {
            (secret(session))
            input type="hidden" name="scope" value=(place.scope);
            h3 { (shown(&place.scope)) @if !place.name.is_empty() { ": " (shown(&place.name)) } }
            @if let Some(why) = &place.unreadable {
                p.quiet { (shown(why)) }
            } @else {
                button { "Read the dead letters" }
                @if let Some(cost) = place.cost { " " span.warn { (cost) } }
            }
        }
    }
}

fn redrives(session: &Session, redrives: &[RedriveReport]) -> Markup {
    html! {
        @for redrive in redrives {
            form.table method="post" action="stop-redrive" {
                (secret(session))
                input type="hidden" name="scope" value=(redrive.scope);
                h3 { "Redrive of " (shown(&redrive.scope)) " by " (shown(&redrive.by)) }
                (redrive.sent) " of " (redrive.wanted) " messages sent, "
                (redrive.passed) " passed over. "
                @if redrive.runs { button { "Stop it" } } @else { "It has ended." }
                @if let Some(trouble) = &redrive.trouble { p.bad { (shown(trouble)) } }
            }
        }
    }
}

/// The dead letters of a scope, with what was searched for.
pub(super) struct LettersPage<'a> {
    pub(super) session: &'a Session,
    pub(super) place: &'a LetterPlace,
    pub(super) search: &'a Search,
    /// `None` before they are read, and after a redrive.
    pub(super) snapshot: Option<&'a Snapshot>,
    pub(super) redrives: &'a [RedriveReport],
    /// The page of the list, from 0.
    pub(super) page: usize,
}

pub(super) fn letters(page: &LettersPage<'_>) -> Markup {
    let LettersPage {
        session,
        place,
        snapshot,
        ..
    } = page;
    let content = html! {
        h2 { "Dead letters of " (shown(&place.scope)) }
        (redrives(session, page.redrives))
        (read_form(session, place))
        @if let Some(snapshot) = snapshot {
            (found(page, snapshot))
        } @else {
            p { "They are not read, or something was done since they were." }
        }
    };
    frame("Dead letters", Some(session), &content)
}

fn found(page: &LettersPage<'_>, snapshot: &Snapshot) -> Markup {
    let search = page.search;
    let all = &snapshot.read.letters;
    let matching = search.of_letters(all);
    let grouped = groups(&matching);
    let begin = page.page.saturating_mul(LETTERS_SHOWN).min(matching.len());
    let end = begin.saturating_add(LETTERS_SHOWN).min(matching.len());
    let scope = snapshot.scope.as_str();
    let link = format!("letters?{}&page=", search.query(scope));
    html! {
        p { (matching.len()) " of " (all.len()) " dead letters, as they were at "
            (rfc3339(snapshot.at_unix_ms)) }
        @if let Some(cut) = &snapshot.read.cut { p.warn { (shown(cut)) } }
        (search_form(scope, search))
        div.table { table {
            caption { "By cause and reason" }
            thead { tr { th { "cause" } th { "reason" } th.number { "letters" } th.number { "open" }
                th { "first" } th { "last" } th {} } }
            tbody { @for group in grouped.iter().take(GROUPS_SHOWN) { (group_row(scope, search, group)) } }
        } }
        @if grouped.len() > GROUPS_SHOWN { p.quiet { "… and " (grouped.len() - GROUPS_SHOWN) " more groups" } }
        div.table { table {
            caption { "Letters " (begin.saturating_add(1).min(end)) " to " (end) }
            thead { tr { th { "position" } th { "given up" } th { "cause" } th { "reason" }
                th { "origin" } th { "key" } th { "since" } } }
            tbody { @for letter in matching.get(begin..end).unwrap_or_default() { (letter_row(scope, letter)) } }
        } }
        p {
            @if begin > 0 { a href={ (link) (page.page.saturating_sub(1)) } { "Earlier" } " " }
            @if end < matching.len() { a href={ (link) (page.page + 1) } { "Further" } }
        }
    }
}

fn search_form(scope: &str, search: &Search) -> Markup {
    html! {
        form.search method="get" action="letters" {
            input type="hidden" name="scope" value=(scope);
            @if !search.kind.is_empty() {
                (field("kind", "Kind of reason", &search.kind))
            }
            (field("cause", "Cause", &search.cause))
            (field("reason", "Reason contains", &search.reason))
            (field("origin", "Origin contains", &search.origin))
            (field("key", "Key contains", &search.key))
            (field("since", "From (UTC)", &search.since))
            (field("until", "To (UTC)", &search.until))
            label { input type="checkbox" name="all" value="yes" checked[search.all]; " also those that are done" }
            button { "Search" } " "
            a href={ "letters?" (Search::default().query(scope)) } { "All open ones" } " "
            a href={ "redrive?" (search.query(scope)) } { "Redrive what is found…" }
        }
    }
}

fn field(name: &str, label: &str, value: &str) -> Markup {
    html! { label { (label) " " input name=(name) value=(shown(value)); } }
}

fn group_row(scope: &str, search: &Search, group: &Group<'_>) -> Markup {
    let of_group = Search {
        cause: group.cause.to_owned(),
        kind: group.kind.clone(),
        reason: search.reason.clone(),
        origin: search.origin.clone(),
        key: search.key.clone(),
        since: search.since.clone(),
        until: search.until.clone(),
        at: String::new(),
        all: search.all,
    };
    let query = of_group.query(scope);
    html! {
        tr {
            td { (shown(&group.cause.replace('_', " "))) }
            td { a href={ "letters?" (query) } { (shown(cut(group.example))) } }
            td.number { (group.count) }
            td.number { (group.open) }
            td { (time(group.first_ms)) }
            td { (time(group.last_ms)) }
            td { @if group.open > 0 { a href={ "redrive?" (query) } { "Redrive…" } } }
        }
    }
}

fn letter_row(scope: &str, letter: &Letter) -> Markup {
    html! {
        tr {
            td { a href={ "letter?" (of_place(&letter.at).query(scope)) } { (shown(&letter.at)) } }
            td { (time(letter.failed_at_ms)) }
            td { (shown(&letter.cause.replace('_', " "))) }
            td { (shown(cut(&letter.reason))) }
            td { (shown(&letter.origin)) }
            td { (shown(letter.key.as_deref().unwrap_or_default())) }
            td { (shown(&letter.state.replace('_', " "))) }
        }
    }
}

/// A time, if it is known.
fn time(millis: Option<u64>) -> String {
    millis.map(rfc3339).unwrap_or_default()
}

/// The search for one letter, whatever was done about it.
pub(super) fn of_place(at: &str) -> Search {
    Search {
        at: at.to_owned(),
        all: true,
        ..Search::default()
    }
}

/// The beginning of a reason.
fn cut(reason: &str) -> &str {
    let end = reason.floor_char_boundary(REASON_SHOWN);
    reason.get(..end).unwrap_or_default()
}

/// One dead letter. `is_whole`: it was read with its headers.
pub(super) fn letter(
    session: &Session,
    scope: &str,
    detail: &LetterDetail,
    is_whole: bool,
) -> Markup {
    let letter = &detail.letter;
    let attempts = letter.attempts.map(|attempts| attempts.to_string());
    let bytes = is_whole.then(|| format!("{} bytes", detail.payload_bytes));
    let bytes = bytes.unwrap_or_default();
    let rows = [
        ("message", letter.origin.clone()),
        ("key", letter.key.clone().unwrap_or_default()),
        ("cause", letter.cause.replace('_', " ")),
        ("reason", letter.reason.clone()),
        ("attempts", attempts.unwrap_or_default()),
        ("first failed", time(detail.first_failed_at_ms)),
        ("given up", time(letter.failed_at_ms)),
        ("since", letter.state.replace('_', " ")),
        ("payload", bytes),
    ];
    let search = of_place(&letter.at);
    let content = html! {
        h2 { "Dead letter " (shown(&letter.at)) }
        div.table { table { tbody {
            @for (name, value) in rows.iter().filter(|(_, value)| !value.is_empty()) {
                tr { th scope="row" { (name) } td.text { (shown(value)) } }
            }
            @for (name, value) in &detail.headers {
                tr {
                    th scope="row" { "header " (shown(name)) }
                    td.text { (value.as_deref().map(shown).unwrap_or_else(|| "not shown".to_owned())) }
                }
            }
        } } }
        @if let Some(payload) = &detail.payload { pre.table { (shown(payload)) } }
        @else if is_whole {
            p.quiet { "Payloads and values of headers are not shown: " code { "status.operate.payloads" } }
        } @else {
            p.quiet { "Headers are not shown, because another receive would be used up: "
                code { "oncegate dead-letters show" } }
        }
        p {
            a href={ "redrive?" (search.query(scope)) } { "Redrive it…" } " "
            a href={ "letters?" (Search::default().query(scope)) } { "All open ones" }
        }
    };
    frame("Dead letter", Some(session), &content)
}

/// Asks whether to redrive as many letters.
pub(super) fn confirm(
    session: &Session,
    place: &LetterPlace,
    search: &Search,
    snapshot: &Snapshot,
) -> Markup {
    let letters = &snapshot.read.letters;
    let matching = search.of_letters(letters);
    let places = search.places(letters);
    let passed = matching.len().saturating_sub(places.len());
    let unknown = matching
        .iter()
        .filter(|letter| letter.cause == OUTCOME_UNKNOWN && places.contains(&letter.at))
        .count();
    let scope = place.scope.as_str();
    let content = html! {
        h2 { "Redrive " (places.len()) " of " (letters.len()) " dead letters of " (shown(scope)) }
        @for (name, value) in search.fields().iter().filter(|(name, value)| !value.is_empty() && *name != "all") {
            p { (name) ": " b { (shown(value)) } }
        }
        p { "Their messages are sent back to where they came from, and their handlers run again. What was completed "
            "meanwhile is not run." }
        @if unknown > 0 {
            p.bad { (unknown) " of them have an unknown outcome: their effects may have happened, and would happen again. "
                "Look downstream first, and say " code { "oncegate complete" } " for those that have." }
        }
        @if passed > 0 { p.quiet { (passed) " more match, and are done or under way: they are not sent." } }
        @if places.is_empty() {
            p { "There is nothing to redrive." }
        } @else {
            form.stack method="post" action="redrive" {
                (secret(session))
                input type="hidden" name="scope" value=(scope);
                input type="hidden" name="snapshot" value=(snapshot.id);
                @for (name, value) in search.fields() {
                    input type="hidden" name=(name) value=(shown(value));
                }
                label { "Why, for the journal" input name="why" required maxlength="500"; }
                label { "At most this many a second (empty: no limit)"
                    input name="rate" inputmode="numeric" pattern="[0-9]*"; }
                button { "Redrive " (places.len()) (if places.len() == 1 { " message" } else { " messages" }) }
            }
        }
        p { a href={ "letters?" (search.query(scope)) } { "Back to the letters" } }
    };
    frame("Redrive", Some(session), &content)
}
