//! The status page that acts: dead letters by kind, redrive, pause and resume, with forms as a
//! browser sends them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use oncegate_testkit::{HttpAnswer, HttpClient, Record, Sent, process, unique, until};

use super::raw::{Answer, RawWorker};
use super::{LIMIT, Running, Stage, program};

/// The token of every page here.
const TOKEN: &str = "a long random text of these tests";
const LETTERS: usize = 105;
/// The first ones are of one kind, the others of another.
const LOCKED: usize = 60;

/// A process of `oncegate run` with its page, and a person who has signed in.
struct Acting {
    running: Running,
    client: HttpClient,
    origin: String,
    cookie: String,
    secret: String,
}

impl Acting {
    /// Starts it with a log of its own, so that its page is found.
    async fn start(stage: &Stage, group: &str, name: &str, flags: &[&str]) -> Self {
        let token = stage.path("token");
        std::fs::write(&token, format!("{TOKEN}\n")).unwrap();
        let config = stage.path("page.toml");
        let text = "version = 1\n[status.operate]\ntoken = { file = \"token\" }\njournal = \"journal.jsonl\"\n";
        std::fs::write(&config, text).unwrap();
        let config = config.to_str().unwrap();
        let fixed = ["--config", config, "--listen", "127.0.0.1:0"];
        let command = stage.command(group, &[&fixed[..], flags].concat());
        let log = stage.path(name);
        let process = oncegate_testkit::Process::spawn_logged(name, command, &log);
        let running = Running {
            group: group.to_owned(),
            process,
        };
        let address = until("the page", LIMIT, async || {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let plain = text
                .replace("\u{1b}[0m", "")
                .replace("\u{1b}[3m", "")
                .replace("\u{1b}[2m", "");
            let line = plain
                .lines()
                .find(|line| line.contains("the status page is served"));
            let address = line.and_then(|line| line.split("address=").nth(1)?.trim().parse().ok());
            address.ok_or(text)
        })
        .await;
        let mut acting = Self {
            running,
            client: HttpClient::http1(address),
            origin: format!("http://{address}"),
            cookie: String::new(),
            secret: String::new(),
        };
        acting.sign_in().await;
        acting
    }

    async fn sign_in(&mut self) {
        let form = format!("name=ada&token={}", TOKEN.replace(' ', "+"));
        let answer = self.post("/sign-in", &form).await;
        assert_eq!(answer.status, 303, "{answer:?}");
        let cookie = answer.header("set-cookie").unwrap();
        cookie
            .split(';')
            .next()
            .unwrap()
            .clone_into(&mut self.cookie);
        let page = self.get("/operate").await;
        self.secret = between(&page, "name=\"secret\" value=\"", "\"").to_owned();
    }

    async fn get(&self, path: &str) -> String {
        let headers = [("cookie", self.cookie.as_str())];
        let sent = Sent::post(path, "", "").method("GET").unkeyed();
        let answer = self.client.send(sent.headers(&headers)).await;
        String::from_utf8(answer.body.to_vec()).unwrap()
    }

    /// Sends a form as a browser does.
    async fn post(&self, path: &str, form: &str) -> HttpAnswer {
        let headers = [
            ("cookie", self.cookie.as_str()),
            ("origin", self.origin.as_str()),
            ("content-type", "application/x-www-form-urlencoded"),
        ];
        let form = format!("secret={}&{form}", self.secret);
        let sent = Sent::post(path, "", &form).unkeyed().headers(&headers);
        self.client.send(sent).await
    }

    /// Clicks, and expects the next page.
    async fn click(&self, path: &str, form: &str) {
        let answer = self.post(path, form).await;
        assert_eq!(answer.status, 303, "{path}: {answer:?}");
    }

    async fn status(&self) -> serde_json::Value {
        serde_json::from_str(&self.get("/status.json").await).unwrap()
    }

    /// Reads the dead letters, and returns the page that lists them.
    async fn read(&self, scope: &str) -> String {
        self.click("/read-letters", &format!("scope={scope}")).await;
        self.get(&format!("/letters?scope={scope}")).await
    }
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> &'a str {
    let (_, rest) = text
        .split_once(before)
        .unwrap_or_else(|| panic!("{before:?} in {text}"));
    rest.split_once(after).unwrap().0
}

/// The link in the row of a group: the query of its redrive.
fn redrive_of(list: &str, example: &str) -> String {
    let row = list
        .split("<tr>")
        .find(|row| row.contains(example) && row.contains("Redrive…"));
    let row = row.unwrap_or_else(|| panic!("{example:?} in {list}"));
    between(row, "href=\"redrive?", "\"").replace("&amp;", "&")
}

