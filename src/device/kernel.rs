//! What is known of kernels that no probe can find out: bugs that corrupt in silence.

/// Whether UDP segmentation of kernel `release` (as `uname -r` prints it) is known to mangle
/// GSO batches: 7.0.0 up to 7.1.4, without an error that a sender could see.
pub fn mangles_gso(release: &str) -> bool {
    const FIRST: [u32; 3] = [7, 0, 0];
    const LAST: [u32; 3] = [7, 1, 4];
    version(release).is_some_and(|version| (FIRST..=LAST).contains(&version))
}

/// Whether NAT of kernel `release` may spoil the checksum of VXLAN packets, which are sent without
/// one of their own: before 5.7, where no stable release took the correction over.
pub fn spoils_vxlan_checksums(release: &str) -> bool {
    // The long-term kernels that got it, and from which release on.
    const CORRECTED: [[u32; 3]; 3] = [[5, 4, 41], [4, 19, 123], [4, 14, 181]];
    let Some(version) = version(release) else { return false };
    let is_corrected = |first: &[u32; 3]| version[..2] == first[..2] && version[2] >= first[2];
    version < [5, 7, 0] && !CORRECTED.iter().any(is_corrected)
}

/// Whether programs of kernel `release` can take an IPv4 header off a packet of IPv6
/// (`BPF_F_ADJ_ROOM_DECAP_L3_IPV6`).
pub fn uncovers_ipv6(release: &str) -> bool {
    version(release).is_some_and(|version| version >= [6, 3, 0])
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

/// The release of kernel.org that the running kernel was made of. Distributions count for
/// themselves: `uname -r` says 4.19.0-27 for what is 4.19.316.
pub fn upstream_release() -> String {
    let uname = rustix::system::uname();
    let build = uname.version().to_string_lossy();
    // Ubuntu's.
    let signature = std::fs::read_to_string("/proc/version_signature").unwrap_or_default();
    upstream(&uname.release().to_string_lossy(), &build, &signature).to_owned()
}

/// Debian names it in the build (`uname -v`), Ubuntu in the signature.
fn upstream<'a>(release: &'a str, build: &'a str, signature: &'a str) -> &'a str {
    let is_release = |word: &&str| word.starts_with(|first: char| first.is_ascii_digit());
    let ubuntus = signature.strip_prefix("Ubuntu ").and_then(|words| words.split(' ').next_back());
    let debians = build.split_once("Debian ").and_then(|(_, words)| words.split(' ').next());
    ubuntus.or(debians).map(str::trim).filter(is_release).unwrap_or(release)
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
        for release in ["5.6.19", "5.4.40", "4.19.0-9-amd64", "3.10.0"] {
            assert!(spoils_vxlan_checksums(release), "{release} is not warned of");
        }
        for release in ["5.7.0", "6.1.0-28-amd64", "5.4.41", "4.19.123", "unknown"] {
            assert!(!spoils_vxlan_checksums(release), "{release} is warned of");
        }
        for release in [release(), upstream_release()] {
            assert!(
                version(&release).is_some(),
                "this kernel's own release {release} is unreadable"
            );
        }
    }

    #[test]
    fn the_release_beneath_a_distributions_number_is_found() {
        let debian = "#1 SMP Debian 4.19.316-1 (2024-06-25)";
        assert_eq!(upstream("4.19.0-27-amd64", debian, ""), "4.19.316-1");
        let early = "#1 SMP Debian 4.19.118-2 (2020-04-29)";
        assert!(spoils_vxlan_checksums(upstream("4.19.0-9-amd64", early, "")));
        let ubuntu = "Ubuntu 5.4.0-216.236-generic 5.4.292\n";
        let build = "#236-Ubuntu SMP Fri Apr 11 19:53:21 UTC 2025";
        assert_eq!(upstream("5.4.0-216-generic", build, ubuntu), "5.4.292");
        assert!(!spoils_vxlan_checksums("5.4.292"), "Ubuntu's throughput falls for nothing");
        for (build, signature) in [("#1 SMP PREEMPT_DYNAMIC", ""), ("Debian ", "Ubuntu "), ("", "")]
        {
            assert_eq!(upstream("5.6.1-arch1", build, signature), "5.6.1-arch1");
        }
    }
}
