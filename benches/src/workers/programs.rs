//! The programs of the workers. One whose language is not installed is left out.

use std::path::{Path, PathBuf};
use std::process::Command;

use oncegate_testkit::{LoopbackPort, Process, process};
use tempfile::TempDir;

use super::rows::Kind;

/// The programs that can be started here.
#[derive(Debug)]
pub(super) struct Programs {
    folder: TempDir,
    has_go: bool,
    has_node: bool,
}

impl Programs {
    /// Builds the worker in Go. Prints on standard error which languages are not installed.
    pub(super) fn prepare() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let has_go = is_installed("go", "version");
        let has_node = is_installed("node", "--version");
        if has_go {
            let built = Command::new("go")
                .args(["build", "-o"])
                .arg(go_program(&folder))
                .arg(source("worker.go"))
                .current_dir(folder.path())
                // The worker needs nothing but Go itself.
                .envs([("GOTOOLCHAIN", "local"), ("GOPROXY", "off")])
                .status();
            assert!(
                built.expect("Go can be started").success(),
                "benches/workers/worker.go cannot be built"
            );
        }
        Self {
            folder,
            has_go,
            has_node,
        }
    }

    /// Returns whether the worker can be started.
    pub(super) fn have(&self, worker: Kind) -> bool {
        match worker {
            Kind::Python { .. } => true,
            Kind::Go => self.has_go,
            Kind::Node => self.has_node,
        }
    }

    /// Starts a worker behind HTTP. Returns `None` for one that the command starts itself.
    pub(super) fn start(&self, worker: Kind, port: &LoopbackPort, log: &Path) -> Option<Process> {
        let mut command = match worker {
            Kind::Python { .. } => return None,
            Kind::Go => process::bound_to_parent(go_program(&self.folder), "KILL"),
            Kind::Node => {
                let mut command = process::bound_to_parent("node", "KILL");
                command.arg(source("worker.js"));
                command
            }
        };
        command.arg(port.number().to_string());
        Some(Process::spawn_logged("worker", command, log))
    }

    /// The flags of `oncegate run` for a worker. One behind HTTP listens at the port.
    pub(super) fn flags(worker: Kind, port: &LoopbackPort) -> Vec<String> {
        let Kind::Python {
            script,
            arguments,
            processes,
            batch,
        } = worker
        else {
            let url = format!("http://127.0.0.1:{}/", port.number());
            return ["--handler".to_owned(), url].into();
        };
        let program = format!("python3 '{}' {arguments}", source(script).display());
        ["--handler-exec", &program, "--workers", processes]
            .into_iter()
            .chain(
                batch
                    .into_iter()
                    .flat_map(|batch| ["--batch-messages", batch]),
            )
            .map(str::to_owned)
            .collect()
    }
}

/// The folder of the library for Python.
pub(super) fn python_library() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packages/python/src")
}

/// The command, which `scripts/bench` builds beside this program.
pub(super) fn oncegate() -> PathBuf {
    let own = std::env::current_exe().expect("this program has a path");
    let path = own.with_file_name("oncegate");
    assert!(
        path.exists(),
        "there is no {}; `scripts/bench` builds it",
        path.display()
    );
    path
}

fn go_program(folder: &TempDir) -> PathBuf {
    folder.path().join("worker")
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("workers")
        .join(name)
}

fn is_installed(program: &str, version: &str) -> bool {
    let answered = Command::new(program).arg(version).output();
    let is_installed = answered.is_ok_and(|answer| answer.status.success());
    if !is_installed {
        eprintln!("`{program}` is not installed, so its worker is left out");
    }
    is_installed
}
