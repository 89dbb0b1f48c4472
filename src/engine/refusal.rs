//! What a kernel's refusal means: pure tables from errno to the next step.

use std::io;

use rustix::io::Errno;

use crate::stats::DropReason;

/// What to do after a refused send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendRefusal {
    /// Not in this form: send the same datagrams one by one, and have long ones fragmented.
    Form,
    /// No buffer for now: try again once there is room.
    Busy,
    /// Interrupted, or an earlier datagram's ICMP error; the send never began. The tunnel's socket
    /// is unconnected and has no IP_RECVERR, so the kernel queues no such error on it; this holds
    /// should that ever change.
    Stale,
    /// The datagram can't go: drop it for this reason.
    Drop(DropReason),
}

/// Reads the errno of a send. `train` says whether more than one datagram was in it.
///
/// EIO: the route has no transmit checksum, or is transformed (net/ipv4/udp.c,
/// `udp_send_skb`). EINVAL and EMSGSIZE: a segment exceeds the path MTU, and so does a single
/// datagram with EMSGSIZE.
pub(super) fn read_send(error: &io::Error, train: bool) -> SendRefusal {
    match Errno::from_io_error(error) {
        Some(Errno::IO | Errno::INVAL | Errno::OPNOTSUPP) if train => SendRefusal::Form,
        Some(Errno::MSGSIZE) => SendRefusal::Form,
        Some(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => SendRefusal::Busy,
        Some(Errno::CONNREFUSED | Errno::INTR) => SendRefusal::Stale,
        Some(Errno::PERM | Errno::ACCESS) => SendRefusal::Drop(DropReason::SendForbidden),
        Some(
            Errno::NETUNREACH
            | Errno::HOSTUNREACH
            | Errno::NETDOWN
            | Errno::HOSTDOWN
            | Errno::ADDRNOTAVAIL,
        ) => SendRefusal::Drop(DropReason::SendUnreachable),
        _ => SendRefusal::Drop(DropReason::SendFailed),
    }
}

/// What to do after a refused TUN write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteRefusal {
    /// The super-packet itself is the problem: write the same packets one by one.
    Super,
    /// The packet can't go: drop it for this reason.
    Drop(DropReason),
    /// The device is gone.
    Gone,
}

/// Reads the errno of a TUN write. `merged` says whether it was a super-packet.
///
/// EBADFD: the device was deleted under the descriptor (drivers/net/tun.c). EIO: it is down.
pub(super) fn read_write(error: &io::Error, merged: bool) -> WriteRefusal {
    match Errno::from_io_error(error) {
        Some(Errno::BADFD) => WriteRefusal::Gone,
        Some(Errno::INVAL | Errno::OPNOTSUPP | Errno::MSGSIZE) if merged => WriteRefusal::Super,
        Some(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
            WriteRefusal::Drop(DropReason::TunFull)
        }
        _ => WriteRefusal::Drop(DropReason::TunWriteFailed),
    }
}

/// What to do after a failed TUN read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadRefusal {
    /// Nothing is left for now.
    Drained,
    /// Try again.
    Again,
    /// One packet could not be handed over, and is lost; the queue goes on.
    Packet,
    /// The device is gone.
    Gone,
}

/// Reads the errno of a TUN read.
///
/// Only EBADFD says that the device is gone. EINVAL is one packet whose offload the kernel can't
/// express (`tun_put_user`, drivers/net/tun.c), already taken off the queue.
pub(super) fn read_read(error: &io::Error) -> ReadRefusal {
    match Errno::from_io_error(error) {
        Some(Errno::AGAIN) => ReadRefusal::Drained,
        Some(Errno::INTR) => ReadRefusal::Again,
        Some(Errno::BADFD | Errno::BADF) => ReadRefusal::Gone,
        _ => ReadRefusal::Packet,
    }
}

/// Whether a failed receive means no more than that nothing is to be had now.
pub(super) fn receive_is_drained(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::AGAIN | Errno::INTR | Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(errno: Errno) -> io::Error {
        errno.into()
    }

    #[test]
    fn a_message_goes_in_another_form_only_where_its_form_is_at_fault() {
        for train in [true, false] {
            assert_eq!(read_send(&error(Errno::MSGSIZE), train), SendRefusal::Form);
        }
        for errno in [Errno::IO, Errno::INVAL] {
            assert_eq!(read_send(&error(errno), true), SendRefusal::Form);
            let single = SendRefusal::Drop(DropReason::SendFailed);
            assert_eq!(read_send(&error(errno), false), single, "a single datagram: no retry");
        }
        assert_eq!(
            read_send(&error(Errno::PERM), true),
            SendRefusal::Drop(DropReason::SendForbidden)
        );
        assert_eq!(read_send(&error(Errno::CONNREFUSED), true), SendRefusal::Stale);
        assert_eq!(read_send(&error(Errno::NOBUFS), false), SendRefusal::Busy);
    }

    #[test]
    fn one_unreadable_packet_is_not_taken_for_a_lost_device() {
        assert_eq!(read_read(&error(Errno::INVAL)), ReadRefusal::Packet);
        assert_eq!(read_read(&error(Errno::BADFD)), ReadRefusal::Gone);
        assert_eq!(read_read(&error(Errno::AGAIN)), ReadRefusal::Drained);
        assert!(receive_is_drained(&error(Errno::AGAIN)));
        assert!(
            !receive_is_drained(&error(Errno::PERM)),
            "a forbidden receive would spin for ever"
        );
    }

    #[test]
    fn a_deleted_device_is_told_from_one_that_is_down() {
        assert_eq!(read_write(&error(Errno::BADFD), true), WriteRefusal::Gone);
        let down = WriteRefusal::Drop(DropReason::TunWriteFailed);
        assert_eq!(read_write(&error(Errno::IO), true), down);
        assert_eq!(read_write(&error(Errno::INVAL), false), down);
        assert_eq!(read_write(&error(Errno::INVAL), true), WriteRefusal::Super);
    }
}