/// The journal of what was done on pages and by commands.
fn journal(stage: &Stage, event: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(stage.path("journal.jsonl")).unwrap_or_default();
    let entries = text.lines().map(|line| serde_json::from_str(line).unwrap());
    entries
        .filter(|entry: &serde_json::Value| entry["event"] == event)
        .collect()
}

/// The number of an order: `{"order_id":"A-7","amount":10}`.
fn number(body: &str) -> usize {
    between(body, "A-", "\"").parse().unwrap()
}

/// Reads the letters, and looks at one. Returns the page that lists them.
async fn read_both_kinds(page: &Acting, scope: &str) -> String {
    let list = page.read(scope).await;
    assert!(list.contains("105 of 105 dead letters"), "{list}");
    assert!(
        list.contains("&lt;b&gt;locked&lt;/b&gt;") && !list.contains("<b>locked"),
        "{list}"
    );
    assert!(list.contains("no such account"), "{list}");
    assert!(!list.contains("amount"), "nothing of a payload: {list}");
    let one = between(&list, "href=\"letter?", "\"").replace("&amp;", "&");
    let one = page.get(&format!("/letter?{one}")).await;
    assert!(one.contains("attempts") && !one.contains("amount"), "{one}");
    list
}

/// Counts the letters of one kind and redrives them, up to the end of the redrive.
async fn redrive_one_kind(page: &Acting, stage: &Stage, list: &str) {
    let scope = &stage.scope;
    let query = redrive_of(list, "&lt;b&gt;locked");
    let confirm = page.get(&format!("/redrive?{query}")).await;
    assert!(
        confirm.contains("Redrive 60 of 105 dead letters"),
        "{confirm}"
    );
    assert_eq!(
        stage.kafka.read_all(&stage.topic).await.len(),
        LETTERS,
        "counting sends nothing"
    );
    let snapshot = between(&confirm, "name=\"snapshot\" value=\"", "\"");
    let order = format!("{query}&snapshot={snapshot}&why=the+ledgers+are+open");
    page.click("/redrive", &order).await;
    let after = page.get(&format!("/letters?scope={scope}")).await;
    assert!(
        !after.contains("105 of 105"),
        "as they were before: {after}"
    );
    let again = page.post("/redrive", &order).await;
    assert_eq!(again.status, 409, "a second click sends nothing: {again:?}");

    until("the end of the redrive", LIMIT, async || {
        let shown = page.get("/operate").await;
        if shown.contains("60 of 60 messages sent, 0 passed over. It has ended.") {
            Ok(())
        } else {
            Err(shown)
        }
    })
    .await;
}

// invariant: page-redrive
#[tokio::test]
async fn letters_redriven_from_the_page_run_once() {
    let stage = Stage::with_orders(LETTERS).await;
    let unlocked = Arc::new(AtomicBool::new(false));
    let is_unlocked = Arc::clone(&unlocked);
    let worker = RawWorker::start(move |asked| match number(&asked.body) {
        n if n < LOCKED && is_unlocked.load(SeqCst) => Answer::status(200, "", "done"),
        n if n < LOCKED => Answer::status(422, "", &format!("ledger {n} is <b>locked</b>")),
        _ => Answer::status(422, "", "no such account"),
    })
    .await;
    let limit = format!(
        "--set=consumer.{}.dead_letter_limit.in_a_row=1000",
        stage.scope
    );
    let url = worker.url();
    let page = Acting::start(&stage, &unique("run"), "log", &["--handler", &url, &limit]).await;
    stage.until_consumed(&page.running.group).await;

    let list = read_both_kinds(&page, &stage.scope).await;
    let asked_before = worker.asked().len();
    unlocked.store(true, SeqCst);
    redrive_one_kind(&page, &stage, &list).await;
    stage.until_consumed(&page.running.group).await;
    let list = page.read(&stage.scope).await;
    assert!(list.contains("45 of 105 dead letters"), "{list}");
    assert!(!list.contains("locked"), "{list}");
    let all = format!("/letters?scope={}&all=yes&reason=locked", stage.scope);
    let all = page.get(&all).await;
    assert!(
        all.contains("60 of 105") && all.contains("<td>completed</td>"),
        "{all}"
    );

    let mut again: BTreeMap<usize, usize> = BTreeMap::new();
    for asked in worker.asked().iter().skip(asked_before) {
        *again.entry(number(&asked.body)).or_default() += 1;
    }
    let once: BTreeMap<usize, usize> = (0..LOCKED).map(|n| (n, 1)).collect();
    assert_eq!(again, once, "each of the kind runs once more, and no other");
    let redriven = journal(&stage, "redriven");
    assert_eq!(redriven.len(), LOCKED);
    let is_signed = |entry: &serde_json::Value| {
        entry["by"] == "ada" && entry["reason"] == "the ledgers are open"
    };
    assert!(redriven.iter().all(is_signed), "{redriven:?}");
    page.running.stop().await;
}

