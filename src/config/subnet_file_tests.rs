//! Tests on real directories; the full disk is a tmpfs in a mount namespace of its own.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use rustix::fs::{CWD, FileType};

use super::*;
use std::net::Ipv4Addr;

/// Where the child of the full-disk test finds its tmpfs.
const FULL_DISK_DIRECTORY: &str = "WEFT_TEST_FULL_DISK";

fn prefix(text: &str) -> Prefix {
    text.parse().unwrap()
}

fn example() -> SubnetFile {
    SubnetFile {
        networks: prefix("10.5.0.0/16").into(),
        subnets: prefix("10.5.72.0/24").into(),
        mtu_bytes: 1472,
        masquerade: false,
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn names_in(path: &Path) -> Vec<OsString> {
    fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

#[test]
fn four_lines_exactly() {
    let expected = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.72.1/24\n\
                    FLANNEL_MTU=1472\nFLANNEL_IPMASQ=false\n";
    assert_eq!(example().render(), expected);
    assert!(SubnetFile { masquerade: true, ..example() }.render().ends_with("IPMASQ=true\n"));
}

#[test]
fn six_lines_with_both_families() {
    let both = |text: &str| text.parse::<Prefixes>().unwrap();
    let (networks, subnets) =
        (both("10.5.0.0/16,fd00:5::/48"), both("10.5.72.0/24,fd00:5:0:72::/64"));
    let file = SubnetFile { networks, subnets, ..example() };
    let expected = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.72.1/24\n\
                    FLANNEL_IPV6_NETWORK=fd00:5::/48\nFLANNEL_IPV6_SUBNET=fd00:5:0:72::1/64\n\
                    FLANNEL_MTU=1472\nFLANNEL_IPMASQ=false\n";
    assert_eq!(file.render(), expected);
    let previous = Previous::parse(expected);
    assert_eq!((previous.networks, previous.subnets), (Some(networks), Some(subnets)));
}

#[test]
fn written_with_directories_and_mode_and_read_back() {
    let directory = directory();
    let path = directory.path().join("run/flannel/subnet.env");
    example().write(&path).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), example().render());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
    assert_eq!(names_in(path.parent().unwrap()), ["subnet.env"], "a temporary file is left");
    let previous = Previous::read(&path).unwrap();
    assert_eq!(previous.networks, Some(example().networks));
    assert_eq!(previous.subnets, Some(example().subnets));
    assert!(previous.complaints.is_empty());
}

#[test]
fn mode_is_independent_of_old_file() {
    let directory = directory();
    let path = directory.path().join("subnet.env");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let old_inode = fs::metadata(&path).unwrap().ino();
    example().write(&path).unwrap();
    let status = fs::metadata(&path).unwrap();
    assert_eq!(status.permissions().mode() & 0o7777, 0o644);
    assert_ne!(status.ino(), old_inode, "the old file was written into");
}

#[test]
fn a_missing_file_is_a_first_start() {
    let directory = directory();
    let path = directory.path().join("none/subnet.env");
    assert_eq!(Previous::read(&path).unwrap(), Previous::default());
}

#[test]
fn a_reader_never_sees_a_part() {
    let directory = directory();
    let path = directory.path().join("subnet.env");
    let texts: Vec<SubnetFile> = [1400, 65_535]
        .map(|mtu_bytes| SubnetFile { mtu_bytes, masquerade: mtu_bytes > 1400, ..example() })
        .into();
    texts[0].write(&path).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut reads = 0_u32;
            while !done.load(Ordering::Relaxed) || reads == 0 {
                let text = fs::read_to_string(&path).unwrap();
                assert!(texts.iter().any(|whole| whole.render() == text), "torn: {text:?}");
                reads += 1;
            }
            reads
        });
        for round in 0..100 {
            texts[round % 2].write(&path).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
    });
    assert_eq!(names_in(directory.path()), ["subnet.env"]);
}

