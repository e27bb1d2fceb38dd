//! PostgreSQL servers for one test.

use std::ffi::OsStr;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use crate::disk::SmallDisk;
use crate::place::{self, Port};
use crate::postgres::Postgres;
use crate::process::{self, Account, Process};

/// How long a server may take until it answers; recovery after a crash takes place in this time
/// too.
const START_LIMIT: Duration = Duration::from_secs(240);

/// How long the processes of a killed server may take to be gone.
const GONE_LIMIT: Duration = Duration::from_secs(20);

const HINT: &str = "`scripts/fetch-servers` installs postgresql";

/// Where Debian keeps the programs of each version, which are not in the path.
const DEBIAN: &str = "/usr/lib/postgresql";

/// Accounts to run the server as when the tests run as root, which PostgreSQL refuses.
pub(crate) const ACCOUNTS: [&str; 2] = ["postgres", "nobody"];

/// A PostgreSQL server for one test; it is stopped when this value is dropped.
///
/// It syncs its disk, and trusts every client on loopback.
#[derive(Debug)]
pub struct PostgresServer {
    postgres: Postgres,
    settings: Vec<String>,
    account: Option<Account>,
    process: Option<Process>,
    // After the process: fields are dropped in this order, and the server must not write any more.
    dir: TempDir,
    port: Port,
}

impl PostgresServer {
    /// Starts a server on a free port and waits until it answers.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Like [`PostgresServer::start`], with further settings: `["synchronous_commit=off"]`.
    ///
    /// # Panics
    /// As [`PostgresServer::start`].
    pub async fn start_with(settings: &[&str]) -> Self {
        let mut server = Self::place(settings);
        server.initialise();
        server.start_again().await;
        server
    }

    /// Like [`PostgresServer::start`], with TLS by these files in PEM. The role `postgres` is
    /// trusted; every other role must use TLS: the role `server` with a certificate of that name,
    /// and the others with a password.
    ///
    /// # Panics
    /// As [`PostgresServer::start`], or when the files cannot be copied.
    pub async fn start_tls(certificate: &Path, key: &Path, authority: &Path) -> Self {
        use std::os::unix::fs::PermissionsExt as _;
        let mut server = Self::place(&["ssl=on", "ssl_ca_file=root.crt"]);
        server.initialise();
        server.install_certificate(certificate, key);
        server.install(authority, "root.crt");
        let access = "host all postgres 127.0.0.1/32 trust\n\
                      hostssl all server 127.0.0.1/32 cert\n\
                      hostssl all all 127.0.0.1/32 scram-sha-256\n";
        fs::write(server.data().join("pg_hba.conf"), access)
            .expect("the data folder can be written");
        let key = server.data().join("server.key");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("the key is ours");
        server.start_again().await;
        server
    }

    /// Gives the server another certificate and key; it uses them for new connections after a
    /// reload.
    ///
    /// # Panics
    /// When the files cannot be copied.
    pub fn install_certificate(&self, certificate: &Path, key: &Path) {
        self.install(certificate, "server.crt");
        self.install(key, "server.key");
    }

    /// Copies a file into the data folder, under the server's account.
    fn install(&self, file: &Path, name: &str) {
        let to = self.data().join(name);
        fs::copy(file, &to)
            .unwrap_or_else(|error| panic!("cannot copy to {}: {error}", to.display()));
        if let Some(account) = &self.account {
            account.own(&to);
        }
    }

    /// Starts a standby that follows `primary` by streaming replication, on a port of its own, from
    /// a copy of its data.
    ///
    /// # Panics
    /// When the copy fails, or as [`PostgresServer::start`].
    pub async fn standby_of(primary: &Self) -> Self {
        let mut server = Self::place(&[]);
        let mut command = server.command("pg_basebackup");
        command.args([
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--host=127.0.0.1",
            "--username=postgres",
        ]);
        command
            .arg(format!("--port={}", primary.port.number()))
            .arg("--pgdata")
            .arg(server.data());
        finish(&mut command, "pg_basebackup");
        server.start_again().await;
        server
    }

    /// A place for a server, with nothing in it.
    fn place(settings: &[&str]) -> Self {
        let port = Port::reserve();
        let account = process::runs_as_root().then(|| {
            let found = ACCOUNTS.into_iter().find_map(Account::named);
            found.unwrap_or_else(|| {
                panic!("there is none of the accounts {ACCOUNTS:?} to run PostgreSQL as")
            })
        });
        let dir = match &account {
            None => place::server_dir("postgres"),
            // A workspace of root's may be closed to others.
            Some(account) => {
                let on_disk = || std::env::temp_dir().join("oncegate-test-servers");
                let dir =
                    place::server_dir_in(&place::in_memory().unwrap_or_else(on_disk), "postgres");
                account.own(dir.path());
                dir
            }
        };
        let url = format!("postgres://postgres@{}/postgres", port.address());
        Self {
            postgres: Postgres::at(url),
            settings: settings.iter().map(ToString::to_string).collect(),
            account,
            process: None,
            dir,
            port,
        }
    }

    fn initialise(&self) {
        let mut command = self.command("initdb");
        command
            .args([
                "--username=postgres",
                "--auth=trust",
                "--encoding=UTF8",
                "--locale=C",
                "--no-sync",
            ])
            .arg("--pgdata")
            .arg(self.data());
        finish(&mut command, "initdb");
    }

