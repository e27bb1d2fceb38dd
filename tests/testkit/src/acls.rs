//! Grants and revokes rights in a Kafka cluster, by the protocol itself: librdkafka's bindings have
//! no requests for it, and Kafka's own tool takes seconds.
//!
//! Source: <https://kafka.apache.org/protocol#The_Messages_CreateAcls>, version 1.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// `CreateAcls`.
const CREATE: i16 = 30;

/// `DeleteAcls`.
const DELETE: i16 = 31;

/// The oldest version of both that Kafka 4 still speaks.
const VERSION: i16 = 1;

/// The name is meant literally, with no pattern.
const LITERAL: i8 = 3;

/// The right is given, not taken.
const ALLOW: i8 = 3;

/// What a right concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On<'a> {
    /// A topic.
    Topic(&'a str),
    /// A consumer group.
    Group(&'a str),
}

/// An operation, with Kafka's number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i8)]
pub enum Right {
    /// Consume.
    Read = 3,
    /// Produce.
    Write = 4,
    /// See that it exists.
    Describe = 8,
    /// See its settings.
    DescribeConfigs = 10,
}

/// Gives these rights to users, all at once, at a listener whose clients may do that.
///
/// # Panics
/// When the broker does not accept it.
pub(crate) async fn grant(broker: &str, rights: &[(&str, Right, On<'_>)]) {
    let answer = ask(broker, CREATE, rights).await;
    let mut results = &*answer;
    for (user, right, on) in rights {
        let code = results.read_i16().await.expect("a code");
        assert_eq!(code, 0, "Kafka does not give {user} {right:?} on {on:?}");
        let length = results.read_i16().await.expect("the length of a text");
        results = results
            .get(usize::try_from(length).unwrap_or(0)..)
            .expect("the text");
    }
}

/// Takes a right back.
///
/// # Panics
/// When the broker does not accept it, or the user does not have it.
pub(crate) async fn revoke(broker: &str, (user, right, on): (&str, Right, On<'_>)) {
    let answer = ask(broker, DELETE, &[(user, right, on)]).await;
    let mut result = &*answer;
    assert_eq!(
        result.read_i16().await.expect("a code"),
        0,
        "Kafka does not take {right:?} on {on:?}"
    );
    let length = result.read_i16().await.expect("the length of a text");
    let mut removed = result
        .get(usize::try_from(length).unwrap_or(0)..)
        .expect("the text");
    assert_eq!(
        removed.read_i32().await.expect("a number"),
        1,
        "{user} has no {right:?} on {on:?}"
    );
}

/// Sends a request about these rights, and returns the answer from its first result on.
///
/// A right is written in the same way when it is created and when it is named to be deleted.
async fn ask(broker: &str, request: i16, rights: &[(&str, Right, On<'_>)]) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend_from_slice(&request.to_be_bytes());
    body.extend_from_slice(&VERSION.to_be_bytes());
    body.extend_from_slice(&1_i32.to_be_bytes());
    text(&mut body, "testkit");
    body.extend_from_slice(&i32::try_from(rights.len()).expect("a few").to_be_bytes());
    for (user, right, on) in rights {
        let (kind, name) = match on {
            On::Topic(name) => (2_i8, name),
            On::Group(name) => (3, name),
        };
        body.extend_from_slice(&kind.to_be_bytes());
        text(&mut body, name);
        body.extend_from_slice(&LITERAL.to_be_bytes());
        text(&mut body, &format!("User:{user}"));
        text(&mut body, "*");
        body.extend_from_slice(&(*right as i8).to_be_bytes());
        body.extend_from_slice(&ALLOW.to_be_bytes());
    }
    let mut socket = TcpStream::connect(broker)
        .await
        .expect("the broker listens");
    let length = i32::try_from(body.len()).expect("it is short");
    socket
        .write_all(&[&length.to_be_bytes(), &*body].concat())
        .await
        .expect("the broker takes it");
    let length = socket.read_i32().await.expect("the broker answers");
    let mut answer = vec![0; usize::try_from(length).expect("it is positive")];
    socket
        .read_exact(&mut answer)
        .await
        .expect("the whole answer");
    // The number of the request, the throttle, and the number of results; each is a code and a text
    // first.
    answer.split_off(12)
}

fn text(into: &mut Vec<u8>, text: &str) {
    into.extend_from_slice(
        &i16::try_from(text.len())
            .expect("it is short")
            .to_be_bytes(),
    );
    into.extend_from_slice(text.as_bytes());
}
