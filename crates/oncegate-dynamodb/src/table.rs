//! Makes the table, and says how others make it: templates, and the rights of a consumer.

use std::time::Duration;

use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType,
    TableDescription, TableStatus, TimeToLiveSpecification, TimeToLiveStatus,
};
use futures_util::future::try_join_all;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::store::StoreError;
use tokio::time::{Instant, sleep};

use super::DynamoDbStore;
use super::api::Api;
use super::errors::{Failure, NO_TABLE};
use super::item::{ID, TTL, descriptor_id, text};

/// The longest time until a new table can be used.
const CREATION_MOST: Duration = Duration::from_secs(120);

/// The time between two looks at a table that is being made.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// The actions that a consumer needs.
const ACTIONS: [&str; 5] = [
    "dynamodb:BatchGetItem",
    "dynamodb:DescribeTable",
    "dynamodb:DescribeTimeToLive",
    "dynamodb:GetItem",
    "dynamodb:PutItem",
];

/// The work of [`DynamoDbStore::create_table`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableChange {
    /// `true` if the table exists.
    pub exists: bool,
    /// The calls in words, one a line; empty when there is nothing to do.
    pub calls: String,
}

/// The state of the table's time to live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TimeToLive {
    On,
    Off,
    /// By another attribute.
    Other(String),
    /// The right to ask is missing.
    Unknown,
}

impl DynamoDbStore {
    /// Returns what [`create_table`](Self::create_table) would do.
    ///
    /// # Errors
    /// When DynamoDB does not answer, the rights do not suffice, or there is a table of this name
    /// with other keys.
    pub async fn table_change(&self) -> Result<TableChange, StoreError> {
        let api = &self.inner.api;
        let table = self.table();
        let described = described(api).await.map_err(|error| self.at_table(error))?;
        let mut calls = String::new();
        let exists = described.is_some();
        if let Some(description) = &described {
            check_keys(description).map_err(|error| self.at_table(error))?;
        } else {
            calls += &format!("CreateTable {table}: partition key {ID} (S), on demand\n");
        }
        let is_on = match &described {
            Some(_) => time_to_live(api)
                .await
                .map_err(|error| self.at_table(error))?,
            None => TimeToLive::Off,
        };
        if is_on == TimeToLive::Off {
            calls += &format!("UpdateTimeToLive {table}: by the attribute {TTL}\n");
        }
        Ok(TableChange { exists, calls })
    }

    /// Makes the table if there is none, on demand, waits until it can be used, and turns its time
    /// to live on. It can be repeated.
    ///
    /// Needs the rights `dynamodb:CreateTable`, `DescribeTable`, `DescribeTimeToLive` and
    /// `UpdateTimeToLive`.
    ///
    /// # Errors
    /// As [`table_change`](Self::table_change), and when the table cannot be used after two
    /// minutes.
    pub async fn create_table(&self) -> Result<(), StoreError> {
        self.create().await.map_err(|error| self.at_table(error))
    }

    async fn create(&self) -> Result<(), StoreError> {
        let api = &self.inner.api;
        if described(api).await?.is_none() {
            create(api).await?;
        }
        let deadline = Instant::now() + CREATION_MOST;
        loop {
            let description = described(api).await?;
            if let Some(description) = &description
                && description.table_status == Some(TableStatus::Active)
            {
                check_keys(description)?;
                break;
            }
            if Instant::now() >= deadline {
                return Err(StoreError::unavailable(
                    "the table is being made for longer than two minutes; run this again later",
                ));
            }
            sleep(LOOK_INTERVAL).await;
        }
        if time_to_live(api).await? != TimeToLive::Off {
            return Ok(());
        }
        let by_ttl = TimeToLiveSpecification::builder()
            .attribute_name(TTL)
            .enabled(true)
            .build()
            .map_err(StoreError::refused)?;
        let update = api
            .client()
            .update_time_to_live()
            .table_name(&api.table)
            .time_to_live_specification(by_ttl);
        update.send().await.map_err(|error| failed(api, &error))?;
        Ok(())
    }

