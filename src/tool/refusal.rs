//! What the kernel answers about routes and sends, and what a refusal stands for, in words.

use std::io;
use std::net::IpAddr;

use rustix::io::Errno;

use crate::host::netlink::{self, NetlinkError};
use crate::host::state::KernelFamily;

/// An answer of the kernel to a question, of which a refusal is one.
pub(super) fn or_refused<T>(
    answer: Result<T, NetlinkError>,
) -> Result<Result<T, io::Error>, NetlinkError> {
    match answer {
        Ok(answer) => Ok(Ok(answer)),
        Err(NetlinkError::Refused(_, source)) => Ok(Err(source)),
        Err(error) => Err(error),
    }
}

/// The interface of what `pod` of `host` sends: the one by which packets go there, if that is
/// without a tunnel, as with host-gw and with DirectRouting; else the `device`.
pub(super) async fn way_in<A: KernelFamily>(
    pod: A,
    host: IpAddr,
    device: Option<u32>,
) -> Result<Option<u32>, NetlinkError> {
    let path = or_refused(netlink::path_to(pod).await)?.ok();
    let direct = path.filter(|path| path.gateway == Some(host));
    Ok(direct.map(|path| path.interface_index).or(device))
}

/// What the kernel means, and its own words. Of routes: `fib_props` in net/ipv4/fib_semantics.c,
/// `fib4_rule_action` in net/ipv4/fib_rules.c and `fib_validate_source` in
/// net/ipv4/fib_frontend.c.
pub(super) fn why(error: &io::Error) -> String {
    let stands_for = match Errno::from_io_error(error) {
        Some(Errno::INVAL) => {
            "a route or rule of type blackhole, or an address that the kernel takes for forged"
        }
        Some(Errno::ACCESS) => {
            "a route or rule of type prohibit, or a broadcast address of a link of this host"
        }
        Some(Errno::HOSTUNREACH) => "a route of type unreachable, or forwarding is off there",
        Some(Errno::NETUNREACH) => "no route, or a rule of type unreachable",
        Some(Errno::XDEV) => "the source check, rp_filter, refuses where it comes from",
        Some(Errno::PERM) => {
            "a firewall rule for what this host sends, an IPsec policy, or a full conntrack table"
        }
        Some(Errno::MSGSIZE) => "longer than the path's MTU, as this host knows it",
        _ => return error.to_string(),
    };
    format!("{stands_for} ({error})")
}