/// Runs a command about the scope of the stage, with its journal.
fn oncegate(stage: &Stage, arguments: &[&str]) -> Output {
    let journal: PathBuf = stage.path("journal.jsonl");
    let mut command: Command = process::bound_to_parent(program(), "KILL");
    command
        .args(arguments)
        .args(["--store", stage.redis.url()])
        .env("ONCEGATE_JOURNAL", journal)
        .env("ONCEGATE_OPERATOR", "bob")
        .current_dir(stage.dir.path());
    command.output().unwrap()
}

/// Waits until the page says this of the pause of its scope.
async fn until_paused(page: &Acting, is_paused: bool) {
    until("the pause", LIMIT, async || {
        let status = page.status().await;
        let scope = &status["consumers"][0]["status"]["scopes"][0];
        if scope.is_object() && scope["pause"].is_object() == is_paused {
            Ok(())
        } else {
            Err(status.to_string())
        }
    })
    .await;
}

/// The pause in health, metrics and sentences.
async fn shows_its_pause(page: &Acting) {
    let status = page.status().await;
    let consumer = &status["consumers"][0];
    assert_eq!(consumer["ready"], false, "{consumer}");
    assert_eq!(
        consumer["live"], true,
        "a restart would not help: {consumer}"
    );
    let reasons = consumer["reasons"].to_string();
    assert!(reasons.contains("paused_by_operator"), "{consumer}");
    let waits = consumer["waits"][0].as_str().unwrap();
    assert!(
        waits.contains("paused by ada") && waits.contains("the bank is away"),
        "{waits}"
    );
    let metrics = page.get("/metrics").await;
    let gauge = metrics
        .lines()
        .find(|line| line.contains("cause=\"operator\""));
    assert!(gauge.is_some_and(|line| line.ends_with(" 1")), "{metrics}");
}

/// Waits until the processes know of so many messages that are not finished.
async fn until_they_lag(pages: &[&Acting], messages: u64) {
    until("all to know of the new messages", LIMIT, async || {
        let mut lag = 0;
        for page in pages {
            let status = page.status().await;
            let partitions = status["consumers"][0]["status"]["source"]["partitions"].clone();
            let partitions = partitions.as_array().cloned().unwrap_or_default();
            lag += partitions
                .iter()
                .map(|one| one["lag"].as_u64().unwrap_or_default())
                .sum::<u64>();
        }
        if lag == messages {
            Ok(())
        } else {
            Err(lag.to_string())
        }
    })
    .await;
}

/// The arguments of a change of the stage's scope.
fn with_reason<'a>(stage: &'a Stage, verb: &'a str) -> [&'a str; 6] {
    let why = "the bank is back";
    [verb, "--scope", &stage.scope, "--yes", "--why", why]
}

fn resume_by_command(stage: &Stage) {
    let again = oncegate(stage, &with_reason(stage, "pause"));
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    let resumed = oncegate(
        stage,
        &[&with_reason(stage, "resume")[..], &["--json"]].concat(),
    );
    assert_eq!(resumed.status.code(), Some(0), "{resumed:?}");
    let document: serde_json::Value = serde_json::from_slice(&resumed.stdout).unwrap();
    assert_eq!(
        (&document["paused"], &document["done"]),
        (&false.into(), &true.into())
    );
    assert_eq!(document["pause"]["by"], "ada", "{document}");
}

/// The answers when the scope is not paused, or unknown; and the journal of all before.
fn nothing_is_left_to_resume(stage: &Stage) {
    let not_paused = oncegate(stage, &with_reason(stage, "resume"));
    assert_eq!(not_paused.status.code(), Some(1), "{not_paused:?}");
    let unknown = oncegate(
        stage,
        &["pause", "--scope", "nobody-has-it", "--yes", "--why", "x"],
    );
    assert_eq!(unknown.status.code(), Some(78), "{unknown:?}");
    for (event, by) in [("pause", "ada"), ("resume", "bob")] {
        let entries = journal(stage, event);
        assert_eq!(entries.len(), 1, "{entries:?}");
        assert_eq!(
            (&entries[0]["by"], &entries[0]["key"]),
            (&by.into(), &stage.scope.as_str().into())
        );
    }
}

