//! The memory of the servers, as they report it while they are watched.

use oncegate_core::store::StoreMemory;
use parking_lot::Mutex;

use super::info::Info;

/// The memory of the server with the least room, when the servers were asked last.
#[derive(Debug, Default)]
pub(super) struct FullestServer {
    last: Mutex<Option<StoreMemory>>,
}

impl FullestServer {
    /// Takes what the servers have answered in one round. Without an answer, the last round counts.
    pub(super) fn note(&self, servers: impl Iterator<Item = StoreMemory>) {
        let fullest = servers.max_by(|one, other| {
            used_share(one)
                .total_cmp(&used_share(other))
                .then(one.used_bytes.cmp(&other.used_bytes))
        });
        if fullest.is_some() {
            *self.last.lock() = fullest;
        }
    }

    pub(super) fn get(&self) -> Option<StoreMemory> {
        *self.last.lock()
    }
}

/// The share of its limit that a server uses; zero without a limit.
#[expect(clippy::cast_precision_loss, reason = "a share to compare")]
pub(super) fn used_share(memory: &StoreMemory) -> f64 {
    memory
        .max_bytes
        .map_or(0.0, |max| memory.used_bytes as f64 / max as f64)
}

/// The memory in an INFO; `None` if the server does not show it.
pub(super) fn of(info: &Info<'_>) -> Option<StoreMemory> {
    let max_bytes = info.number("maxmemory").filter(|max| *max > 0);
    Some(StoreMemory {
        used_bytes: info.number("used_memory")?,
        max_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(used_bytes: u64, max_bytes: Option<u64>) -> StoreMemory {
        StoreMemory {
            used_bytes,
            max_bytes,
        }
    }

    #[test]
    fn a_limit_of_zero_is_none() {
        assert_eq!(
            of(&Info("used_memory:1024\r\nmaxmemory:0\r\n")),
            Some(server(1_024, None))
        );
        assert_eq!(
            of(&Info("used_memory:1024\r\nmaxmemory:4096\r\n")),
            Some(server(1_024, Some(4_096)))
        );
        assert_eq!(of(&Info("redis_version:7.0.15\r\n")), None);
    }

    #[test]
    fn the_server_with_the_least_room_counts() {
        let fullest = FullestServer::default();
        assert_eq!(fullest.get(), None);
        fullest.note(
            [
                server(900, Some(10_000)),
                server(90, Some(100)),
                server(5_000, None),
            ]
            .into_iter(),
        );
        assert_eq!(fullest.get(), Some(server(90, Some(100))));
        fullest.note([server(1, None), server(7, None)].into_iter());
        assert_eq!(fullest.get(), Some(server(7, None)));
        fullest.note(std::iter::empty());
        assert_eq!(
            fullest.get(),
            Some(server(7, None)),
            "no server has answered"
        );
    }
}
