//! A small disk that can be filled.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::place::server_dir;
use crate::process::runs_as_root;

/// A file system in memory of a given size, unmounted on drop.
#[derive(Debug)]
pub struct SmallDisk {
    path: PathBuf,
    /// The folder that it is mounted on, unless the caller owns that folder.
    folder: Option<TempDir>,
}

impl SmallDisk {
    /// Mounts it.
    ///
    /// # Panics
    /// Without root: mounting needs it.
    #[must_use]
    pub fn mount(bytes: u64) -> Self {
        let folder = server_dir("small-disk");
        let mut disk = Self::mount_on(folder.path().to_owned(), bytes);
        disk.folder = Some(folder);
        disk
    }

    /// The same, on a folder that is there and outlives it.
    pub fn mount_on(path: PathBuf, bytes: u64) -> Self {
        assert!(
            runs_as_root(),
            "this test fills a disk of its own, and only root can mount it: run it as root"
        );
        let size = format!("size={bytes}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(&path)
            .status();
        assert!(
            mounted.is_ok_and(|status| status.success()),
            "cannot mount a tmpfs (`mount`, util-linux)"
        );
        Self { path, folder: None }
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills it to the last page.
    ///
    /// # Panics
    /// When it fails for another reason than a full disk.
    pub fn fill(&self) {
        let mut ballast = File::create(self.ballast()).expect("a file can be made");
        for bytes in [1 << 20, 4_096] {
            let chunk = vec![7; bytes];
            loop {
                match ballast.write_all(&chunk) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::StorageFull => break,
                    Err(error) => panic!("the disk cannot be filled: {error}"),
                }
            }
        }
    }

    /// Makes room again.
    ///
    /// # Panics
    /// When it was not filled.
    pub fn make_room(&self) {
        fs::remove_file(self.ballast()).expect("it was filled");
    }

    fn ballast(&self) -> PathBuf {
        self.path.join("ballast")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: what is still open on it keeps it alive until it is closed.
        drop(
            Command::new("umount")
                .arg("--lazy")
                .arg(&self.path)
                .status(),
        );
    }
}
