//! What is known of kernels that no probe can find out: bugs that corrupt in silence.

/// Whether UDP segmentation of kernel `release` (as `uname -r` prints it) is known to mangle
/// GSO batches: 7.0.0 up to 7.1.4, without an error that a sender could see.
pub fn mangles_gso(release: &str) -> bool {
    const FIRST: [u32; 3] = [7, 0, 0];
    const LAST: [u32; 3] = [7, 1, 4];
    version(release).is_some_and(|version| (FIRST..=LAST).contains(&version))
}

/// Whether NAT of kernel `release` may spoil the checksum of VXLAN packets, which are sent without
/// one of their own: before 5.7, unless its maker has taken the correction over.
pub fn spoils_vxlan_checksums(release: &str) -> bool {
    version(release).is_some_and(|version| version < [5, 7, 0])
}

/// Whether memory of io_uring and of BPF counts against its user's limit of locked memory in kernel
/// `release`: before 5.11, since which it is the control group's.
pub fn counts_locked_memory(release: &str) -> bool {
    version(release).is_some_and(|version| version < [5, 11, 0])
}

/// The three leading numbers of a release; a missing or unreadable later one is zero.
fn version(release: &str) -> Option<[u32; 3]> {
    let digits = |part: &str| {
        let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part[..end].parse().ok()
    };
    let mut parts = release.split(['.', '-']);
    let major = digits(parts.next()?)?;
    let mut next = || parts.next().and_then(digits).unwrap_or(0);
    Some([major, next(), next()])
}

/// The running kernel's release.
pub fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_with_bugs_differ_from_their_neighbours() {
        for release in ["7.0.0", "7.0", "7.0.9-arch1-1", "7.1.4-200.fc44.x86_64", "7.1-rc3"] {
            assert!(mangles_gso(release), "{release} would corrupt packets");
        }
        for release in ["6.18.44", "6.1.0-28-amd64", "7.1.5", "7.2.0", "5.15", "", "unknown"] {
            assert!(!mangles_gso(release), "{release} would lose its speed");
        }
        for release in ["5.6.19", "4.19.0-9-amd64", "3.10.0"] {
            assert!(spoils_vxlan_checksums(release), "{release} is not warned of");
        }
        for release in ["5.7.0", "6.1.0-28-amd64", "unknown"] {
            assert!(!spoils_vxlan_checksums(release), "{release} is warned of");
        }
        let release = release();
        assert!(version(&release).is_some(), "this kernel's own release {release} is unreadable");
    }
}
