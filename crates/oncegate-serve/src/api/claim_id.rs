//! The text form of a claim, which its owner sends with every operation.
//!
//! It has all that a server needs, so any server over the same store can extend and end the claim,
//! and a restart loses none. The 128 random bits of its token are what makes it unguessable; the
//! checksum only finds text that was cut or mistyped.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use oncegate_core::key::{Digest, Fingerprint, Scope, StoreKey};
use oncegate_core::record::{Token, whole_millis};
use oncegate_runtime::running::detached::DetachedClaim;

/// The version of the form. A release reads a version before any release writes it.
const VERSION: u8 = 1;
const CHECKSUM_BYTES: usize = 4;
/// The longest text of a claim: with the longest scope.
const MAX_TEXT_BYTES: usize = 256;

/// Returns the text form of a claim.
pub(super) fn encode(claim: &DetachedClaim) -> String {
    let mut out = vec![VERSION, u8::from(claim.fingerprint.is_some())];
    out.extend_from_slice(claim.token.as_bytes());
    out.extend_from_slice(claim.key.digest().as_bytes());
    if let Some(fingerprint) = &claim.fingerprint {
        out.extend_from_slice(fingerprint.as_bytes());
    }
    // A record counts no more attempts than a byte has numbers.
    out.push(u8::try_from(claim.attempt).unwrap_or(u8::MAX));
    out.extend_from_slice(&whole_millis(claim.lease).to_be_bytes());
    out.extend_from_slice(&whole_millis(claim.retention).to_be_bytes());
    out.extend_from_slice(claim.key.scope().as_bytes());
    let checksum = checksum(&out);
    out.extend_from_slice(&checksum);
    URL_SAFE_NO_PAD.encode(out)
}

/// Reads the text form of a claim; `None` if it is none.
pub(super) fn decode(text: &str) -> Option<DetachedClaim> {
    if text.len() > MAX_TEXT_BYTES {
        return None;
    }
    let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
    let body = bytes.len().checked_sub(CHECKSUM_BYTES)?;
    let (body, check) = bytes.split_at_checked(body)?;
    if checksum(body) != check {
        return None;
    }
    let mut rest = body;
    let [version, has_fingerprint] = take(&mut rest)?;
    if version != VERSION || has_fingerprint > 1 {
        return None;
    }
    let token = Token::from(take::<16>(&mut rest)?);
    let digest = Digest::from_bytes(take(&mut rest)?);
    let fingerprint = if has_fingerprint == 1 {
        Some(Fingerprint::from_bytes(take(&mut rest)?))
    } else {
        None
    };
    let [attempt] = take(&mut rest)?;
    let lease = Duration::from_millis(u64::from_be_bytes(take(&mut rest)?));
    let retention = Duration::from_millis(u64::from_be_bytes(take(&mut rest)?));
    let scope = Scope::new(std::str::from_utf8(rest).ok()?).ok()?;
    Some(DetachedClaim {
        key: StoreKey::new(&scope, digest),
        token,
        fingerprint,
        attempt: u32::from(attempt),
        lease,
        retention,
    })
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, left) = rest.split_first_chunk::<N>()?;
    *rest = left;
    Some(*taken)
}

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let [a, b, c, d, ..] = blake3::derive_key("oncegate 2026-12-01 claim id checksum v1", bytes);
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    fn claim(scope: &str, fingerprint: Option<Fingerprint>) -> DetachedClaim {
        DetachedClaim {
            key: StoreKey::new(&Scope::new(scope).unwrap(), Digest::from_bytes([7; 16])),
            token: Token::from_bits(u128::MAX / 3),
            fingerprint,
            attempt: 3,
            lease: Duration::from_millis(30_001),
            retention: Duration::from_secs(7 * 86_400),
        }
    }

    #[test]
    fn a_claim_reads_back_and_damaged_text_does_not() {
        let fingerprint = Fingerprint::from_bytes([1, 2, 3, 4, 5, 6, 7]);
        for claim in [
            claim("n", None),
            claim(&"s".repeat(Scope::MAX_BYTES), Some(fingerprint)),
        ] {
            let text = encode(&claim);
            assert_eq!(decode(&text), Some(claim));
            for at in 0..text.len() {
                let mut damaged = text.clone().into_bytes();
                let byte = damaged.get_mut(at).unwrap();
                *byte = if *byte == b'A' { b'B' } else { b'A' };
                let damaged = String::from_utf8(damaged).unwrap();
                assert_eq!(decode(&damaged), None, "character {at}");
                assert_eq!(decode(text.get(..at).unwrap()), None, "cut at {at}");
            }
        }
        assert_eq!(decode(""), None);
        assert_eq!(decode(&"A".repeat(100_000)), None);
    }
}
