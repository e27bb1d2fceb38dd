//! The start-up check: the table's keys, replicas and time to live, and the rights of this caller.

use std::time::Duration;

use aws_sdk_dynamodb::types::{BillingMode, MultiRegionConsistency, TableDescription, TableStatus};
use oncegate_core::store::{Checkup, StoreError, Survives};

use super::Inner;
use super::api::{Api, Expected, Lane, Written};
use super::item::{ID, Item, REVISION, Revision, TTL, text};
use super::settings::DynamoDbSettings;
use super::table::{TimeToLive, check_keys, described, time_to_live};

/// The item that is asked for by the check of the rights. No scope has such a name, and it is never
/// written.
const RIGHTS: &str = ":rights";

/// A wall clock that is wrong by more than this is told. DynamoDB refuses signatures that are a few
/// times older.
const WALL_ERROR: Duration = Duration::from_secs(60);

pub(crate) async fn check(inner: &Inner) -> Result<Checkup, StoreError> {
    let api = &inner.api;
    let mut warnings = Vec::new();
    check_rights(api).await?;
    let mut store = format!("DynamoDB table {}", api.table);
    if let Some(region) = &inner.region {
        store += &format!(" in {region}");
    }
    match described(api).await {
        Ok(Some(table)) => {
            check_table(&table, inner, &mut warnings)?;
            store += &format!(" ({})", capacity(&table));
        }
        // The rights were there a moment ago.
        Ok(None) => return Err(StoreError::unavailable("the table has gone away")),
        Err(StoreError::Refused { reason }) => warnings.push(format!(
            "the table's keys and replicas cannot be checked: {reason}; grant `dynamodb:DescribeTable`"
        )),
        Err(error) => return Err(error),
    }
    match time_to_live(api).await? {
        TimeToLive::On => {}
        TimeToLive::Off => warnings.push(format!(
            "the table has no time to live, so expired records stay in it and are paid for; `oncegate migrate` turns it \
             on, by the attribute `{TTL}`"
        )),
        TimeToLive::Other(name) => warnings.push(format!(
            "the table's time to live is by the attribute `{name}`, which records do not have, so expired ones stay in \
             it; set it to `{TTL}`"
        )),
        TimeToLive::Unknown => warnings.push(
            "the table's time to live cannot be checked; grant `dynamodb:DescribeTimeToLive`".to_owned(),
        ),
    }
    if let Some(endpoint) = &inner.endpoint {
        store += &format!(" at {endpoint}");
    }
    let wall_error = api.clock.wall_error();
    if wall_error > WALL_ERROR {
        warnings.push(format!(
            "this machine's clock is {} s from DynamoDB's: no lease depends on it, but signatures of requests do; set it",
            wall_error.as_secs()
        ));
    }
    Ok(Checkup {
        store,
        survives: Survives::Declared,
        warnings,
    })
}

/// Tries what consumers do, on an item that does not exist, under a condition that never holds.
async fn check_rights(api: &Api) -> Result<(), StoreError> {
    let deadline = api.deadline();
    api.get(RIGHTS, Lane::Call, deadline)
        .await
        .map_err(|error| needs(error, "GetItem"))?;
    api.get_all(vec![RIGHTS.to_owned()])
        .await
        .map_err(|error| needs(error, "BatchGetItem"))?;
    let revision = Revision::random();
    let item = Item::from([
        (ID.to_owned(), text(RIGHTS)),
        (REVISION.to_owned(), revision.value()),
    ]);
    let never = Expected::Never;
    match api.put(item, revision, never, Lane::Call, deadline).await {
        Ok(Written::Other(_)) => Ok(()),
        Ok(Written::Done) => Err(StoreError::refused(
            "the server writes what a condition forbids: it is no DynamoDB that a claim is safe on",
        )),
        Err(error) => Err(needs(error, "PutItem")),
    }
}

fn needs(error: StoreError, action: &str) -> StoreError {
    match error {
        StoreError::Refused { reason } if reason.contains("AccessDenied") => {
            StoreError::refused(format_args!(
                "{reason}; grant `dynamodb:{action}` (`oncegate migrate --print` has the policy)"
            ))
        }
        other => other,
    }
}

