//! What one weftd hands to the next: the tunnel's descriptors, whose queues hold what comes
//! meanwhile, and its workers, which may go on until those of the next one run.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use crate::engine::{Worker, end_all};
use crate::failure::lock;

/// Shared between the daemon, which talks to the last and the next weftd, and the tunnel.
#[derive(Clone, Default)]
pub struct Handover(Arc<Shared>);

#[derive(Default)]
struct Shared {
    inherited: Mutex<Option<Vec<OwnedFd>>>,
    has_inherited: bool,
    owner: Owner,
    offered: watch::Sender<Offered>,
    step: watch::Sender<Step>,
    /// The weftd that has handed over has not let go of everything yet.
    is_held: watch::Sender<bool>,
    /// It waits until this one carries packets, and would go on should this one end before.
    has_predecessor: AtomicBool,
    is_leaving: AtomicBool,
    /// Workers that have outlived their tunnel.
    lingering: Mutex<Vec<Worker>>,
    /// What runs WireGuard in this process, which has outlived its backend.
    lingering_wireguard: Mutex<Option<Arc<dyn Send + Sync>>>,
}

/// How far a weftd is that goes on for another one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Step {
    /// It prepares itself, and the other one carries packets.
    #[default]
    Prepares,
    /// It needs what the other one still has.
    NeedsRoom,
    /// Packets are carried by the store's leases.
    Carries,
    /// It can't, though the other one has let go: why.
    Fails(String),
}

/// Who has what a weftd was started with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Owner {
    /// The service manager, or this very process: lets go of what is of no use.
    #[default]
    Keeper,
    /// A weftd whose workers carry packets with it, and which goes on if it can't be used.
    Running,
    /// Such a weftd, which is to end in any case: whoever runs both has replaced it.
    Replaced,
}

/// What the next weftd could go on with.
#[derive(Debug, Clone, Default)]
pub enum Offered {
    /// What this one was started with, if anything.
    #[default]
    Inherited,
    /// Nothing, and what this one was started with is of no use.
    Nothing,
    /// Nothing either, because the kernel carries the packets, or workers whose device and ports
    /// the next one has after this one: only this one's place.
    Place,
    /// The tunnel's queues and sockets.
    Tunnel(Arc<Vec<OwnedFd>>),
}

/// The tunnel of the weftd that runs is not what this one would make; where they differ.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot take over the tunnel of the weftd that runs, which goes on: {0}; stop that one, and \
     start this one without --take-over"
)]
pub struct TakeOverError(String);

impl Handover {
    /// For a start that goes on with these descriptors, if they suit it. If not, it fails where a
    /// weftd is [`Owner::Running`] with them, and makes others where it may.
    pub fn new(descriptors: Vec<OwnedFd>, owner: Owner) -> Self {
        let has_inherited = !descriptors.is_empty();
        let is_before = owner != Owner::Keeper;
        let (is_held, has_predecessor) = (watch::Sender::new(is_before), is_before.into());
        let inherited = Mutex::new(has_inherited.then_some(descriptors));
        let owner = if has_inherited { owner } else { Owner::Keeper };
        let shared = Shared {
            inherited,
            has_inherited,
            owner,
            is_held,
            has_predecessor,
            ..Shared::default()
        };
        Self(Arc::new(shared))
    }

    /// What the next weftd could go on with, and each change of it.
    pub fn offered(&self) -> watch::Receiver<Offered> {
        self.0.offered.subscribe()
    }

    /// Waits until this weftd can't go on without what the one before has, or does not need it.
    pub async fn past_preparing(&self) {
        // The sender lives as long as this.
        self.0.step.subscribe().wait_for(|step| *step != Step::Prepares).await.ok();
    }

    /// Waits until packets are carried by the store's leases, or can't be.
    pub async fn outcome(&self) -> Result<(), String> {
        let mut step = self.0.step.subscribe();
        let ended = step.wait_for(|step| matches!(step, Step::Carries | Step::Fails(_))).await;
        match ended.as_deref() {
            Ok(Step::Fails(why)) => Err(why.clone()),
            _ => Ok(()),
        }
    }

    /// The weftd that has handed over has let go of everything.
    pub fn has_room(&self) {
        self.0.is_held.send_replace(false);
    }

    /// It waits no more.
    pub fn is_alone(&self) {
        self.0.has_predecessor.store(false, Ordering::Relaxed);
    }

    /// Closes what the next weftd may need, which has it, or makes its own.
    pub fn let_go(&self) {
        self.end_workers();
        drop(lock(&self.0.inherited).take());
        self.0.offered.send_replace(Offered::Nothing);
    }

    /// From here on the workers outlive their tunnel.
    pub fn leave(&self) {
        self.0.is_leaving.store(true, Ordering::Relaxed);
    }

