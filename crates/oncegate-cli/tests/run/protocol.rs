//! What workers on standard streams write beside their answers and instead of them, over SQLite: no
//! server runs here.

use serde_json::Value;

use super::example;
use super::raw::{Answer, RawWorker};
use super::stdin::{Feed, order};

/// A worker that notes each message in the ledger, with its attempt, and then does what the test
/// says.
fn worker(answer: &str) -> String {
    format!(
        r#"
import json, os, sys, time
out = sys.stdout.buffer
def write(text): out.write(text.encode()); out.flush()
def line(id, **more): return json.dumps({{"id": id, "outcome": "complete", **more}})
def note(message):
    with open("ledger", "a") as ledger:
        ledger.write(json.dumps([json.loads(message["payload"])["order_id"], message["attempt"], message["recovered"]]) + "\n")
{answer}
for text in sys.stdin:
    message = json.loads(text)
    if message["type"] == "message":
        note(message)
        answer(message)
    elif message["type"] == "batch":
        for one in message["messages"]: note(one)
        answer_batch(message["messages"])
"#
    )
}

/// A worker that reports that it is ready, and answers a message like this.
fn answering(answer: &str) -> String {
    worker(&format!(
        "write('{{\"type\":\"ready\",\"v\":1}}\\n')\ndef answer(message):\n    id = message['id']\n    {answer}"
    ))
}

fn three_orders(script: &str) -> Feed {
    let feed = Feed::of(&[&order("A-1"), &order("A-2"), &order("A-3")]);
    std::fs::write(feed.path("worker.py"), script).unwrap();
    feed
}

const EXEC: [&str; 2] = ["--handler-exec", "python3 worker.py"];

type Noted = (String, u32, bool);

fn noted(feed: &Feed) -> Vec<Noted> {
    let mut noted: Vec<Noted> = feed
        .ledger()
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    noted.sort();
    noted
}

fn once_each() -> Vec<Noted> {
    ["A-1", "A-2", "A-3"]
        .map(|order| (order.to_owned(), 1, false))
        .into()
}

/// Each of these ended the process, and repeated the effects of the messages that it had.
#[tokio::test]
async fn what_is_no_answer_costs_no_message() {
    let ready = r#"write('\ufeff{"type":"ready","v":1}\r\n')"#;
    let marked = worker(&format!(
        "{ready}\ndef answer(message): write('\\ufeff' + line(message['id']) + '\\r\\n')"
    ));
    let early = worker(
        "write('starting up\\n{\"type\":\"ready\",\"v\":1}\\n')\ndef answer(message): write(line(message['id']) + '\\n')",
    );
    for (what, script) in [
        ("a byte order mark", marked),
        ("a line before ready", early),
        ("blank lines", answering("write(line(id) + '\\n\\n \\n')")),
        (
            "a print",
            answering("write('charging the card\\n' + line(id) + '\\n')"),
        ),
        (
            "a log in JSON",
            answering("write(json.dumps({'level': 30, 'id': 17}) + line(id) + '\\n')"),
        ),
        (
            "several lines",
            answering("write(json.dumps(json.loads(line(id)), indent=2) + '\\n')"),
        ),
        ("no line feed", answering("write(line(id))")),
    ] {
        let feed = three_orders(&script);
        let ended = feed.run(&EXEC).await;
        assert_eq!(ended.code, Some(0), "{what}: {ended:?}");
        assert_eq!(noted(&feed), once_each(), "{what}: {ended:?}");
    }
}

