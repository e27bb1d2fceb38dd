//! `oncegate migrate`, `doctor` and `inspect` on a table of DynamoDB.

use oncegate_testkit::DynamoDbServer;

use super::{Answer, oncegate_with};

/// Emulators check no credentials, and the SDK wants some.
const CREDENTIALS: [(&str, &str); 2] = [
    ("AWS_ACCESS_KEY_ID", "test"),
    ("AWS_SECRET_ACCESS_KEY", "test"),
];

async fn at(store: &str, arguments: &[&str]) -> Answer {
    let arguments = [arguments, &["--store", store]].concat();
    oncegate_with(&arguments, &CREDENTIALS, b"").await
}

#[tokio::test]
async fn templates_and_rights_are_printed_without_a_connection() {
    let store = "dynamodb://orders?region=eu-central-1";
    let printed = at(store, &["migrate", "--print", "--role", "billing"]).await;
    let text = &printed.ended(0).out;
    for part in [
        "TableName: orders",
        "resource \"aws_dynamodb_table\"",
        "table/orders",
        "role   = \"billing\"",
    ] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
    at(store, &["migrate", "--print", "--journal"])
        .await
        .ended(2)
        .says("journal");
    at("dynamodb://orders?zone=1", &["migrate", "--yes"])
        .await
        .ended(78)
        .says("`zone`")
        .says("dynamodb://TABLE");
}

#[tokio::test]
async fn a_table_is_made_and_looked_into() {
    let server = DynamoDbServer::start().await;
    let endpoint = server.endpoint();
    let store = &format!("dynamodb://orders?region=us-east-1&endpoint={endpoint}");
    let missing = at(store, &["doctor"]).await;
    assert!(
        missing.ended(1).out.contains("oncegate migrate"),
        "{missing:?}"
    );
    let planned = at(store, &["migrate", "--dry-run"]).await;
    assert!(
        planned.ended(1).out.contains("CreateTable orders"),
        "{planned:?}"
    );
    at(store, &["migrate", "--yes"]).await.ended(0);
    at(store, &["migrate", "--dry-run"])
        .await
        .ended(0)
        .says("nothing to do");
    let fine = at(store, &["doctor"]).await;
    assert!(fine.ended(0).out.contains("declared"), "{fine:?}");
    let record = ["inspect", "--store-key", "billing:eMT5oSC2v1zTz8Nw5IO50A"];
    at(store, &record).await.ended(1);
}
