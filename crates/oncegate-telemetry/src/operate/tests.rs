use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::*;
use crate::Telemetry;
use oncegate_runtime::health::Status;

const TOKEN: &str = "a long random text of this test";
/// What each text of others tries.
const MARKUP: &str =
    "<script>alert(1)</script>\"><img src=x onerror=alert(2)>'&amp;\u{202e}\u{1b}[2J";

/// Remembers what was asked for, and has these letters.
#[derive(Default)]
struct Recorder {
    letters: Mutex<Vec<Letter>>,
    calls: Mutex<Vec<String>>,
    stamp: AtomicU64,
    name: String,
}

impl Recorder {
    fn note(&self, call: impl Into<String>) {
        self.calls.lock().push(call.into());
    }
}

#[async_trait]
impl Operator for Recorder {
    fn places(&self) -> Vec<LetterPlace> {
        vec![LetterPlace {
            scope: "billing".to_owned(),
            name: self.name.clone(),
            unreadable: None,
            cost: None,
        }]
    }

    fn stamp(&self) -> u64 {
        self.stamp.load(SeqCst)
    }

    async fn read(&self, scope: &str) -> Result<Letters, String> {
        self.note(format!("read {scope}"));
        Ok(Letters {
            letters: self.letters.lock().clone(),
            cut: Some(self.name.clone()),
        })
    }

    async fn show(&self, scope: &str, at: &str) -> Result<Option<LetterDetail>, String> {
        self.note(format!("show {scope} {at}"));
        let letters = self.letters.lock();
        let found = letters.iter().find(|letter| letter.at == at);
        Ok(found.map(|letter| LetterDetail {
            letter: letter.clone(),
            headers: vec![(self.name.clone(), Some(self.name.clone()))],
            payload: Some(self.name.clone()),
            ..LetterDetail::default()
        }))
    }

    async fn redrive(&self, order: RedriveOrder) -> Result<(), String> {
        let Change { scope, by, why } = &order.change;
        let (count, rate) = (order.places.len(), order.rate);
        self.note(format!(
            "redrive {count} of {scope} at {rate:?} by {by}: {why}"
        ));
        self.stamp.fetch_add(1, SeqCst);
        Ok(())
    }

    fn stop_redrive(&self, scope: &str) {
        self.note(format!("stop {scope}"));
    }

    fn redrives(&self) -> Vec<RedriveReport> {
        vec![RedriveReport {
            scope: "billing".to_owned(),
            trouble: Some(self.name.clone()),
            by: self.name.clone(),
            ..RedriveReport::default()
        }]
    }

    async fn pause(&self, change: Change) -> Result<(), String> {
        self.note(format!(
            "pause {} by {}: {}",
            change.scope, change.by, change.why
        ));
        Ok(())
    }

    async fn resume(&self, _: Change) -> Result<(), String> {
        self.note("resume");
        Err(self.name.clone())
    }
}

/// A page that is served on loopback until the end of the test.
struct Page {
    recorder: Arc<Recorder>,
    address: SocketAddr,
    _serving: JoinSet<()>,
}

/// A browser's cookie and the secret in its forms.
struct Browser {
    cookie: String,
    secret: String,
}

impl Page {
    async fn with(recorder: Recorder) -> Self {
        let recorder = Arc::new(recorder);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let telemetry = Telemetry::prometheus().unwrap();
        let operator = Arc::clone(&recorder);
        telemetry.operated_by(Operate::new(operator, || Ok(TOKEN.to_owned())));
        let mut serving = JoinSet::new();
        serving.spawn(async move { telemetry.serve::<String>(listener, []).await });
        Self {
            recorder,
            address,
            _serving: serving,
        }
    }

    /// Sends a request with these header lines, and returns the whole answer.
    async fn ask(&self, first: &str, headers: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let length = body.len();
        let request =
            format!("{first} HTTP/1.1\r\n{headers}content-length: {length}\r\n\r\n{body}");
        // The server may answer, and close the connection, before it has read everything.
        drop(stream.write_all(request.as_bytes()).await);
        let mut answer = Vec::new();
        drop(stream.read_to_end(&mut answer).await);
        String::from_utf8(answer).unwrap()
    }

