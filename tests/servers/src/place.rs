//! Places for servers: loopback ports, and folders that are removed.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// The ports to choose from.
///
/// They lie below Linux's range for outgoing connections. From inside that range, a client that
/// keeps connecting to a stopped server is sooner or later given the server's port as its own,
/// connects to itself, and the server cannot come back.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// How many ports to try before giving up.
const PORT_TRIES: usize = 200;

/// How many bytes must be free in memory, so that the servers of all tests that run at once have
/// room there.
const ROOM_IN_MEMORY: u64 = 4 << 30;

/// A loopback port that no other test process will take while this value lives, also while the
/// server on it is stopped.
#[derive(Debug)]
pub struct Port {
    number: u16,
    /// The same port of another loopback address: while it is bound, other test processes take the
    /// port as used, and the server can still bind its own. The kernel frees it however this
    /// process ends.
    _mark: TcpListener,
}

impl Port {
    /// Takes a free one.
    ///
    /// # Panics
    /// When none is found.
    #[must_use]
    pub fn reserve() -> Self {
        for number in std::iter::repeat_with(|| fastrand::u16(PORTS)).take(PORT_TRIES) {
            let Ok(mark) = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 2), number)) else {
                continue;
            };
            if TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok() {
                return Self {
                    number,
                    _mark: mark,
                };
            }
        }
        panic!("no free loopback port among {PORT_TRIES} tries in {PORTS:?}")
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// `127.0.0.1:port`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.number)
    }
}

/// `target/test-servers` of the workspace: the fetched servers, and the folders of the running
/// ones.
pub fn test_servers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/test-servers")
}

/// An empty folder for one server, deleted on drop.
///
/// A process that is killed deletes nothing, and neither does a server in a `static`; so the
/// folders carry the id of their process, and those of dead processes are deleted here.
pub fn server_dir(name: &str) -> TempDir {
    server_dir_in(
        &in_memory().unwrap_or_else(|| test_servers().join("run")),
        name,
    )
}

/// Where the folders of servers are kept in memory, if there is room: a server that syncs its
/// writes waits for those of all others on its disk, for seconds when a build has just ended.
pub(crate) fn in_memory() -> Option<PathBuf> {
    let shared = Path::new("/dev/shm");
    let room = rustix::fs::statvfs(shared).ok()?;
    let name = format!(
        "oncegate-test-servers-{}",
        rustix::process::getuid().as_raw()
    );
    (room.f_bavail.saturating_mul(room.f_frsize) >= ROOM_IN_MEMORY).then(|| shared.join(name))
}

/// Like [`server_dir`], in another place.
pub fn server_dir_in(root: &Path, name: &str) -> TempDir {
    fs::create_dir_all(root)
        .unwrap_or_else(|error| panic!("cannot create {}: {error}", root.display()));
    sweep(root);
    tempfile::Builder::new()
        .prefix(&format!("{}-{name}-", std::process::id()))
        .tempdir_in(root)
        .unwrap_or_else(|error| panic!("cannot create a folder in {}: {error}", root.display()))
}

fn sweep(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.split('-').next());
        let dead = owner.is_some_and(|id| !Path::new("/proc").join(id).exists());
        if dead {
            // Another process may be sweeping too. The second one finds nothing, and that is fine.
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}