/// A known outcome stays known, whatever stands beside it: each of these was unknown, and repeated
/// the effects of its messages.
// invariant: answers-in-noise
#[tokio::test]
async fn what_stands_beside_an_outcome_costs_no_effect() {
    for beside in [
        r#"write('charging [====>  ] 50%\rcharging [======] 100%\r' + line(id) + '\n')"#,
        r#"__import__('subprocess').run(['printf', 'sending...']); write(line(id) + '\n')"#,
        r#"write('WARN config={retries: 3} ' + line(id) + '\n')"#,
        r#"write('\x1b[32mok\x1b[0m ' + line(id) + '\n')"#,
        r#"out.write(b'\xff '); write(line(id) + '\n')"#,
        r#"write('42 ' + line(id) + '\n')"#,
        r#"write('[step 1 of 3: sending\n' + line(id) + '\n')"#,
        r#"write('{step 1 of 3: sending\n' + line(id) + '\n')"#,
        r#"write('{"step": \n' + line(id) + '\n')"#,
        r#"write('data: ' + line(id) + '\n\n')"#,
        r#"write('\0' + line(id) + '\n')"#,
        r#"write(json.dumps(line(id)) + '\n')"#,
        r#"write(json.dumps({'event': 'done', 'answer': json.loads(line(id))}) + '\n')"#,
        r#"write(line(id, reason={'code': 1}) + '\n')"#,
        r#"write(line(id, delay_ms=-1, reason=7) + '\n')"#,
        r#"write(json.dumps({'id': int(id), 'outcome': 'COMPLETE'}) + '\n')"#,
        r#"write(json.dumps({'level': 30, 'id': id, 'msg': 'charged'}) + '\n' + line(id) + '\n')"#,
        r#"write(json.dumps({'order': 'A', 'outcome': 'complete'}) + '\n' + line(id) + '\n')"#,
    ] {
        let feed = three_orders(&answering(beside));
        let ended = feed.run(&[&EXEC[..], &["--lease", "1s"]].concat()).await;
        assert_eq!(ended.code, Some(0), "{beside}: {ended:?}");
        assert_eq!(noted(&feed), once_each(), "{beside}: {ended:?}");
        assert!(!ended.err.contains("restarting"), "{beside}: {ended:?}");
    }
}

/// The retry that was asked for comes, however its delay is written.
#[tokio::test]
async fn a_delay_that_is_none_has_its_default() {
    for delay in ["500.0", "5e2", "\"500\"", "0.5", "-1", "{}"] {
        let answer = format!(
            r#"write('{{"id":"%s","outcome":"retry","delay_ms":{delay}}}\n' % id) if message['attempt'] == 1 else write(line(id) + '\n')"#
        );
        let feed = three_orders(&answering(&answer));
        let ended = feed.run(&[&EXEC[..], &["--lease", "1s"]].concat()).await;
        assert_eq!(ended.code, Some(0), "{delay}: {ended:?}");
        let twice: Vec<Noted> = once_each()
            .into_iter()
            .flat_map(|(order, _, _)| [(order.clone(), 1, false), (order, 2, false)])
            .collect();
        assert_eq!(noted(&feed), twice, "{delay}: {ended:?}");
        let is_wrong = ended
            .err
            .contains("a field of the worker's answer is wrong");
        assert_eq!(is_wrong, !delay.starts_with('5'), "{delay}: {ended:?}");
    }
}

#[tokio::test]
async fn answers_of_two_threads_on_one_line_count() {
    let script = worker(
        r#"write('{"type":"ready","v":1,"max_in_flight":2}\n')
waiting = []
def answer(message):
    waiting.append(line(message["id"]))
    if len(waiting) == 2:
        write("".join(waiting) + "\n\n")
        waiting.clear()
"#,
    );
    let feed = Feed::of(&[&order("A-1"), &order("A-2")]);
    std::fs::write(feed.path("worker.py"), script).unwrap();
    let ended = feed.run(&EXEC).await;
    assert_eq!((ended.code, feed.ledger().len()), (Some(0), 2), "{ended:?}");
}