#[test]
fn symlink_is_replaced_and_target_untouched() {
    let directory = directory();
    let victim = directory.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    let path = directory.path().join("subnet.env");
    for target in [victim.as_path(), Path::new("/nowhere")] {
        symlink(target, &path).unwrap();
        example().write(&path).unwrap();
        assert!(fs::symlink_metadata(&path).unwrap().is_file(), "the link was followed");
        assert_eq!(fs::read_to_string(&path).unwrap(), example().render());
        fs::remove_file(&path).unwrap();
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
}

#[test]
fn irregular_file_is_refused_and_untouched() {
    let directory = directory();
    let path = directory.path().join("subnet.env");
    fs::create_dir(&path).unwrap();
    assert!(example().write(&path).unwrap_err().to_string().contains("(Directory)"));
    assert!(Previous::read(&path).unwrap_err().to_string().contains("(Directory)"));
    fs::remove_dir(&path).unwrap();
    rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    assert!(example().write(&path).unwrap_err().to_string().contains("(Fifo)"));
    assert!(Previous::read(&path).unwrap_err().to_string().contains("(Fifo)"));
}

#[test]
fn world_writable_directory_is_refused_unless_sticky() {
    let directory = directory();
    let path = directory.path().join("subnet.env");
    let set = |mode| fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode));
    set(0o777).unwrap();
    let error = example().write(&path).unwrap_err();
    assert!(matches!(error, FileError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("777"), "{error}");
    assert!(names_in(directory.path()).is_empty());
    set(0o1777).unwrap();
    example().write(&path).unwrap();
}

#[test]
fn a_directory_of_another_user_is_refused() {
    let directory = directory();
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can give a directory away");
        return;
    }
    std::os::unix::fs::chown(directory.path(), Some(12_345), None).unwrap();
    let error = example().write(&directory.path().join("subnet.env")).unwrap_err();
    assert!(matches!(error, FileError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("12345"), "{error}");
}

#[test]
fn uncreatable_directory_is_an_error() {
    let directory = directory();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let error = example().write(&file.join("subnet.env")).unwrap_err();
    assert!(matches!(&error, FileError::Io { path, .. } if *path == file), "{error:?}");
    assert!(example().write(Path::new("/")).is_err());
    let long = directory.path().join("n".repeat(250));
    let error = example().write(&long).unwrap_err();
    assert!(error.to_string().contains("temporary file"), "{error}");
}

#[test]
fn a_full_disk_leaves_the_old_file_whole() {
    if let Some(mount) = std::env::var_os(FULL_DISK_DIRECTORY) {
        return fill_disk_and_write(Path::new(&mount));
    }
    let directory = directory();
    let script = format!(
        "umask 077; mount -t tmpfs -o size=8k tmpfs '{}' || exit 77; exec \"$0\" \"$@\"",
        directory.path().display()
    );
    let child = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "config::subnet_file::tests::a_full_disk_leaves_the_old_file_whole"])
        .arg("--nocapture")
        .env(FULL_DISK_DIRECTORY, directory.path())
        .output();
    match child {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(text.contains("refused"), "{text}");
        }
        Ok(output) if output.status.code() == Some(101) => {
            panic!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(_) | Err(_) => println!("skipped: no right to mount in a namespace of its own"),
    }
}

fn fill_disk_and_write(mount: &Path) {
    let path = mount.join("subnet.env");
    example().write(&path).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode, 0o644, "the umask of 077 was applied");
    fs::write(mount.join("filler"), [0; 4096]).unwrap();
    let error = SubnetFile { mtu_bytes: 9000, ..example() }.write(&path).unwrap_err();
    let FileError::Io { source, .. } = error else { panic!("{error:?}") };
    assert_eq!(source.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(fs::read_to_string(&path).unwrap(), example().render());
    assert_eq!(names_in(mount).len(), 2, "a temporary file is left");
    println!("the full disk was refused");
}

