//! What a thread may still ask of the kernel once it has what it needs, so that a fault in it is
//! worth less to whoever finds it.
//!
//! A worker handles bytes from strangers, and keeps nothing but its two files: no capability, and
//! only the system calls that move packets, manage its memory and end it. The control plane keeps
//! the capabilities of its work, and writes the files of its work (`files`). Neither gets anything
//! back by starting a program.

mod files;

use std::collections::BTreeMap;
use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs,
};
use rustix::time::{ClockId, clock_gettime};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use crate::words::words;

pub(crate) use files::Writable;

/// What the control plane goes on with: routes, devices and rules; a tunnel port below 1024, when
/// the address changes; raw packets for path MTUs and for iptables; programs in the kernel, whose
/// maps count against a limit before 5.11; rings, whose memory is locked, for as many workers as
/// there are; workers that get a processor before others; and files of the store or of TLS that
/// belong to another user.
const OF_CONTROL: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::SYS_RESOURCE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_NICE)
    .union(CapabilitySet::DAC_OVERRIDE);

/// Numbers by their names in libc(3), of system calls for the most part.
macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name,)*] };
}

/// System calls of a worker: packets in and out, waiting, its memory, its end. Names that not every
/// architecture has come apart.
const OF_WORKER: &[libc::c_long] = calls![
    SYS_read SYS_readv SYS_write SYS_writev SYS_recvmmsg SYS_sendmmsg SYS_sendmsg SYS_getsockopt
    SYS_io_uring_enter SYS_io_uring_register SYS_ppoll SYS_futex SYS_nanosleep SYS_clock_nanosleep
    SYS_clock_gettime SYS_sched_yield SYS_restart_syscall SYS_brk SYS_mmap SYS_mremap SYS_munmap
    SYS_mprotect SYS_madvise SYS_getrandom SYS_close SYS_getpid SYS_gettid SYS_rt_sigaction
    SYS_rt_sigprocmask SYS_rt_sigreturn SYS_sigaltstack SYS_tgkill SYS_exit SYS_exit_group
];

