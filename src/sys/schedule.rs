//! How the scheduler treats the calling thread (sched_setattr(2)).

use std::io;

/// A way to share processors with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Before every ordinary thread as soon as it can run (`SCHED_FIFO`), at the lowest of the
    /// real-time priorities.
    RealTime,
    /// Like others, by its nice value (`SCHED_OTHER`).
    Ordinary {
        /// -20, which comes first, to 19.
        nice: i32,
        /// How long it wants to run at a time, in nanoseconds: the shorter, the sooner it may. Zero
        /// for what the kernel takes. Kernels before 6.12 know no such wish.
        slice_ns: u64,
    },
}

/// Puts the calling thread into a class. Real time, and a nice value below the present one, want a
/// right or a resource limit.
pub fn set_class(class: Class) -> io::Result<()> {
    let mut wanted = empty();
    match class {
        Class::RealTime => {
            wanted.sched_policy = libc::SCHED_FIFO as u32;
            wanted.sched_priority = 1;
        }
        Class::Ordinary { nice, slice_ns } => {
            wanted.sched_policy = libc::SCHED_OTHER as u32;
            (wanted.sched_nice, wanted.sched_runtime) = (nice, slice_ns);
        }
    }
    // SAFETY: the kernel reads as many bytes as the structure says of itself, and keeps none.
    let answer = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const wanted, 0) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The class of the calling thread. Before Linux 6.12 its slice is zero.
pub fn class() -> io::Result<Class> {
    let mut found = empty();
    let bytes = found.size;
    // SAFETY: the kernel writes no more than `bytes`, which are the structure's.
    let answer = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut found, bytes, 0) };
    match (answer, i32::try_from(found.sched_policy)) {
        (0, Ok(libc::SCHED_FIFO)) => Ok(Class::RealTime),
        (0, _) => Ok(Class::Ordinary { nice: found.sched_nice, slice_ns: found.sched_runtime }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn empty() -> libc::sched_attr {
    libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_what_it_was_made() {
        std::thread::spawn(|| {
            let wanted = Class::Ordinary { nice: 5, slice_ns: 300_000 };
            set_class(wanted).unwrap();
            let Class::Ordinary { nice, slice_ns } = class().unwrap() else { panic!("real time") };
            assert_eq!(nice, 5);
            assert!([0, 300_000].contains(&slice_ns), "a slice of {slice_ns} ns");
        })
        .join()
        .unwrap();
    }
}
