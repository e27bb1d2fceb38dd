//! The libraries for workers, from `packages/`, as programs find them once they are installed.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A folder of this repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
        .canonicalize()
        .unwrap()
}

/// Both libraries, until this value is dropped.
pub(crate) struct Libraries {
    modules: TempDir,
}

impl Libraries {
    pub(crate) fn new() -> Self {
        let modules = tempfile::tempdir().unwrap();
        // Node finds a package by the name of its folder.
        std::os::unix::fs::symlink(repository("packages/node"), modules.path().join("oncegate"))
            .unwrap();
        Self { modules }
    }

    /// A command that runs a script in Python.
    pub(crate) fn python(&self, script: &Path) -> String {
        let sources = repository("packages/python/src");
        format!(
            "env PYTHONDONTWRITEBYTECODE=1 'PYTHONPATH={}' python3 '{}'",
            sources.display(),
            script.display()
        )
    }

    /// A command that runs a script in Node.
    pub(crate) fn node(&self, script: &Path) -> String {
        format!(
            "env 'NODE_PATH={}' node '{}'",
            self.modules.path().display(),
            script.display()
        )
    }
}
