//! The forms of a specification: Rust, files, command line, descriptor.

use super::super::*;

#[test]
fn one_specification_from_rust_file_and_command_line() {
    check(
        &Key::json(["order_id", "customer.id"]),
        r#"{"json":["order_id","customer.id"]}"#,
        Some("order_id, customer.id"),
    );
    check(
        &Key::json([Field::from("id"), Field::path("amount").decimal()]),
        r#"{"json":["id",{"path":"amount","as":"decimal"}]}"#,
        Some("id,amount:decimal"),
    );
    let fields = [
        Field::path("email").trim().lowercase().nfc(),
        Field::path("at").timestamp(TimeUnit::Millis),
    ];
    check(
        &Key::json(fields),
        r#"{"json":[{"path":"email","as":["trim","lowercase","nfc"]},{"path":"at","as":["timestamp-millis"]}]}"#,
        Some("email:trim:lowercase:nfc,at:timestamp-millis"),
    );
    check(&Key::payload(), r#""payload""#, Some("payload"));
    check(&Key::payload(), r#"{"payload":{}}"#, None);
    check(
        &Key::payload().except(["sent_at", "trace.id"]),
        r#"{"payload":{"except":["sent_at","trace.id"]}}"#,
        Some("payload-except:sent_at, trace.id"),
    );
    check(
        &Key::header("x-id"),
        r#"{"header":"x-id"}"#,
        Some("header:x-id"),
    );
    check(&Key::message_key(), r#""message_key""#, Some("message-key"));
    check(
        &Key::message_id(),
        r#"{"message_id":{}}"#,
        Some("message_id"),
    );
    check(
        &Key::message_id()
            .tenant(TenantSource::header("org"))
            .max_payload_bytes(9),
        r#"{"message_id":{},"tenant":{"header":"org"},"max_payload_bytes":9}"#,
        None,
    );
    check(
        &Key::json(["id"]).tenant(TenantSource::json(Field::path("org").lowercase())),
        r#"{"json":["id"],"tenant":{"json":{"path":"org","as":"lowercase"}}}"#,
        None,
    );
    // A field with the name of a reserved word needs the prefix.
    check(
        &Key::json(["payload"]),
        r#"{"json":["payload"]}"#,
        Some("json:payload"),
    );
    check(
        &Key::json(["a\\:b\\,c", "d"]),
        r#"{"json":["a\\:b\\,c","d"]}"#,
        Some("a\\:b\\,c,d"),
    );
}

#[track_caller]
fn check(key: &Key, json: &str, text: Option<&str>) {
    assert_eq!(&serde_json::from_str::<Key>(json).unwrap(), key, "{json}");
    assert_eq!(&json.parse::<Key>().unwrap(), key, "{json}");
    assert_eq!(&key.to_string().parse::<Key>().unwrap(), key);
    assert_eq!(
        &serde_json::from_str::<Key>(&serde_json::to_string(key).unwrap()).unwrap(),
        key
    );
    if let Some(text) = text {
        assert_eq!(&text.parse::<Key>().unwrap(), key, "{text}");
    }
}

#[test]
fn a_stream_under_another_name_has_the_keys_of_the_first() {
    let scope = Scope::new("billing").unwrap();
    let order = KeyInput::payload(r#"{"order_id":7}"#);
    let key = |key: &Key, route: &str| key.compile(&scope).unwrap().derive(route, &order).unwrap();
    let plain = Key::json(["order_id"]);
    let orders = key(&plain, "orders");
    assert_ne!(key(&plain, "eu.orders"), orders);
    let routed = plain.clone().route("orders");
    assert_eq!(key(&routed, "eu.orders"), orders);
    assert_eq!(key(&routed, "orders"), orders);
    let mirrored = plain
        .clone()
        .route_of("eu.orders", "orders")
        .route_of("eu.refunds", "refunds");
    assert_eq!(key(&mirrored, "eu.orders"), orders);
    assert_eq!(key(&mirrored, "orders"), orders, "others keep their own");
    assert_eq!(key(&mirrored, "eu.refunds"), key(&plain, "refunds"));
    // Not a part of the specification: the scope's records stay those of the same key.
    assert_eq!(
        serde_json::to_string(&mirrored).unwrap(),
        serde_json::to_string(&plain).unwrap()
    );
    let with_rest = mirrored.route("rest");
    assert_eq!(key(&with_rest, "eu.orders"), orders);
    assert_eq!(key(&with_rest, "us.orders"), key(&plain, "rest"));
    for bad in [
        plain.clone().route(" "),
        plain.clone().route_of("", "orders"),
        plain.clone().route_of("eu.orders", ""),
    ] {
        assert!(
            bad.check().unwrap_err().to_string().contains("route"),
            "{bad:?}"
        );
    }
}

#[test]
fn what_is_wrong_is_said_with_what_to_do() {
    #[track_caller]
    fn check(spec: &str, expected: &str) {
        let error = spec.parse::<Key>().unwrap_err().to_string();
        assert!(error.contains(expected), "{spec}: {error}");
    }
    check("", "path `` has an empty part");
    check("a,,b", "path `` has an empty part");
    check("a..b", "path `a..b` has an empty part");
    check("a,b,a", "path `a` is given twice");
    check("a\\:b,a:b", "`b` is no normaliser; there are trim");
    check("a\\x", "a backslash may stand only before");
    check("items.*.id", "`*` alone is reserved");
    check("at:timestamp", "timestamp-days, -seconds");
    check("a:decimal:trim", "put it before");
    check("a:trim:trim", "is given twice");
    check("header:", "header needs a name");
    check("payload-except:", "path `` has an empty part");
    check("payload-except:a,a", "path `a` is given twice");
    check("{", "EOF");
    check("{}", "exactly one of json, payload");
    check(r#"{"json":["a"],"payload":{}}"#, "names 2");
    check(
        r#"{"jsn":["a"]}"#,
        "unknown field `jsn`, expected one of `json`",
    );
    check(r#"{"json":["a"],"json":["b"]}"#, "duplicate field `json`");
    check(
        r#"{"json":[{"path":"a","as":"upper"}]}"#,
        "`upper` is no normaliser",
    );
    check(
        r#"{"json":[{"path":"a","is":"trim"}]}"#,
        "unknown field `is`",
    );
    check(r#"{"json":[7]}"#, "expected a path as");
    check(
        r#"{"custom":{"name":"x","version":1}}"#,
        "unknown field `custom`",
    );
    check(r#"{"json":["a"],"max_payload_bytes":0}"#, "between 1 and");
    check(
        r#"{"json":["a"],"tenant":{"json":"a"}}"#,
        "path `a` is given twice",
    );
    let error = Key::header("x").except(["a"]).check().unwrap_err();
    assert_eq!(error, KeySpecError::ExceptWithoutPayload);
    let error = Key::json(Vec::<Field>::new()).check().unwrap_err();
    assert_eq!(error, KeySpecError::NoFields);
    let many = Key::json((0..=MAX_PATHS).map(|n| format!("f{n}")))
        .check()
        .unwrap_err();
    assert_eq!(
        many,
        KeySpecError::TooManyPaths {
            count: MAX_PATHS + 1,
            limit: MAX_PATHS
        }
    );
    assert!(matches!(
        Key::json(["x".repeat(1025)]).check(),
        Err(KeySpecError::PathTooLong { .. })
    ));
    assert!(
        serde_json::from_str::<Key>(r#""mesage_key""#).is_err(),
        "a typo is no path"
    );
}

#[test]
fn a_custom_key_cannot_be_written_down_but_described() {
    let [first, again, second, third] = [1, 1, 2, 3].map(|version| {
        Key::custom("csv", version, |_: &dyn KeySource, _: &mut KeyParts<'_>| {
            Ok(())
        })
    });
    let error = serde_json::to_string(&first).unwrap_err().to_string();
    assert!(error.contains("`csv` is a function"), "{error}");
    assert_eq!(first, again);
    assert_ne!(first, second);
    let text = Descriptor::new(&third, None).unwrap();
    assert_eq!(
        text.as_str(),
        r#"{"format":1,"key":{"custom":{"name":"csv","version":3}},"fingerprint":null}"#
    );
}

// invariant: key-spec-changed
#[test]
fn equal_specifications_have_equal_descriptors() {
    let one = Key::json([Field::from("b"), Field::path("a").decimal()])
        .tenant(TenantSource::json("o\\:rg"))
        .max_payload_bytes(7);
    let two = r#"{"tenant":{"json":"o:rg"},"json":[{"as":["decimal"],"path":"a"},"b"]}"#
        .parse()
        .unwrap();
    let fingerprint: FingerprintSpec = serde_json::from_str(r#"{"except":["z","y"]}"#).unwrap();
    let descriptor = Descriptor::new(&one, Some(&fingerprint)).unwrap();
    let other = FingerprintSpec::payload().except(["y", "z"]);
    assert_eq!(descriptor, Descriptor::new(&two, Some(&other)).unwrap());
    assert_eq!(
        descriptor.to_string(),
        r#"{"format":1,"key":{"json":[{"path":"a","as":["decimal"]},"b"],"tenant":{"json":"o:rg"}},"fingerprint":{"except":["y","z"]}}"#
    );
    for different in ["a,b", "a:decimal,b", "b,a:decimal,c", "payload"] {
        let different = Descriptor::new(&different.parse().unwrap(), Some(&other)).unwrap();
        assert_ne!(descriptor, different);
    }
}

#[test]
fn fingerprint_specifications_go_there_and_back() {
    for (text, spec) in [
        (r#""payload""#, FingerprintSpec::payload()),
        (r#""raw""#, FingerprintSpec::raw()),
        (
            r#"{"except":["sent_at"]}"#,
            FingerprintSpec::payload().except(["sent_at"]),
        ),
    ] {
        assert_eq!(serde_json::from_str::<FingerprintSpec>(text).unwrap(), spec);
        assert_eq!(serde_json::to_string(&spec).unwrap(), text);
    }
    for wrong in [
        r#""pay""#,
        "{}",
        r#"{"except":["a","a"]}"#,
        r#"{"except":["a"],"x":1}"#,
        "7",
    ] {
        assert!(
            serde_json::from_str::<FingerprintSpec>(wrong).is_err(),
            "{wrong}"
        );
    }
    assert!(
        FingerprintSpec::raw()
            .except(["a"])
            .compile(&Key::message_key())
            .is_err()
    );
}

#[test]
fn scopes() {
    for good in ["a", "Billing-2.eu_west", &"x".repeat(64)] {
        assert_eq!(Scope::new(good).unwrap().as_str(), good);
    }
    for bad in [
        "",
        "a:b",
        "a b",
        "*",
        "{a}",
        "a?",
        "[a]",
        "a\n",
        "ä",
        &"x".repeat(65),
    ] {
        assert!(Scope::new(bad).is_err(), "{bad}");
        assert!(
            serde_json::from_value::<Scope>(bad.into()).is_err(),
            "{bad}"
        );
    }
}

#[test]
fn the_use_of_defaults_is_no_part_of_a_descriptor() {
    for (with, without) in [
        (
            r#"{"json":[{"path":"a","default":true},{"path":"b","as":["decimal"],"default":true}],"tenant":{"json":{"path":"t","default":true}}}"#,
            r#"{"json":["a",{"path":"b","as":"decimal"}],"tenant":{"json":"t"}}"#,
        ),
        (
            r#"{"parts":[{"path":"a","default":true,"optional":true},{"first_of":[{"path":"b","default":true},"c"]}]}"#,
            r#"{"parts":[{"path":"a","optional":true},{"first_of":["b","c"]}]}"#,
        ),
        (
            r#"{"cases":[{"when":{"path":"a","default":true},"parts":[{"path":"b","default":true}]}]}"#,
            r#"{"cases":[{"when":{"path":"a"},"parts":["b"]}]}"#,
        ),
    ] {
        let key: Key = with.parse().unwrap();
        assert_eq!(key.to_string().parse::<Key>().unwrap(), key, "{key}");
        let other: Key = without.parse().unwrap();
        assert_ne!(key, other);
        assert_eq!(
            Descriptor::new(&key, None).unwrap(),
            Descriptor::new(&other, None).unwrap()
        );
    }
}
