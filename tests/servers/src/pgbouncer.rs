//! PgBouncer for a test, before a PostgreSQL server.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use crate::place::{self, Port};
use crate::postgres::Postgres;
use crate::postgres_server::ACCOUNTS;
use crate::process::{self, Account, Process};

/// Names the program, when it is not the one that `scripts/fetch-servers` fetches.
const VARIABLE: &str = "ONCEGATE_PGBOUNCER";

/// That program's folder, under `target/test-servers`; the release is the one of
/// `scripts/fetch-servers`.
const FOLDER: &str = "pgbouncer-forky";

const START_LIMIT: Duration = Duration::from_secs(60);

const HINT: &str = "`scripts/fetch-servers` fetches it";

/// A `PgBouncer` in transaction mode, whose few server connections are shared by all clients; it
/// stops when this value is dropped.
#[derive(Debug)]
pub struct PgBouncer {
    postgres: Postgres,
    _process: Process,
    _port: Port,
    _dir: TempDir,
}

impl PgBouncer {
    /// Starts it before `server`, with further lines for its configuration.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn before(server: &Postgres, settings: &[&str]) -> Self {
        let port = Port::reserve();
        let account = process::runs_as_root().then(|| {
            let found = ACCOUNTS.into_iter().find_map(Account::named);
            found.unwrap_or_else(|| {
                panic!("there is none of the accounts {ACCOUNTS:?} to run PgBouncer as")
            })
        });
        let dir = place::server_dir_in(
            &std::env::temp_dir().join("oncegate-test-servers"),
            "pgbouncer",
        );
        let program = account.as_ref().map_or_else(program, |_| copied_into(&dir));
        let own = "postgres://postgres@127.0.0.1:";
        let rest = server
            .url()
            .strip_prefix(own)
            .expect("a server on loopback");
        let (server_port, database) = rest.split_once('/').expect("a database");
        let file = |name: &str| dir.path().join(name);
        let users = file("users");
        fs::write(&users, "\"postgres\" \"\"\n").expect("the folder can be written");
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={server_port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {}\nunix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = transaction\n\
             default_pool_size = 4\n{}\n",
            port.number(),
            users.display(),
            settings.join("\n"),
        );
        fs::write(file("pgbouncer.ini"), settings).expect("the folder can be written");
        if let Some(account) = &account {
            account.own(dir.path());
        }
        let mut command: Command = process::bound_to_parent_as(account.as_ref(), program, "KILL");
        command.current_dir(dir.path()).arg(file("pgbouncer.ini"));
        let mut process = Process::spawn_logged("PgBouncer", command, &file("pgbouncer.log"));
        let postgres = Postgres::at(format!("{own}{}/{database}", port.number()));
        process
            .ready(START_LIMIT, HINT, || async { postgres.answers().await })
            .await;
        Self {
            postgres,
            _process: process,
            _port: port,
            _dir: dir,
        }
    }

    /// The URL of the server's database through it.
    #[must_use]
    pub fn url(&self) -> &str {
        self.postgres.url()
    }
}

fn program() -> PathBuf {
    let program = std::env::var_os(VARIABLE).map_or_else(
        || place::test_servers().join(FOLDER).join("pgbouncer"),
        PathBuf::from,
    );
    assert!(
        program.is_file(),
        "no PgBouncer at {}: {HINT}",
        program.display()
    );
    program
}

/// It refuses to run as root, and a workspace of root's may be closed to others.
fn copied_into(dir: &TempDir) -> PathBuf {
    let program = program();
    let folder = program.parent().expect("it is in a folder");
    let copied = Command::new("cp")
        .arg("-r")
        .arg(folder)
        .arg(dir.path().join("program"))
        .status();
    assert!(
        copied.expect("cp runs").success(),
        "cannot copy {}",
        folder.display()
    );
    dir.path()
        .join("program")
        .join(program.file_name().expect("it is a file"))
}