    /// Kills the server with SIGKILL, all its processes, and waits until they are gone. Its data
    /// stays.
    ///
    /// # Panics
    /// When one of them does not go.
    pub fn kill(&mut self) {
        let Some(process) = self.process.take() else {
            return;
        };
        let children = process::children(process.id());
        drop(process);
        process::kill_and_wait(&children, GONE_LIMIT);
    }

    /// Starts the killed server again, on the same port and with its data, and waits until it
    /// answers.
    ///
    /// # Panics
    /// When it still runs, or does not start.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "PostgreSQL still runs");
        let log = self.dir.path().join("server.log");
        let mut command = self.command("postgres");
        command
            .arg("-D")
            .arg(self.data())
            .args([
                "-c",
                "listen_addresses=127.0.0.1",
                "-c",
                "unix_socket_directories=",
            ])
            .args(["-c", "fsync=on", "-c", "max_connections=200", "-c"])
            .arg(format!("port={}", self.port.number()));
        for setting in &self.settings {
            command.args(["-c", setting]);
        }
        let mut process = Process::spawn_logged("PostgreSQL", command, &log);
        let (postgres, own) = (&self.postgres, self.data());
        let own = &own;
        process
            .ready(START_LIMIT, HINT, || async move {
                match postgres.data_directory().await {
                    Ok(data) if Path::new(&data) == own => Ok(()),
                    Ok(data) => Err(format!("the server of {data} answers in its place")),
                    Err(error) => Err(error),
                }
            })
            .await;
        self.process = Some(process);
    }

    /// The processor time that the server has used so far, all its sessions together.
    ///
    /// # Panics
    /// When it has been killed.
    pub fn cpu_time(&mut self) -> Duration {
        let id = self.process().id();
        let sessions = process::children(id)
            .into_iter()
            .map(|child| process::cpu_time(child, false));
        process::cpu_time(id, true) + sessions.sum::<Duration>()
    }

    /// Starts the killed server again as a standby, which takes no writes.
    ///
    /// # Panics
    /// As [`PostgresServer::start_again`].
    pub async fn start_again_as_standby(&mut self) {
        let signal = self.data().join("standby.signal");
        fs::write(&signal, "")
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", signal.display()));
        self.start_again().await;
    }

    /// A small file system of the server's own, for a tablespace; it goes with the returned value,
    /// which must be dropped before the server.
    ///
    /// # Panics
    /// When it cannot be mounted, which only root may do.
    #[must_use]
    pub fn small_disk(&self, mebibytes: u32) -> SmallDisk {
        let path = self.dir.path().join("small-disk");
        fs::create_dir(&path)
            .unwrap_or_else(|error| panic!("cannot create {}: {error}", path.display()));
        let disk = SmallDisk::mount_on(path, u64::from(mebibytes) << 20);
        if let Some(account) = &self.account {
            account.own(disk.path());
        }
        disk
    }

    /// The running server's process, to stop it by a signal for example.
    ///
    /// # Panics
    /// When it has been killed.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("PostgreSQL runs")
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = process::bound_to_parent_as(self.account.as_ref(), find(program), "KILL");
        command.current_dir(self.dir.path());
        command
    }
}

impl Drop for PostgresServer {
    /// Has the server remove its shared memory, which one that is killed leaves to the machine: it
    /// has 4,096 segments at most, and then no PostgreSQL starts any more.
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            process.end_by("QUIT", GONE_LIMIT);
        }
    }
}

impl Deref for PostgresServer {
    type Target = Postgres;

    fn deref(&self) -> &Postgres {
        &self.postgres
    }
}

/// The version of the server that the tests start, `15.13` for example; `unknown` when it does not
/// report it.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn version() -> String {
    // `postgres (PostgreSQL) 15.13 (Debian 15.13-0+deb12u1)`
    let said = Command::new(find("postgres")).arg("--version").output();
    let said = said
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    said.split(' ')
        .nth(2)
        .unwrap_or("unknown")
        .trim()
        .to_owned()
}

/// Runs one of PostgreSQL's programs to its end.
///
/// # Panics
/// When it fails.
fn finish(command: &mut Command, program: &str) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("cannot run {program}: {error}. {HINT}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} failed. {HINT}\n{said}");
}

/// Where a program is: in the path, or where Debian keeps its newest version.
fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file());
    let versions = fs::read_dir(DEBIAN)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let number = |folder: &PathBuf| {
        folder
            .file_name()
            .and_then(OsStr::to_str)?
            .parse::<u32>()
            .ok()
    };
    let newest = || {
        let found = versions
            .filter_map(|folder| Some((number(&folder)?, folder.join("bin").join(program))));
        found
            .filter(|(_, file)| file.is_file())
            .max()
            .map(|(_, file)| file)
    };
    in_path
        .or_else(newest)
        .unwrap_or_else(|| panic!("{program} is neither in the path nor in {DEBIAN}. {HINT}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_ended_server_leaves_no_shared_memory() {
        let server = PostgresServer::start().await;
        let known = fs::read_to_string(server.data().join("postmaster.pid")).unwrap();
        // The seventh line has the key and the id of the segment.
        let id = known
            .lines()
            .nth(6)
            .and_then(|line| line.split_whitespace().last());
        let id = id.expect("PostgreSQL has a segment");
        assert!(segments().iter().any(|segment| segment == id), "{known}");
        drop(server);
        assert!(
            segments().iter().all(|segment| segment != id),
            "{id} is left"
        );
    }

    fn segments() -> Vec<String> {
        let table = fs::read_to_string("/proc/sysvipc/shm").unwrap();
        let ids = table
            .lines()
            .filter_map(|line| line.split_whitespace().nth(1));
        ids.map(str::to_owned).collect()
    }
}