#[tokio::test]
async fn a_result_that_is_no_json_is_not_kept() {
    let answer = "write(line(id, result={'fee': float('nan'), 'rate': float('-inf')}) + '\\n')";
    let feed = three_orders(&answering(answer));
    let ended = feed.run(&EXEC).await;
    assert_eq!(
        (ended.code, noted(&feed)),
        (Some(0), once_each()),
        "{ended:?}"
    );
    assert_eq!(
        ended
            .err
            .matches("the result of the message is no JSON")
            .count(),
        3,
        "{}",
        ended.err
    );
}

/// The outcome of a wrong answer is unknown. The second one in a row is no accident.
#[tokio::test]
async fn a_worker_that_answers_wrongly_stops_its_consumer() {
    for wrong in [
        "write(json.dumps({'id': id, 'outcome': 'done'}) + '\\n')",
        "write(line(id + '0') + '\\n')",
        "write(line('1') + '\\n')",
        "write(json.dumps({'outcome': 'complete'}) + '\\n')",
        "write(line(id)[:-9] + '\\n')",
    ] {
        let feed = three_orders(&answering(wrong));
        let flags = [
            "--lease",
            "1s",
            "--concurrency",
            "1",
            "--set",
            "max_attempts=10",
        ];
        let dead = ["--dead-letters", "dead.jsonl"];
        let ended = feed.run(&[&EXEC[..], &flags, &dead].concat()).await;
        assert_eq!(ended.code, Some(65), "{wrong}: {ended:?}");
        assert!(
            ended
                .err
                .contains("the worker breaks the protocol: 2 wrong answers in a row"),
            "{}",
            ended.err
        );
        assert_eq!(feed.ledger().len(), 2, "{wrong}: {ended:?}");
        assert_eq!(feed.read("dead.jsonl"), "", "{wrong}");
        std::fs::write(feed.path("worker.py"), answering("write(line(id) + '\\n')")).unwrap();
        let ended = feed.run(&[&EXEC[..], &flags, &dead].concat()).await;
        assert_eq!(ended.code, Some(0), "{wrong}: {ended:?}");
        assert_eq!(
            feed.ledger().len(),
            5,
            "each is done by the right worker: {ended:?}"
        );
        assert_eq!(feed.read("dead.jsonl"), "", "{wrong}");
    }
}

/// The wrong answers have right ones between them.
#[tokio::test]
async fn a_wrong_answer_costs_only_its_message() {
    let answer = "write(json.dumps({'id': id, 'outcome': 'done'}) + '\\n') if 'A-2' in message['payload'] and \
                  message['attempt'] == 1 else write(line(id) + '\\n')";
    let feed = three_orders(&answering(answer));
    let ended = feed.run(&[&EXEC[..], &["--lease", "1s"]].concat()).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let noted = noted(&feed);
    assert_eq!(noted.len(), 4, "{noted:?}");
    assert!(noted.contains(&("A-2".to_owned(), 2, true)), "{noted:?}");
    assert!(
        !ended.err.contains("restarting"),
        "the process goes on: {}",
        ended.err
    );
}

/// Nine of ten messages are answered, and the worker then says nothing more until its time is up.
// invariant: batch-early-answer
#[tokio::test]
async fn answers_of_a_batch_count_when_the_rest_takes_too_long() {
    let script = worker(
        r#"write('{"type":"ready","v":1,"batches":true}\n')
def answer_batch(messages):
    answered = messages if messages[0]["attempt"] > 1 else messages[:-1]
    write(json.dumps([json.loads(line(one["id"])) for one in answered]) + "\n")
"#,
    );
    let orders: Vec<String> = (0..10)
        .map(|number| order(&format!("A-{number}")))
        .collect();
    let feed = Feed::of(&orders.iter().map(String::as_str).collect::<Vec<_>>());
    std::fs::write(feed.path("worker.py"), script).unwrap();
    let flags = [
        "--batch-messages",
        "10",
        "--set",
        "batch.wait=5s",
        "--timeout",
        "3s",
        "--lease",
        "1s",
        "--json",
    ];
    let ended = feed.run(&[&EXEC[..], &flags].concat()).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let noted = noted(&feed);
    let again: Vec<&Noted> = noted
        .iter()
        .filter(|(_, attempt, _)| *attempt > 1)
        .collect();
    assert_eq!(
        (noted.len(), again.len()),
        (11, 1),
        "{noted:?}\n{}",
        ended.err
    );
    assert!(again[0].2, "it is recovered: {noted:?}");
    let answer: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(answer["consumers"][0]["handled"], 10);
}

