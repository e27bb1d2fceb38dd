//! Which requests a rule takes, and what is no rule.

use ::http::Request;

use super::*;

fn rules(all: &[(&str, &str)]) -> Rules {
    Rules::new(
        all.iter()
            .map(|(method, path)| Rule::new(method, path).unwrap()),
    )
    .unwrap()
}

fn found(rules: &Rules, method: &str, path: &str) -> Option<String> {
    let request = Request::builder().method(method).uri(path).body(());
    let (parts, ()) = request.unwrap().into_parts();
    rules.find(&parts).map(|rule| rule.to_string())
}

#[test]
fn a_request_has_the_first_rule_that_fits() {
    let rules = rules(&[
        ("POST", "/api/payments"),
        ("POST", "/api/{kind}"),
        ("DELETE", "/api/payments/{id}"),
    ]);
    for path in [
        "/api/payments",
        "/api/payments?x=/refunds",
        "/api//payments/",
        "/%61pi/pay%6Dents",
        "/x/../api/./payments",
        "http://host/api/payments",
        "/api%2Fpayments",
        "/API/payments",
        "/api/payments;v=1",
    ] {
        assert_eq!(
            found(&rules, "POST", path).as_deref(),
            Some("POST /api/payments"),
            "{path}"
        );
    }
    assert_eq!(
        found(&rules, "POST", "/api/refunds").as_deref(),
        Some("POST /api/{kind}")
    );
    for (method, path) in [
        ("GET", "/api/payments"),
        ("POST", "/api"),
        ("POST", "/api/payments/7"),
        ("DELETE", "/api/payments"),
    ] {
        assert_eq!(found(&rules, method, path), None, "{method} {path}");
    }
}

#[test]
fn a_key_that_need_not_be_there_may_be_missing_and_not_wrong() {
    let rule = Rule::new("POST", "/a").unwrap();
    let rule = rule.key_in_body(&Key::json(["order"])).unwrap().optional();
    let key = |body: &'static str| rule.key_of_body(&Bytes::from(body)).unwrap();
    for without in ["", "{}", r#"{"order":null}"#] {
        assert_eq!(key(without).ok(), Some(None), "{without}");
    }
    assert!(matches!(key(r#"{"order":7}"#), Ok(Some(_))));
    for wrong in [r#"{"order":7,"order":7}"#, "{", r#"{"order":" "}"#] {
        assert!(key(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_rule_that_never_counts_is_found() {
    assert!(
        rules(&[
            ("POST", "/a/b"),
            ("POST", "/a/{x}"),
            ("PUT", "/a/b"),
            ("POST", "/a/b/c")
        ])
        .shadowed()
        .is_empty()
    );
    for second in ["/a/b", "/a/{y}", "/a/b/", "/a/%62"] {
        let shadowed = rules(&[("POST", "/a/{x}"), ("POST", second)]).shadowed();
        assert!(
            matches!(&*shadowed, [one] if one.contains("/a/{x}") && one.contains(second)),
            "{second}: {shadowed:?}"
        );
    }
}

#[test]
fn what_is_no_rule_is_refused_in_words() {
    for (method, path, words) in [
        ("GET", "/a", "changes nothing"),
        ("post", "/a", "capitals"),
        ("P T", "/a", "method"),
        ("POST", "a", "begins with a slash"),
        ("POST", "/a?b", "no query"),
        ("POST", "/a{b}", "whole part"),
        ("POST", "/{}", "no name"),
        ("POST", "/{a}/{a}", "one name"),
    ] {
        let why = Rule::new(method, path).unwrap_err().to_string();
        assert!(why.contains(words), "{method} {path}: {why}");
    }
    assert!(Rules::new([]).unwrap_err().to_string().contains("no rules"));
    let rule = || Rule::new("POST", "/a/{id}").unwrap();
    assert!(rule().key_in_path(["other"]).is_err());
    assert!(rule().key_in_path(Vec::<String>::new()).is_err());
    assert!(rule().key_in_header("a b").is_err());
    assert!(rule().key_in_body(&Key::json(Vec::<&str>::new())).is_err());
    for wrong in ["", "1xx", "6xx", "20", "2x", "ok"] {
        assert!(rule().keep([wrong]).is_err(), "{wrong}");
    }
}

#[test]
fn keys_of_two_rules_or_two_lists_of_values_differ() {
    let key = |rule: &Rule, path: &str| {
        let (parts, ()) = Request::post(path).body(()).unwrap().into_parts();
        match rule.key_of_head(&parts, &[]) {
            FoundKey::Known(key) => key,
            _ => panic!("the key is in the path"),
        }
    };
    let rule = |path: &str| {
        Rule::new("POST", path)
            .unwrap()
            .key_in_path(["a", "b"])
            .unwrap()
    };
    let one = rule("/x/{a}/{b}");
    let other = rule("/y/{a}/{b}");
    assert_eq!(key(&one, "/x/1/2"), key(&one, "/x/%31/2/"));
    assert_ne!(key(&one, "/x/1/23"), key(&one, "/x/12/3"));
    assert_ne!(key(&one, "/x/1/2"), key(&other, "/y/1/2"));
    assert!(key(&one, &format!("/x/{}/2", "k".repeat(5_000))).len() < 200);
    let body = |path: &str, body: &'static str| {
        let rule = Rule::new("POST", path).unwrap();
        let rule = rule.key_in_body(&Key::json(["order"])).unwrap();
        rule.key_of_body(&Bytes::from_static(body.as_bytes()))
            .unwrap()
    };
    let order = body("/p", r#"{"order":7,"x":1}"#).ok();
    assert_eq!(order, body("/p", r#"{ "order": 7 }"#).ok());
    assert_ne!(order, body("/p", r#"{"order":"7"}"#).ok());
    assert_ne!(order, body("/q", r#"{"order":7}"#).ok());
    for wrong in ["", "{}", "[7]", r#"{"order":{}}"#] {
        assert!(body("/p", wrong).is_err(), "{wrong}");
    }
}

#[test]
fn only_the_named_statuses_are_kept() {
    let rule = Rule::new("POST", "/a").unwrap();
    assert_eq!(rule.keeps(StatusCode::OK), None);
    let rule = rule.keep(["2xx", "404"]).unwrap();
    for (status, kept) in [
        (200, true),
        (299, true),
        (404, true),
        (400, false),
        (503, false),
    ] {
        let status = StatusCode::from_u16(status).unwrap();
        assert_eq!(rule.keeps(status), Some(kept), "{status}");
    }
}