    /// Removes these records, whatever their states, and the descriptor of their scope.
    ///
    /// For a scope that a test had for itself: a message whose record is removed runs again when it
    /// is delivered again. Needs the right `dynamodb:DeleteItem`.
    ///
    /// # Errors
    /// When DynamoDB does not answer, or refuses. Some of the records may be removed then; it can
    /// be repeated.
    pub async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
        let api = &self.inner.api;
        let ids = keys.iter().map(|key| key.as_str().to_owned());
        let deletes = ids.chain([descriptor_id(scope)]).map(|id| {
            let delete = api.client().delete_item().table_name(&api.table);
            delete.key(ID, text(id)).send()
        });
        try_join_all(deletes)
            .await
            .map(drop)
            .map_err(|error| self.at_table(failed(api, &error)))
    }

    /// A CloudFormation template of the table, in YAML.
    pub fn cloudformation(table: &str) -> String {
        format!(
            "Resources:
  OncegateTable:
    Type: AWS::DynamoDB::Table
    DeletionPolicy: Retain
    UpdateReplacePolicy: Retain
    Properties:
      TableName: {table}
      BillingMode: PAY_PER_REQUEST
      AttributeDefinitions:
        - AttributeName: {ID}
          AttributeType: S
      KeySchema:
        - AttributeName: {ID}
          KeyType: HASH
      TimeToLiveSpecification:
        AttributeName: {TTL}
        Enabled: true
      DeletionProtectionEnabled: true
      PointInTimeRecoverySpecification:
        PointInTimeRecoveryEnabled: true
"
        )
    }

    /// The table as a resource of Terraform.
    pub fn terraform(table: &str) -> String {
        format!(
            r#"resource "aws_dynamodb_table" "oncegate" {{
  name                        = "{table}"
  billing_mode                = "PAY_PER_REQUEST"
  hash_key                    = "{ID}"
  deletion_protection_enabled = true

  attribute {{
    name = "{ID}"
    type = "S"
  }}

  ttl {{
    attribute_name = "{TTL}"
    enabled        = true
  }}

  point_in_time_recovery {{
    enabled = true
  }}
}}
"#
        )
    }

    /// The policy of IAM with the rights of a consumer, in JSON.
    pub fn policy(table: &str) -> String {
        let actions: Vec<String> = ACTIONS
            .iter()
            .map(|action| format!("        \"{action}\""))
            .collect();
        format!(
            r#"{{
  "Version": "2012-10-17",
  "Statement": [
    {{
      "Effect": "Allow",
      "Action": [
{}
      ],
      "Resource": "arn:aws:dynamodb:*:*:table/{table}"
    }}
  ]
}}
"#,
            actions.join(",\n")
        )
    }
}

/// The description of the table; `None` if there is none.
pub(crate) async fn described(api: &Api) -> Result<Option<TableDescription>, StoreError> {
    let ask = api.client().describe_table().table_name(&api.table);
    match ask.customize().interceptor(api.dated()).send().await {
        Ok(answer) => Ok(answer.table),
        Err(error) if error.code() == Some(NO_TABLE) => Ok(None),
        Err(error) => Err(failed(api, &error)),
    }
}

/// Returns whether the table's items are deleted after their records have expired.
pub(crate) async fn time_to_live(api: &Api) -> Result<TimeToLive, StoreError> {
    let ask = api.client().describe_time_to_live().table_name(&api.table);
    let answer = match ask.send().await {
        Ok(answer) => answer.time_to_live_description,
        Err(error) if is_denied(&error) => return Ok(TimeToLive::Unknown),
        Err(error) => return Err(failed(api, &error)),
    };
    let Some(answer) = answer else {
        return Ok(TimeToLive::Off);
    };
    let is_on = matches!(
        answer.time_to_live_status,
        Some(TimeToLiveStatus::Enabled | TimeToLiveStatus::Enabling)
    );
    Ok(match answer.attribute_name {
        Some(name) if is_on && name == TTL => TimeToLive::On,
        Some(name) if is_on => TimeToLive::Other(name),
        _ => TimeToLive::Off,
    })
}

/// Checks that items are found by their id alone.
pub(crate) fn check_keys(table: &TableDescription) -> Result<(), StoreError> {
    let is_id = match table.key_schema() {
        [only] => only.attribute_name == ID && only.key_type == KeyType::Hash,
        _ => false,
    };
    let is_text = table.attribute_definitions().iter().any(|attribute| {
        attribute.attribute_name == ID && attribute.attribute_type == ScalarAttributeType::S
    });
    if is_id && is_text {
        return Ok(());
    }
    Err(StoreError::refused(format_args!(
        "the table has other keys than `{ID}` (S) as its partition key alone: name a table of oncegate's own, which \
         `oncegate migrate` creates"
    )))
}

pub(crate) fn is_denied<E: ProvideErrorMetadata>(error: &SdkError<E>) -> bool {
    error
        .code()
        .is_some_and(|code| code.contains("AccessDenied"))
}

async fn create(api: &Api) -> Result<(), StoreError> {
    let id = AttributeDefinition::builder()
        .attribute_name(ID)
        .attribute_type(ScalarAttributeType::S)
        .build()
        .map_err(StoreError::refused)?;
    let key = KeySchemaElement::builder()
        .attribute_name(ID)
        .key_type(KeyType::Hash)
        .build()
        .map_err(StoreError::refused)?;
    let create = api
        .client()
        .create_table()
        .table_name(&api.table)
        .attribute_definitions(id)
        .key_schema(key)
        .billing_mode(BillingMode::PayPerRequest);
    match create.send().await {
        Ok(_) => Ok(()),
        // Another process makes it at the same time.
        Err(error) if error.code() == Some("ResourceInUseException") => Ok(()),
        Err(error) => Err(failed(api, &error)),
    }
}

fn failed<E>(api: &Api, error: &SdkError<E>) -> StoreError
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    Failure::of(error, &api.table).of_read()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_and_policy_name_the_table_and_its_attributes() {
        for text in [
            DynamoDbStore::cloudformation("once"),
            DynamoDbStore::terraform("once"),
        ] {
            assert!(
                text.contains("once\n") || text.contains("\"once\""),
                "{text}"
            );
            assert!(
                text.contains("PAY_PER_REQUEST") && text.contains(TTL),
                "{text}"
            );
        }
        let policy = DynamoDbStore::policy("once");
        assert!(policy.contains("table/once\"") && policy.contains("\"dynamodb:PutItem\""));
    }
}
