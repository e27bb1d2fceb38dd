//! The kinds of doors. A new kind is a setting of [`Door`] that names it, a file here that
//! implements [`DoorKind`], and a line in [`KINDS`]; nothing else knows which kinds there are.

use super::api::ApiKind;
use super::proxy::ProxyKind;
use super::webhook::WebhookKind;
use crate::config::shape::Door;

pub(crate) use super::kind::{DoorKind, DoorParts, Flaw, ServedDoor};

/// All kinds. The first is the one of a door that names no other.
pub(crate) static KINDS: &[&dyn DoorKind] = &[&ProxyKind, &WebhookKind, &ApiKind];

/// Returns the kind of a door.
///
/// # Errors
/// When it names several; the text says which.
pub(crate) fn of(door: &Door) -> Result<&'static dyn DoorKind, String> {
    let mut found: Option<(&'static str, &'static dyn DoorKind)> = None;
    for kind in KINDS {
        let Some((setting, true)) = kind.named(door) else {
            continue;
        };
        if let Some((other, _)) = found {
            return Err(format!(
                "it has both `{other}` and `{setting}`; make two doors"
            ));
        }
        found = Some((setting, *kind));
    }
    Ok(found.map_or(&ProxyKind, |(_, kind)| kind))
}
