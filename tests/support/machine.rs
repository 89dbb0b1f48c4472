//! Several machines on one: a command of its own hostname, machine-id and boot.

use std::path::Path;

use super::lab::{Namespace, Process};

/// What tells one machine from another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Machine<'a> {
    pub(crate) hostname: &'a str,
    pub(crate) machine_id: &'a str,
    /// Another after each reboot.
    pub(crate) boot_id: &'a str,
}

impl Machine<'_> {
    /// Starts `argv` on this machine, whose files are in `dir`.
    #[track_caller]
    pub(crate) fn spawn(&self, namespace: &Namespace, dir: &Path, argv: &[&str]) -> Process {
        const SCRIPT: &str = "hostname \"$1\" \
            && mount --bind \"$2/machine-id\" /etc/machine-id \
            && mount --bind \"$2/boot-id\" /proc/sys/kernel/random/boot_id \
            && shift 2 && exec \"$@\"";
        std::fs::create_dir_all(dir).expect("a directory of the test");
        for (name, text) in [("machine-id", self.machine_id), ("boot-id", self.boot_id)] {
            std::fs::write(dir.join(name), format!("{text}\n")).expect("a file of the test");
        }
        let dir = dir.display().to_string();
        let machine =
            ["unshare", "--uts", "--mount", "sh", "-c", SCRIPT, "sh", self.hostname, &dir];
        namespace.spawn(&[&machine, argv].concat())
    }
}
