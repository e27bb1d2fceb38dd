//! Tables: how they are made, and what the check says of them.

use std::time::Duration;

use aws_sdk_dynamodb::types::{
    AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType,
    ScalarAttributeType,
};
use oncegate_core::rules::Verdict;
use oncegate_core::store::{Store, StoreError, Survives};
use oncegate_servers::{DynamoDbServer, unique};

use super::proxy::{Fault, Proxy};
use super::{
    apply, builder, claim, client, complete, granted, new_key, new_table, new_token, verdict,
};

fn reason(error: StoreError) -> String {
    match error {
        StoreError::Refused { reason } => reason.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_is_made_once_and_then_there_is_nothing_to_do() {
    let server = DynamoDbServer::start().await;
    let table = unique("once");
    let missing = builder(&server.endpoint(), &table).connect().await;
    let missing = reason(missing.unwrap_err());
    assert!(
        missing.contains(&table) && missing.contains("oncegate migrate"),
        "{missing}"
    );
    let maker = builder(&server.endpoint(), &table).may_be_missing();
    let store = maker.connect().await.unwrap();
    let change = store.table_change().await.unwrap();
    assert!(
        !change.exists && change.calls.contains("CreateTable"),
        "{change:?}"
    );
    store.create_table().await.unwrap();
    store.create_table().await.unwrap();
    let change = store.table_change().await.unwrap();
    assert!(change.exists && change.calls.is_empty(), "{change:?}");
    let checkup = store.check().await.unwrap();
    assert_eq!(checkup.survives, Survives::Declared);
    assert_eq!(checkup.warnings, Vec::<String>::new());
    assert!(checkup.store.contains(&table) && checkup.store.contains("on demand"));
}

fn attribute(name: &str) -> AttributeDefinition {
    let attribute = AttributeDefinition::builder().attribute_name(name);
    let attribute = attribute.attribute_type(ScalarAttributeType::S);
    attribute.build().unwrap()
}

fn key(name: &str, kind: KeyType) -> KeySchemaElement {
    let key = KeySchemaElement::builder().attribute_name(name);
    key.key_type(kind).build().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_another_kind_is_refused() {
    let server = DynamoDbServer::start().await;
    let table = unique("other");
    let create = client(&server.endpoint());
    let create = create.create_table().table_name(&table);
    let create = create
        .attribute_definitions(attribute("id"))
        .attribute_definitions(attribute("sort"))
        .key_schema(key("id", KeyType::Hash))
        .key_schema(key("sort", KeyType::Range));
    create
        .billing_mode(BillingMode::PayPerRequest)
        .send()
        .await
        .unwrap();
    let store = builder(&server.endpoint(), &table)
        .may_be_missing()
        .connect()
        .await;
    // Its first request is refused already, or its check is.
    let error = match store {
        Ok(store) => store.table_change().await.unwrap_err(),
        Err(error) => error,
    };
    assert!(!reason(error).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_is_missing_is_named() {
    let server = DynamoDbServer::start().await;
    let proxy = Proxy::before(&server.address()).await;
    let made = new_table(&server.endpoint()).await;
    let store = builder(&proxy.endpoint(), made.table())
        .connect()
        .await
        .unwrap();
    let denied = Fault::Refuse(400, "AccessDeniedException");
    for action in ["GetItem", "BatchGetItem", "PutItem"] {
        proxy.next(action, 1, denied);
        let text = reason(store.check().await.unwrap_err());
        assert!(
            text.contains(&format!("grant `dynamodb:{action}`")),
            "{text}"
        );
    }
    for action in ["DescribeTable", "DescribeTimeToLive"] {
        proxy.next(action, 1, denied);
        let warnings = store.check().await.unwrap().warnings;
        assert!(
            warnings.iter().any(|one| one.contains(action)),
            "{warnings:?}"
        );
    }
}

/// DynamoDB deletes expired items within days: until then they count as absent, and afterwards they
/// are.
#[tokio::test(flavor = "multi_thread")]
async fn an_item_that_is_deleted_late_or_early_is_no_trouble() {
    let server = DynamoDbServer::start().await;
    let store = new_table(&server.endpoint()).await;
    let key = new_key();
    let token = new_token();
    granted(apply(&store, &key, claim(token)).await);
    apply(&store, &key, complete(token, "done")).await.unwrap();
    let duplicate = verdict(apply(&store, &key, claim(new_token())).await);
    assert!(matches!(duplicate, Verdict::Completed { .. }));
    // Late: its retention is over, and the item is there.
    store.pass(&key, Duration::from_secs(3_600)).await.unwrap();
    assert_eq!(store.read(vec![key.clone()]).await.remove(0).unwrap(), None);
    let again = new_token();
    assert_eq!(granted(apply(&store, &key, claim(again)).await).attempt, 1);
    // Early: the item of a claim is gone, and its owner completes it.
    let id = AttributeValue::S(key.as_str().to_owned());
    let delete = client(&server.endpoint());
    let delete = delete.delete_item().table_name(store.table());
    delete.key("id", id).send().await.unwrap();
    let completed = apply(&store, &key, complete(again, "done")).await;
    let recreated = oncegate_core::rules::Reply::Applied { recreated: true };
    assert_eq!(completed.unwrap(), recreated);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_trial_has_written_is_removed() {
    let server = DynamoDbServer::start().await;
    let store = new_table(&server.endpoint()).await;
    let key = new_key();
    let scope = oncegate_core::key::Scope::new(key.scope()).unwrap();
    granted(apply(&store, &key, claim(new_token())).await);
    store.describe(&scope, None, "{}").await.unwrap();
    store
        .remove(&scope, std::slice::from_ref(&key))
        .await
        .unwrap();
    assert_eq!(store.read(vec![key]).await.remove(0).unwrap(), None);
    assert_eq!(store.descriptor(&scope).await.unwrap(), None);
}
