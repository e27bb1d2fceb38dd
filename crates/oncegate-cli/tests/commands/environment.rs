//! Variables of the environment: those that are empty, misspelled, or fit several names.

use std::path::Path;

use super::check::file;
use super::{Answer, command, ended, oncegate_with};

const BILLING: &str = "[store]\nurl = \"sqlite:records.db\"\n[consumer.billing]\nkey = \"order_id\"\n\
                       source = { stdin = {} }\nlease = \"10s\"\nhandler = { command = \"cat\" }\n\
                       dead_letters = { file = \"dead.jsonl\" }\n";

#[tokio::test]
async fn an_empty_variable_is_one_that_is_not_set() {
    let empty = [
        "STORE",
        "SCOPE",
        "KEY",
        "BROKERS",
        "JOURNAL",
        "OPERATOR",
        "LOG",
        "LOG_FORMAT",
        "STATUS_URL",
        "CONFIG",
        "CONSUMER__BILLING__LEASE",
    ];
    let names: Vec<String> = empty
        .iter()
        .map(|name| format!("ONCEGATE_{name}"))
        .collect();
    let variables: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "")).collect();
    let settings = file(BILLING);
    for arguments in [
        &["check", "--config", &settings.path][..],
        &["key", "--config", &settings.path],
        &["run", "--config", &settings.path],
    ] {
        let answer = oncegate_with(arguments, &variables, br#"{"order_id":1}"#).await;
        answer.ended(0);
    }
}

#[tokio::test]
async fn a_wrong_value_of_a_variable_names_the_variable() {
    let wrong = [("ONCEGATE_LOG_FORMAT", "yaml")];
    let answer = oncegate_with(&["key", "--key", "id"], &wrong, b"{}").await;
    answer
        .ended(2)
        .says("from the variable ONCEGATE_LOG_FORMAT");
    let given = ["--log-format", "yaml", "key", "--key", "id"];
    let answer = oncegate_with(&given, &[("ONCEGATE_LOG_FORMAT", "text")], b"{}").await;
    assert!(!answer.ended(2).err.contains("variable"), "{answer:?}");
}

#[tokio::test]
async fn a_misspelled_variable_is_named_with_the_one_that_was_meant() {
    let settings = file(BILLING);
    let arguments = ["check", "--config", &settings.path];
    for (name, meant) in [
        ("ONCEGATE_STROE", "did you mean ONCEGATE_STORE?"),
        ("ONCEGATE_CONSUMER_BILLING_LEASE", "ONCEGATE_CONSUMER__"),
    ] {
        let answer = oncegate_with(&arguments, &[(name, "1m")], b"").await;
        answer.ended(0).says(name).says(meant);
    }
}

fn consumer(name: &str) -> String {
    format!(
        "[consumer.{name}]\nkey = \"order_id\"\nhandler = {{ command = \"true\" }}\n\
         source.kafka = {{ brokers = \"b:9092\", topics = \"t\", group = {name} }}\n\
         dead_letters = {{ kafka = \"dead\" }}\n"
    )
}

#[tokio::test]
async fn a_variable_that_fits_several_names_is_an_error_that_has_them() {
    let names = ["\"eu-orders\"", "\"eu.orders\"", "\"EU_ORDERS\""];
    let consumers: String = names.into_iter().map(consumer).collect();
    let settings = file(&format!("[store]\nurl = \"sqlite:r.db\"\n{consumers}"));
    let variable = "ONCEGATE_CONSUMER__EU_ORDERS__LEASE";
    let arguments = ["check", "--config", &settings.path];
    let answer = oncegate_with(&arguments, &[(variable, "2m")], b"").await;
    answer.ended(1).says(variable);
    for name in ["`eu-orders`", "`eu.orders`", "`EU_ORDERS`"] {
        answer.says(name);
    }
    oncegate_with(&arguments, &[], b"").await.ended(0);
}

#[tokio::test]
async fn the_dashes_of_an_outbox_are_underscores_in_a_variable() {
    let settings = file(
        "[store]\nurl = \"postgres://og@127.0.0.1:1/p\"\n[outbox.eu-shop]\n\
         kafka = { brokers = [\"127.0.0.1:9092\"] }\n",
    );
    let arguments = ["check", "--config", &settings.path, "--explain"];
    let variables = [("ONCEGATE_OUTBOX__EU_SHOP__BATCH", "7")];
    let answer = oncegate_with(&arguments, &variables, b"").await;
    let line = answer.ended(0).line("outbox.eu-shop.batch");
    assert!(line.contains("= 7"), "{line}");
}

/// Runs the consumer in this folder, with one message.
async fn run(folder: &Path, flags: &[&str]) -> Answer {
    let mut command = command(&[&["run"], flags].concat());
    command.current_dir(folder);
    ended(command, b"{\"order_id\":1}\n").await
}

#[tokio::test]
async fn flags_change_what_the_file_of_the_folder_says() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("oncegate.toml"), BILLING).unwrap();
    let folder = folder.path();
    let answer = run(folder, &["--listen", "off"]).await;
    answer
        .ended(0)
        .says("oncegate.toml in the working directory");
    assert!(
        answer.out.starts_with("billing: 1 message, 1 handled"),
        "{answer:?}"
    );
    run(folder, &["--scope", "shop", "--lease", "5s"])
        .await
        .ended(78)
        .says("`shop`")
        .says("billing");
    let both = run(folder, &["--handler-exec", "./worker"]).await;
    both.ended(78)
        .says("`command` (oncegate.toml:7)")
        .says("`exec` (--handler-exec)");
    let sources = run(folder, &["--topic", "orders", "--brokers", "b:9092"]).await;
    sources
        .ended(78)
        .says("`stdin` (oncegate.toml:5)")
        .says("`kafka` (--");
    run(folder, &["--config", "/dev/null", "--listen", "off"])
        .await
        .ended(78);
}
