//! Where the kernel's programs are: attached to the TUN device and to the interface beneath it, and
//! behind the veth pair, while there is one.

use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::backend::udp::owner::Owner;
use crate::failure::{LogOnce, with_causes};
use crate::fast_path::Program;
use crate::host::netlink::{self, NetlinkError};

use super::attachment::{AttachResult, Attacher, Attachment, Ground, clear_inward, place};
use super::merging::{Delivery, Pair, clear_pair, find, pair_names};
use super::obstacle::Obstacle;

/// How long the programs stay away from a device where another program removed them.
const EVICTED: Duration = Duration::from_secs(600);

#[derive(Default)]
pub(super) struct Placement {
    /// The programs for what leaves and what arrives, and the numbers of their devices. To drop
    /// them takes them off both.
    pub(super) attached: Option<([u32; 2], [Attachment; 2])>,
    /// Where somebody removed them, and until when they stay away.
    evicted: Option<(Ground, Instant)>,
    /// What the interface delivers, and the pair that merges it, while it needs one.
    pub(super) delivery: Delivery,
    pair: Option<Pair>,
    logged: LogOnce,
}

impl Placement {
    /// Whether the programs may be on these devices: where another program removes them, they are
    /// not put back at once.
    pub(super) async fn check(&mut self, ground: &Ground) -> Result<(), Obstacle> {
        if self.is_evicted(ground) {
            return Err(Obstacle::Evicted(ground.interface.clone()));
        }
        let devices = [ground.tun_device, ground.underlay_device];
        // They stay known while the kernel is asked: weftd may be stopped meanwhile, and is to
        // leave them in place.
        if let Some((attached, programs)) = &self.attached
            && *attached == devices
            && let Err(obstacle) = look(ground, programs).await
        {
            self.attached = None;
            if let Obstacle::Evicted(_) = obstacle {
                self.evicted = Some((ground.clone(), Instant::now() + EVICTED));
            }
            return Err(obstacle);
        }
        Ok(())
    }

    fn is_evicted(&self, ground: &Ground) -> bool {
        let evicted = self.evicted.as_ref();
        evicted.is_some_and(|(evicted, until)| evicted == ground && Instant::now() < *until)
    }

    /// Has the programs see packets of these devices, by what was published. They take none before
    /// that.
    pub(super) async fn attach(&mut self, attacher: Attacher<'_>, ground: &Ground) -> AttachResult {
        let devices = [ground.tun_device, ground.underlay_device];
        if self.is_evicted(ground)
            || self.attached.as_ref().is_some_and(|(attached, _)| *attached == devices)
        {
            return Ok(());
        }
        self.attached = None;
        let out = attacher.attach(Program::Out, ground.tun_device).await?;
        let inward = attacher.attach(Program::In, ground.underlay_device).await?;
        let [first, second] = pair_names(&ground.tun_name);
        // Behind the pair as well the next one replaces the last.
        let but = [&ground.interface, &first, &second].map(String::as_str);
        // Known before that: weftd may be stopped meanwhile, and is to leave them.
        self.attached = Some((devices, [out, inward]));
        let cleared = clear_inward(attacher.owner, &but).await;
        if cleared.is_err() {
            self.attached = None;
        }
        Ok(cleared?)
    }

    /// Has a pair if the interface delivers single packets, and if one can be had.
    pub(super) async fn settle_pair(
        &mut self,
        attacher: Attacher<'_>,
        tun: &str,
    ) -> Result<(), NetlinkError> {
        if let Some(pair) = &self.pair
            && !pair.is_whole().await?
        {
            self.pair = None;
        }
        if self.attached.is_none() {
            // With a pair that an earlier weftd has left, the interface delivered single packets.
            self.delivery.is_single |= find(tun).await?.is_some();
        }
        if self.delivery.is_single && self.pair.is_none() {
            match Pair::make(attacher, tun).await {
                Ok(pair) => self.pair = Some(pair),
                Err(error) => {
                    self.delivery.trust(Instant::now());
                    self.logged.once(&with_causes(&*error), |text| {
                        warn!("packets that {tun} receives are not merged, which is slow: {text}");
                    });
                }
            }
        }
        Ok(())
    }

    /// The device that received TCP packets go through; 0 if none.
    pub(super) fn gro_device(&self) -> u32 {
        let pair = self.pair.as_ref().filter(|_| self.delivery.is_single);
        pair.map_or(0, |pair| pair.first.index)
    }

    /// Whether nobody has removed a program that is to be there.
    pub(super) async fn is_there(&self) -> Result<bool, NetlinkError> {
        if let Some((_, attached)) = &self.attached
            && !are_there(attached).await?
        {
            return Ok(false);
        }
        match &self.pair {
            Some(pair) => pair.is_attached().await,
            None => Ok(true),
        }
    }

    /// Leaves everything in place for the next weftd.
    pub(super) fn leave(&mut self) {
        let attached = self.attached.take().into_iter().flat_map(|(_, attached)| attached);
        attached.for_each(Attachment::leave);
        self.pair.take().into_iter().for_each(Pair::leave);
    }
}

/// What is amiss with the programs, if not all of them are there. A device that goes takes its
/// programs along, and nobody has removed them.
async fn look(ground: &Ground, programs: &[Attachment; 2]) -> Result<(), Obstacle> {
    let is_gone = async |name, index| {
        let link = netlink::link_named(name).await?;
        Ok::<_, NetlinkError>(link.is_none_or(|link| link.id.index != index))
    };
    if are_there(programs).await? {
        Ok(())
    } else if is_gone(&ground.tun_name, ground.tun_device).await? {
        Err(Obstacle::NoGround)
    } else if is_gone(&ground.interface, ground.underlay_device).await? {
        Err(Obstacle::NoInterface(ground.interface.clone()))
    } else {
        Err(Obstacle::Evicted(ground.interface.clone()))
    }
}

/// Whether nobody has removed a program.
async fn are_there(programs: &[Attachment; 2]) -> Result<bool, NetlinkError> {
    let [out, inward] = programs;
    Ok(out.is_there().await? && inward.is_there().await?)
}

/// Removes what an earlier weftd has left.
pub(super) async fn clear(owner: Owner, ground: &Ground) -> Result<(), NetlinkError> {
    place(Program::Out, ground.tun_device, owner).clear().await?;
    clear_inward(owner, &[]).await?;
    clear_pair(&ground.tun_name).await
}
