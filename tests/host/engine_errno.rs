//! A worker whose kernel refuses sends and writes: nothing that can still go is lost, and what
//! can't is counted under the errno's reason.
//!
//! The refusals come from a seccomp filter on the worker's thread, which fails the system call by
//! its number and its count of messages or buffers; everything else is the real kernel. It is the
//! mmsg engine's: operations of an io_uring pass no filter, `engine_suite` has the kernel itself
//! refuse them. Needs root, for it makes network namespaces.

use std::net::{Ipv4Addr, UdpSocket};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::time::Duration;

use weft::engine::WorkerEnd;
use weft::packet::Span;
use weft::stats::DropReason;
use weft::sys::udp::{Datagrams, SendBatch};

use crate::support::dataplane::*;
use crate::support::lab::wait_until;
use crate::support::seccomp::Refusal;

/// sendmmsg's third argument is the number of messages.
fn send_refusal(counts: RangeInclusive<u32>, errno: i32) -> Refusal {
    Refusal { number: libc::SYS_sendmmsg, argument: (2, counts), errno }
}

/// writev's third argument is the number of buffers: an offload header, and one for each packet
/// that was merged.
fn write_refusal(counts: RangeInclusive<u32>, errno: i32) -> Refusal {
    Refusal { number: libc::SYS_writev, argument: (2, counts), errno }
}

fn host_with(refusal: &Refusal) -> Host {
    Host::start_with(Options::ALL, || refusal.install())
}

fn send_batch(peer: &UdpSocket, bulk: &Super) {
    let arena = bulk.segments.concat();
    let spans = [Span::new(0, arena.len())];
    let segment_bytes = Some(bulk.segments[0].len() as u16);
    let message = Datagrams { destination: HOST.into(), segment_bytes, spans };
    let sent = SendBatch::new(1, 1).send(peer.as_fd(), &arena, std::iter::once(message));
    assert_eq!(sent.ok(), Some(1));
}

#[test]
fn a_refused_gso_batch_is_sent_singly() {
    for errno in [libc::EIO, libc::EINVAL, libc::EMSGSIZE, libc::EOPNOTSUPP] {
        let refusal = send_refusal(1..=1, errno);
        let host = host_with(&refusal);
        let (pod, peer) = (host.pod_device(), host.outside(PEER));
        for round in 1..=3u64 {
            let bulk = super_packet(TCP, POD, FAR, 14_300, 1420);
            pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
            let got = receive_all(&peer, bulk.segments.len());
            assert_eq!(got, after_hops(&bulk.segments, HOPS), "{refusal:?}, round {round}");
            host.settle(&host.stats.egress, 11 * round);
            // Counted after the datagrams, so they may be seen first.
            wait_until(Duration::from_secs(10), "the refusal is counted", || {
                host.stats.gso_fallbacks.get() > 0
            });
            assert_eq!(host.stats.gso_fallbacks.get(), 1, "{refusal:?}: not remembered");
        }
        assert_eq!(drops(&host.stats.egress), [], "{refusal:?}");
    }
}

#[test]
fn a_failed_send_is_dropped_by_errno() {
    let cases = [
        (libc::ENOBUFS, DropReason::SendBufferFull),
        (libc::ENOMEM, DropReason::SendBufferFull),
        (libc::EAGAIN, DropReason::SendBufferFull),
        (libc::EPERM, DropReason::SendForbidden),
        (libc::EACCES, DropReason::SendForbidden),
        (libc::ENETUNREACH, DropReason::SendUnreachable),
        (libc::EHOSTUNREACH, DropReason::SendUnreachable),
        (libc::ENETDOWN, DropReason::SendUnreachable),
        (libc::ECONNREFUSED, DropReason::SendFailed),
        (libc::EFAULT, DropReason::SendFailed),
    ];
    for (errno, reason) in cases {
        let refusal = send_refusal(1..=1024, errno);
        let host = host_with(&refusal);
        let pod = host.pod_device();
        let bulk = super_packet(UDP, POD, FAR, 14_300, 1420);
        pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
        pod.write(&marked(POD, Ipv4Addr::new(10, 5, 3, 3), 1, 64));
        host.settle(&host.stats.egress, 12);
        assert_eq!(drops(&host.stats.egress), [(reason, 12)], "{refusal:?}");
        assert_eq!(host.stats.gso_fallbacks.get(), 0, "{refusal:?}");
        assert!(host.ended.try_recv().is_err(), "{refusal:?}: the worker ended");
    }
}

