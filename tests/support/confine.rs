//! What a service manager or a container runtime lays around a program: a list of system calls,
//! capabilities, a file system that is read only.
#![allow(unsafe_code, reason = "namespaces and filters of a thread have no safe form")]

use std::collections::BTreeMap;
use std::process::Command;

use super::seccomp;

/// A call may be made if the low half of argument `.0`, masked by `.1`, is `.2`.
pub(crate) type Condition = (u32, u32, u32);

/// System calls that may be made; all others fail with EPERM, `clone3` with ENOSYS.
#[derive(Debug, Clone, Default)]
pub(crate) struct AllowList {
    calls: BTreeMap<String, Vec<Condition>>,
}

impl AllowList {
    /// Adds a call whatever its arguments.
    pub(crate) fn allow(&mut self, name: &str) {
        self.calls.insert(name.to_owned(), Vec::new());
    }

    /// Adds a call under each of these conditions, and under no other.
    pub(crate) fn allow_if(&mut self, name: &str, conditions: &[Condition]) {
        self.calls.insert(name.to_owned(), conditions.to_vec());
    }

    /// Takes a call away.
    pub(crate) fn refuse(&mut self, name: &str) {
        self.calls.remove(name);
    }

    /// Whether the call is there, under some condition or none.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.calls.contains_key(name)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Takes effect for the calling thread and for what it starts from now on.
    pub(crate) fn install(&self) {
        let numbers = call_numbers();
        let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        let load = |at| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at);
        let equal = |value, no| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, no, value);
        let answer = |value| step(libc::BPF_RET | libc::BPF_K, 0, 0, value);
        let mut program = Vec::new();
        for (name, conditions) in &self.calls {
            // As runtimes do: a name that this machine does not have is of another one.
            let Some(number) = numbers.get(name) else { continue };
            if conditions.is_empty() {
                program.extend([load(0), equal(*number, 1), answer(libc::SECCOMP_RET_ALLOW)]);
            }
            for (argument, mask, value) in conditions {
                program.extend([
                    load(0),
                    equal(*number, 4),
                    load(16 + 8 * argument),
                    step(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, *mask),
                    equal(*value, 1),
                    answer(libc::SECCOMP_RET_ALLOW),
                ]);
            }
        }
        // libc goes on with clone.
        let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
        program.extend([load(0), equal(libc::SYS_clone3 as u32, 1), answer(missing)]);
        program.push(answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
        seccomp::install(&mut program);
    }
}

/// Names and numbers of this machine's system calls, from the kernel's header.
fn call_numbers() -> BTreeMap<String, u32> {
    let places = ["x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h"];
    let header = places
        .iter()
        .find_map(|place| std::fs::read_to_string(format!("/usr/include/{place}")).ok())
        .expect("the kernel's headers are installed: scripts/setup");
    header
        .lines()
        .filter_map(|line| {
            let mut words = line.strip_prefix("#define __NR_")?.split_whitespace();
            Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
        })
        .collect()
}

/// Gives the calling thread, and what it starts from now on, a file system that can be written
/// below `/tmp` and `/dev` only.
pub(crate) fn read_only_except_tmp() {
    // SAFETY: the call takes no pointers; it concerns the calling thread only.
    let result = unsafe { libc::unshare(libc::CLONE_FS | libc::CLONE_NEWNS) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    for arguments in [
        &["--make-rprivate", "/"][..],
        &["--bind", "/tmp", "/tmp"],
        &["-o", "remount,bind,ro", "/"],
    ] {
        let output = Command::new("mount").args(arguments).output().expect("mount runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "mount {arguments:?}: {text}");
    }
}

/// The words in front of a program that has these capabilities, such as `net_admin`, and no way
/// to more.
pub(crate) fn with_capabilities(names: &[String]) -> Vec<String> {
    let set: String = names.iter().map(|name| format!(",+{name}")).collect();
    let bounding = format!("--bounding-set=-all{set}");
    ["setpriv", &bounding, "--inh-caps=-all", "--no-new-privs"].map(str::to_owned).to_vec()
}
