//! System calls that fail by a filter, everything else being the real kernel.
#![allow(unsafe_code, reason = "a seccomp filter is installed with prctl, which has no safe form")]

use std::ops::RangeInclusive;

use weft::engine::{Engine, call_ns, preferred};

/// Calls of one number fail when one of their arguments lies in a range.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    /// The system call.
    pub(crate) number: libc::c_long,
    /// Which argument is looked at, from 0, and its low 32 bits that are refused.
    pub(crate) argument: (u32, RangeInclusive<u32>),
    /// How the call fails.
    pub(crate) errno: i32,
}

impl Refusal {
    /// Every call of this number fails.
    pub(crate) fn always(number: libc::c_long, errno: i32) -> Self {
        Self { number, argument: (0, 0..=u32::MAX), errno }
    }

    /// Takes effect for the calling thread and for what it starts from now on, programs too.
    pub(crate) fn install(&self) {
        // Offsets in `struct seccomp_data`: the number, and the lower half of an argument.
        let low_half = if cfg!(target_endian = "little") { 0 } else { 4 };
        let (argument, values) = &self.argument;
        let (number_at, argument_at) = (0, 16 + 8 * argument + low_half);
        let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        let jump = |kind: u32| (libc::BPF_JMP | kind | libc::BPF_K) as u16;
        let answer = (libc::BPF_RET | libc::BPF_K) as u16;
        let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let refused = libc::SECCOMP_RET_ERRNO | self.errno as u32;
        let mut program = [
            step(load, 0, 0, number_at),
            step(jump(libc::BPF_JEQ), 0, 4, self.number as u32),
            step(load, 0, 0, argument_at),
            step(jump(libc::BPF_JGE), 0, 2, *values.start()),
            step(jump(libc::BPF_JGT), 1, 0, *values.end()),
            step(answer, 0, 0, refused),
            step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        install(&mut program);
    }
}

/// Makes each system call of the calling thread, and of what it starts, cost microseconds on any
/// machine, as long seccomp profiles and the mitigations of older processors do: each product
/// needs the one before, so that no processor takes less than 3 cycles for one of the 4,000.
pub(crate) fn make_calls_dear() {
    let step = |code: u32, k| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    // The kernel remembers calls whose outcome depends on no argument, and skips the filter.
    let load_argument = step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 16);
    let multiply = step(libc::BPF_ALU | libc::BPF_MUL | libc::BPF_K, 3);
    let mut program = vec![multiply; 4000];
    program.insert(0, load_argument);
    program.push(step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    install(&mut program);
    let call_ns = call_ns();
    assert_eq!(preferred(call_ns), Engine::IoUring, "a system call still takes only {call_ns} ns");
}

/// Installs a filter for the calling thread and for what it starts from now on.
pub(crate) fn install(program: &mut [libc::sock_filter]) {
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the filter is copied during the call from a slice that outlives it, and its length
    // is the slice's.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}