/// EIO means that the batch is at fault, until the datagrams are refused one by one as well.
#[test]
fn refused_single_datagrams_are_counted() {
    let host = host_with(&send_refusal(1..=1024, libc::EIO));
    let pod = host.pod_device();
    let bulk = super_packet(TCP, POD, FAR, 14_300, 1420);
    pod.write_offloaded(bulk.header, bulk.header_bytes, &bulk.packet);
    host.settle(&host.stats.egress, 11);
    assert_eq!(drops(&host.stats.egress), [(DropReason::SendFailed, 11)]);
    wait_until(Duration::from_secs(10), "the batch's refusal is counted", || {
        host.stats.gso_fallbacks.get() > 0
    });
    assert_eq!(host.stats.gso_fallbacks.get(), 1);
}

#[test]
fn a_refused_super_packet_switches_its_kind_off() {
    for errno in [libc::EINVAL, libc::EOPNOTSUPP, libc::EMSGSIZE] {
        let refusal = write_refusal(3..=1024, errno);
        let host = host_with(&refusal);
        let (pod, peer) = (host.pod_device(), host.outside(PEER));
        let rounds = [(TCP, 1), (TCP, 1), (UDP, 2), (UDP, 2), (TCP, 2)];
        for ((protocol, fallbacks), round) in rounds.into_iter().zip(1..) {
            let bulk = super_packet(protocol, FAR, POD, 14_300, 1420);
            send_batch(&peer, &bulk);
            let got = pod.read_all(bulk.segments.len());
            assert_eq!(got, after_hops(&bulk.segments, HOPS), "{refusal:?}, round {round}");
            host.settle(&host.stats.ingress, 11 * round);
            assert_eq!(host.stats.tun_fallbacks.get(), fallbacks, "{refusal:?}, round {round}");
        }
        assert_eq!(drops(&host.stats.ingress), [], "{refusal:?}");
    }
}

#[test]
fn a_refused_super_packet_keeps_its_place() {
    let host = host_with(&write_refusal(3..=1024, libc::EINVAL));
    let (pod, peer) = (host.pod_device(), host.outside(PEER));
    let mut bulk = super_packet(TCP, FAR, POD, 14_300, 1420);
    // Another window, so the last segment is not merged.
    bulk.segments[10][34] ^= 1;
    send_batch(&peer, &bulk);
    assert_eq!(pod.read_all(11), after_hops(&bulk.segments, HOPS));
    host.settle(&host.stats.ingress, 11);
    assert_eq!(host.stats.tun_fallbacks.get(), 1);
}

#[test]
fn a_failed_write_is_dropped_by_errno() {
    let cases = [
        (libc::EAGAIN, DropReason::TunFull),
        (libc::ENOBUFS, DropReason::TunFull),
        (libc::ENOMEM, DropReason::TunFull),
        (libc::EIO, DropReason::TunWriteFailed),
        (libc::EFAULT, DropReason::TunWriteFailed),
    ];
    for (errno, reason) in cases {
        let refusal = write_refusal(1..=1024, errno);
        let host = host_with(&refusal);
        let peer = host.outside(PEER);
        send_batch(&peer, &super_packet(TCP, FAR, POD, 14_300, 1420));
        peer.send_to(&marked(FAR, POD, 1, 64), HOST).expect("the wire is up");
        host.settle(&host.stats.ingress, 12);
        assert_eq!(drops(&host.stats.ingress), [(reason, 12)], "{refusal:?}");
        assert_eq!(host.stats.tun_fallbacks.get(), 0, "{refusal:?}");
        assert!(host.ended.try_recv().is_err(), "{refusal:?}: the worker ended");
    }
}

#[test]
fn a_lost_device_ends_its_writing_worker() {
    let host = host_with(&write_refusal(1..=1024, libc::EBADFD));
    let peer = host.outside(PEER);
    send_batch(&peer, &super_packet(TCP, FAR, POD, 14_300, 1420));
    let (end, _) = host.ended.recv_timeout(PATIENCE).expect("the worker notices");
    assert!(matches!(end, WorkerEnd::TunGone(_)), "{end:?}");
    assert_eq!(drops(&host.stats.ingress), [(DropReason::TunWriteFailed, 11)]);
    assert!(conserved(&host.stats.ingress));
}

/// Super-packets first, then every write: the packets of a refused super-packet are refused too.
#[test]
fn refused_single_packets_are_counted() {
    let host = host_with(&write_refusal(1..=1024, libc::EINVAL));
    let peer = host.outside(PEER);
    send_batch(&peer, &super_packet(UDP, FAR, POD, 14_300, 1420));
    host.settle(&host.stats.ingress, 11);
    assert_eq!(drops(&host.stats.ingress), [(DropReason::TunWriteFailed, 11)]);
    assert_eq!(host.stats.tun_fallbacks.get(), 1);
}
