use bytes::Bytes;

use super::*;

const NOW: StoreTime = StoreTime::from_millis(1_000_000);

fn claim_of(bits: u128, lease: Duration) -> Operation {
    Operation::Claim {
        token: Token::from_bits(bits),
        lease,
        fingerprint: None,
        fenced: true,
        longest_lease: Duration::MAX,
    }
}

#[test]
fn a_lease_is_over_after_its_last_millisecond() {
    let (record, _) = apply(NOW, None, &claim_of(1, Duration::from_millis(10)));
    for (later_ms, retry_in_ms) in [(0, Some(11)), (9, Some(2)), (10, Some(1)), (11, None)] {
        let now = NOW + Duration::from_millis(later_ms);
        let (_, reply) = apply(now, record.clone(), &claim_of(2, Duration::from_millis(10)));
        let Reply::Verdict { verdict, .. } = reply else {
            panic!("{reply:?}")
        };
        match retry_in_ms {
            Some(ms) => assert_eq!(
                verdict,
                Verdict::Busy {
                    retry_in: Duration::from_millis(ms)
                }
            ),
            None => assert!(
                matches!(verdict, Verdict::Granted(Grant { attempt: 2, .. })),
                "{verdict:?}"
            ),
        }
    }
}

/// A claim with a lease of 10 ms, in a scope with this longest lease.
fn claim_within(bits: u128, longest_ms: u64) -> Operation {
    Operation::Claim {
        token: Token::from_bits(bits),
        lease: Duration::from_millis(10),
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::from_millis(longest_ms),
    }
}

// invariant: clock-goes-back
#[test]
fn what_is_left_of_a_lease_is_cut_to_the_longest_of_the_scope() {
    let ms = Duration::from_millis;
    let (claimed, _) = apply(NOW, None, &claim_within(1, 10));
    for (back_ms, longest_ms, left_ms) in [
        (0, 10, 10),
        (0, 9, 9),
        (500, 10, 10),
        (500, 600, 510),
        (0, 0, 0),
    ] {
        let now = StoreTime::from_millis(NOW.millis() - back_ms);
        let (cut, reply) = apply(now, claimed.clone(), &claim_within(2, longest_ms));
        let busy = Verdict::Busy {
            retry_in: ms(left_ms + 1),
        };
        assert_eq!(
            reply,
            Reply::Verdict {
                verdict: busy,
                uncompared: false
            }
        );
        assert_eq!(
            cut.as_ref().map(|cut| cut.expires_at),
            Some(now + ms(left_ms) + TAIL)
        );
        // A repeat by the owner cuts nothing.
        let (kept, _) = apply(now, claimed.clone(), &claim_within(1, longest_ms));
        assert_eq!(kept, claimed);
    }
}

#[test]
fn the_end_of_time_is_no_overflow() {
    let token = Token::from_bits(1);
    let complete = Operation::Complete {
        token,
        fingerprint: None,
        result: Bytes::new(),
        retention: Duration::MAX,
    };
    let release = Operation::Release {
        token,
        delay: Duration::MAX,
        end: ReleaseCause::Interrupted,
        reason: String::new(),
    };
    let fail = Operation::Fail {
        token,
        reason: String::new(),
        retention: Duration::MAX,
    };
    for now in [StoreTime::default(), NOW, StoreTime::from_micros(u64::MAX)] {
        let (claimed, _) = apply(now, None, &claim_of(1, Duration::MAX));
        for operation in [&complete, &release, &fail, &claim_of(2, Duration::MAX)] {
            let (record, _) = apply(now, claimed.clone(), operation);
            let record = record.expect("nothing is forgotten before the end of time");
            assert!(record.kept(now));
        }
    }
}

#[test]
fn a_fencing_token_grows_when_the_clock_goes_back() {
    let lease = Duration::from_millis(10);
    let (claimed, _) = apply(NOW, None, &claim_of(1, lease));
    let expected = claimed.clone().expect("a claim leaves a record");
    let earlier = StoreTime::from_micros(NOW.micros() / 2);
    let (reopened, _) = apply(earlier, claimed, &Operation::Reopen { expected });
    let (_, reply) = apply(earlier, reopened, &claim_of(2, lease));
    let Reply::Verdict {
        verdict: Verdict::Granted(grant),
        ..
    } = reply
    else {
        panic!("{reply:?}")
    };
    assert_eq!(grant.fencing_token, Some(FencingToken(NOW.micros() + 1)));
}
