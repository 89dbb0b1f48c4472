//! Small files that are replaced as a whole: `subnet.env`, the cache beside it, and the leases of a
//! local store.
//!
//! A reader sees the old file or the new one, never a part, whatever fails: the new text is
//! complete and on disk under another name before it takes the file's place. No file that is there
//! is ever opened for writing, whoever has put it there. weftd's own files are not written at all
//! to a directory in which users other than root and this one could have planted something.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

/// Mode while the text is incomplete.
const TEMPORARY_MODE: Mode = Mode::from_raw_mode(0o600);
/// Mode of directories that are missing; the umask applies, as for flanneld.
const DIRECTORY_MODE: u32 = 0o755;

/// Others may write here …
const WORLD_WRITABLE: u32 = 0o002;
/// … but not remove or rename each other's files.
const STICKY: u32 = 0o1000;

/// Why a file was not written or read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A system call failed.
    #[error("cannot {operation} {path}", path = path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Others could replace the file or have written it, or it is not a file of this kind.
    #[error("{path} {problem}", path = path.display())]
    Refused {
        /// The file or its directory.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// What an operation on a file gives.
pub type Result<T> = std::result::Result<T, FileError>;

/// Writes `text` to `path` with `mode`, whatever the umask, and makes its directory if it is
/// missing.
///
/// On an error the old file, if any, is as it was.
pub fn write(path: &Path, text: &[u8], mode: Mode) -> Result<()> {
    let directory_path = directory_of(path);
    make_directory(directory_path)?;
    let directory = open_directory(directory_path)?;
    check_directory(&directory, directory_path)?;
    replace(&directory, path, text, mode)
}

/// As [`write`], in a directory of somebody else, whoever that is.
pub fn write_for_others(path: &Path, text: &[u8], mode: Mode) -> Result<()> {
    make_directory(directory_of(path))?;
    write_shared(path, text, mode)
}

/// As [`write`], in a directory that has to be there, and that others may share.
pub fn write_shared(path: &Path, text: &[u8], mode: Mode) -> Result<()> {
    replace(&open_directory(directory_of(path))?, path, text, mode)
}

/// Makes the directory at `path`, with those above it, if it is missing.
pub fn make_directory(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path);
    made.map_err(|error| failed("make the directory", path, error))
}

fn replace(directory: &OwnedFd, path: &Path, text: &[u8], mode: Mode) -> Result<()> {
    let name = path.file_name().ok_or_else(|| refused(path, "names no file".to_owned()))?;
    check_target(directory, name, path)?;
    let (temporary, file) = create_temporary(directory, name, path)?;
    let placed = fill(&file, text, mode, path).and_then(|()| {
        rustix::fs::renameat(directory, &temporary, directory, name)
            .map_err(|errno| failed("put the new text in place of", path, errno))
    });
    if let Err(error) = placed {
        // The error that matters is the first one; a left-over temporary file is harmless.
        rustix::fs::unlinkat(directory, &temporary, AtFlags::empty()).ok();
        return Err(error);
    }
    sync_directory(directory).map_err(|errno| failed("sync", directory_of(path), errno))
}

/// Makes the names in `directory` durable, where its file system can: EINVAL is the answer of those
/// that sync files only (fsync(2)).
fn sync_directory(directory: &OwnedFd) -> rustix::io::Result<()> {
    rustix::fs::fsync(directory).or_else(|errno| match errno {
        Errno::INVAL => Ok(()),
        errno => Err(errno),
    })
}

/// The contents of the file, at most `bytes_max` bytes; `None` if there is no file.
pub fn read(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>> {
    open(path, OFlags::empty())?.map(|(file, _)| contents(file, path, bytes_max)).transpose()
}

/// As [`read`], of a file that nobody else may have written.
pub fn read_private(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>> {
    let Some((file, status)) = open(path, OFlags::NOFOLLOW)? else { return Ok(None) };
    let owner = status.st_uid;
    let mode = Mode::from_raw_mode(status.st_mode);
    let is_ours = owner == 0 || owner == rustix::process::geteuid().as_raw();
    if !is_ours || mode.intersects(Mode::WGRP | Mode::WOTH) {
        let mode = mode.as_raw_mode();
        let whose = format!("belongs to user {owner} and has mode {mode:o}");
        return Err(refused(path, whose + ", so that others may have written it: remove it"));
    }
    contents(file, path, bytes_max).map(Some)
}

fn open(path: &Path, further: OFlags) -> Result<Option<(File, rustix::fs::Stat)>> {
    // Without O_NONBLOCK a FIFO in this place would stop the start for ever.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | further;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(failed("open", path, errno)),
    };
    let status = rustix::fs::fstat(&file).map_err(|errno| failed("examine", path, errno))?;
    check_regular(FileType::from_raw_mode(status.st_mode), path)?;
    Ok(Some((file, status)))
}

fn contents(file: File, path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|error| failed("read", path, error))?;
    if bytes.len() as u64 > bytes_max {
        let problem = format!("has more than {bytes_max} bytes: is it one of weft's?");
        return Err(refused(path, problem));
    }
    Ok(bytes)
}

