//! The TUN device: opening, offload negotiation, reading and writing packets with their offload
//! header. Addresses and routes are the host's business, not this file's.

use std::ffi::c_int;
use std::io::{self, IoSlice};
use std::num::NonZeroU16;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::writev;

use crate::offload::VNET_HEADER_BYTES;
use crate::sys::steering::Steering;
use crate::sys::tun as sys;

/// The TUN device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum TunError {
    /// The device node or the ioctl refused.
    #[error(
        "cannot create the TUN device {name}: is the tun module loaded, /dev/net/tun there, and \
         CAP_NET_ADMIN granted?"
    )]
    Open {
        /// The name or name template asked for.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A kept device that another process has.
    #[error(
        "another process has {0}, the device of a weftd of the same port and network: stop that one"
    )]
    Taken(String),
    /// It is there, and cannot be set up.
    #[error("cannot {what} of {name}")]
    Refused {
        /// What was tried.
        what: &'static str,
        /// The device.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Super-packets that a TUN device passes up and takes in.
#[derive(Debug, Clone, Copy)]
pub struct TunOffload {
    /// TCP super-packets.
    pub tso: bool,
    /// UDP super-packets (kernel 6.2).
    pub uso: bool,
}

/// An open queue of a TUN device, non-blocking. Closing the last queue deletes the device, unless
/// it is kept.
#[derive(Debug)]
pub struct Tun {
    queue: OwnedFd,
    /// The device's name.
    pub name: String,
    /// What the device passes up and takes in.
    pub offload: TunOffload,
}

/// The largest mark that a queue can have: the last signal (`valid_signal`, fs/fcntl.c). Of more
/// queues nobody can go on with the device.
const MARK_MAX: u16 = 64;

impl Tun {
    /// Creates a device of `count` queues, named after `template` (`flannel%d` takes the first
    /// free number), with as much of `wanted` as the kernel has. A device of one queue is made
    /// without support for several: the kernel then tracks no flows on it. A kept device of that
    /// name is opened again.
    pub fn open(
        template: &str,
        wanted: TunOffload,
        count: NonZeroU16,
    ) -> Result<Vec<Self>, TunError> {
        let open = |name: &str| {
            sys::open(name, flags(count.get().into()))
                .map_err(|source| TunError::Open { name: name.to_owned(), source })
        };
        let (first, name) = open(template)?;
        set_vnet_header(&first, &name)?;
        // Header and offloads belong to the device: its other queues have them as well.
        let offload = negotiate(first.as_fd(), wanted);
        let mut queues = vec![Self { queue: first, name: name.clone(), offload }];
        for number in 1..count.get() {
            let queue = open(&name)?.0;
            if number <= MARK_MAX {
                sys::set_mark(queue.as_fd(), number)
                    .map_err(|source| TunError::Open { name: name.clone(), source })?;
            }
            queues.push(Self { queue, name: name.clone(), offload });
        }
        Ok(queues)
    }

    /// Goes on with all queues of a device, which [`Self::open`] has opened in another process.
    pub(super) fn inherit(mut queues: Vec<OwnedFd>, wanted: TunOffload) -> io::Result<Vec<Self>> {
        let kind = flags(queues.len());
        // Which is which counts, and a service manager may hand them over in any order.
        queues.sort_by_key(|queue| sys::mark(queue.as_fd()));
        if queues.windows(2).any(|pair| sys::mark(pair[0].as_fd()) == sys::mark(pair[1].as_fd())) {
            return Err(io::Error::other("which queue of the TUN device is which is not known"));
        }
        let Some(first) = queues.first() else { return Ok(Vec::new()) };
        let (name, _) = sys::identify(first.as_fd())?;
        for queue in &queues {
            let (other, found) = sys::identify(queue.as_fd())?;
            if other != name || found & flags(usize::MAX) != kind {
                return Err(io::Error::other(format!("the TUN device {other} is of another kind")));
            }
        }
        set_vnet_header(first, &name).map_err(io::Error::other)?;
        let offload = negotiate(first.as_fd(), wanted);
        let queues = queues.into_iter();
        Ok(queues.map(|queue| Self { queue, name: name.clone(), offload }).collect())
    }

    /// The same queue, for another process.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.queue.try_clone()
    }

    /// Has the device outlive weftd, or not.
    pub fn set_kept(&self, is_kept: bool) -> Result<(), TunError> {
        let what = "choose the end, with weftd or without,";
        sys::set_persistent(self.queue.as_fd(), is_kept).map_err(refused(what, &self.name))
    }

    /// Has the kernel choose the queue of a packet for this host's peers by `steering` alone.
    /// Without, its queue is the last one to which its other direction was written, for three
    /// seconds, and each change may reorder it.
    pub fn steer(&self, steering: &Steering) -> io::Result<()> {
        steering.attach(self.queue.as_fd())
    }

    /// A queue whose other end is `queue`'s, not the kernel's: no right is needed to make one.
    #[cfg(test)]
    pub(crate) fn stub(queue: OwnedFd) -> Self {
        let offload = TunOffload { tso: false, uso: false };
        Self { queue, name: "stub".to_owned(), offload }
    }

    /// Reads one packet without waiting into `frame`, its offload header first; returns the bytes
    /// of both. A packet that is longer is cut, so give it 64 KiB and the header.
    pub fn read(&self, frame: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.queue, frame)?)
    }

    /// Writes one packet: `parts` are its offload header and its bytes, in order.
    pub fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        writev(&self.queue, parts)?;
        Ok(())
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

/// What a queue is opened with, one of `count` of its device.
fn flags(count: usize) -> c_int {
    let several = if count > 1 { sys::IFF_MULTI_QUEUE } else { 0 };
    sys::IFF_TUN | sys::IFF_NO_PI | sys::IFF_VNET_HDR | several
}

fn set_vnet_header(queue: &OwnedFd, name: &str) -> Result<(), TunError> {
    sys::set_vnet_header(queue.as_fd(), VNET_HEADER_BYTES as i32)
        .map_err(refused("set the offload header", name))
}

fn refused(what: &'static str, name: &str) -> impl FnOnce(io::Error) -> TunError {
    move |source| TunError::Refused { what, name: name.to_owned(), source }
}

/// Asks for the most first: an unknown bit makes the kernel refuse the whole set.
fn negotiate(queue: BorrowedFd<'_>, wanted: TunOffload) -> TunOffload {
    let tcp = sys::TUN_F_TSO4 | sys::TUN_F_TSO6 | sys::TUN_F_TSO_ECN;
    let udp = sys::TUN_F_USO4 | sys::TUN_F_USO6;
    for (tso, uso) in [(true, true), (true, false), (false, true)] {
        let features = sys::TUN_F_CSUM | if tso { tcp } else { 0 } | if uso { udp } else { 0 };
        let is_wanted = (wanted.tso || !tso) && (wanted.uso || !uso);
        if is_wanted && sys::set_offload(queue, features).is_ok() {
            return TunOffload { tso, uso };
        }
    }
    // Refusing to clear offloads is no error: a device starts without any.
    sys::set_offload(queue, 0).ok();
    TunOffload { tso: false, uso: false }
}
