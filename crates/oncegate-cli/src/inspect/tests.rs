use oncegate::core::record::{Record, StoreTime, TAIL, Token, TokenTag};

use super::*;

const NOW: StoreTime = StoreTime::from_millis(1_000_000);

fn shown(expires_in: Duration, state: State) -> (String, InspectDocument) {
    let key: StoreKey = "billing:eMT5oSC2v1zTz8Nw5IO50A".parse().unwrap();
    let record = Record {
        expires_at: NOW + expires_in,
        fingerprint: None,
        state,
    };
    let found = RecordSnapshot { now: NOW, record };
    (words(&key, Some(&found)), document(&key, Some(&found)))
}

fn pending(recovery: Recovery) -> State {
    let token = Token::from_bits(u128::MAX);
    State::Pending {
        token,
        attempt: 2,
        recovery,
        fencing_token: Some(FencingToken(77)),
    }
}

fn check(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(text.contains(line), "{line:?} is missing in:\n{text}");
    }
}

#[test]
fn a_running_attempt() {
    let (text, json) = shown(TAIL + Duration::from_secs(26), pending(Recovery::Takeover));
    check(
        &text,
        &[
            "attempt        2; the one before",
            "26.0 s left",
            "fencing token  77",
            "ffffffff…",
            "would wait",
        ],
    );
    assert!(
        !text.contains("ffffffffff"),
        "the token is the owner's alone"
    );
    assert_eq!(
        (json.state, json.protected_for_ms, json.recovered),
        ("pending", Some(26_001), Some(true))
    );
}

#[test]
fn an_abandoned_attempt() {
    let (text, json) = shown(TAIL - Duration::from_secs(5), pending(Recovery::None));
    check(
        &text,
        &[
            "lease          over",
            "run the handler, as attempt 3",
            "forgotten      in 29 d 23 h",
        ],
    );
    assert_eq!(
        (json.protected_for_ms, json.recovered),
        (Some(0), Some(false))
    );
}

#[test]
fn a_retry_that_waits() {
    let by = TokenTag([0; 4]);
    let reason = "bank\nis closed".to_owned();
    let state = State::Released {
        by,
        attempt: 1,
        recovery: Recovery::None,
        fencing_token: None,
        reason,
    };
    let (text, json) = shown(TAIL + Duration::from_secs(90), state);
    check(
        &text,
        &[
            r"reason     bank\nis closed",
            "after 1 min 30 s",
            "attempts   1 counted",
        ],
    );
    assert_eq!(
        (json.state, json.attempt, json.fencing_token),
        ("released", Some(1), None)
    );
}

#[test]
fn a_result_is_described_and_never_shown() {
    let state = State::Completed {
        by: TokenTag([1; 4]),
        result: b"\x01\"secret\"".as_slice().into(),
    };
    let (text, json) = shown(Duration::from_secs(86_400), state);
    check(
        &text,
        &["result     8 bytes of JSON", "forgotten  in 1 d 0 h"],
    );
    assert!(!text.contains("secret"));
    assert_eq!((json.state, json.result_bytes), ("completed", Some(9)));
}

fn failed(handed_over: bool) -> State {
    State::Failed {
        by: TokenTag([1; 4]),
        attempt: 10,
        handed_over,
        reason: "no such account".to_owned(),
    }
}

#[test]
fn a_failure_and_its_dead_letter() {
    check(
        &shown(TAIL, failed(true)).0,
        &[
            "dead letter  written",
            "no second dead letter",
            "no such account",
        ],
    );
    check(
        &shown(TAIL, failed(false)).0,
        &["not known to be written", "and write the dead letter"],
    );
}

#[test]
fn absence_is_said_in_words() {
    let key: StoreKey = "billing:eMT5oSC2v1zTz8Nw5IO50A".parse().unwrap();
    check(&words(&key, None), &["state  absent", "as attempt 1"]);
    assert_eq!(document(&key, None).state, "absent");
}
