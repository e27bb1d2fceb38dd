//! Right workers of every kind, the reports, and mistakes in the arguments.

mod limits;

use std::path::Path;
use std::process::Stdio;

use oncegate_testing::Fault;
use oncegate_testkit::{LoopbackPort, Process, process};
use serde_json::json;
use tokio::process::Command;

use super::{LIMIT, RIGHT_KEY, Stage, batch_flags, worker};

/// The workers in which nothing must be found.
const RIGHT: [(&str, &str); 6] = [
    ("worker.py", "right"),
    ("worker.js", "right"),
    ("worker.js", "twoSteps"),
    ("batches.py", "right"),
    ("batches.py", "one_after_the_other"),
    ("batches.py", "whole_batch_again_with_keys"),
];

async fn is_clean(flags: &[&str]) {
    let stage = Stage::new();
    let proved = stage.prove(RIGHT_KEY, &[flags, &["--json"]].concat()).await;
    let document = proved.ended(0).json();
    assert_eq!(
        document["passed"],
        json!(true),
        "seed {}: {document:#}",
        stage.seed
    );
    assert!(
        document["effects"].as_u64() >= Some(5),
        "seed {}: {document:#}",
        stage.seed
    );
}

/// How many rounds there are with all faults, and with a part of them: each by itself, and some
/// with several.
const ROUNDS: &str = "26";
const ROUNDS_OF_A_PART: &str = "9";

/// Every day, each worker is tried with a third of the faults, so that each fault meets two of
/// them. `ONCEGATE_PROVE_RUNS=n` sets how many runs there are, each with another seed and all
/// faults. Each takes some 10 s.
// invariant: right-handlers-clean
#[tokio::test]
async fn nothing_is_found_in_right_workers_in_python_and_node() {
    let given = std::env::var("ONCEGATE_PROVE_RUNS").ok();
    let runs = given
        .as_ref()
        .map_or(RIGHT.len(), |runs| runs.parse().unwrap());
    for (run, (script, name)) in (1..=runs).zip(RIGHT.into_iter().cycle()) {
        let part = Fault::ALL
            .iter()
            .skip(run % 3)
            .step_by(3)
            .map(|fault| fault.as_str());
        let part = part.collect::<Vec<_>>().join(",");
        let faults = match given {
            None => vec!["--rounds", ROUNDS_OF_A_PART, "--faults", &part],
            Some(_) => vec!["--rounds", ROUNDS],
        };
        println!("run {run} of {runs}: {script} {name} {faults:?}");
        let program = worker(script, name);
        is_clean(
            &[
                &["--handler-exec", &program],
                &faults[..],
                batch_flags(script),
            ]
            .concat(),
        )
        .await;
    }
}

// invariant: right-handlers-clean
#[tokio::test]
async fn a_command_for_each_message_is_tried_too() {
    let faults = [
        "--faults",
        "kill-after-effect,refused,answer-lost,two-consumers",
        "--rounds",
        "5",
    ];
    is_clean(
        &[
            &["--handler-command", &worker("command.py", "")][..],
            &faults,
        ]
        .concat(),
    )
    .await;
}

// invariant: right-handlers-clean, planted-bugs-found
#[tokio::test]
async fn a_worker_behind_http_is_tried_too() {
    let stage = Stage::new();
    let cases: [(&str, &[&str], i32); 3] = [
        ("right", &[], 0),
        ("right", &["--batch-messages", "3"], 0),
        ("no_downstream_key", &[], 1),
    ];
    for (bug, batches, code) in cases {
        let port = LoopbackPort::reserve();
        let downstream = LoopbackPort::reserve();
        let listen = format!("127.0.0.1:{}", downstream.number());
        let mut command = process::bound_to_parent("python3", "KILL");
        let script = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/prove/workers/worker_http.py"
        );
        command.args([script, &port.number().to_string(), bug]);
        command.env("ONCEGATE_DOWNSTREAM", format!("http://{listen}"));
        let _worker =
            Process::spawn_logged("worker", command, &stage.dir.path().join("worker.log"));
        let url = format!("http://127.0.0.1:{}/", port.number());
        drop(downstream);
        let flags = ["--handler", &url, "--listen", &listen, "--rounds", "4"];
        let faults = ["--faults", "answer-lost,refused,two-consumers"];
        let proved = stage
            .prove(RIGHT_KEY, &[&flags[..], &faults, batches].concat())
            .await;
        proved.ended(code);
        let found = proved.defects().contains(&"no-downstream-key");
        assert_eq!(found, code == 1, "seed {}: {}", stage.seed, proved.out);
    }
}

