//! What a kernel's errors mean: pure tables from errno to the next step.

use std::io;

use rustix::io::Errno;

use crate::stats::DropReason;

use super::worker::WorkerEnd;

/// What to do after a failed send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendError {
    /// Refused in this form: send the same datagrams one by one, and have long ones fragmented.
    Form,
    /// No buffer for now: try again once there is room.
    BufferFull,
    /// Interrupted, or an earlier datagram's ICMP error; the send never began. The tunnel's socket
    /// is unconnected and has no IP_RECVERR, so the kernel queues no such error on it; this holds
    /// should that ever change.
    Stale,
    /// The datagram can't go: drop it for this reason.
    Drop(DropReason),
}

/// Reads the errno of a send. `is_batch` says whether more than one datagram was in it.
///
/// EIO: the route has no transmit checksum, or is transformed (net/ipv4/udp.c,
/// `udp_send_skb`). EINVAL and EMSGSIZE: a segment exceeds the path MTU, and so does a single
/// datagram with EMSGSIZE.
pub(super) fn classify_send_error(error: &io::Error, is_batch: bool) -> SendError {
    match Errno::from_io_error(error) {
        Some(Errno::IO | Errno::INVAL | Errno::OPNOTSUPP) if is_batch => SendError::Form,
        Some(Errno::MSGSIZE) => SendError::Form,
        Some(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => SendError::BufferFull,
        Some(Errno::CONNREFUSED | Errno::INTR) => SendError::Stale,
        Some(Errno::PERM | Errno::ACCESS) => SendError::Drop(DropReason::SendForbidden),
        Some(
            Errno::NETUNREACH
            | Errno::HOSTUNREACH
            | Errno::NETDOWN
            | Errno::HOSTDOWN
            | Errno::ADDRNOTAVAIL,
        ) => SendError::Drop(DropReason::SendUnreachable),
        _ => SendError::Drop(DropReason::SendFailed),
    }
}

/// Why what a failed TUN write held is dropped; nothing if the super-packet, which it was if
/// `is_super`, is itself the problem: then the same packets are written one by one.
pub(super) fn write_failure(error: &io::Error, is_super: bool) -> Option<DropReason> {
    match Errno::from_io_error(error) {
        Some(Errno::INVAL | Errno::OPNOTSUPP | Errno::MSGSIZE) if is_super => None,
        Some(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => Some(DropReason::TunFull),
        _ => Some(DropReason::TunWriteFailed),
    }
}

/// Whether a failed TUN write says that the device was deleted under the descriptor
/// (drivers/net/tun.c); EIO says that it is down.
pub(super) fn is_gone(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::BADFD)
}

/// What a failed receive means: mostly no more than that nothing is to be had now.
pub(super) fn receive_failed(error: io::Error) -> Result<(), WorkerEnd> {
    match Errno::from_io_error(&error) {
        Some(Errno::AGAIN | Errno::INTR | Errno::CONNREFUSED) => Ok(()),
        _ => Err(WorkerEnd::WaitFailed(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::io::Reads;

    #[test]
    fn only_an_error_about_form_changes_the_form() {
        let of = |errno: Errno, is_batch| classify_send_error(&errno.into(), is_batch);
        for is_batch in [true, false] {
            assert_eq!(of(Errno::MSGSIZE, is_batch), SendError::Form);
        }
        for errno in [Errno::IO, Errno::INVAL] {
            assert_eq!(of(errno, true), SendError::Form);
            let single = SendError::Drop(DropReason::SendFailed);
            assert_eq!(of(errno, false), single, "a single datagram: no retry");
        }
        assert_eq!(of(Errno::PERM, true), SendError::Drop(DropReason::SendForbidden));
        assert_eq!(of(Errno::CONNREFUSED, true), SendError::Stale);
        assert_eq!(of(Errno::NOBUFS, false), SendError::BufferFull);
    }

    #[test]
    fn an_unreadable_packet_is_no_lost_device() {
        let mut reads = Reads::new(0);
        reads.moved.drained = false;
        assert!(reads.fail(Errno::INVAL.into()).is_ok());
        assert_eq!((reads.unreadable, reads.moved.drained), (1, false));
        assert!(matches!(reads.fail(Errno::BADFD.into()), Err(WorkerEnd::TunGone(_))));
        assert!(reads.fail(Errno::AGAIN.into()).is_ok());
        assert_eq!((reads.unreadable, reads.moved.drained), (1, true));
        assert!(receive_failed(Errno::AGAIN.into()).is_ok());
        let forbidden = receive_failed(Errno::PERM.into());
        assert!(forbidden.is_err(), "a forbidden receive would spin for ever");
    }

    #[test]
    fn a_deleted_device_differs_from_one_down() {
        let of = |errno: Errno, is_super| write_failure(&errno.into(), is_super);
        assert!(is_gone(&Errno::BADFD.into()) && !is_gone(&Errno::IO.into()));
        for (errno, is_super) in [(Errno::BADFD, true), (Errno::IO, true), (Errno::INVAL, false)] {
            assert_eq!(of(errno, is_super), Some(DropReason::TunWriteFailed));
        }
        assert_eq!(of(Errno::INVAL, true), None);
    }
}
