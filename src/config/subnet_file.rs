//! `subnet.env`: the four lines that container runtimes and root's scripts source, and what the
//! last run left in them.
//!
//! A reader sees the old file or the new one, never a part, whatever fails: the new text is
//! complete and on disk under another name before it takes the file's place. The file is never
//! opened for writing, and nothing is written where others than root or this user could have
//! planted something.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};

use crate::route::Prefix;

const NETWORK_KEY: &str = "FLANNEL_NETWORK";
const SUBNET_KEY: &str = "FLANNEL_SUBNET";

/// Largest file that is read back; ours has about 100 bytes, others may have added their own.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// Mode of the file, whatever the umask: everybody may read it.
const FILE_MODE: Mode = Mode::from_raw_mode(0o644);
/// Mode while the text is incomplete.
const TEMPORARY_MODE: Mode = Mode::from_raw_mode(0o600);
/// Mode of directories that are missing; the umask applies, as for flanneld.
const DIRECTORY_MODE: u32 = 0o755;

/// Others may write here …
const WORLD_WRITABLE: u32 = 0o002;
/// … but not remove or rename each other's files.
const STICKY: u32 = 0o1000;

/// What containers on this host need to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubnetFile {
    /// The overlay's network.
    pub network: Prefix,
    /// This host's subnet.
    pub subnet: Prefix,
    /// MTU of the overlay.
    pub mtu_bytes: u32,
    /// Whether masquerading is done here, so that container runtimes leave it alone.
    pub masquerade: bool,
}

/// What the last run left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Previous {
    /// The overlay's network then.
    pub network: Option<Prefix>,
    /// The subnet that this host had.
    pub subnet: Option<Prefix>,
    /// For the log: what in the file could not be used.
    pub complaints: Vec<String>,
}

/// Why the file was not written or read.
#[derive(Debug, thiserror::Error)]
pub enum SubnetFileError {
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
    /// Root's scripts would source what anybody may replace.
    #[error(
        "{path} is writable by everybody (mode {mode:o}): remove that right, or choose another \
         --subnet-file",
        path = path.display()
    )]
    DirectoryWritable {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The directory's owner could replace the file.
    #[error(
        "{path} belongs to user {owner}, neither root nor this process: change its owner, or \
         choose another --subnet-file",
        path = path.display()
    )]
    DirectoryOwner {
        /// The directory.
        path: PathBuf,
        /// Its owner's number.
        owner: u32,
    },
    /// A symlink, directory or device stands where the file belongs.
    #[error("{path} is a {found}, not a regular file: remove it", path = path.display())]
    NotRegular {
        /// The file.
        path: PathBuf,
        /// What stands there.
        found: &'static str,
    },
    /// Too large to be a subnet file.
    #[error(
        "{path} has more than {FILE_BYTES_MAX} bytes: is it a subnet file?",
        path = path.display()
    )]
    TooLong {
        /// The file.
        path: PathBuf,
    },
}

impl SubnetFile {
    /// The text, byte for byte as flanneld writes it.
    #[must_use]
    pub fn render(&self) -> String {
        let Self { network, subnet, mtu_bytes, masquerade } = self;
        let (address, length) = (subnet.first_host(), subnet.length_bits());
        format!(
            "{NETWORK_KEY}={network}\n{SUBNET_KEY}={address}/{length}\n\
             FLANNEL_MTU={mtu_bytes}\nFLANNEL_IPMASQ={masquerade}\n"
        )
    }

    /// Puts the text in place at `path`, making its directory if need be.
    ///
    /// On an error the old file, if any, is as it was.
    pub fn write(&self, path: &Path) -> Result<(), SubnetFileError> {
        let (directory_path, name) = split(path)?;
        let directory = open_directory(directory_path)?;
        check_target(&directory, name, path)?;
        let temporary = create_temporary(&directory, name, path)?;
        let placed = fill(&temporary.file, &self.render(), path).and_then(|()| {
            rustix::fs::renameat(&directory, &temporary.name, &directory, name)
                .map_err(|errno| failed("put the new text in place of", path, errno))
        });
        if let Err(error) = placed {
            // The error that matters is the first one; a left-over temporary file is harmless.
            rustix::fs::unlinkat(&directory, &temporary.name, AtFlags::empty()).ok();
            return Err(error);
        }
        rustix::fs::fsync(&directory).map_err(|errno| failed("sync", directory_path, errno))
    }
}

impl Previous {
    /// Reads `path`; a missing file is a first start.
    pub fn read(path: &Path) -> Result<Self, SubnetFileError> {
        // Without O_NONBLOCK a FIFO in this place would stop the start for ever.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match rustix::fs::openat(CWD, path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT) => return Ok(Self::default()),
            Err(errno) => return Err(failed("open", path, errno)),
        };
        let kind = rustix::fs::fstat(&file).map_err(|errno| failed("examine", path, errno))?;
        check_regular(FileType::from_raw_mode(kind.st_mode), path)?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|source| {
            SubnetFileError::Io { operation: "read", path: path.into(), source }
        })?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(SubnetFileError::TooLong { path: path.to_owned() });
        }
        Ok(Self::parse(&String::from_utf8_lossy(&bytes)))
    }

    /// Reads the text as flanneld's dotenv reader does: comments, `export`, quotes, `KEY: value`.
    /// One line without a key spoils the whole file; a bad prefix only itself.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut previous = Self::default();
        let mut network_text = None;
        let mut subnet_text = None;
        for (index, line) in text.lines().enumerate() {
            match assignment(line) {
                Line::Empty => {}
                Line::Assignment(NETWORK_KEY, value) => network_text = Some(value),
                Line::Assignment(SUBNET_KEY, value) => subnet_text = Some(value),
                Line::Assignment(_, _) => {}
                Line::Malformed => {
                    let complaint = format!("line {} of the subnet file has no key", index + 1);
                    return Self { complaints: vec![complaint], ..Self::default() };
                }
            }
        }
        previous.network = previous.only_prefix(NETWORK_KEY, network_text);
        previous.subnet = previous.only_prefix(SUBNET_KEY, subnet_text);
        previous
    }

    /// The one valid prefix in a comma-separated list; more than one is none.
    fn only_prefix(&mut self, key: &str, text: Option<String>) -> Option<Prefix> {
        let mut prefixes = Vec::new();
        for item in text.as_deref()?.split(',') {
            match item.parse() {
                Ok(prefix) => prefixes.push(prefix),
                Err(error) => self.complaints.push(format!("{key} in the subnet file: {error}")),
            }
        }
        if prefixes.len() > 1 {
            self.complaints.push(format!("{key} in the subnet file has more than one entry"));
            return None;
        }
        prefixes.pop()
    }
}

