//! Classifiers on a device that outlive the process which attached them, and for kernels before
//! 6.6, which have no TCX: filters of kind `bpf` in the queueing discipline `clsact`
//! (net/sched/cls_bpf.c, tc-bpf(8)).

use std::os::fd::{AsRawFd, BorrowedFd};

use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::tc::{
    TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcHeader, TcMessage,
    TcOption,
};
use tracing::warn;

use super::decode::find;
use super::exchange::request_now;
use super::{Result, add, edit, list, unless_there};
use crate::host::state::LinkId;

/// Its place among the filters of others: behind those with a number below it.
const PRIORITY: u32 = 8285;

/// What devices have without anybody's wish to drop or delay packets: defaults, and where filters
/// are attached.
const USUAL_DISCIPLINES: [&str; 9] =
    ["noqueue", "mq", "mqprio", "pfifo_fast", "pfifo", "fq_codel", "codel", "fq", "sfq"];
const WITH_FILTERS: [&str; 2] = ["clsact", "ingress"];

/// How the names of all programs begin.
const NAMES_BEGIN: &str = "weft_";

/// `ETH_P_ALL` in network byte order.
const ALL_PROTOCOLS: u32 = 0x0300;

/// Which packets of a device a filter sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Those that arrive.
    Ingress,
    /// Those that leave.
    Egress,
}

/// Where a filter of ours is, or would be.
#[derive(Debug, Clone, Copy)]
pub struct FilterPlace {
    /// The device's number.
    pub device: u32,
    /// Which packets it sees.
    pub side: Side,
    /// Tells it from those of another weftd on the same device.
    pub handle: u32,
}

/// A filter of ours; removed when it is dropped, unless it is left.
#[derive(Debug)]
pub struct Filter(FilterPlace);

impl Filter {
    /// Has `program` see packets of a device, in place of a filter that is there already. Makes the
    /// queueing discipline if there is none; it stays, others may use it.
    pub async fn attach(place: FilterPlace, name: &str, program: BorrowedFd<'_>) -> Result<Self> {
        let device = place.device;
        let discipline = RouteNetlinkMessage::NewQueueDiscipline(clsact(device));
        unless_there(add(format!("add clsact to device {device}"), discipline).await)?;
        let mut message = place.message();
        message.attributes.push(TcAttribute::Options(vec![
            // Descriptors are not negative.
            TcOption::Bpf(TcFilterBpfOption::ProgFd(program.as_raw_fd() as u32)),
            TcOption::Bpf(TcFilterBpfOption::ProgName(name.to_owned())),
            TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
        ]));
        let operation = format!("filter packets of device {device} by {name}");
        let request = RouteNetlinkMessage::NewTrafficFilter(message);
        edit(operation, request, NLM_F_CREATE | NLM_F_REPLACE).await?;
        Ok(Self(place))
    }

    /// Whether it is still there.
    pub async fn is_there(&self) -> Result<bool> {
        self.0.is_taken().await
    }

    /// Leaves it in place for the next weftd.
    pub fn leave(self) {
        std::mem::forget(self);
    }
}

impl FilterPlace {
    /// Removes the filter that a weftd has left there, if there is one.
    pub async fn clear(self) -> Result {
        if self.is_taken().await? { self.remove().await } else { Ok(()) }
    }

    async fn remove(self) -> Result {
        let request = RouteNetlinkMessage::DelTrafficFilter(self.message());
        edit(format!("remove a filter of device {}", self.device), request, 0).await
    }

    /// Removes the filters of all weftd from a device; gives how many there were. The queueing
    /// discipline goes with the last filter that it had.
    pub async fn clear_all(device: u32) -> Result<usize> {
        let (mut ours, mut others) = (Vec::new(), 0);
        for side in [Side::Ingress, Side::Egress] {
            let place = Self { device, side, handle: 0 };
            for message in place.list().await? {
                match handle_of_ours(&message) {
                    Some(handle) => ours.push(Self { handle, ..place }),
                    None => others += usize::from(!is_of_a_priority(&message)),
                }
            }
        }
        for place in &ours {
            place.remove().await?;
        }
        if !ours.is_empty() && others == 0 {
            let request = RouteNetlinkMessage::DelQueueDiscipline(clsact(device));
            edit(format!("remove clsact from device {device}"), request, 0).await?;
        }
        Ok(ours.len())
    }

    /// The kinds of the filters on this side of a device that are not ours.
    pub async fn of_others(device: u32, side: Side) -> Result<Vec<String>> {
        let filters = Self { device, side, handle: 0 }.list().await?;
        let is_anothers = |it: &&TcMessage| handle_of_ours(it).is_none() && !is_of_a_priority(it);
        let others = filters.iter().filter(is_anothers);
        Ok(kinds(others))
    }

