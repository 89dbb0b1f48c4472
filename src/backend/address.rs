//! The interface beneath a backend, followed: its next address once it has lost the one that peers
//! know, its name and its MTU. Says what is found; what is set up for an address is the backends'.

use std::time::Duration;

use tokio::time::sleep;
use tracing::warn;

use crate::backend::network::Setup;
use crate::backend::status::Teller;
use crate::config::options::InterfaceOptions;
use crate::failure::{LogOnce, with_causes};
use crate::host::interface::{ExternalInterface, InterfaceError, rediscover};
use crate::host::netlink::{Netlink, NetlinkError};
use crate::host::underlay::{Change, Underlay, UnderlayWatch};

/// Pause before the kernel is asked again after it could not be. It answers unless it lacks
/// memory or sockets, which takes others a while to give back.
const RETRY: Duration = Duration::from_secs(1);

/// Looks for the next address of the external interface.
#[derive(Debug)]
pub(super) struct NextAddress {
    interface: InterfaceOptions,
    follow_address: bool,
    told: LogOnce,
}

impl NextAddress {
    /// Will look as `interface` says.
    pub(super) fn new(interface: &InterfaceOptions, follow_address: bool) -> Self {
        Self { interface: interface.clone(), follow_address, told: LogOnce::default() }
    }

    /// The interface with the address to go on with, after `before` has lost its own. Says why
    /// there is none.
    pub(super) async fn look(
        &mut self,
        netlink: &Netlink,
        before: &ExternalInterface,
    ) -> Option<ExternalInterface> {
        let found = rediscover(netlink, &self.interface).await;
        match judge(before, found, self.follow_address) {
            Next::Move(found) => Some(found),
            Next::Back => None,
            Next::Wait(text) => {
                self.complain(&text);
                None
            }
        }
    }

    /// Says what keeps the backend from its next address.
    pub(super) fn complain(&mut self, text: &str) {
        self.told.once(text, |text| warn!("{text}"));
    }
}

/// What to do about a lost address.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Go on with another one.
    Move(ExternalInterface),
    /// It has come back.
    Back,
    /// Nothing, for this reason.
    Wait(String),
}

/// Of another interface none is taken: it would be gone with the next failure of the first.
fn judge(
    before: &ExternalInterface,
    found: Result<ExternalInterface, InterfaceError>,
    follow_address: bool,
) -> Next {
    let ExternalInterface { name, address: from, .. } = before;
    let lost = format!("{name} has no longer the address {from}");
    match found {
        Err(error) => Next::Wait(format!("{lost}; waiting for one: {}", with_causes(&error))),
        Ok(found) if found.address == *from && found.name == *name => Next::Back,
        Ok(ExternalInterface { name: other, address, .. }) if address == *from => {
            Next::Wait(format!("{lost}, only {other} has it; waiting for it to come back"))
        }
        Ok(ExternalInterface { name: other, address: to, .. }) if other != *name => {
            Next::Wait(format!(
                "{lost}, and weftd would choose {other} with {to} now; it changes the address but \
                 not the interface: waiting for an address of {name}, restart weftd to use {other}"
            ))
        }
        Ok(ExternalInterface { address: to, .. }) if !follow_address => Next::Wait(format!(
            "the address of {name} is no longer {from} but {to}, and --follow-address=false: \
             weftd must be restarted to use it"
        )),
        Ok(found) => Next::Move(found),
    }
}

/// The interface beneath a backend that sets nothing up on it.
#[derive(Debug)]
pub(super) struct Beneath {
    netlink: Netlink,
    watch: UnderlayWatch,
    external: ExternalInterface,
    next_address: NextAddress,
    told: LogOnce,
}

impl Beneath {
    /// Watches the external interface.
    pub(super) fn new(setup: &Setup) -> Result<Self, NetlinkError> {
        let netlink = Netlink::open()?;
        Ok(Self {
            watch: UnderlayWatch::new(netlink.clone(), setup.external.address)?,
            netlink,
            external: setup.external.clone(),
            next_address: NextAddress::new(&setup.interface, setup.follow_address),
            told: LogOnce::default(),
        })
    }

    /// The interface as it was when it was last looked at.
    pub(super) fn external(&self) -> &ExternalInterface {
        &self.external
    }

    /// Waits until the interface has another address, name or MTU, and has `teller` say so.
    pub(super) async fn changed(&mut self, teller: &Teller) -> &ExternalInterface {
        loop {
            match self.watch.changed(&self.external.underlay()).await {
                Ok(Change::Link(Underlay { name, mtu_bytes })) => {
                    (self.external.name, self.external.mtu_bytes) = (name, mtu_bytes);
                    break;
                }
                Ok(Change::Away) => {
                    let look = self.next_address.look(&self.netlink, &self.external);
                    let Some(found) = look.await else { continue };
                    teller.moved(&self.external, &found);
                    self.watch.turn_to(found.address);
                    self.external = found;
                    break;
                }
                Err(error) => {
                    self.reopen(&error);
                    sleep(RETRY).await;
                }
            }
        }
        let external = &self.external;
        teller.state(|state| {
            state.interface.clone_from(&external.name);
            state.mtu_bytes = external.mtu_bytes;
        });
        external
    }

    fn reopen(&mut self, error: &NetlinkError) {
        let text = format!("lost touch with the kernel, opening it again: {}", with_causes(error));
        self.told.once(&text, |text| warn!("{text}"));
        let reopened = Netlink::open().and_then(|netlink| {
            Ok((UnderlayWatch::new(netlink.clone(), self.external.address)?, netlink))
        });
        // A failure of this is the next one of the watch.
        if let Ok(reopened) = reopened {
            (self.watch, self.netlink) = reopened;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::host::interface::LookupError;

    fn interface(name: &str, last: u8) -> ExternalInterface {
        let address = Ipv4Addr::new(192, 0, 2, last);
        let (name, public_address) = (name.to_owned(), address);
        ExternalInterface { name, index: 2, address, public_address, mtu_bytes: 1500 }
    }

    #[test]
    fn only_the_next_address_of_the_same_interface_is_followed() {
        let before = interface("eth0", 1);
        let next = interface("eth0", 2);
        assert_eq!(judge(&before, Ok(next.clone()), true), Next::Move(next.clone()));
        assert_eq!(judge(&before, Ok(before.clone()), true), Next::Back);
        let why = |found, follow_address| match judge(&before, found, follow_address) {
            Next::Wait(text) => text,
            next @ (Next::Move(_) | Next::Back) => panic!("{next:?}"),
        };
        let text = why(Ok(next), false);
        assert!(text.contains("no longer 192.0.2.1 but 192.0.2.2"), "{text}");
        assert!(text.contains("must be restarted"), "{text}");
        let text = why(Ok(interface("lo", 1)), true);
        assert!(text.contains("only lo has it"), "{text}");
        let text = why(Ok(interface("eth1", 9)), true);
        assert!(text.contains("eth1 with 192.0.2.9"), "which one it could be is not said: {text}");
        let none = LookupError::NoAddress { name: "eth0".to_owned() };
        let text = why(Err(InterfaceError::NoDefault(none)), true);
        assert!(text.contains("failed to find IPv4 address for interface eth0"), "{text}");
    }
}