#[test]
fn dotenv_spellings() {
    let subnet = Some(prefix("10.5.72.0/24"));
    for text in [
        "FLANNEL_SUBNET=10.5.72.1/24",
        "FLANNEL_SUBNET=10.5.72.1/24\r\n",
        "# a comment\n\n  export FLANNEL_SUBNET = 10.5.72.1/24  # ours\n",
        "FLANNEL_SUBNET=\"10.5.72.1/24\" # ours",
        "FLANNEL_SUBNET='10.5.72.1/24'",
        "FLANNEL_SUBNET: 10.5.72.1/24",
        "FLANNEL_SUBNET: \"10.5.72.1/24\"",
        "FLANNEL_SUBNET=192.0.2.1/24\nOTHER=a=b:c\nFLANNEL_SUBNET=10.5.72.1/24",
        "FLANNEL_SUBNET=10.5.72.1/24,",
        "FLANNEL_SUBNET=nonsense,10.5.72.1/24",
    ] {
        assert_eq!(Previous::parse(text).subnet(), subnet, "{text:?}");
    }
}

#[test]
fn what_cannot_be_used_is_said() {
    for (text, complaint) in [
        ("FLANNEL_SUBNET=10.5.72.1/24\nrubbish", "line 2"),
        ("=10.5.72.1/24", "line 1"),
        ("FLANNEL_SUBNET=10.5.72.1", "FLANNEL_SUBNET"),
        ("FLANNEL_SUBNET=", "FLANNEL_SUBNET"),
        ("FLANNEL_SUBNET=10.5.72.1/24,10.5.73.1/24", "FLANNEL_SUBNET"),
        ("FLANNEL_SUBNET=fd00::1/64", "FLANNEL_SUBNET"),
    ] {
        let previous = Previous::parse(text);
        assert_eq!(previous.subnets, None, "{text:?}");
        assert_eq!(previous.complaints.len(), 1, "{text:?}: {:?}", previous.complaints);
        assert!(previous.complaints[0].contains(complaint), "{:?}", previous.complaints);
    }
    let mtu_bytes = Some(1472);
    let expected = Previous { mtu_bytes, ..Previous::default() };
    assert_eq!(Previous::parse("FLANNEL_MTU=1472\n"), expected);
    let network = Previous::parse("FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=x\n");
    assert_eq!(network.networks.and_then(Prefixes::v4), Some(prefix("10.5.0.0/16")));
}

#[test]
fn a_huge_file_is_refused() {
    let directory = directory();
    let path = directory.path().join("subnet.env");
    fs::write(&path, "#".repeat(65_537)).unwrap();
    let error = Previous::read(&path).unwrap_err().to_string();
    assert!(error.contains("65536"), "{error}");
    fs::write(&path, [b'A', b'=', 0xff, b'\n']).unwrap();
    assert_eq!(Previous::read(&path).unwrap(), Previous::default());
}

proptest! {
    #[test]
    fn any_text_gives_an_answer(text in ".{0,80}|(FLANNEL_SUBNET[=:].{0,20}\n){0,3}") {
        let previous = Previous::parse(&text);
        prop_assert!(previous.subnets.is_none() || text.contains("FLANNEL_SUBNET"));
        prop_assert!(previous.networks.is_none(), "nothing in the text names a network");
    }

    #[test]
    fn what_is_rendered_reads_back(
        network: u32,
        subnet: u32,
        lengths in (0_u8..=30, 0_u8..=30),
        mtu_bytes: u32,
        masquerade: bool,
    ) {
        let file = SubnetFile {
            networks: Prefix::new(Ipv4Addr::from(network), lengths.0).unwrap().into(),
            subnets: Prefix::new(Ipv4Addr::from(subnet), lengths.1).unwrap().into(),
            mtu_bytes,
            masquerade,
        };
        let previous = Previous::parse(&file.render());
        prop_assert_eq!(previous.networks, Some(file.networks));
        prop_assert_eq!(previous.subnets, Some(file.subnets));
    }
}
