//! Why io_uring can't be used, in the operator's words: the cause, what it means, what to do.
//! Reads one sysctl; everything else is pure.

use std::io;

use rustix::io::Errno;

use crate::backend::error::StartError;
use crate::engine::{RingError, SpawnError};
use crate::failure::with_causes;

/// Who may use io_uring (Documentation/admin-guide/sysctl/kernel.rst, kernel 6.6).
const SYSCTL: &str = "/proc/sys/kernel/io_uring_disabled";

/// What a seccomp profile has to allow.
const CALLS: &str = "io_uring_setup, io_uring_enter and io_uring_register";

/// For the log, when mmsg runs in io_uring's place.
pub(super) fn report(error: &RingError) -> String {
    format!(
        "io_uring is not used: {}; the mmsg engine runs instead, with the same answers and more \
         system calls; to change that, {}, or choose --engine=mmsg",
        with_causes(error),
        cure(error, io_uring_disabled()),
    )
}

/// For the log, when a ring that worked has failed with `error` and mmsg takes its place.
pub(super) fn report_broken(error: &io::Error) -> String {
    format!(
        "io_uring is not used any more until weftd is started again: it failed with {error}; the \
         mmsg engine runs instead, with the same answers and more system calls; please report this"
    )
}

/// For the end of a weftd that may run on nothing but io_uring.
pub(super) fn refusal(error: SpawnError) -> StartError {
    match error {
        SpawnError::Ring(source) => {
            let cure = cure(&source, io_uring_disabled());
            StartError::Ring { cure, source }
        }
        SpawnError::Thread(_) => StartError::Worker(error),
    }
}

/// The sysctl's value; `None` where the kernel has no such sysctl or hides it.
fn io_uring_disabled() -> Option<u8> {
    std::fs::read_to_string(SYSCTL).ok()?.trim().parse().ok()
}

/// What to do about `error` on a host whose sysctl has the value `disabled`.
fn cure(error: &RingError, disabled: Option<u8>) -> String {
    let (source, at_setup) = match error {
        RingError::Setup(source) => (Some(source), true),
        RingError::Register(source) | RingError::Enter(source) => (Some(source), false),
        RingError::NoTimeLimit | RingError::TunRead(_) | RingError::TunSilent => (None, false),
    };
    match (source.and_then(Errno::from_io_error), disabled) {
        (Some(Errno::PERM | Errno::ACCESS), Some(2)) if at_setup => {
            "set the sysctl kernel.io_uring_disabled to 0: it is 2, which forbids io_uring to all"
                .to_owned()
        }
        (Some(Errno::PERM | Errno::ACCESS), Some(1)) if at_setup => format!(
            "set the sysctl kernel.io_uring_disabled to 0, or give weftd the group of \
             kernel.io_uring_group: it is 1 (CAP_SYS_ADMIN does not help, because workers give it \
             up); if that is not it, have the container's seccomp profile allow {CALLS}"
        ),
        (Some(Errno::PERM | Errno::ACCESS), _) => {
            format!("have the container's seccomp profile, or SELinux, allow {CALLS}")
        }
        (Some(Errno::NOSYS), _) => format!(
            "run kernel 6.4 or later with CONFIG_IO_URING; if this is one, have the container's \
             seccomp profile allow {CALLS}"
        ),
        (Some(Errno::NOMEM), _) => {
            "raise the limit of locked memory (LimitMEMLOCK, ulimit -l)".to_owned()
        }
        (Some(Errno::MFILE | Errno::NFILE), _) => {
            "raise the limit of open files (LimitNOFILE, ulimit -n)".to_owned()
        }
        _ => "run kernel 6.4 or later".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(errno: Errno) -> RingError {
        RingError::Setup(errno.into())
    }

    #[test]
    fn each_cause_names_its_cure() {
        let cases = [
            (setup(Errno::PERM), Some(0), "seccomp"),
            (setup(Errno::PERM), None, "seccomp"),
            (setup(Errno::PERM), Some(1), "kernel.io_uring_group"),
            (setup(Errno::PERM), Some(2), "kernel.io_uring_disabled to 0: it is 2"),
            (setup(Errno::NOSYS), None, "CONFIG_IO_URING"),
            (setup(Errno::NOMEM), Some(0), "LimitMEMLOCK"),
            (setup(Errno::MFILE), Some(0), "LimitNOFILE"),
            (RingError::Register(Errno::PERM.into()), Some(1), "seccomp"),
            (RingError::Register(Errno::NOMEM.into()), Some(0), "LimitMEMLOCK"),
            (RingError::Enter(Errno::PERM.into()), Some(2), "seccomp"),
            (RingError::NoTimeLimit, None, "kernel 6.4"),
            (RingError::TunRead(Errno::OPNOTSUPP.into()), None, "kernel 6.4"),
            (RingError::TunSilent, None, "kernel 6.4"),
        ];
        for (error, disabled, expected) in cases {
            let cure = cure(&error, disabled);
            assert!(cure.contains(expected), "{error:?}, sysctl {disabled:?}: {cure}");
            if cure.contains("seccomp") {
                assert!(cure.contains(CALLS), "{error:?}: which calls? {cure}");
            }
        }
    }

    #[test]
    fn log_line_names_cause_and_consequence() {
        let line = report(&setup(Errno::NOSYS));
        let words = ["io_uring is not used", "io_uring_setup failed", "not implemented", "mmsg"];
        for word in words {
            assert!(line.contains(word), "no {word:?} in: {line}");
        }
        assert_eq!(line.lines().count(), 1);
    }

    #[test]
    fn refusal_names_the_cure() {
        let error = refusal(SpawnError::Ring(RingError::TunSilent));
        let text = with_causes(&error);
        assert!(text.contains("kernel 6.4") && text.contains("--engine=auto"), "{text}");
        let error = refusal(SpawnError::Thread(Errno::AGAIN.into()));
        assert!(with_causes(&error).contains("packet worker"), "{error}");
    }
}
