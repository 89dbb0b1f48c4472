//! What is known of kernels that no probe can find out: bugs that corrupt in silence.

/// Whether UDP segmentation of kernel `release` (as `uname -r` prints it) is known to mangle
/// trains of equal datagrams: 7.0.0 up to 7.1.4, without an error that a sender could see.
#[must_use]
pub fn mangles_trains(release: &str) -> bool {
    const FIRST: [u32; 3] = [7, 0, 0];
    const LAST: [u32; 3] = [7, 1, 4];
    version(release).is_some_and(|version| (FIRST..=LAST).contains(&version))
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
#[must_use]
pub fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mangling_releases_are_told_from_their_neighbours() {
        for release in ["7.0.0", "7.0", "7.0.9-arch1-1", "7.1.4-200.fc44.x86_64", "7.1-rc3"] {
            assert!(mangles_trains(release), "{release} would corrupt packets");
        }
        for release in ["6.18.44", "6.1.0-28-amd64", "7.1.5", "7.2.0", "5.15", "", "unknown"] {
            assert!(!mangles_trains(release), "{release} would lose its speed");
        }
        assert!(version(&release()).is_some(), "this kernel's own release is unreadable");
    }
}