/// Those of older architectures, which the C library prefers there.
#[cfg(target_arch = "x86_64")]
const OF_OLD_ARCHITECTURE: &[libc::c_long] = &[libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const OF_OLD_ARCHITECTURE: &[libc::c_long] = &[];

/// Refused, and no fault: glibc's malloc reads a sysctl before it gives memory back, and goes on
/// without, as a backtrace does. The last two are needed to refuse all this.
const REFUSED_QUIETLY: &[libc::c_long] = calls![
    SYS_openat SYS_getcwd SYS_readlinkat SYS_statx SYS_fstat SYS_lseek SYS_prctl SYS_seccomp
];

/// System calls that neither the control plane nor the firewall's programs need: other processes,
/// namespaces, mounts, modules, keys, the clock, and what has often had faults.
const OF_NOBODY: &[libc::c_long] = calls![
    SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_pidfd_getfd SYS_kcmp SYS_unshare
    SYS_setns SYS_chroot SYS_pivot_root SYS_mount SYS_umount2 SYS_open_tree SYS_move_mount
    SYS_fsopen SYS_fsconfig SYS_fsmount SYS_fspick SYS_mount_setattr SYS_open_by_handle_at
    SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_reboot SYS_swapon
    SYS_swapoff SYS_acct SYS_quotactl SYS_syslog SYS_add_key SYS_request_key SYS_keyctl
    SYS_settimeofday SYS_clock_settime SYS_clock_adjtime SYS_adjtimex SYS_userfaultfd
    SYS_perf_event_open SYS_fanotify_init SYS_memfd_secret
];

/// The flags of `clone` that make namespaces (clone(2)).
const NAMESPACES: &[libc::c_int] = calls![
    CLONE_NEWNS CLONE_NEWCGROUP CLONE_NEWUTS CLONE_NEWIPC CLONE_NEWUSER CLONE_NEWPID CLONE_NEWNET
];

/// A thread kept rights that it does not need.
#[derive(Debug, thiserror::Error)]
pub enum RightsError {
    /// Its capabilities could not be given up.
    #[error("cannot give up capabilities")]
    Capabilities(#[source] io::Error),
    /// Programs that it starts could get more rights than it has.
    #[error("cannot forbid new privileges")]
    NoNewPrivileges(#[source] io::Error),
    /// It may write all files that its user may.
    #[error("cannot limit which files are written")]
    Files(#[source] landlock::RulesetError),
    /// Its system calls are not limited.
    #[error(
        "cannot limit the system calls: does this kernel have CONFIG_SECCOMP_FILTER, and does the \
         sandbox allow seccomp?"
    )]
    Calls(#[source] seccompiler::Error),
    /// No filter can be made for this architecture.
    #[error("cannot limit the system calls on this architecture")]
    Architecture(#[from] seccompiler::BackendError),
}

words! {
    /// How a worker gets a processor.
    Priority {
        /// Before every ordinary thread, while it does not use much.
        RealTime = "real-time",
        /// Before others who have had as much, because it runs briefly, while it does.
        ShortSlice = "short-slice",
        /// Like any other thread.
        Ordinary = "ordinary",
    }
}

/// Leaves the calling thread, a worker that has its files, what moves packets; unless it is like
/// any other to the scheduler, also what changes that: for real time the resource limit, or else
/// the capability.
pub(crate) fn keep_for_worker(priority: Priority) -> Result<(), RightsError> {
    // rustix finds the kernel's clock at its first reading, by calls that are not on the list.
    let _found = clock_gettime(ClockId::Monotonic);
    let needs_capability = priority == Priority::RealTime && !may_have_real_time();
    keep(if needs_capability { CapabilitySet::SYS_NICE } else { CapabilitySet::empty() })?;
    if cfg!(debug_assertions) {
        // The tests run such a build: a call that is missing from the list has to be seen.
        limit(REFUSED_QUIETLY, priority, SeccompAction::KillProcess)?;
    }
    limit(&[], priority, SeccompAction::Errno(libc::EPERM as u32))
}

/// Whether this process may have real time without a capability; with another one it sees to that.
fn may_have_real_time() -> bool {
    let limit = getrlimit(Resource::Rtprio);
    let lowest = Rlimit { current: Some(1), maximum: limit.maximum.map(|most| most.max(1)) };
    limit.current.is_none_or(|most| most > 0) || setrlimit(Resource::Rtprio, lowest).is_ok()
}

/// Leaves the calling thread, and what it starts from now on, what the control plane needs while it
/// runs.
pub(crate) fn keep_for_control() -> Result<(), RightsError> {
    keep_capabilities_of_control()?;
    refuse_to_all()
}

/// Leaves the calling thread the capabilities that the control plane has later on: a worker that
/// begins with no more can begin again.
pub(crate) fn keep_capabilities_of_control() -> Result<(), RightsError> {
    // Before kernel 5.8 programs need the older one.
    let has_bpf = capabilities(None).is_ok_and(|now| now.permitted.contains(CapabilitySet::BPF));
    let older = if has_bpf { CapabilitySet::empty() } else { CapabilitySet::SYS_ADMIN };
    keep(OF_CONTROL.union(older))
}

fn keep(kept: CapabilitySet) -> Result<(), RightsError> {
    set_no_new_privs(true).map_err(|errno| RightsError::NoNewPrivileges(errno.into()))?;
    let now = capabilities(None).map_err(|errno| RightsError::Capabilities(errno.into()))?;
    // What is ambient goes with what is inheritable.
    let fewer = CapabilitySets {
        effective: now.effective & kept,
        permitted: now.permitted & kept,
        inheritable: now.inheritable & kept,
    };
    set_capabilities(None, fewer).map_err(|errno| RightsError::Capabilities(errno.into()))
}

/// Allows the calling thread, a worker, its system calls and `more`, and answers others with
/// `refused`. One of a `priority` of its own may change it.
fn limit(
    more: &[libc::c_long],
    priority: Priority,
    refused: SeccompAction,
) -> Result<(), RightsError> {
    let mut rules = with_any_arguments(OF_WORKER.iter().chain(OF_OLD_ARCHITECTURE).chain(more));
    let is = |argument, value: libc::c_int| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value as u64)
    };
    // Whether datagrams may be fragmented changes with the paths, and an earlier weftd's GRO ends
    // once what it has left was received.
    let options = [
        (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
        (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
        (libc::SOL_UDP, libc::UDP_GRO),
    ];
    let options = options.map(|(level, name)| {
        Ok::<_, RightsError>(SeccompRule::new(vec![is(1, level)?, is(2, name)?])?)
    });
    rules.insert(libc::SYS_setsockopt, options.into_iter().collect::<Result<_, _>>()?);
    if priority != Priority::Ordinary {
        let itself = vec![is(0, 0)?];
        rules.insert(libc::SYS_sched_setattr, vec![SeccompRule::new(itself)?]);
    }
    // A signal may meet any thread. Its handler tells the control plane on a socket pair: to nobody
    // in particular, by the fifth argument.
    let to_nobody = SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    rules.insert(libc::SYS_sendto, vec![SeccompRule::new(vec![to_nobody])?]);
    // A debug build asks whether a file is open before it closes it.
    rules.insert(libc::SYS_fcntl, vec![SeccompRule::new(vec![is(1, libc::F_GETFD)?])?]);
    filter(rules, refused, SeccompAction::Allow)
}

/// Refuses the calling thread, and what it starts from now on, what nobody needs.
fn refuse_to_all() -> Result<(), RightsError> {
    let mut rules = with_any_arguments(OF_NOBODY);
    let with = |flag: &libc::c_int| {
        let flag = u64::from(flag.cast_unsigned());
        let is_set = SeccompCmpOp::MaskedEq(flag);
        let condition = SeccompCondition::new(0, SeccompCmpArgLen::Qword, is_set, flag)?;
        SeccompRule::new(vec![condition])
    };
    rules.insert(libc::SYS_clone, NAMESPACES.iter().map(with).collect::<Result<_, _>>()?);
    filter(rules, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32))?;
    // Its flags are out of a filter's sight. The C library goes on with clone.
    let newer = with_any_arguments(&[libc::SYS_clone3]);
    filter(newer, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))
}

/// Rules that match these system calls, whatever they are called with.
fn with_any_arguments<'a>(
    numbers: impl IntoIterator<Item = &'a libc::c_long>,
) -> BTreeMap<i64, Vec<SeccompRule>> {
    numbers.into_iter().map(|number| (*number, Vec::new())).collect()
}

/// Answers system calls that match `rules` with `matched`, others with `others`.
fn filter(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    others: SeccompAction,
    matched: SeccompAction,
) -> Result<(), RightsError> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = SeccompFilter::new(rules, others, matched, architecture)?;
    let program: BpfProgram = filter.try_into()?;
    apply_filter(&program).map_err(RightsError::Calls)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::UdpSocket;
    use std::process::Command;

    use super::*;

    fn permitted() -> CapabilitySet {
        capabilities(None).unwrap().permitted
    }

    #[test]
    fn control_keeps_its_work_and_no_more() {
        let before = permitted();
        std::thread::spawn(move || {
            keep_for_control().unwrap();
            let now = capabilities(None).unwrap();
            assert_eq!(now.permitted, before & OF_CONTROL);
            assert_eq!(now.effective, now.permitted);
            let wanted = CapabilitySets { permitted: before, ..now };
            let more = before != now.permitted;
            assert_eq!(set_capabilities(None, wanted).is_err(), more, "got capabilities back");
            // Root's programs get all capabilities, but for the promise.
            let output = Command::new("grep").args(["CapPrm", "/proc/self/status"]).output();
            let text = String::from_utf8(output.unwrap().stdout).unwrap();
            let digits = text.split_whitespace().nth(1).unwrap();
            let child = u64::from_str_radix(digits, 16).unwrap();
            assert_eq!(child & !now.permitted.bits(), 0, "a program got {text}");
        })
        .join()
        .unwrap();
        assert_eq!(permitted(), before, "another thread lost rights");
    }

    #[test]
    fn a_thread_that_logs_still_writes() {
        let mut file = tempfile::tempfile().unwrap();
        std::thread::spawn(move || {
            keep_for_worker(Priority::RealTime).unwrap();
            io::Write::write_all(&mut file, b"x").unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn control_starts_programs_and_makes_no_namespaces() {
        std::thread::spawn(|| {
            keep_for_control().unwrap();
            let run = |words: &[&str]| Command::new(words[0]).args(&words[1..]).output().unwrap();
            assert!(run(&["true"]).status.success());
            for words in [&["unshare", "-n", "true"][..], &["unshare", "-Ur", "true"]] {
                let output = run(words);
                assert!(!output.status.success(), "{words:?}: {output:?}");
            }
            std::thread::spawn(|| ()).join().unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_worker_can_do_nothing_but_move_packets() {
        let open = tempfile::tempfile().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        std::thread::spawn(move || {
            keep(CapabilitySet::empty()).unwrap();
            limit(&[], Priority::Ordinary, SeccompAction::Errno(libc::EPERM as u32)).unwrap();
            let is_refused = |error: io::Error| error.raw_os_error() == Some(libc::EPERM);
            assert!(File::open("/dev/null").is_err_and(is_refused));
            assert!(UdpSocket::bind("127.0.0.1:0").is_err_and(is_refused));
            assert!(socket.set_nonblocking(true).is_err_and(is_refused));
            assert!(socket.set_broadcast(true).is_err_and(is_refused));
            assert!(Command::new("/bin/true").spawn().is_err_and(is_refused));
            assert!(std::thread::Builder::new().spawn(|| ()).is_err_and(is_refused));
            assert!(io_uring::IoUring::new(2).is_err_and(is_refused));
            assert!(open.set_len(1).is_err_and(is_refused));
            drop(open);
        })
        .join()
        .unwrap();
    }
}