fn check_table(
    table: &TableDescription,
    inner: &Inner,
    warnings: &mut Vec<String>,
) -> Result<(), StoreError> {
    check_keys(table)?;
    if let Some(status) = &table.table_status
        && !matches!(status, TableStatus::Active | TableStatus::Updating)
    {
        return Err(StoreError::unavailable(format_args!(
            "the table is {}",
            status.as_str()
        )));
    }
    check_replicas(table, &inner.settings, inner.region.as_deref(), warnings)
}

/// Refuses a table that two regions may write to with conditions of their own.
fn check_replicas(
    table: &TableDescription,
    settings: &DynamoDbSettings,
    region: Option<&str>,
    warnings: &mut Vec<String>,
) -> Result<(), StoreError> {
    let own = region.unwrap_or_default();
    let others: Vec<&str> = table
        .replicas()
        .iter()
        .filter_map(|replica| replica.region_name())
        .filter(|name| *name != own)
        .collect();
    if others.is_empty() {
        return Ok(());
    }
    let others = others.join(", ");
    if table.multi_region_consistency == Some(MultiRegionConsistency::Strong) {
        warnings.push(format!(
            "the table is a global one with strong consistency ({others}): it has no time to live, so expired records \
             stay in it; a write may conflict with one of another region, and is repeated"
        ));
        return Ok(());
    }
    match settings.home_region.as_deref() {
        Some(home) if home == own => Ok(()),
        Some(home) => Err(StoreError::refused(format_args!(
            "this is {own}, and the home region of the table is {home}: consumers run there alone, until its replica \
             here is made the home by `home_region`"
        ))),
        None => Err(StoreError::refused(format_args!(
            "the table is a global one with eventual consistency (also in {others}): two regions would both be granted \
             one key. Use a table of one region, or one with strong consistency, or name the one region in which \
             consumers run as `home_region`"
        ))),
    }
}

fn capacity(table: &TableDescription) -> String {
    let billing = table.billing_mode_summary();
    let is_on_demand = billing
        .and_then(|billing| billing.billing_mode())
        .is_some_and(|mode| *mode == BillingMode::PayPerRequest);
    if is_on_demand {
        return "on demand".to_owned();
    }
    let provisioned = table.provisioned_throughput();
    let units = provisioned.map(|units| {
        (
            units.read_capacity_units().unwrap_or_default(),
            units.write_capacity_units().unwrap_or_default(),
        )
    });
    match units {
        Some((reads, writes)) => {
            format!("provisioned: {reads} read and {writes} write units a second")
        }
        None => "provisioned".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use aws_sdk_dynamodb::types::ReplicaDescription;

    use super::*;

    fn global(consistency: Option<MultiRegionConsistency>) -> TableDescription {
        let replicas = ["eu-west-1", "us-east-1"]
            .map(|region| ReplicaDescription::builder().region_name(region).build());
        TableDescription::builder()
            .set_replicas(Some(replicas.to_vec()))
            .set_multi_region_consistency(consistency)
            .build()
    }

    fn checked(
        table: &TableDescription,
        home: Option<&str>,
        region: &str,
    ) -> (Result<(), StoreError>, Vec<String>) {
        let settings = DynamoDbSettings {
            home_region: home.map(str::to_owned),
            ..DynamoDbSettings::DEFAULT
        };
        let mut warnings = Vec::new();
        let checked = check_replicas(table, &settings, Some(region), &mut warnings);
        (checked, warnings)
    }

    #[test]
    fn a_global_table_with_eventual_consistency_needs_a_home() {
        for consistency in [None, Some(MultiRegionConsistency::Eventual)] {
            let table = global(consistency);
            let error = checked(&table, None, "eu-west-1").0.unwrap_err();
            assert!(error.to_string().contains("also in us-east-1"), "{error}");
            assert!(checked(&table, Some("eu-west-1"), "eu-west-1").0.is_ok());
            let error = checked(&table, Some("us-east-1"), "eu-west-1").0;
            assert!(error.unwrap_err().to_string().contains("is us-east-1"));
        }
    }

    #[test]
    fn strong_consistency_is_allowed_and_told() {
        let table = global(Some(MultiRegionConsistency::Strong));
        let (checked, warnings) = checked(&table, None, "eu-west-1");
        assert!(checked.is_ok() && warnings.len() == 1, "{warnings:?}");
    }

    #[test]
    fn a_table_of_one_region_is_no_global_one() {
        let table = TableDescription::builder().build();
        let (checked, warnings) = checked(&table, None, "eu-west-1");
        assert!(checked.is_ok() && warnings.is_empty());
    }
}