/// One line of a dotenv file.
enum Line<'a> {
    Empty,
    Assignment(&'a str, String),
    Malformed,
}

fn assignment(line: &str) -> Line<'_> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Line::Empty;
    }
    let Some(at) = line.find(['=', ':']) else { return Line::Malformed };
    let key = line[..at].trim();
    let key = key.strip_prefix("export ").map_or(key, str::trim_start);
    if key.is_empty() {
        return Line::Malformed;
    }
    Line::Assignment(key, unquoted(line[at + 1..].trim()))
}

/// The value without its quotes, or without the comment after it.
fn unquoted(value: &str) -> String {
    for quote in ['"', '\''] {
        if let Some(rest) = value.strip_prefix(quote)
            && let Some(end) = rest.find(quote)
        {
            return rest[..end].to_owned();
        }
    }
    let end = value.find(" #").unwrap_or(value.len());
    value[..end].trim_end().to_owned()
}

/// The directory, `.` for a bare name, and the name.
fn split(path: &Path) -> Result<(&Path, &OsStr), SubnetFileError> {
    let name = path
        .file_name()
        .ok_or_else(|| SubnetFileError::NotRegular { path: path.to_owned(), found: "directory" })?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok((directory.unwrap_or_else(|| Path::new(".")), name))
}

/// Opens the directory once, so that everything after happens in the one that was checked.
fn open_directory(path: &Path) -> Result<OwnedFd, SubnetFileError> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path).map_err(|source| {
        SubnetFileError::Io { operation: "make the directory", path: path.to_owned(), source }
    })?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(CWD, path, flags, Mode::empty())
        .map_err(|errno| failed("open the directory", path, errno))?;
    let status = rustix::fs::fstat(&directory).map_err(|errno| failed("examine", path, errno))?;
    if status.st_mode & WORLD_WRITABLE != 0 && status.st_mode & STICKY == 0 {
        let mode = Mode::from_raw_mode(status.st_mode).as_raw_mode();
        return Err(SubnetFileError::DirectoryWritable { path: path.to_owned(), mode });
    }
    let owner = status.st_uid;
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(SubnetFileError::DirectoryOwner { path: path.to_owned(), owner });
    }
    Ok(directory)
}

fn check_target(directory: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), SubnetFileError> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(status) => check_regular(FileType::from_raw_mode(status.st_mode), path),
        Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed("examine", path, errno)),
    }
}

fn check_regular(kind: FileType, path: &Path) -> Result<(), SubnetFileError> {
    let found = match kind {
        FileType::RegularFile => return Ok(()),
        FileType::Symlink => "symbolic link",
        FileType::Directory => "directory",
        FileType::Fifo => "FIFO",
        FileType::Socket => "socket",
        FileType::CharacterDevice | FileType::BlockDevice => "device",
        FileType::Unknown => "file of unknown kind",
    };
    Err(SubnetFileError::NotRegular { path: path.to_owned(), found })
}

/// The new text before it takes the file's place.
struct Temporary {
    name: OsString,
    file: File,
}

/// A random name, because a daemon in another container may use the same directory and process
/// number; `O_EXCL`, because then nobody else has it open.
fn create_temporary(
    directory: &OwnedFd,
    name: &OsStr,
    path: &Path,
) -> Result<Temporary, SubnetFileError> {
    let mut temporary_name = OsString::from(".");
    temporary_name.push(name);
    temporary_name.push(format!(".{:016x}", fastrand::u64(..)));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, &temporary_name, flags, TEMPORARY_MODE)
        .map_err(|errno| failed("make a temporary file beside", path, errno))?;
    Ok(Temporary { name: temporary_name, file: File::from(file) })
}

fn fill(mut file: &File, text: &str, path: &Path) -> Result<(), SubnetFileError> {
    let wrap =
        |operation| move |source| SubnetFileError::Io { operation, path: path.to_owned(), source };
    file.write_all(text.as_bytes()).map_err(wrap("write the new text of"))?;
    rustix::fs::fchmod(file, FILE_MODE).map_err(|errno| failed("set the mode of", path, errno))?;
    file.sync_all().map_err(wrap("sync the new text of"))
}

fn failed(operation: &'static str, path: &Path, errno: rustix::io::Errno) -> SubnetFileError {
    SubnetFileError::Io { operation, path: path.to_owned(), source: errno.into() }
}

#[cfg(test)]
#[path = "subnet_file_tests.rs"]
mod tests;
