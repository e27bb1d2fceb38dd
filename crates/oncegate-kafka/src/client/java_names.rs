//! Properties of Kafka's Java client that librdkafka does not have, and what to set instead.

/// The properties, each with what to do instead.
const INSTEAD: &[(&str, &str)] = &[
    (
        "client.dns.lookup",
        "leave it out: every address of a broker is tried",
    ),
    ("default.api.timeout.ms", "use socket.timeout.ms"),
    ("fetch.max.wait.ms", "use fetch.wait.max.ms"),
    (
        "interceptor.classes",
        "leave it out: there are no interceptors",
    ),
    (
        "key.deserializer",
        "leave it out: keys and payloads are bytes here",
    ),
    ("max.poll.records", "use in_flight_messages"),
    ("receive.buffer.bytes", "use socket.receive.buffer.bytes"),
    ("request.timeout.ms", "use socket.timeout.ms"),
    (
        "sasl.client.callback.handler.class",
        "use sasl.oauthbearer.method",
    ),
    ("sasl.jaas.config", "use sasl.username and sasl.password"),
    (
        "sasl.login.callback.handler.class",
        "use sasl.oauthbearer.method",
    ),
    ("send.buffer.bytes", "use socket.send.buffer.bytes"),
    (
        "ssl.keystore.type",
        "leave it out: ssl.keystore.location is a PKCS#12 file",
    ),
    ("ssl.protocol", "leave it out: TLS 1.2 or later is used"),
    ("ssl.truststore.certificates", "use ssl.ca.pem"),
    (
        "ssl.truststore.location",
        "use ssl.ca.location, a file in PEM",
    ),
    (
        "ssl.truststore.password",
        "leave it out: ssl.ca.location needs none",
    ),
    (
        "ssl.truststore.type",
        "leave it out: ssl.ca.location is a file in PEM",
    ),
    (
        "value.deserializer",
        "leave it out: keys and payloads are bytes here",
    ),
];

/// Returns what to set instead of a property of the Java client.
pub(crate) fn instead(name: &str) -> Option<&'static str> {
    INSTEAD
        .iter()
        .find(|(java, _)| *java == name)
        .map(|(_, instead)| *instead)
}