/// `path` with `suffix` behind its name.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = OsString::from(path);
    path.push(suffix);
    path.into()
}

/// The directory of the file at `path`: `.` for a bare name.
pub fn directory_of(path: &Path) -> &Path {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    directory.unwrap_or_else(|| Path::new("."))
}

/// Opens the directory once, so that everything after happens in the one that was checked.
fn open_directory(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|errno| failed("open the directory", path, errno))
}

fn check_directory(directory: &OwnedFd, path: &Path) -> Result<()> {
    let status = rustix::fs::fstat(directory).map_err(|errno| failed("examine", path, errno))?;
    let (owner, mode) = (status.st_uid, Mode::from_raw_mode(status.st_mode).as_raw_mode());
    let problem = if mode & WORLD_WRITABLE != 0 && mode & STICKY == 0 {
        format!("is writable by everybody (mode {mode:o}): remove that right")
    } else if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        format!("belongs to user {owner}, neither root nor this process: change its owner")
    } else {
        return Ok(());
    };
    Err(refused(path, problem + ", or keep the file elsewhere (of weftd: --subnet-file)"))
}

fn check_target(directory: &OwnedFd, name: &OsStr, path: &Path) -> Result<()> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        // A link is replaced, never followed: rename(2) puts the new file in the link's own place.
        Ok(status) if FileType::from_raw_mode(status.st_mode).is_symlink() => Ok(()),
        Ok(status) => check_regular(FileType::from_raw_mode(status.st_mode), path),
        Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed("examine", path, errno)),
    }
}

fn check_regular(kind: FileType, path: &Path) -> Result<()> {
    if kind == FileType::RegularFile {
        return Ok(());
    }
    Err(refused(path, format!("is no regular file ({kind:?}): remove it")))
}

/// A random name, because a daemon in another container may use the same directory and process
/// number; `O_EXCL`, because then nobody else has it open.
fn create_temporary(directory: &OwnedFd, name: &OsStr, path: &Path) -> Result<(OsString, File)> {
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{:016x}", fastrand::u64(..)));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, &temporary, flags, TEMPORARY_MODE)
        .map_err(|errno| failed("make a temporary file beside", path, errno))?;
    Ok((temporary, File::from(file)))
}

/// Of which file a process that was killed may have left this temporary one.
pub fn temporary_of(name: &str) -> Option<&str> {
    let (of, random) = name.strip_prefix('.')?.rsplit_once('.')?;
    let is_ours =
        random.len() == 16 && random.bytes().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'));
    is_ours.then_some(of)
}

fn fill(mut file: &File, text: &[u8], mode: Mode, path: &Path) -> Result<()> {
    file.write_all(text).map_err(|error| failed("write the new text of", path, error))?;
    match rustix::fs::fchmod(file, mode) {
        // Of a file of our own: its file system has the same mode for all.
        Ok(()) | Err(Errno::PERM | Errno::OPNOTSUPP) => {}
        Err(errno) => return Err(failed("set the mode of", path, errno)),
    }
    file.sync_all().map_err(|error| failed("sync the new text of", path, error))
}

/// That `operation` on `path` failed.
pub fn failed(operation: &'static str, path: &Path, source: impl Into<io::Error>) -> FileError {
    FileError::Io { operation, path: path.to_owned(), source: source.into() }
}

fn refused(path: &Path, problem: String) -> FileError {
    FileError::Refused { path: path.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_directory_that_cannot_be_synced_is_no_error() {
        let directory = open_directory(Path::new("/proc")).unwrap();
        assert_eq!(rustix::fs::fsync(&directory), Err(Errno::INVAL), "no such directory");
        assert_eq!(sync_directory(&directory), Ok(()));
    }

    #[test]
    fn untrusted_file_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cache");
        assert!(read_private(&path, 9).unwrap().is_none());
        write(&path, b"peers", Mode::from_raw_mode(0o600)).unwrap();
        assert_eq!(read_private(&path, 9).unwrap().as_deref(), Some(&b"peers"[..]));
        let error = read_private(&path, 4).unwrap_err().to_string();
        assert!(error.contains("more than 4 bytes"), "{error}");
        for mode in [0o620, 0o602, 0o666] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = read_private(&path, 9).unwrap_err().to_string();
            assert!(error.contains(&format!("{mode:o}")), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(read_private(&path, 9).is_ok());
        let link = directory.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(read_private(&link, 9).is_err(), "a link was followed");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(12_345), None).unwrap();
            let error = read_private(&path, 9).unwrap_err().to_string();
            assert!(error.contains("12345"), "{error}");
        }
    }
}
