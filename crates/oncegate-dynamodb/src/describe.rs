//! The descriptor of a scope: an item without a time to live, written by compare-and-set.

use oncegate_core::key::Scope;
use oncegate_core::store::StoreError;

use super::api::{Api, Expected, Lane, Written};
use super::item::{DESCRIPTOR, ID, Item, REVISION, Revision, descriptor_id, text};

/// Sets the descriptor if the current one is the expected one. Returns the one afterwards.
pub(crate) async fn describe(
    api: &Api,
    scope: &Scope,
    expected: Option<&str>,
    proposed: &str,
) -> Result<String, StoreError> {
    let deadline = api.deadline();
    let id = descriptor_id(scope);
    let revision = Revision::random();
    let item = Item::from([
        (ID.to_owned(), text(&id)),
        (DESCRIPTOR.to_owned(), text(proposed)),
        (REVISION.to_owned(), revision.value()),
    ]);
    let expected_item = match expected {
        None => Expected::Absent,
        Some(expected) => Expected::Describes(expected),
    };
    let lane = Lane::Call;
    match api
        .put(item, revision, expected_item, lane, deadline)
        .await?
    {
        Written::Done => Ok(proposed.to_owned()),
        Written::Other(None) => Ok(expected.unwrap_or_default().to_owned()),
        Written::Other(Some(item)) => read(&item, scope),
    }
}

/// Reads the descriptor; `None` if there is none.
pub(crate) async fn descriptor(api: &Api, scope: &Scope) -> Result<Option<String>, StoreError> {
    let id = descriptor_id(scope);
    let item = api.get(&id, Lane::Call, api.deadline()).await?;
    item.map(|item| read(&item, scope)).transpose()
}

fn read(item: &Item, scope: &Scope) -> Result<String, StoreError> {
    let found = item.get(DESCRIPTOR).and_then(|value| value.as_s().ok());
    found.cloned().ok_or_else(|| {
        StoreError::refused(format_args!(
            "item `{}` is no descriptor of a scope: another program has written it",
            descriptor_id(scope)
        ))
    })
}
