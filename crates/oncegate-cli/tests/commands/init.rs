//! `oncegate init`: what it writes is correct, runs, and replaces nothing.

use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::{Answer, command, oncegate};

async fn initialised(flags: &[&str]) -> (TempDir, Answer) {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("billing");
    let answer = oncegate(&[&["init", folder.to_str().unwrap()], flags].concat(), b"").await;
    (dir, answer)
}

/// Runs `oncegate` in the folder.
async fn within(folder: &Path, arguments: &[&str], input: Option<&str>) -> Answer {
    let mut command = command(arguments);
    let input = input.map(|name| std::fs::File::open(folder.join(name)).unwrap());
    command
        .current_dir(folder)
        .stdin(input.map_or_else(Stdio::null, Stdio::from));
    let output = tokio::time::timeout(super::LIMIT, command.output())
        .await
        .unwrap()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Answer {
        code: output.status.code(),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

/// Builds the worker as the answer of `init` says.
fn build(language: &str, folder: &Path) {
    match language {
        "go" => call(&["go", "build", "-o", "worker", "worker.go"], folder),
        "rust" => build_with_cargo(folder),
        _ => {}
    }
}

fn call(arguments: &[&str], folder: &Path) {
    let mut command = Command::new(arguments[0]);
    command
        .args(&arguments[1..])
        .current_dir(folder)
        .env_remove("CARGO_TARGET_DIR");
    assert!(
        command
            .status()
            .expect("the language is installed")
            .success(),
        "{arguments:?}"
    );
}

/// Always in the same folder, so that its dependencies are compiled once on a machine, and with the
/// versions of this workspace, which are on this machine.
fn build_with_cargo(folder: &Path) {
    let at = Path::new(env!("CARGO_TARGET_TMPDIR")).join("worker-in-rust");
    std::fs::create_dir_all(at.join("src")).unwrap();
    std::fs::copy(folder.join("src/main.rs"), at.join("src/main.rs")).unwrap();
    // It is below this workspace, and no member of it.
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    std::fs::write(at.join("Cargo.toml"), manifest + "\n[workspace]\n").unwrap();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::copy(workspace.join("Cargo.lock"), at.join("Cargo.lock")).unwrap();
    call(
        &["cargo", "build", "--release", "--offline", "--quiet"],
        &at,
    );
    std::fs::create_dir_all(folder.join("target/release")).unwrap();
    std::fs::copy(
        at.join("target/release/worker"),
        folder.join("target/release/worker"),
    )
    .unwrap();
}

/// The worker in this language handles the messages that come with it.
async fn runs(language: &str) {
    let (dir, answer) = initialised(&["--language", language]).await;
    assert!(answer.ended(0).out.contains(PROVE), "{answer:?}");
    let folder = dir.path().join("billing");
    build(language, &folder);
    within(&folder, &["check"], None)
        .await
        .ended(0)
        .line("oncegate.toml is fine.");
    let run = ["run", "--config", "oncegate.toml"];
    let first = within(&folder, &run, Some("orders.jsonl")).await;
    assert_eq!(
        first.ended(0).out,
        "billing: 4 messages, 1 handled, 2 duplicates, 1 dead letter\n"
    );
    let charges = std::fs::read_to_string(folder.join("charges.txt")).unwrap();
    assert_eq!(charges.lines().count(), 1, "{charges}");
    assert!(charges.contains("A-1"), "{charges}");
    let second = within(&folder, &run, Some("orders.jsonl")).await;
    assert!(
        second.ended(0).out.contains("0 handled, 3 duplicates"),
        "{}",
        second.out
    );
    assert_eq!(
        std::fs::read_to_string(folder.join("charges.txt")).unwrap(),
        charges
    );
    is_proved(&folder).await;
}

/// What `init` names as next, `worker-test` and `prove`, finds nothing wrong with its own worker.
async fn is_proved(folder: &Path) {
    let samples = std::fs::read_to_string(folder.join("samples.jsonl")).unwrap();
    std::fs::write(folder.join("one.json"), samples.lines().next().unwrap()).unwrap();
    let test = ["worker-test", "--config", "oncegate.toml", "one.json"];
    within(folder, &test, None).await.ended(0);
    let mut trial: Vec<&str> = PROVE.split(' ').skip(1).collect();
    trial.extend(["--faults", "kill-after-effect,redelivery", "--rounds", "3"]);
    let ended = within(folder, &trial, None).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

/// The command that `init` names.
const PROVE: &str = "oncegate prove --config oncegate.toml --samples samples.jsonl";

#[tokio::test]
async fn a_worker_in_python_runs() {
    runs("python").await;
}

#[tokio::test]
async fn a_worker_in_node_runs() {
    runs("node").await;
}

#[tokio::test]
async fn a_worker_in_go_runs() {
    runs("go").await;
}

#[tokio::test]
async fn a_worker_in_rust_runs() {
    runs("rust").await;
}

#[tokio::test]
async fn a_worker_in_bash_runs() {
    runs("bash").await;
}

/// An argument of a program has a limit of 128 KiB, and for curl one that begins with @ is a file.
#[tokio::test]
async fn a_worker_in_bash_passes_on_whatever_is_in_an_order() {
    let (dir, answer) = initialised(&["--language", "bash"]).await;
    answer.ended(0);
    let folder = dir.path().join("billing");
    let large = format!(r#"{{"order_id":"A-1","note":"{}"}}"#, "n".repeat(200_000));
    for order in [large.as_str(), "@worker.sh"] {
        let bank = TcpListener::bind("127.0.0.1:0").await.unwrap();
        std::fs::write(folder.join("order"), order).unwrap();
        let mut worker = tokio::process::Command::new("bash");
        worker.arg("worker.sh").current_dir(&folder);
        let url = format!("http://{}", bank.local_addr().unwrap());
        worker.env("ONCEGATE_DOWNSTREAM", url);
        worker.env("ONCEGATE_IDEMPOTENCY_KEY", "key");
        worker.stdin(std::fs::File::open(folder.join("order")).unwrap());
        let served = async {
            let (mut stream, _) = bank.accept().await.unwrap();
            let mut request = Vec::new();
            let mut is_continued = false;
            while !request.ends_with(order.as_bytes()) {
                assert!(stream.read_buf(&mut request).await.unwrap() > 0);
                // curl asks before it sends what is large.
                if !is_continued && request.ends_with(b"\r\n\r\n") {
                    let go_on = b"HTTP/1.1 100 Continue\r\n\r\n";
                    stream.write_all(go_on).await.unwrap();
                    is_continued = true;
                }
            }
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
            stream.write_all(answer).await.unwrap();
        };
        let ended = tokio::join!(worker.output(), served).0.unwrap();
        assert!(ended.status.success(), "{ended:?}");
    }
}

/// The effect has happened whatever becomes of the result, and what the user's code prints is no
/// answer.
async fn survives(language: &str, file: &str, result: &str, changes: &[&str]) {
    for change in changes {
        let (dir, answer) = initialised(&["--language", language]).await;
        answer.ended(0);
        let folder = dir.path().join("billing");
        let worker = std::fs::read_to_string(folder.join(file)).unwrap();
        assert_eq!(worker.matches(result).count(), 1, "{worker}");
        std::fs::write(folder.join(file), worker.replace(result, change)).unwrap();
        build(language, &folder);
        let run = ["run", "--config", "oncegate.toml"];
        let ended = within(&folder, &run, Some("orders.jsonl")).await;
        assert_eq!(ended.code, Some(0), "{change}: {ended:?}");
        assert_eq!(
            ended.out, "billing: 4 messages, 1 handled, 2 duplicates, 1 dead letter\n",
            "{change}"
        );
        let charges = std::fs::read_to_string(folder.join("charges.txt")).unwrap();
        assert_eq!(
            charges.lines().count(),
            1,
            "{change}: {charges}\n{}",
            ended.err
        );
    }
}

#[tokio::test]
async fn a_worker_in_python_charges_once_whatever_it_returns() {
    let result = "    return {\"charged\": order[\"order_id\"]}\n";
    let deep =
        "    result = []\n    for _ in range(100_000): result = [result]\n    return result\n";
    let changes = [
        "    print('charging', flush=True)\n    return 1\n",
        "    import subprocess; subprocess.run(['echo', 'charging'])\n    return 1\n",
        "    import datetime; return datetime.datetime.now()\n",
        "    import decimal; return {'amount': decimal.Decimal('10.50')}\n",
        "    return float('nan')\n",
        "    result = []; result.append(result); return result\n",
        deep,
    ];
    survives("python", "worker.py", result, &changes).await;
}

#[tokio::test]
async fn a_worker_in_node_charges_once_whatever_it_returns() {
    let changes = [
        "console.log('charging'); return 1;",
        "return { amount: 1n };",
        "const result = []; result.push(result); return result;",
        "let result = []; for (let n = 0; n < 100_000; n++) result = [result]; return result;",
        "return { toJSON() { throw new Error('no'); } };",
    ];
    survives(
        "node",
        "worker.js",
        "return { charged: order.order_id };",
        &changes,
    )
    .await;
}

#[tokio::test]
async fn a_worker_in_go_charges_once_whatever_it_returns() {
    let changes = [
        "func() any { fmt.Println(`charging`); return 1 }()",
        "map[string]any{`fee`: func() {}}",
    ];
    survives(
        "go",
        "worker.go",
        "map[string]string{\"charged\": o.OrderID}",
        &changes,
    )
    .await;
}

/// U+2028 and U+2029 end a line for some readers, and not in JSON.
#[tokio::test]
async fn line_separators_of_unicode_end_no_line() {
    for language in ["python", "node", "go"] {
        let (dir, answer) = initialised(&["--language", language]).await;
        answer.ended(0);
        let folder = dir.path().join("billing");
        build(language, &folder);
        let notes = [
            "one\u{2028}two",
            "one\u{2029}two",
            "one\u{85}two",
            "\u{2028}",
        ]
        .iter()
        .zip(1..);
        let order = |(note, number): (&&str, u32)| {
            format!("{{\"order_id\":\"U-{number}\",\"amount\":1,\"note\":\"{note}\"}}\n")
        };
        std::fs::write(
            folder.join("orders.jsonl"),
            notes.map(order).collect::<String>(),
        )
        .unwrap();
        let run = ["run", "--config", "oncegate.toml"];
        let ended = within(&folder, &run, Some("orders.jsonl")).await;
        assert_eq!(
            ended.ended(0).out,
            "billing: 4 messages, 4 handled, 0 duplicates\n",
            "{language}"
        );
    }
}

#[tokio::test]
async fn every_source_gets_a_configuration_without_errors() {
    let kafka = [
        "--source",
        "kafka",
        "--brokers",
        "a:9092, b:9092",
        "--topic",
        "sales",
        "--scope",
        "a.b",
    ];
    let sqs = [
        "--source",
        "sqs",
        "--queue",
        "sales",
        "--endpoint-url",
        "http://127.0.0.1:9324",
    ];
    let amqp = [
        "--source",
        "amqp",
        "--queue",
        "sales",
        "--amqp-url",
        "amqp://shop@a:5672/shop",
    ];
    let stdin = ["--source", "stdin", "--store", "sqlite:it's \"here\".db"];
    let all: [(&[&str], &[&str]); 4] = [
        (
            &kafka,
            &["a:9092", "b:9092", "sales.dead", "redis://localhost:6379"],
        ),
        (&sqs, &["sales", "http://127.0.0.1:9324", "orders-dead"]),
        (
            &amqp,
            &["sales", "a:5672/shop", "orders-dead", "RABBITMQ_PASSWORD"],
        ),
        (&stdin, &["it's", "here", "dead.jsonl"]),
    ];
    for (flags, needles) in all {
        let (dir, answer) = initialised(&[&["--language", "python"], flags].concat()).await;
        assert!(answer.ended(0).out.contains("next:"), "{answer:?}");
        let folder = dir.path().join("billing");
        within(&folder, &["check"], None)
            .await
            .ended(0)
            .line("oncegate.toml is fine.");
        let explained = within(&folder, &["check", "--explain"], None).await;
        for needle in needles {
            assert!(
                explained.out.contains(needle),
                "{needle}: {}",
                explained.out
            );
        }
    }
}

#[tokio::test]
async fn nothing_is_overwritten_and_a_dry_run_writes_nothing() {
    let (dir, answer) = initialised(&["--language", "bash", "--dry-run"]).await;
    assert!(answer.ended(0).out.contains("version = 1"), "{answer:?}");
    let folder = dir.path().join("billing");
    assert!(!folder.exists());
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("worker.sh"), "mine").unwrap();
    let answer = oncegate(
        &["init", folder.to_str().unwrap(), "--language", "bash"],
        b"",
    )
    .await;
    answer
        .ended(1)
        .says("worker.sh exists; nothing was written");
    assert_eq!(
        std::fs::read_to_string(folder.join("worker.sh")).unwrap(),
        "mine"
    );
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
}

#[tokio::test]
async fn the_json_document_lists_files_and_commands() {
    let of_go = (
        "go",
        ["worker.go"].as_slice(),
        "go build -o worker worker.go",
    );
    let of_rust = (
        "rust",
        ["Cargo.toml", "src/main.rs"].as_slice(),
        "cargo build --release",
    );
    for (language, worker, build) in [of_go, of_rust] {
        let (dir, answer) =
            initialised(&["--language", language, "--source", "kafka", "--json"]).await;
        let document = answer.ended(0).json();
        assert_eq!(
            (&document["schema"], &document["done"]),
            (&"oncegate.init/1".into(), &true.into())
        );
        let files = document["files"].as_array().unwrap();
        assert_eq!(files.len(), 3 + worker.len(), "{files:?}");
        for file in files {
            assert!(
                dir.path()
                    .join("billing")
                    .join(file.as_str().unwrap())
                    .is_file(),
                "{file}"
            );
        }
        assert!(
            worker.iter().all(|name| files.contains(&(*name).into())),
            "{files:?}"
        );
        assert_eq!(document["next"][0], build);
    }
}

#[tokio::test]
async fn a_language_without_a_template_is_told_of_http() {
    let answer = super::oncegate(&["init", "--language", "java"], b"").await;
    answer
        .ended(2)
        .says("http://127.0.0.1:8080/handle")
        .says("python, node");
}
