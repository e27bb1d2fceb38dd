//! Parses which node of a cluster has which slot, from `CLUSTER SLOTS` and from redirections.

use std::fmt;

use redis::{ServerError, Value};

/// The number of slots of a cluster.
pub(super) const SLOTS: usize = 16_384;

/// The slot of a key: of the text in its braces, or of the whole key if it has none.
pub(super) fn slot(key: &str) -> u16 {
    debug_assert!(!key.contains('{'), "a scope holds no braces");
    crc16::State::<crc16::XMODEM>::calculate(key.as_bytes()) % (SLOTS as u16)
}

/// A node's address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Host {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Host {
    /// Parses `host:port`. An IPv6 address has no brackets; an empty host means the server that was
    /// asked.
    fn parse(text: &str, asked: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = if host.is_empty() { asked } else { host };
        Some(Self {
            host: host.to_owned(),
            port: port.parse().ok()?,
        })
        .filter(Self::is_known)
    }

    /// Returns whether it is an address: a node whose address is not known yet is listed at `?`.
    fn is_known(&self) -> bool {
        self.host != "?" && self.port != 0
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

/// A redirection to another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Redirect {
    /// The redirection is valid once: the slot and this key are being moved.
    pub(super) once: bool,
    pub(super) slot: u16,
    pub(super) host: Host,
}

/// Parses the redirection in an error of the server at `asked`, if the error is one.
pub(super) fn redirect(error: &ServerError, asked: &str) -> Option<Redirect> {
    let once = match error.code() {
        "MOVED" => false,
        "ASK" => true,
        _ => return None,
    };
    let (slot, host) = error.details()?.split_once(' ')?;
    let slot = slot
        .parse()
        .ok()
        .filter(|slot| usize::from(*slot) < SLOTS)?;
    Some(Redirect {
        once,
        slot,
        host: Host::parse(host, asked)?,
    })
}

/// Slots `first..=last`, their primary and its replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) primary: Host,
    pub(super) replicas: Vec<Host>,
}

/// Parses the answer of the server at `asked` to `CLUSTER SLOTS`; `None` when it is malformed.
pub(super) fn ranges(answer: &Value, asked: &str) -> Option<Vec<Range>> {
    let Value::Array(ranges) = answer else {
        return None;
    };
    ranges
        .iter()
        .map(|range| read_range(range, asked))
        .collect()
}

fn read_range(range: &Value, asked: &str) -> Option<Range> {
    let Value::Array(parts) = range else {
        return None;
    };
    let (first, parts) = parts.split_first()?;
    let (last, nodes) = parts.split_first()?;
    let mut nodes = nodes.iter().filter_map(|node| read_node(node, asked));
    let first = read_slot(first)?;
    let last = read_slot(last)?;
    Some(Range {
        first,
        last,
        primary: nodes.next()?,
        replicas: nodes.collect(),
    })
}

fn read_slot(value: &Value) -> Option<u16> {
    let Value::Int(slot) = value else { return None };
    u16::try_from(*slot)
        .ok()
        .filter(|slot| usize::from(*slot) < SLOTS)
}

fn read_node(node: &Value, asked: &str) -> Option<Host> {
    let Value::Array(parts) = node else {
        return None;
    };
    let (host, parts) = parts.split_first()?;
    let Value::Int(port) = parts.first()? else {
        return None;
    };
    let host = match host {
        Value::BulkString(host) => String::from_utf8(host.clone()).ok()?,
        Value::SimpleString(host) => host.clone(),
        Value::Nil => String::new(),
        _ => return None,
    };
    // A node that does not know its own address returns an empty host.
    let host = if host.is_empty() {
        asked.to_owned()
    } else {
        host
    };
    Some(Host {
        host,
        port: u16::try_from(*port).ok()?,
    })
    .filter(Host::is_known)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Value {
        redis::parse_redis_value(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_key_has_the_slot_that_the_server_gives_it() {
        // As `CLUSTER KEYSLOT` answers.
        assert_eq!(slot("123456789"), 0x31C3);
        assert_eq!(slot("foo"), 12_182);
        assert_eq!(
            slot("billing:AAAAAAAAAAAAAAAAAAAAAA"),
            slot("billing:AAAAAAAAAAAAAAAAAAAAAA")
        );
    }

    fn read(line: &str) -> Option<Redirect> {
        match parse(&format!("-{line}\r\n")) {
            Value::ServerError(error) => redirect(&error, "asked"),
            other => panic!("{other:?}"),
        }
    }

    fn host(host: &str, port: u16) -> Host {
        Host {
            host: host.to_owned(),
            port,
        }
    }

    #[test]
    fn redirections_are_read() {
        assert_eq!(
            read("MOVED 3999 127.0.0.1:6381"),
            Some(Redirect {
                once: false,
                slot: 3999,
                host: host("127.0.0.1", 6381)
            })
        );
        assert_eq!(
            read("ASK 1 ::1:7000"),
            Some(Redirect {
                once: true,
                slot: 1,
                host: host("::1", 7000)
            })
        );
        assert_eq!(
            read("MOVED 7 :6381"),
            Some(Redirect {
                once: false,
                slot: 7,
                host: host("asked", 6381)
            })
        );
        for other in [
            "MOVED 99999 a:1",
            "MOVED",
            "MOVED 7 ?:0",
            "ASK 7 :0",
            "TRYAGAIN later",
            "ERR MOVED 1 a:1",
        ] {
            assert_eq!(read(other), None, "{other}");
        }
    }

    #[test]
    fn slots_are_read_and_nonsense_is_not() {
        let answer = parse(
            "*2\r\n\
             *4\r\n:0\r\n:5460\r\n*3\r\n$9\r\n127.0.0.1\r\n:7000\r\n$2\r\nid\r\n*3\r\n$9\r\n127.0.0.1\r\n:7003\r\n$2\r\nid\r\n\
             *4\r\n:5461\r\n:16383\r\n*3\r\n$0\r\n\r\n:7001\r\n$2\r\nid\r\n*3\r\n$1\r\n?\r\n:0\r\n$2\r\nid\r\n",
        );
        let ranges = ranges(&answer, "seed").unwrap();
        assert_eq!((ranges[0].first, ranges[0].last), (0, 5460));
        assert_eq!(
            ranges[0].replicas,
            [Host {
                host: "127.0.0.1".to_owned(),
                port: 7003
            }]
        );
        assert_eq!(
            ranges[1].primary,
            Host {
                host: "seed".to_owned(),
                port: 7001
            }
        );
        assert_eq!(ranges[1].replicas, []);
        for nonsense in [
            "+OK\r\n",
            "*1\r\n:1\r\n",
            "*1\r\n*2\r\n:0\r\n:1\r\n",
            "*1\r\n*2\r\n:0\r\n:99999\r\n",
        ] {
            assert_eq!(super::ranges(&parse(nonsense), "seed"), None, "{nonsense}");
        }
    }
}
