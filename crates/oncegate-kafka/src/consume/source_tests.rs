//! Settings that a source refuses before it opens.

use super::*;

#[test]
fn properties_are_known_before_the_start() {
    let checked = |name: &str, value: &str| {
        KafkaSource::new("127.0.0.1:1", "group", ["orders"])
            .property(name, value)
            .check()
    };
    for (name, value, says) in [
        (
            "sasl.jaas.config",
            "required password=\"hush\"",
            "sasl.username",
        ),
        (
            "ssl.truststore.location",
            "/etc/kafka.jks",
            "ssl.ca.location",
        ),
        ("max.poll.records", "500", "in_flight"),
        ("key.deserializer", "org.Any", "bytes"),
        ("session.timeout", "6", "No such configuration property"),
        ("session.timeout.ms", "soon", "session.timeout.ms"),
        ("compression.type", "gzip", "no effect"),
    ] {
        let error = checked(name, value).unwrap_err().to_string();
        assert!(
            error.contains(name) && error.contains(says) && !error.contains("hush"),
            "{error}"
        );
    }
    checked("session.timeout.ms", "6000").expect("it is known");
}

// invariant: consumption-without-commits
#[test]
fn times_at_their_limits_are_refused_by_name() {
    let source = || KafkaSource::new("127.0.0.1:1", "group", ["orders"]);
    assert!(source().check().is_ok());
    for interval in [Duration::ZERO, Duration::MAX] {
        let error = source().commit_interval(interval).check().unwrap_err();
        assert!(error.to_string().contains("commit_interval"), "{error}");
    }
    let error = source().open_timeout(Duration::MAX).check().unwrap_err();
    assert!(error.to_string().contains("open_timeout"), "{error}");
    assert!(source().drain_timeout(Duration::MAX).check().is_err());
}
