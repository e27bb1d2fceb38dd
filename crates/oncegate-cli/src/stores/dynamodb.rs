//! Stores in a table of DynamoDB.

use async_trait::async_trait;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::store::StoreError;
use oncegate::dynamodb::{DynamoDbSettings, DynamoDbStore};
use schemars::{Schema, schema_for};

use super::{Extras, Opened, Opening, Purpose, Statements, StoreKind, TableChange};
use crate::exit::Problem;

pub(super) struct DynamoDb;

const SCHEME: &str = "dynamodb";

/// The format of a table's keys and attributes.
const FORMAT: u32 = 1;

/// The table in templates, where no URL names one.
const TABLE: &str = "oncegate";

#[async_trait]
impl StoreKind for DynamoDb {
    fn name(&self) -> &'static str {
        "DynamoDB"
    }

    fn forms(&self) -> &'static str {
        "dynamodb://table?region=region"
    }

    fn has_scheme(&self, scheme: &str) -> bool {
        scheme == SCHEME
    }

    fn location(&self, url: &str) -> Result<String, String> {
        match DynamoDbStore::check_url(url) {
            Ok(()) => Ok(url.to_owned()),
            Err(StoreError::Refused { reason }) => Err(reason.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn schema(&self) -> Schema {
        schema_for!(DynamoDbSettings)
    }

    fn statements(&self, location: &str, asked: &Statements<'_>) -> Result<Option<String>, String> {
        if asked.journal {
            let why = "--journal: DynamoDB keeps none beside its records; name a file as the consumer's `journal`";
            return Err(why.to_owned());
        }
        let table = location.split(['/', '?']).nth(2).unwrap_or(TABLE);
        let policy = DynamoDbStore::policy(table);
        let mut text = format!(
            "# The table, for CloudFormation:\n{}\n# The same for Terraform:\n{}\n# The rights of a consumer, as a policy of \
             IAM:\n{policy}",
            DynamoDbStore::cloudformation(table),
            DynamoDbStore::terraform(table),
        );
        if let Some(role) = asked.role {
            text += &format!(
                "\n# The same for Terraform:\nresource \"aws_iam_role_policy\" \"oncegate\" {{\n  role   = \"{role}\"\n  \
                 policy = <<POLICY\n{policy}POLICY\n}}\n"
            );
        }
        Ok(Some(text))
    }

    async fn open(&self, opening: Opening<'_>) -> Result<Opened, Problem> {
        let builder = DynamoDbStore::builder(opening.location);
        let mut builder = builder.settings(opening.settings.dynamodb.clone());
        // What looks at a store reports a missing table with everything else, or makes it.
        if opening.purpose == Purpose::Read {
            builder = builder.may_be_missing();
        }
        let store = builder.start_patience(opening.patience).connect().await?;
        Ok(Opened::new(store))
    }
}

#[async_trait]
impl Extras for DynamoDbStore {
    async fn table_change(&self) -> Result<Option<TableChange>, StoreError> {
        let change = DynamoDbStore::table_change(self).await?;
        Ok(Some(TableChange {
            from: change.exists.then_some(FORMAT),
            to: FORMAT,
            text: change.calls,
        }))
    }

    async fn make_tables(&self) -> Result<(), StoreError> {
        self.create_table().await
    }

    async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
        DynamoDbStore::remove(self, scope, keys).await
    }
}