// invariant: pause-begins-nothing
#[tokio::test]
async fn a_pause_holds_every_process_until_it_is_resumed() {
    let stage = Stage::with_orders(20).await;
    let worker = RawWorker::start(|_| Answer::status(200, "", "done")).await;
    let group = unique("run");
    let url = worker.url();
    let flags = ["--handler", url.as_str()];
    let first = Acting::start(&stage, &group, "first.log", &flags).await;
    let second = Acting::start(&stage, &group, "second.log", &flags).await;
    stage.until_consumed(&group).await;
    assert_eq!(worker.asked().len(), 20);
    let scope = stage.scope.clone();

    let answer = first.post("/pause", &format!("scope={scope}&why=")).await;
    assert_eq!(answer.status, 409, "it must say why: {answer:?}");
    first
        .click("/pause", &format!("scope={scope}&why=the+bank+is+away"))
        .await;
    // One that starts while the scope is paused obeys it, too.
    let third = Acting::start(&stage, &group, "third.log", &flags).await;
    for page in [&first, &second, &third] {
        until_paused(page, true).await;
    }
    shows_its_pause(&first).await;

    let more = (20..40).map(|n| Record::new(format!(r#"{{"order_id":"A-{n}","amount":10}}"#)));
    stage
        .kafka
        .produce(&stage.topic, more.collect::<Vec<_>>())
        .await;
    until_they_lag(&[&first, &second, &third], 20).await;
    assert_eq!(worker.asked().len(), 20, "nothing begins");

    resume_by_command(&stage);
    stage.until_consumed(&group).await;
    assert_eq!(worker.asked().len(), 40);
    for page in [&first, &second, &third] {
        until_paused(page, false).await;
    }
    nothing_is_left_to_resume(&stage);
    for page in [first, second, third] {
        page.running.stop().await;
    }
}

#[tokio::test]
async fn a_message_that_keeps_failing_is_shown_with_its_reason() {
    let stage = Stage::with_orders(1).await;
    let worker = RawWorker::start(|_| {
        Answer::status(503, "oncegate-outcome: retry\r\n", "ledger <7> is locked")
    })
    .await;
    let url = worker.url();
    // The waits grow: it fails five times soon, and is not given up before this test ends.
    let fast = ["backoff.first=100ms", "backoff.most=1h", "max_attempts=254"];
    let flags: Vec<&str> = fast.iter().flat_map(|set| ["--set", *set]).collect();
    let flags = [&["--handler", url.as_str()][..], &flags].concat();
    let page = Acting::start(&stage, &unique("run"), "log", &flags).await;
    let status = until("five failures", LIMIT, async || {
        let status = page.status().await;
        let reasons = status["consumers"][0]["reasons"].to_string();
        if reasons.contains("keeps_failing") {
            Ok(status)
        } else {
            Err(status.to_string())
        }
    })
    .await;
    let consumer = &status["consumers"][0];
    assert_eq!(
        (&consumer["live"], &consumer["ready"]),
        (&true.into(), &true.into()),
        "{consumer}"
    );
    let failing = &consumer["status"]["failing"][0];
    assert!(
        failing["failed"]["times"].as_u64().unwrap() >= 5,
        "{failing}"
    );
    assert!(
        failing["key"]
            .as_str()
            .unwrap()
            .starts_with(&format!("{}:", stage.scope)),
        "{failing}"
    );
    let origin = failing["origin"].as_str().unwrap();
    assert!(origin.starts_with(&stage.topic), "{failing}");

    let summary = page.get("/").await;
    assert!(
        summary.contains(origin) && summary.contains("ledger &lt;7&gt; is locked"),
        "{summary}"
    );
    assert!(!summary.contains("<7>"), "{summary}");
    let mut shown = Command::new(program());
    shown
        .args(["status", "--url", &page.origin])
        .current_dir(stage.dir.path());
    let shown = shown.output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(
        shown.contains("failed ") && shown.contains("ledger <7> is locked"),
        "{shown}"
    );
    page.running.stop().await;
}

#[tokio::test]
async fn a_token_that_is_short_or_absent_is_refused() {
    let stage = Stage::with_orders(1).await;
    let config = stage.path("page.toml");
    let flags = |file: &str| {
        [
            "--config",
            file,
            "--handler-command",
            "true",
            "--listen",
            "127.0.0.1:0",
        ]
        .map(str::to_owned)
    };
    for (token, says) in [
        ("{ file = \"short\" }", "at least 16"),
        ("{ file = \"absent\" }", "cannot read"),
        ("\"too short\"", "at least 16"),
    ] {
        std::fs::write(stage.path("short"), "too short\n").unwrap();
        let text = format!("version = 1\n[status.operate]\ntoken = {token}\n");
        std::fs::write(&config, text).unwrap();
        let flags = flags(config.to_str().unwrap());
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut refused = stage.start(&flags);
        let code = refused.process.end_within(LIMIT).await.code();
        assert_eq!(code, Some(78), "{}", stage.log());
        let log = stage.log();
        assert!(
            log.contains("status.operate.token") && log.contains(says),
            "{token}: {log}"
        );
    }
}
