//! The location of the file: it must not change while the file is open, and it is checked at
//! start-up.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use oncegate_core::store::{Checkup, StoreError, Survives};
use rusqlite::Connection;

use super::errors;

/// Network file systems, by their names in Linux.
const NETWORK_FILE_SYSTEMS: [&str; 11] = [
    "9p",
    "afs",
    "ceph",
    "cifs",
    "fuse.glusterfs",
    "fuse.s3fs",
    "fuse.sshfs",
    "lustre",
    "nfs",
    "nfs4",
    "smb3",
];

/// File systems whose files are in memory, and lost when the machine stops.
const MEMORY_FILE_SYSTEMS: [&str; 3] = ["tmpfs", "ramfs", "devtmpfs"];

/// File systems that containers write on top of their image, lost with the container.
const CONTAINER_FILE_SYSTEMS: [&str; 3] = ["overlay", "aufs", "fuse.fuse-overlayfs"];

/// The identity of the opened file, also if its path names another file by now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Identity {
    #[cfg(unix)]
    device_and_inode: (u64, u64),
}

impl Identity {
    #[cfg(unix)]
    fn of(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let metadata = fs::metadata(path)?;
        Ok(Self {
            device_and_inode: (metadata.dev(), metadata.ino()),
        })
    }

    /// On other systems, an open file can be neither deleted nor replaced.
    #[cfg(not(unix))]
    fn of(_: &Path) -> io::Result<Self> {
        Ok(Self {})
    }
}

/// A file that must not be moved while it is open.
///
/// SQLite continues with a file that was deleted or replaced while open. Its later writes would be
/// lost with the process, and for another process the same messages would be new.
pub(super) struct OpenedFile {
    path: PathBuf,
    opened: Option<Identity>,
}

impl OpenedFile {
    pub(super) fn of(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            opened: Identity::of(path).ok(),
        }
    }

    pub(super) fn check(&self) -> Result<(), StoreError> {
        let path = self.path.display();
        match Identity::of(&self.path) {
            Ok(now) if Some(&now) == self.opened.as_ref() => Ok(()),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::unavailable(
                format_args!("cannot check {path}: {error}"),
            )),
            _ => Err(StoreError::refused(format_args!(
                "{path} was moved, deleted or replaced while it was open; put it back, or restart"
            ))),
        }
    }

    /// Adds the path of the file to an error.
    pub(super) fn name(&self, error: StoreError) -> StoreError {
        errors::of_file(&self.path, error)
    }
}

/// The start-up check of the file.
pub(super) fn check(connection: &Connection, path: &Path) -> rusqlite::Result<Checkup> {
    let version = rusqlite::version();
    let journal: String = connection.pragma_query_value(None, "journal_mode", |row| row.get(0))?;
    let synchronous: i64 = connection.pragma_query_value(None, "synchronous", |row| row.get(0))?;
    let synced = match synchronous {
        ..1 => Survives::Unsynced,
        1 => Survives::Moments,
        2.. => Survives::Disk,
    };
    let mut warnings = Vec::new();
    if synced < Survives::Disk {
        warnings.push(
            "synchronous is NORMAL: a power cut may take back completions that were acknowledged; \
             use Synchronous::Full"
                .to_owned(),
        );
    }
    let kind = kind_of(path).unwrap_or_default();
    let (lasts, warning) = judge(&kind);
    warnings.extend(warning);
    let survives = synced.min(lasts);
    let store = format!("sqlite {version}, journal {journal}, at {}", path.display());
    Ok(Checkup {
        store,
        survives,
        warnings,
    })
}

/// The most that a synced file survives on this kind of file system, with a warning if that is less
/// than expected.
fn judge(kind: &str) -> (Survives, Option<String>) {
    if NETWORK_FILE_SYSTEMS.contains(&kind) {
        let warning = format!(
            "the file is on a network file system ({kind}): its locks and syncs may not hold, and processes on several \
             machines would damage it; use a local disk"
        );
        return (Survives::Disk, Some(warning));
    }
    if MEMORY_FILE_SYSTEMS.contains(&kind) {
        let warning = format!(
            "the file is in memory ({kind}): a restart of the machine or container takes every record; use a local disk"
        );
        return (Survives::Memory, Some(warning));
    }
    if CONTAINER_FILE_SYSTEMS.contains(&kind) {
        let warning = format!(
            "the file is in the writable layer of a container ({kind}): every record goes with the container when it is \
             removed or replaced; mount a volume and put the file there"
        );
        return (Survives::Memory, Some(warning));
    }
    (Survives::Disk, None)
}

/// The kind of the file system of the file; known on Linux only.
fn kind_of(path: &Path) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    file_system(&mounts, &fs::canonicalize(path).ok()?).map(str::to_owned)
}

/// The kind of the file system of a path: that of its longest mount point, the last one of equals.
///
/// See proc_pid_mountinfo(5): the mount point is the fifth field, the kind the first one after a
/// lone dash.
fn file_system<'m>(mounts: &'m str, path: &Path) -> Option<&'m str> {
    let mounts = mounts.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?.replace("\\040", " ");
        path.starts_with(&point)
            .then_some((point.len(), file_system.split(' ').next()?))
    });
    mounts
        .max_by_key(|(length, _)| *length)
        .map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_mount_says_what_a_file_is_on() {
        let mounts = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
                      30 22 0:5 / /srv rw - nfs4 server:/export rw,vers=4.2\n\
                      31 30 0:6 / /srv/fast\\040disk rw master:2 - xfs /dev/vdb rw\n";
        for (path, kind) in [
            ("/var/lib/records.db", "ext4"),
            ("/srv/billing/records.db", "nfs4"),
            ("/srv/fast disk/records.db", "xfs"),
            ("/srvice/records.db", "ext4"),
        ] {
            assert_eq!(file_system(mounts, Path::new(path)), Some(kind), "{path}");
        }
        assert_eq!(file_system("no mounts\n", Path::new("/")), None);
    }

    #[test]
    fn a_file_is_on_disk_only_where_there_is_one() {
        for (kind, survives, said) in [
            ("ext4", Survives::Disk, None),
            ("", Survives::Disk, None),
            ("tmpfs", Survives::Memory, Some("in memory (tmpfs)")),
            ("overlay", Survives::Memory, Some("mount a volume")),
            ("nfs4", Survives::Disk, Some("network file system (nfs4)")),
        ] {
            let (lasts, warning) = judge(kind);
            assert_eq!(lasts, survives, "{kind}");
            assert_eq!(warning.is_some(), said.is_some(), "{kind}");
            assert!(
                said.is_none_or(|said| warning.unwrap_or_default().contains(said)),
                "{kind}"
            );
        }
    }
}
