//! `oncegate check`, the schemas of `oncegate generate`, and the documentation of the settings.

use std::path::{Path, PathBuf};

use super::{oncegate, oncegate_with};

fn docs(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs")
        .join(name)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The example that the documentation begins with.
fn documented() -> String {
    let text = read(&docs("CONFIGURATION.md"));
    let example = text
        .split("```toml\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    example.expect("an example in TOML").to_owned()
}

pub(super) struct File {
    _dir: tempfile::TempDir,
    pub(super) path: String,
}

pub(super) fn file(text: &str) -> File {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oncegate.toml");
    std::fs::write(&path, text).unwrap();
    File {
        path: path.to_str().unwrap().to_owned(),
        _dir: dir,
    }
}

#[tokio::test]
async fn the_names_that_share_a_route_are_shown() {
    let of = |topics: &str, route: &str| {
        file(&format!(
            "[store]\nurl = \"sqlite:records.db\"\n[consumer.billing]\nkey = \"order_id\"\n{route}\n\
             source.kafka = {{ brokers = \"b:9092\", topics = {topics} }}\n\
             dead_letters = {{ kafka = \"dead\" }}\nhandler = {{ command = \"true\" }}\n"
        ))
    };
    let two = "[\"orders\", \"eu.orders\"]";
    let shown = oncegate(
        &["check", "--config", &of(two, "route = \"orders\"").path],
        b"",
    )
    .await;
    shown.ended(0);
    let line = "billing: messages of orders, eu.orders have the keys of the route orders";
    assert!(shown.out.contains(line), "{}", shown.out);
    let json = oncegate(
        &[
            "check",
            "--config",
            &of(two, "route = { \"eu.orders\" = \"orders\" }").path,
            "--json",
        ],
        b"",
    )
    .await;
    let expected = serde_json::json!([{"consumer": "billing", "route": "orders", "names": ["orders", "eu.orders"]}]);
    assert_eq!(json.ended(0).json()["routes"], expected);
    let none = oncegate(&["check", "--config", &of(two, "").path, "--json"], b"")
        .await
        .ended(0)
        .json();
    assert!(none.get("routes").is_none(), "{none}");

    let stranger = oncegate(
        &[
            "check",
            "--config",
            &of(two, "route = { \"us.orders\" = \"orders\" }").path,
        ],
        b"",
    )
    .await;
    assert!(
        stranger
            .ended(0)
            .err
            .contains("no topic or queue us.orders"),
        "{}",
        stranger.err
    );
    for (route, words) in [
        ("route = 7", "it must be a route"),
        ("route = \"\"", "route"),
        ("route = { a = 1 }", "it must be a route"),
    ] {
        let refused = oncegate(&["check", "--config", &of(two, route).path], b"").await;
        assert!(
            refused.ended(1).err.contains(words),
            "{route}: {}",
            refused.err
        );
    }
}

/// A file may be checked on another machine; `doctor` is for the one that runs it.
#[tokio::test]
async fn a_worker_that_is_not_there_is_named() {
    let of = |handler: &str| {
        file(&format!(
            "[store]\nurl = \"sqlite:records.db\"\n[consumer.billing]\nkey = \"order_id\"\n\
             dead_letters = {{ file = \"dead.jsonl\" }}\nsource = {{ stdin = {{}} }}\nhandler = {{ {handler} }}\n"
        ))
    };
    for (handler, named) in [
        (
            "exec = \"python3 forgotten.py\"",
            "there is no file \"forgotten.py\"",
        ),
        (
            "command = [\"no-such-program\"]",
            "there is no program \"no-such-program\" in PATH",
        ),
    ] {
        let file = of(handler);
        let warned = oncegate(&["check", "--config", &file.path], b"").await;
        assert!(warned.ended(0).err.contains(named), "{}", warned.err);
        assert!(
            warned.err.contains("handler.") && warned.err.contains("warning"),
            "{}",
            warned.err
        );
        let refused = oncegate(&["doctor", "--config", &file.path], b"").await;
        assert!(refused.ended(1).out.contains(named), "{}", refused.out);
    }
}

#[tokio::test]
async fn the_documented_examples_are_fine_and_fit_the_schema() {
    let example = file(&documented());
    let answer = oncegate(&["check", "--config", &example.path, "--strict"], b"").await;
    assert_eq!(
        (
            answer.ended(0).err.as_str(),
            answer.line(&example.path).ends_with("is fine.")
        ),
        ("", true)
    );

    let schema: serde_json::Value =
        serde_json::from_str(&read(&docs("oncegate.schema.json"))).unwrap();
    let schema = jsonschema::validator_for(&schema).expect("it is a schema");
    let workers = docs("../examples/workers/oncegate.toml");
    oncegate(
        &["check", "--config", workers.to_str().unwrap(), "--strict"],
        b"",
    )
    .await
    .ended(0);
    for text in [documented(), read(&workers)] {
        let instance: serde_json::Value = toml::from_str(&text).unwrap();
        let errors: Vec<String> = schema
            .iter_errors(&instance)
            .map(|error| error.to_string())
            .collect();
        assert!(errors.is_empty(), "{errors:?}");
    }
    for wrong in [
        serde_json::json!({ "defaults": { "lease": 30 } }),
        serde_json::json!({ "defaults": { "leese": "30s" } }),
        serde_json::json!({ "consumer": { "billing": { "strictness": "maybe" } } }),
        serde_json::json!({ "consumer": { "billing": { "key": { "jsn": ["id"] } } } }),
    ] {
        assert!(!schema.is_valid(&wrong), "{wrong}");
    }
}

#[tokio::test]
async fn the_committed_schema_and_table_are_those_of_the_code() {
    let schema = oncegate(&["generate", "schema", "config"], b"").await;
    let hint = "run `oncegate generate schema config > docs/oncegate.schema.json`";
    assert_eq!(
        read(&docs("oncegate.schema.json")),
        schema.ended(0).out,
        "{hint}"
    );
    let prove = oncegate(&["generate", "schema", "prove"], b"").await;
    let hint = "run `oncegate generate schema prove > docs/prove.schema.json`";
    assert_eq!(
        read(&docs("prove.schema.json")),
        prove.ended(0).out,
        "{hint}"
    );
    let table = oncegate(&["generate", "settings"], b"").await;
    let text = read(&docs("CONFIGURATION.md"));
    let documented = text
        .split("<!-- settings -->\n")
        .nth(1)
        .and_then(|rest| rest.split("<!-- end").next());
    assert_eq!(
        documented,
        Some(table.ended(0).out.as_str()),
        "put the output of `oncegate generate settings` there"
    );
}

#[tokio::test]
async fn mistakes_are_shown_with_their_lines_and_counted() {
    let wrong = file(
        &documented()
            .replace("lease = \"30s\"", "leese = 30")
            .replace("\"7d\"", "7"),
    );
    let answer = oncegate(&["check", "--config", &wrong.path], b"").await;
    answer.ended(1).says("did you mean `lease`?").says("^^^^^");
    assert!(
        answer.out.contains("has 2 errors and 0 warnings"),
        "{}",
        answer.out
    );
    let document = oncegate(&["check", "--config", &wrong.path, "--json"], b"")
        .await
        .ended(1)
        .json();
    assert_eq!(
        (&document["schema"], &document["ok"]),
        (&"oncegate.check/1".into(), &false.into())
    );
    let lines: Vec<_> = document["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["line"].as_u64())
        .collect();
    assert_eq!(lines, [Some(9), Some(10)]);
    assert_eq!(document["findings"][0]["path"], "defaults.leese");
    oncegate(&["check", "--config", "/no/such/file.toml"], b"")
        .await
        .ended(78)
        .says("/no/such/file.toml");
}

#[tokio::test]
async fn every_value_is_explained_with_its_origin() {
    let example = file(&documented());
    let environment = [("ONCEGATE_CONSUMER__BILLING__LEASE", "60s")];
    let answer = oncegate_with(
        &["check", "--config", &example.path, "--explain"],
        &environment,
        b"",
    )
    .await;
    let lease = answer.ended(0).line("consumer.billing.lease");
    assert_eq!(
        lease,
        "consumer.billing.lease = \"60s\" # ONCEGATE_CONSUMER__BILLING__LEASE"
    );
    let retention = answer.line("consumer.billing.retention");
    assert_eq!(
        retention,
        format!("consumer.billing.retention = \"7d\" # {}:10", example.path)
    );
    assert_eq!(
        answer.line("consumer.billing.concurrency"),
        "consumer.billing.concurrency = 64 # default"
    );
}

#[tokio::test]
async fn a_secret_that_stands_there_is_never_shown() {
    let text = documented().replace("{ file = \"/run/secrets/redis\" }", "\"hunter2\"");
    let literal = file(&text);
    for (arguments, code) in [
        (&["--explain"][..], 0),
        (&["--strict"], 1),
        (&["--json", "--explain"], 0),
    ] {
        let answer = oncegate(
            &[&["check", "--config", literal.path.as_str()], arguments].concat(),
            b"",
        )
        .await;
        answer.ended(code);
        assert!(
            !answer.out.contains("hunter2") && !answer.err.contains("hunter2"),
            "{answer:?}"
        );
    }
}

/// A configuration with this key and topic.
fn keyed(key: &str, topic: &str) -> File {
    file(&format!(
        "[store]\nurl = \"sqlite:records.db\"\n[consumer.billing]\nkey = {key}\n\
         source.kafka = {{ brokers = \"b:9092\", topics = [{topic:?}] }}\n\
         dead_letters = {{ kafka = \"dead\" }}\nhandler = {{ command = \"true\" }}\n"
    ))
}

#[tokio::test]
async fn paths_and_topics_of_other_notations_are_refused_with_the_way() {
    for (key, topic, words) in [
        ("{ json = [\"items[0].sku\"] }", "orders", "`items.0.sku`"),
        ("\"$.order_id\"", "orders", "`order_id`"),
        (
            "\"order_id\"",
            "^orders\\..*",
            "patterns of topics are not supported",
        ),
    ] {
        let settings = keyed(key, topic);
        let answer = oncegate(&["check", "--config", &settings.path], b"").await;
        answer.ended(1).says(words);
    }
    let settings = keyed("'\\$.order_id'", "orders");
    let named = oncegate(&["check", "--config", &settings.path], b"").await;
    named.ended(0).says("contents are not compared");
    let whole = keyed("\"payload\"", "orders");
    let whole = oncegate(&["check", "--config", &whole.path], b"").await;
    assert!(
        !whole.ended(0).err.contains("not compared"),
        "{}",
        whole.err
    );
}

#[tokio::test]
async fn a_check_asks_the_servers_where_that_is_wanted() {
    let file = file(
        "[store]\nurl = \"sqlite:records.db\"\n[consumer.billing]\nkey = \"order_id\"\n\
         source.kafka = { brokers = \"127.0.0.1:1\", topics = [\"orders\"] }\n\
         dead_letters = { kafka = \"dead\" }\nhandler = { command = \"true\" }\n",
    );
    let offline = oncegate(&["check", "--config", &file.path], b"").await;
    offline.ended(0);
    let arguments = ["check", "--online", "--json", "--config", &file.path];
    let online = oncegate(&arguments, b"").await;
    online.ended(69);
    let answer: serde_json::Value = serde_json::from_str(&online.out).unwrap();
    assert_eq!(answer["ok"], true, "{answer}");
    let finding = &answer["online"]["findings"][0];
    assert_eq!(finding["consumer"], "billing", "{answer}");
    assert!(
        finding["found"].as_str().unwrap().contains("127.0.0.1:1"),
        "{answer}"
    );
}