    fn headers(&self, cookie: &str) -> String {
        let address = self.address;
        format!(
            "host: {address}\r\norigin: http://{address}\r\ncookie: {cookie}\r\n\
             content-type: application/x-www-form-urlencoded\r\n"
        )
    }

    async fn get(&self, path: &str, browser: &Browser) -> String {
        let headers = self.headers(&browser.cookie);
        self.ask(&format!("GET {path}"), &headers, "").await
    }

    async fn post(&self, path: &str, browser: &Browser, body: &str) -> String {
        let body = format!("secret={}&{body}", browser.secret);
        let headers = self.headers(&browser.cookie);
        self.ask(&format!("POST {path}"), &headers, &body).await
    }

    async fn signed_in(&self, name: &str) -> Browser {
        let body = fields::query(&[("name", name), ("token", TOKEN)]);
        let answer = self.ask("POST /sign-in", &self.headers(""), &body).await;
        assert!(answer.starts_with("HTTP/1.1 303"), "{answer}");
        let cookie = between(&answer, "set-cookie: ", ";").to_owned();
        assert!(answer.contains("; HttpOnly; SameSite=Strict"), "{answer}");
        let mut browser = Browser {
            cookie,
            secret: String::new(),
        };
        let page = self.get("/operate", &browser).await;
        browser.secret = between(&page, "name=\"secret\" value=\"", "\"").to_owned();
        browser
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.recorder.calls.lock())
    }
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> &'a str {
    let (_, rest) = text
        .split_once(before)
        .unwrap_or_else(|| panic!("{before:?} in {text}"));
    rest.split_once(after).unwrap().0
}

fn letter(number: usize, reason: &str) -> Letter {
    Letter {
        at: format!("dead/0@{number}"),
        cause: "permanent".to_owned(),
        reason: reason.to_owned(),
        origin: format!("orders/0@{number}"),
        failed_at_ms: Some(1_700_000_000_000),
        state: "open".to_owned(),
        is_open: true,
        ..Letter::default()
    }
}

/// 60 letters of one kind and 45 of another.
fn two_kinds() -> Vec<Letter> {
    let locked = (0..60).map(|n| letter(n, &format!("ledger {n} is locked")));
    let unknown = (60..105).map(|n| letter(n, "no such account"));
    locked.chain(unknown).collect()
}

/// Every form, and every page behind the sign-in.
const FORMS: [&str; 6] = [
    "/pause",
    "/resume",
    "/read-letters",
    "/redrive",
    "/stop-redrive",
    "/sign-out",
];
const PAGES: [&str; 4] = [
    "/operate",
    "/letters?scope=billing",
    "/letter?scope=billing&at=dead/0@1",
    "/redrive?scope=billing",
];
const BODY: &str = "scope=billing&why=x&snapshot=1";

// invariant: page-acts-for-strangers
#[tokio::test]
async fn without_a_session_nothing_is_shown_or_changed() {
    let page = Page::with(Recorder {
        letters: Mutex::new(two_kinds()),
        ..Recorder::default()
    })
    .await;
    let browser = page.signed_in("ada").await;
    page.post("/read-letters", &browser, BODY).await;
    assert_eq!(page.calls(), ["read billing"]);

    let port = page.address.port();
    for cookie in [
        String::new(),
        format!("oncegate-{port}="),
        format!("oncegate-{port}={}", "0".repeat(64)),
        browser.cookie.replace(&port.to_string(), "1"),
    ] {
        let other = Browser {
            cookie,
            secret: browser.secret.clone(),
        };
        for path in PAGES {
            let answer = page.get(path, &other).await;
            assert!(answer.starts_with("HTTP/1.1 303"), "{path}: {answer}");
            assert!(answer.contains("location: sign-in"), "{path}: {answer}");
            assert!(!answer.contains("ledger"), "{path}: {answer}");
        }
        for path in FORMS {
            let answer = page.post(path, &other, BODY).await;
            assert!(answer.starts_with("HTTP/1.1 303"), "{path}: {answer}");
            assert!(answer.contains("location: sign-in"), "{path}: {answer}");
        }
    }
    // Nothing that a scrape asks for reads or changes anything either.
    for path in ["/", "/metrics", "/status.json", "/healthz", "/readyz"] {
        let answer = page
            .ask(&format!("GET {path}"), "host: localhost\r\n", "")
            .await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        assert!(!answer.contains("ledger"), "{path}: {answer}");
    }
    assert_eq!(page.calls(), Vec::<String>::new());
}

