//! Pauses the consumers of a scope, in every process, and resumes them.

use oncegate_core::key::Scope;
use oncegate_core::store::{Pause, ScopeDescriptor, Store, StoreError};

use oncegate_runtime::gate::{remove_pause, write_pause};

/// The outcome of a pause.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "only a paused scope begins nothing"]
pub enum Paused {
    /// The scope is paused: within seconds, no consumer of it begins an attempt, whenever it
    /// started. What runs ends, and is acknowledged.
    Yes,
    /// The scope was paused already, with this reason. Nothing was changed.
    Already(Pause),
    /// The store has no such scope: no gate has opened it. Nothing was changed.
    UnknownScope,
}

/// The outcome of a resume.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "only a resumed scope goes on"]
pub enum Resumed {
    /// The consumers of the scope go on within seconds. The value is the pause that is over.
    Yes(Pause),
    /// The scope was not paused. Nothing was changed.
    NotPaused,
    /// The store has no such scope: no gate has opened it. Nothing was changed.
    UnknownScope,
}

/// Pauses the consumers of a scope, in every process: they begin no attempt and receive nothing
/// more, until [`resume`] is called. It outlives restarts.
///
/// A consumer reads it with its checks for losses, between one and three seconds apart. HTTP
/// endpoints and functions of the scope are not paused.
///
/// # Errors
/// When the store does not answer, or the scope's descriptor cannot be read.
pub async fn pause(store: &dyn Store, scope: &Scope, pause: &Pause) -> Result<Paused, StoreError> {
    let before = write_pause(store, scope, pause).await?;
    Ok(match before {
        None => Paused::UnknownScope,
        Some(ScopeDescriptor {
            pause: Some(before),
            ..
        }) => Paused::Already(before),
        Some(_) => Paused::Yes,
    })
}

/// Lets the consumers of a paused scope go on.
///
/// # Errors
/// When the store does not answer, or the scope's descriptor cannot be read.
pub async fn resume(store: &dyn Store, scope: &Scope) -> Result<Resumed, StoreError> {
    let before = remove_pause(store, scope).await?;
    Ok(match before {
        None => Resumed::UnknownScope,
        Some(before) => before.pause.map_or(Resumed::NotPaused, Resumed::Yes),
    })
}

/// Returns the pause of a scope; `None` when it is not paused, or was never opened.
///
/// # Errors
/// When the store does not answer, or the scope's descriptor cannot be read.
pub async fn pause_of(store: &dyn Store, scope: &Scope) -> Result<Option<Pause>, StoreError> {
    let Some(text) = store.descriptor(scope).await? else {
        return Ok(None);
    };
    Ok(ScopeDescriptor::parse(scope, &text)?.pause)
}

#[cfg(test)]
mod tests {
    use oncegate_core::record::StoreTime;
    use oncegate_core::store::{Epoch, MemoryStore};

    use super::*;

    #[tokio::test]
    async fn a_pause_is_kept_until_it_is_removed_and_none_replaces_it() {
        let store = MemoryStore::with_clock(StoreTime::default);
        let scope = Scope::new("billing").unwrap();
        let first = Pause::new(5, "the bank is away", "ada");
        let unknown = pause(&store, &scope, &first).await.unwrap();
        assert_eq!(unknown, Paused::UnknownScope);
        let unknown = resume(&store, &scope).await.unwrap();
        assert_eq!(unknown, Resumed::UnknownScope);
        let absent = store.descriptor(&scope).await.unwrap();
        assert_eq!(absent, None, "it stays absent");

        let new = ScopeDescriptor::new("{}", Epoch::from_bits(1));
        let text = new.to_text().unwrap();
        store.describe(&scope, None, &text).await.unwrap();
        let running = resume(&store, &scope).await.unwrap();
        assert_eq!(running, Resumed::NotPaused);
        let begun = pause(&store, &scope, &first).await.unwrap();
        assert_eq!(begun, Paused::Yes);
        let second = Pause::new(6, "another", "bob");
        let again = pause(&store, &scope, &second).await.unwrap();
        assert_eq!(again, Paused::Already(first.clone()));
        let held = pause_of(&store, &scope).await.unwrap();
        assert_eq!(held.as_ref(), Some(&first));
        let over = resume(&store, &scope).await.unwrap();
        assert_eq!(over, Resumed::Yes(first));
        let left = store.descriptor(&scope).await.unwrap();
        assert_eq!(left, Some(text), "nothing of it is left");
    }
}