    /// Ends the workers that have outlived their tunnel.
    pub fn end_workers(&self) {
        end_all(&mut lock(&self.0.lingering));
        drop(lock(&self.0.lingering_wireguard).take());
    }

    /// Whether another weftd waits until packets are carried here.
    pub fn has_predecessor(&self) -> bool {
        self.0.has_predecessor.load(Ordering::Relaxed)
    }

    /// Whether the next weftd can go on with this one now: one take-over at a time.
    pub fn can_hand_over(&self) -> bool {
        let offered = self.0.offered.borrow();
        !self.has_predecessor() && matches!(*offered, Offered::Tunnel(_) | Offered::Place)
    }

    /// The next weftd did not come, or the control plane panicked: another start of this process is
    /// to go on with what was its own, while the workers go on.
    pub fn come_back(&self) -> Self {
        let offered = self.0.offered.borrow().clone();
        let inherited = lock(&self.0.inherited).take();
        let has_inherited = inherited.is_some() || matches!(offered, Offered::Tunnel(_));
        Self(Arc::new(Shared {
            inherited: Mutex::new(inherited),
            has_inherited,
            offered: watch::Sender::new(offered),
            lingering: Mutex::new(std::mem::take(&mut *lock(&self.0.lingering))),
            lingering_wireguard: Mutex::new(lock(&self.0.lingering_wireguard).take()),
            ..Shared::default()
        }))
    }

    /// What this weftd was started with, the first time; or what it has come back to, each time.
    pub(super) fn take_inherited(&self) -> io::Result<Option<Vec<OwnedFd>>> {
        if let Some(inherited) = lock(&self.0.inherited).take() {
            return Ok(Some(inherited));
        }
        match &*self.0.offered.borrow() {
            Offered::Tunnel(tunnel) => {
                tunnel.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>().map(Some)
            }
            Offered::Inherited | Offered::Nothing | Offered::Place => Ok(None),
        }
    }

    /// Closes what this weftd was started with, if anything, and waits until its owner has closed
    /// it, too. An error for this `reason`, and nothing is touched, if that is a weftd that may go
    /// on with it.
    pub(super) async fn refuse(&self, reason: &str) -> Result<(), TakeOverError> {
        if self.0.owner == Owner::Running {
            return Err(TakeOverError(reason.to_owned()));
        }
        drop(lock(&self.0.inherited).take());
        if self.0.owner == Owner::Replaced {
            self.clear().await;
        }
        end_all(&mut lock(&self.0.lingering));
        if self.0.has_inherited {
            self.0.offered.send_replace(Offered::Nothing);
        }
        Ok(())
    }

    /// Whether an earlier start of this process has left what runs WireGuard.
    pub(super) fn has_wireguard(&self) -> bool {
        lock(&self.0.lingering_wireguard).is_some()
    }

    /// Has the weftd before, and what an earlier start of this process has left, let go of
    /// everything, and waits for that.
    pub(super) async fn clear(&self) {
        self.advances(Step::NeedsRoom);
        self.end_workers();
        // The sender lives as long as this.
        self.0.is_held.subscribe().wait_for(|has| !*has).await.ok();
    }

    /// What there is for the next one now.
    pub(super) fn offer(&self, what: Offered) {
        self.0.offered.send_replace(what);
    }

    /// Packets are carried by the store's leases.
    pub(super) fn is_carrying(&self) {
        self.advances(Step::Carries);
        self.end_workers();
    }

    /// Packets can't be carried, though the weftd before has let go: it is to go on.
    pub(super) fn fails(&self, why: String) {
        self.advances(Step::Fails(why));
    }

    fn advances(&self, to: Step) {
        self.0.step.send_if_modified(|step| {
            let is_news = *step != Step::Carries && *step != to;
            if is_news {
                *step = to;
            }
            is_news
        });
    }

    /// Whether workers outlive their tunnel, which then goes on.
    pub(super) fn keeps_workers(&self) -> bool {
        self.0.is_leaving.load(Ordering::Relaxed) || std::thread::panicking()
    }

    /// The backend ends, and what runs WireGuard for it goes on for the next weftd, or for the next
    /// start after a panic.
    pub(super) fn wireguard_ends(&self, userspace: Arc<dyn Send + Sync>) {
        if self.keeps_workers() {
            *lock(&self.0.lingering_wireguard) = Some(userspace);
        }
    }

    /// The tunnel ends, and so do its workers, unless they are to go on for the next weftd, or for
    /// the next start after a panic.
    pub(super) fn tunnel_ends(&self, mut workers: Vec<Worker>) {
        if self.keeps_workers() {
            // Those of before have the leases, and these may not have them yet.
            lock(&self.0.lingering).append(&mut workers);
        } else {
            end_all(&mut workers);
        }
    }
}