// invariant: page-acts-for-strangers
#[tokio::test]
async fn a_wrong_token_begins_no_session() {
    let page = Page::with(Recorder::default()).await;
    let long = "x".repeat(65);
    let wrong = [
        ("ada", ""),
        ("ada", "a long random text of this tesT"),
        ("ada", "a long random text of this test2"),
        ("", TOKEN),
        (long.as_str(), TOKEN),
    ];
    for (name, token) in wrong {
        let body = fields::query(&[("name", name), ("token", token)]);
        let answer = page.ask("POST /sign-in", &page.headers(""), &body).await;
        assert!(answer.starts_with("HTTP/1.1 403"), "{name}: {answer}");
        assert!(
            !answer.contains("set-cookie") && !answer.contains(TOKEN),
            "{answer}"
        );
    }
    let right = fields::query(&[("name", "ada"), ("token", TOKEN)]);
    let elsewhere = page
        .headers("")
        .replace("origin: http://127", "origin: http://128");
    let answer = page.ask("POST /sign-in", &elsewhere, &right).await;
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert!(!answer.contains("set-cookie"), "{answer}");
}

#[test]
fn a_short_token_is_none() {
    let operate = |token: Result<&'static str, &'static str>| {
        let token = token.map(str::to_owned).map_err(str::to_owned);
        Operate::new(Arc::new(Recorder::default()), move || token.clone())
    };
    assert!(operate(Ok(TOKEN)).token().is_ok());
    assert!(operate(Ok("")).token().is_err());
    assert!(operate(Ok("fifteen bytes!!")).token().is_err());
    assert!(operate(Err("no such file")).token().is_err());
}

// invariant: page-acts-for-strangers
#[tokio::test]
async fn forms_of_other_pages_change_nothing() {
    let page = Page::with(Recorder {
        letters: Mutex::new(two_kinds()),
        ..Recorder::default()
    })
    .await;
    let browser = page.signed_in("ada").await;
    let other = page.signed_in("bob").await;
    let ours = page.headers(&browser.cookie);
    let port = page.address.port();
    let form = format!("secret={}&{BODY}", browser.secret);
    let of_other = format!("secret={}&{BODY}", other.secret);
    let large = format!("{form}&more={}", "x".repeat(20_000));
    let with_origin = |origin: &str| {
        let line = format!("origin: http://127.0.0.1:{port}\r\n");
        ours.replace(&line, origin)
    };
    let forged = [
        (with_origin(""), form.as_str(), "403"),
        (with_origin("origin: null\r\n"), &form, "403"),
        (with_origin("origin: http://evil.example\r\n"), &form, "403"),
        (with_origin("origin: http://127.0.0.1:1\r\n"), &form, "403"),
        (
            ours.clone() + "sec-fetch-site: cross-site\r\n",
            &form,
            "403",
        ),
        (ours.clone(), BODY, "403"),
        (ours.clone(), of_other.as_str(), "403"),
        (ours.replace("x-www-form-urlencoded", "json"), &form, "400"),
        (ours.clone(), &large, "400"),
        (
            ours.replace("host: 127.0.0.1", "host: evil.example"),
            &form,
            "421",
        ),
    ];
    for (headers, body, status) in &forged {
        for path in FORMS {
            let answer = page.ask(&format!("POST {path}"), headers, body).await;
            let expected = format!("HTTP/1.1 {status}");
            assert!(answer.starts_with(&expected), "{path} {headers}: {answer}");
        }
    }
    // A link is no form.
    for path in FORMS.iter().filter(|path| **path != "/redrive") {
        let answer = page.get(&format!("{path}?{form}"), &browser).await;
        assert!(answer.starts_with("HTTP/1.1 405"), "{path}: {answer}");
    }
    assert_eq!(page.calls(), Vec::<String>::new());
    // The session is as it was.
    page.post("/pause", &browser, BODY).await;
    assert_eq!(page.calls(), ["pause billing by ada: x"]);
}