/// Has headless Chromium open the report, and returns the document that it shows.
/// ONCEGATE_SCREENSHOT names a file for a picture of it.
async fn in_chromium(stage: &Stage) -> String {
    let profile = tempfile::tempdir().unwrap();
    let open = async |option: &str| {
        let mut command = Command::new("chromium");
        command.args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ]);
        command.args(["--hide-scrollbars", "--window-size=1280,900", option]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        command.arg(format!(
            "file://{}",
            stage.dir.path().join("out/prove/report.html").display()
        ));
        command
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let ended = tokio::time::timeout(LIMIT, command.output())
            .await
            .expect("Chromium ends");
        let ended = ended.expect("Chromium is there: scripts/fetch-servers installs it");
        assert!(
            ended.status.success(),
            "{}",
            String::from_utf8_lossy(&ended.stderr)
        );
        String::from_utf8(ended.stdout).unwrap()
    };
    if let Ok(path) = std::env::var("ONCEGATE_SCREENSHOT") {
        open(&format!("--screenshot={path}")).await;
    }
    open("--dump-dom").await
}

// invariant: report-schema
#[tokio::test]
async fn the_reports_have_the_finding_and_repeat_it() {
    let stage = Stage::new();
    let program = worker("worker.py", "no_downstream_key");
    let flags = [
        "--handler-exec",
        &program,
        "--faults",
        "answer-lost",
        "--rounds",
        "2",
        "--report",
        "out/prove",
    ];
    let proved = stage.prove(RIGHT_KEY, &flags).await;
    assert_eq!(
        proved.ended(1).defects(),
        ["no-downstream-key"],
        "seed {}: {}",
        stage.seed,
        proved.out
    );
    let document: serde_json::Value =
        serde_json::from_str(&stage.read("out/prove/report.json")).unwrap();
    fits_the_schema(&document);
    let finding = &document["findings"][0];
    assert_eq!(
        (&finding["defect"], &finding["after"]),
        (&json!("no-downstream-key"), &json!(["answer-lost"]))
    );
    let shown: Vec<&serde_json::Value> = finding["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|place| &finding["timeline"][place.as_u64().unwrap() as usize])
        .collect();
    assert!(
        shown.len() >= 2 && shown.iter().all(|event| event["event"] == "performed"),
        "{shown:?}"
    );
    let repeat = finding["repeat"].as_str().unwrap();
    assert_eq!(
        failures_of(&stage.dir.path().join("out/prove/junit.xml")).await,
        [format!("no-downstream-key {repeat}")]
    );
    let html = stage.read("out/prove/report.html");
    is_shown_as_written(&html, &in_chromium(&stage).await);
    let junit = stage.read("out/prove/junit.xml");
    for text in [&html, &junit, &proved.out, &proved.err] {
        assert!(!text.contains("o-100"), "something of a payload: {text}");
    }
    // The round that is named shows the same, and only that round is played.
    let round = finding["round"].to_string();
    let flags = [
        "--handler-exec",
        &program,
        "--faults",
        "answer-lost",
        "--round",
        &round,
        "--json",
    ];
    let again = stage.prove(RIGHT_KEY, &flags).await;
    let document = again.ended(1).json();
    fits_the_schema(&document);
    assert_eq!(
        (&document["rounds"], &document["findings"][0]["round"]),
        (&json!(2), &finding["round"])
    );
}

/// The page needs nothing else, and the browser understands the picture as it was written.
fn is_shown_as_written(html: &str, shown: &str) {
    assert!(
        html.contains("<svg") && html.contains("no-downstream-key"),
        "{html}"
    );
    for elsewhere in ["src=", "href=", "url(", "@import", "<script"] {
        assert!(!html.contains(elsewhere), "{elsewhere} in the file");
    }
    for part in ["<circle ", "class=\"effect marked\"", "</section>"] {
        assert_eq!(
            shown.matches(part).count(),
            html.matches(part).count(),
            "{part} in {shown}"
        );
    }
    assert!(
        shown.matches("class=\"effect marked\"").count() >= 2,
        "{shown}"
    );
}

/// The document is what docs/prove.schema.json says, and has no member that it does not name.
fn fits_the_schema(document: &serde_json::Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/prove.schema.json");
    let schema = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let schema = jsonschema::validator_for(&closed(schema)).expect("it is a schema");
    let errors: Vec<String> = schema
        .iter_errors(document)
        .map(|error| error.to_string())
        .collect();
    assert!(errors.is_empty(), "{errors:?} in {document}");
}

/// The schema without what later releases may add.
fn closed(mut schema: serde_json::Value) -> serde_json::Value {
    match &mut schema {
        serde_json::Value::Object(members) => {
            if members.contains_key("properties") {
                members.insert("unevaluatedProperties".to_owned(), json!(false));
            }
            // The kinds of events share what each event has.
            members
                .iter_mut()
                .filter(|(name, _)| *name != "oneOf")
                .for_each(|(_, member)| *member = closed(member.take()));
        }
        serde_json::Value::Array(items) => items
            .iter_mut()
            .for_each(|item| *item = closed(item.take())),
        _ => {}
    }
    schema
}

/// The failures of a JUnit file, each with the command that repeats it, as another program's XML
/// parser reads them; each kind of defect has a case.
async fn failures_of(junit: &Path) -> Vec<String> {
    const FAILED: &str = r#"
failed = [(case, case.find("failure")) for case in cases if case.find("failure") is not None]
assert len(failed) == int(suites.get("failures"))
for case, failure in failed:
    assert failure.get("type") == case.get("name") and failure.get("message")
    print(case.get("name"), failure.text.split("repeat: ")[1].strip())
"#;
    read(junit, FAILED).await
}

/// The faults that were skipped, each with a reason.
async fn skipped_of(junit: &Path) -> Vec<String> {
    const SKIPPED: &str = r#"
skipped = [(case, case.find("skipped")) for case in cases if case.find("skipped") is not None]
assert len(skipped) == int(suites.find("testsuite").get("skipped"))
for case, reason in skipped:
    assert reason.get("message") and case.get("classname") == "oncegate.prove.faults"
    print(case.get("name"))
"#;
    read(junit, SKIPPED).await
}

/// The lines that this program in Python prints of the test cases.
async fn read(junit: &Path, program: &str) -> Vec<String> {
    const CASES: &str = r#"
import sys, xml.etree.ElementTree as tree
suites = tree.parse(sys.argv[1]).getroot()
cases = suites.findall("testsuite/testcase")
assert suites.tag == "testsuites" and len(cases) == int(suites.get("tests")), len(cases)
assert len({case.get("name") for case in cases}) == len(cases)
"#;
    let mut command = Command::new("python3");
    command
        .args(["-c", &format!("{CASES}{program}")])
        .arg(junit)
        .kill_on_drop(true)
        .stderr(Stdio::piped());
    let ended = tokio::time::timeout(LIMIT, command.output())
        .await
        .expect("it ends")
        .unwrap();
    assert!(
        ended.status.success(),
        "{}",
        String::from_utf8_lossy(&ended.stderr)
    );
    String::from_utf8(ended.stdout)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}

/// 40 orders.
fn many_orders() -> String {
    let order = |id: u32| {
        format!(
            "{{\"order_id\":\"o-{id:04}\",\"amount\":{id},\"currency\":\"EUR\",\"sent_at\":\"{id}\"}}\n"
        )
    };
    (1..=40).map(order).collect()
}

// invariant: planted-bugs-found
#[tokio::test]
async fn a_slow_handler_does_not_use_up_the_time_of_a_trial() {
    let stage = Stage::new();
    std::fs::write(stage.dir.path().join("orders.jsonl"), many_orders()).unwrap();
    let program = worker("worker.py", "slow_no_downstream_key");
    let flags = [
        "--handler-exec",
        &program,
        "--seconds",
        "12",
        "--faults",
        "kill-after-effect,answer-lost",
    ];
    let proved = stage.prove("order_id", &flags).await;
    // A machine that is too busy for a single fault says so; the worker never passes.
    match proved.code {
        Some(3) => assert!(
            proved.err.contains("faults were not tried"),
            "{}",
            proved.err
        ),
        _ => assert_eq!(
            proved.ended(1).defects(),
            ["no-downstream-key"],
            "{}",
            proved.err
        ),
    }
}