/// The worker answers nine of ten messages, and oncegate is stopped while it waits for the tenth.
// invariant: batch-early-answer
#[tokio::test]
async fn what_is_answered_of_a_batch_counts_at_a_stop() {
    let script = worker(
        r#"write('{"type":"ready","v":1,"batches":true}\n')
def answer_batch(messages):
    answered = messages if messages[0]["recovered"] else messages[:-1]
    for one in answered: write(line(one["id"]) + "\n")
"#,
    );
    let orders: Vec<String> = (0..10)
        .map(|number| order(&format!("A-{number}")))
        .collect();
    let feed = Feed::of(&orders.iter().map(String::as_str).collect::<Vec<_>>());
    std::fs::write(feed.path("worker.py"), script).unwrap();
    let flags = [
        "--batch-messages",
        "10",
        "--set",
        "batch.wait=5s",
        "--lease",
        "1s",
    ];
    let deadline = ["--set", "consumer.billing.stop_deadline=1s"];
    let mut process = feed.start_on_input(&[&EXEC[..], &flags, &deadline].concat());
    feed.until_in_ledger(r#"["A-9", 1, false]"#).await;
    process.signal("TERM");
    let stopped = feed.end(process).await;
    assert_eq!(stopped.code, Some(130), "{stopped:?}");
    assert!(
        stopped.err.contains("line 10 is unfinished"),
        "{}",
        stopped.err
    );
    let ended = feed.run(&[&EXEC[..], &flags].concat()).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(
        feed.ledger().len(),
        11,
        "only the tenth runs again: {ended:?}"
    );
}

/// U+2028 and U+2029 end a line for Node's readline, and not in JSON.
#[tokio::test]
async fn line_separators_of_unicode_end_no_line_in_the_examples() {
    let order =
        |number| format!("{{\"order_id\":\"U-{number}\",\"note\":\"a\u{2028}b\u{2029}c\u{85}d\"}}");
    for command in [
        format!("node '{}' ledger", example("node/worker_stdio.js")),
        format!("python3 '{}' ledger", example("python/worker_stdio.py")),
    ] {
        let feed = Feed::of(&[&order(1), &order(2)]);
        let ended = feed.run(&["--handler-exec", &command]).await;
        assert_eq!(ended.code, Some(0), "{command}: {ended:?}");
        let mut ledger = feed.ledger();
        ledger.sort();
        assert_eq!(ledger, ["U-1", "U-2"], "{command}: {ended:?}");
    }
}

/// It does not say that it closes its connections, so a request could be on its way to one.
#[tokio::test]
async fn a_worker_that_closes_its_connections_loses_no_request() {
    const ORDERS: usize = 1_000;
    let orders: Vec<String> = (0..ORDERS)
        .map(|number| order(&format!("A-{number}")))
        .collect();
    let feed = Feed::of(&orders.iter().map(String::as_str).collect::<Vec<_>>());
    let worker = RawWorker::start(|_| {
        Answer::Bytes("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}".to_owned())
    })
    .await;
    let ended = feed
        .run(&[
            "--handler",
            &worker.url(),
            "--concurrency",
            "64",
            "--lease",
            "5s",
        ])
        .await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let asked = worker.asked();
    assert!(
        asked.iter().all(|asked| asked.attempt() == 1),
        "{}",
        ended.err
    );
    assert_eq!(asked.len(), ORDERS, "{}", ended.err);
}