// invariant: page-redrive
#[tokio::test]
async fn what_was_counted_is_redriven_and_not_shown_as_before() {
    let page = Page::with(Recorder {
        letters: Mutex::new(two_kinds()),
        ..Recorder::default()
    })
    .await;
    let browser = page.signed_in("ada").await;
    let read = page.post("/read-letters", &browser, "scope=billing").await;
    assert!(read.contains("location: letters?scope=billing"), "{read}");
    let list = page.get("/letters?scope=billing", &browser).await;
    assert!(list.contains("105 of 105 dead letters"), "{list}");
    let kind = fields::query(&[("cause", "permanent"), ("kind", "ledger # is locked")]);
    assert!(list.contains(&kind.replace('&', "&amp;")), "{list}");
    let confirm = page
        .get(&format!("/redrive?scope=billing&{kind}"), &browser)
        .await;
    assert!(
        confirm.contains("Redrive 60 of 105 dead letters"),
        "{confirm}"
    );
    assert_eq!(page.calls(), ["read billing"], "counting changes nothing");

    let snapshot = between(&confirm, "name=\"snapshot\" value=\"", "\"");
    let order = format!("scope=billing&snapshot={snapshot}&{kind}");
    for (wrong, status) in [
        (order.clone(), "409"),
        (format!("{order}&why=x&rate=0"), "409"),
        (format!("{order}&why=x&rate=fast"), "409"),
        (format!("{order}&why=a%0Ab"), "409"),
        (order.replace("snapshot=1", "snapshot=7") + "&why=x", "409"),
        (order.replace("billing", "other") + "&why=x", "404"),
    ] {
        let answer = page.post("/redrive", &browser, &wrong).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{wrong}: {answer}"
        );
    }
    assert_eq!(page.calls(), Vec::<String>::new());

    let order = format!("{order}&why=unlocked&rate=50");
    let done = page.post("/redrive", &browser, &order).await;
    assert!(done.starts_with("HTTP/1.1 303"), "{done}");
    let expected = "redrive 60 of billing at Some(50) by ada: unlocked";
    assert_eq!(page.calls(), [expected]);
    let after = page.get("/letters?scope=billing", &browser).await;
    assert!(!after.contains("ledger"), "as they were before: {after}");
    let again = page.post("/redrive", &browser, &order).await;
    assert!(again.starts_with("HTTP/1.1 409"), "a second click: {again}");
    assert_eq!(page.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn a_redrive_warns_of_outcomes_that_are_unknown() {
    let mut letters = two_kinds();
    letters[3].cause = "outcome_unknown".to_owned();
    let page = Page::with(Recorder {
        letters: Mutex::new(letters),
        ..Recorder::default()
    })
    .await;
    let browser = page.signed_in("ada").await;
    page.post("/read-letters", &browser, "scope=billing").await;
    let all = page.get("/redrive?scope=billing", &browser).await;
    assert!(all.contains("1 of them have an unknown outcome"), "{all}");
    let others = "/redrive?scope=billing&cause=permanent";
    let others = page.get(others, &browser).await;
    assert!(!others.contains("unknown outcome"), "{others}");
}

// invariant: page-markup
#[tokio::test]
async fn markup_is_text_in_every_place() {
    let hostile = Letter {
        at: MARKUP.to_owned(),
        cause: MARKUP.to_owned(),
        reason: MARKUP.to_owned(),
        origin: MARKUP.to_owned(),
        key: Some(MARKUP.to_owned()),
        state: MARKUP.to_owned(),
        is_open: true,
        ..Letter::default()
    };
    let page = Page::with(Recorder {
        letters: Mutex::new(vec![hostile]),
        name: MARKUP.to_owned(),
        ..Recorder::default()
    })
    .await;
    let name: String = MARKUP
        .chars()
        .filter(|c| !c.is_control())
        .take(40)
        .collect();
    let browser = page.signed_in(&name).await;
    page.post("/read-letters", &browser, "scope=billing").await;
    let at = fields::query(&[("scope", "billing"), ("at", MARKUP), ("all", "yes")]);
    let search: Vec<(&str, &str)> = [
        "scope", "cause", "kind", "reason", "origin", "key", "since", "until", "at",
    ]
    .map(|field| (field, if field == "scope" { "billing" } else { MARKUP }))
    .to_vec();
    let search = fields::query(&search);
    let mut answers = Vec::new();
    for path in [
        "/operate".to_owned(),
        "/letters?scope=billing".to_owned(),
        format!("/letters?{search}"),
        format!("/letter?{at}"),
        format!("/redrive?{at}"),
        format!("/redrive?{search}"),
        "/letters?scope=%3Cscript%3E".to_owned(),
    ] {
        answers.push(page.get(&path, &browser).await);
    }
    answers.push(page.post("/resume", &browser, BODY).await);
    for answer in &answers {
        for harmful in ["<script", "<img", "\u{1b}", "\u{202e}"] {
            assert!(!answer.contains(harmful), "{harmful:?}: {answer}");
        }
        assert!(
            answer.contains("content-security-policy: default-src 'none'"),
            "{answer}"
        );
    }
    assert!(answers[3].contains("&lt;script&gt;"), "{}", answers[3]);
}

// invariant: page-markup
#[test]
fn reasons_of_handlers_are_text_in_the_summary() {
    let mut status = serde_json::to_value(Status::default()).unwrap();
    status["phase"] = "running".into();
    status["name"] = MARKUP.into();
    status["failing"] = serde_json::json!([{
        "scope": "billing", "origin": MARKUP, "stage": "ready", "in_stage_for_seconds": 1.0,
        "age_seconds": 1.0, "key": MARKUP, "next_try_seconds": null,
        "failed": { "times": 7, "for_seconds": 1.0, "reason": MARKUP },
    }]);
    let status: Status = serde_json::from_value(status).unwrap();
    let summary = summary(&[status]).into_string();
    assert!(summary.contains("failed 7 times"), "{summary}");
    assert!(
        !summary.contains("<script") && !summary.contains("<img"),
        "{summary}"
    );
}

#[test]
fn ten_thousand_letters_are_a_short_page() {
    let letters: Vec<Letter> = (0..10_000)
        .map(|n| {
            letter(
                n,
                &format!("{} {n}", ["locked", "unknown", "closed"][n % 3]),
            )
        })
        .collect();
    let snapshots = letters::Snapshots::default();
    snapshots.keep("billing", 0, Letters { letters, cut: None });
    let snapshot = snapshots.current("billing", 0).unwrap();
    let sessions = Sessions::default();
    let token = blake3::hash(b"");
    let cookie = sessions.begin("ada", token);
    let mut headers = axum::http::HeaderMap::new();
    headers.insert("host", "a".parse().unwrap());
    headers.insert("cookie", format!("oncegate-0={cookie}").parse().unwrap());
    let session = sessions.find(&headers, token).unwrap();
    let place = Recorder::default().places().remove(0);
    let page = |page| {
        let markup = pages::letters(&pages::LettersPage {
            session: &session,
            place: &place,
            search: &letters::Search::default(),
            snapshot: Some(&snapshot),
            redrives: &[],
            page,
        });
        markup.into_string()
    };
    let begun = std::time::Instant::now();
    let first = page(0);
    println!("a page of 10,000 letters took {:?}", begun.elapsed());
    assert!(
        first.contains("10000 of 10000") && first.contains(">3334<"),
        "{first}"
    );
    assert!(first.len() < 100_000, "{} bytes", first.len());
    assert!(page(99).contains("dead/0@9999") && !page(99).contains("Further"));
    assert!(page(100).contains("Letters 10000 to 10000"));
    assert!(page(usize::MAX).len() < 20_000);
}