    async fn is_taken(self) -> Result<bool> {
        let filters = self.list().await?;
        Ok(filters.iter().any(|found| handle_of_ours(found) == Some(self.handle)))
    }

    async fn list(self) -> Result<Vec<TcMessage>> {
        let mut query = TcMessage::with_index(self.device as i32);
        query.header.parent = self.parent();
        let operation = format!("list filters of device {}", self.device);
        let request = RouteNetlinkMessage::GetTrafficFilter(query);
        let answer = list(&operation, request).await?;
        let filters = answer.into_iter().filter_map(|message| {
            let RouteNetlinkMessage::NewTrafficFilter(found) = message else { return None };
            Some(found)
        });
        Ok(filters.collect())
    }

    fn parent(self) -> TcHandle {
        let minor = match self.side {
            Side::Ingress => TcHandle::MIN_INGRESS,
            Side::Egress => TcHandle::MIN_EGRESS,
        };
        TcHandle { major: TcHandle::CLSACT.major, minor }
    }

    fn message(self) -> TcMessage {
        let header = TcHeader {
            index: self.device as i32,
            handle: self.handle.into(),
            parent: self.parent(),
            info: PRIORITY << 16 | ALL_PROTOCOLS,
            ..TcHeader::default()
        };
        let kind = TcAttribute::Kind(TcFilterBpf::KIND.to_owned());
        TcMessage::from_parts(header, vec![kind])
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        let request = RouteNetlinkMessage::DelTrafficFilter(self.0.message());
        if let Err(error) = request_now(request, 0) {
            let device = self.0.device;
            warn!("cannot remove a filter of device {device}: {error}; see `tc filter show`");
        }
    }
}

/// The kinds of a device's queueing disciplines, as far as they are none that a kernel or a
/// distribution gives to devices by itself.
pub async fn unusual_disciplines(device: u32) -> Result<Vec<String>> {
    let request = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::with_index(device as i32));
    let all = list("list queueing disciplines", request).await?;
    let on_device = all.iter().filter_map(|message| {
        let RouteNetlinkMessage::NewQueueDiscipline(found) = message else { return None };
        // The kernel lists those of all devices.
        (found.header.index == device as i32).then_some(found)
    });
    let mut kinds = kinds(on_device);
    kinds.retain(|kind| !USUAL_DISCIPLINES.iter().chain(&WITH_FILTERS).any(|it| it == kind));
    Ok(kinds)
}

fn kinds<'a>(all: impl Iterator<Item = &'a TcMessage>) -> Vec<String> {
    let kind = |it: &TcMessage| find!(it.attributes, TcAttribute::Kind(kind) => kind.clone());
    let mut kinds: Vec<_> = all.filter_map(kind).collect();
    kinds.dedup();
    kinds
}

/// The handle of a filter that a weftd has attached.
fn handle_of_ours(filter: &TcMessage) -> Option<u32> {
    let options = find!(filter.attributes, TcAttribute::Options(options) => options)?;
    let name = find!(options, TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => name)?;
    let is_ours = filter.header.info >> 16 == PRIORITY && name.starts_with(NAMES_BEGIN);
    is_ours.then(|| filter.header.handle.into())
}

/// A listing has an entry without handle for each priority, before its filters.
fn is_of_a_priority(filter: &TcMessage) -> bool {
    u32::from(filter.header.handle) == 0
}

fn clsact(device: u32) -> TcMessage {
    let handle = TcHandle { major: TcHandle::CLSACT.major, minor: 0 };
    discipline(device, "clsact", TcHandle::CLSACT, handle)
}

fn discipline(device: u32, kind: &str, parent: TcHandle, handle: TcHandle) -> TcMessage {
    let header = TcHeader { index: device as i32, handle, parent, ..TcHeader::default() };
    TcMessage::from_parts(header, vec![TcAttribute::Kind(kind.to_owned())])
}

/// Has a link give its packets to its driver at once. In front of the queues of a TUN device
/// others never fill, and the kernel makes some for each of 256 that it could have: 25 MB.
pub async fn set_no_discipline(link: &LinkId) -> Result {
    let none = discipline(link.index, "noqueue", TcHandle::ROOT, TcHandle::default());
    let flags = NLM_F_CREATE | NLM_F_REPLACE;
    let request = RouteNetlinkMessage::NewQueueDiscipline(none);
    edit(format!("take the queueing discipline off {link}"), request, flags).await
}
