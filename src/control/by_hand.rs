//! What an operator does to leases by hand, with weftd or without it: reserve a subnet for a node,
//! and take one back. Neither is done to a node that lives.

use std::net::IpAddr;
use std::sync::Arc;

use crate::backend_kind::BackendKind;
use crate::config::network::{NetworkConfig, NetworkConfigError};
use crate::config::options::is_host_address;
use crate::control::error::{StoreError, StoreResult};
use crate::control::identity::Phase;
use crate::control::lease::{Lease, LeaseAttributes};
use crate::control::manager::SubnetManager;
use crate::control::snapshot::Snapshot;
use crate::control::store::{Leased, Store};
use crate::route::Prefixes;

/// Why nothing was done.
#[derive(Debug, thiserror::Error)]
pub enum ByHandError {
    /// The store does not do it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The network configuration is no help.
    #[error("the network configuration cannot be used")]
    Config(#[from] NetworkConfigError),
    /// It cannot be, or would harm a node, for this reason.
    #[error("{0}")]
    Refused(String),
}

impl SubnetManager {
    /// All that is in the store.
    pub async fn entries(&self) -> StoreResult<Snapshot> {
        match &self.store {
            Store::Leased(_) => self.store.list().await,
            Store::Assigned(store) => store.entries().await,
        }
    }

    /// Assigns `subnet` to the node of `address` for ever; it takes it when it starts.
    pub async fn reserve(&self, subnet: Prefixes, address: IpAddr) -> Result<Lease, ByHandError> {
        let store = self.writable()?;
        let config = NetworkConfig::parse(&self.store.config().await?)?;
        let snapshot = self.store.list().await?;
        may_reserve(&config, &snapshot, subnet, address)?;
        let reservation = Lease::reservation(subnet, node_of(address));
        let (vacancy, ttl) = (snapshot.vacancy(None), self.timing.lease_ttl);
        Ok(store.create(&reservation, &vacancy, ttl, Phase::Runs).await?.lease)
    }

    /// Deletes the lease or reservation of `subnet`, unless its node lives, or may live and the
    /// operator is not `sure` that it is gone.
    pub async fn release(&self, subnet: Prefixes, sure: bool) -> Result<Arc<Lease>, ByHandError> {
        let store = self.writable()?;
        let snapshot = self.store.list().await?;
        let mut found = snapshot.leases.into_iter().filter(|it| subnet.is_part_of(it.subnets));
        let lease = found
            .next()
            .filter(|_| found.next().is_none())
            .ok_or_else(|| refused(format!("the store has no lease of {subnet}")))?;
        let address = lease.attributes.node_address();
        if let Some(holder) = store.claimed_by(address).await? {
            return Err(refused(format!(
                "the node {address} lives, {holder}, and would end: stop weftd there first"
            )));
        }
        if !sure {
            return Err(refused(format!(
                "nobody can see from here whether the node {address} still uses {subnet}, for a \
                 flannel node says nothing of itself: be sure that it is gone, then repeat this \
                 with --node-is-gone"
            )));
        }
        store.delete(&lease).await?;
        Ok(lease)
    }

    fn writable(&self) -> Result<&Leased, ByHandError> {
        self.store.leased().ok_or_else(|| {
            refused(
                "in Kubernetes the cluster assigns subnets: `kubectl get node -o wide`, and \
                 spec.podCIDR of a Node"
                    .to_owned(),
            )
        })
    }
}

fn refused(why: String) -> ByHandError {
    ByHandError::Refused(why)
}

/// All that is known of a node that was not seen yet.
fn node_of(address: IpAddr) -> LeaseAttributes {
    match address {
        IpAddr::V4(address) => LeaseAttributes::udp(address),
        IpAddr::V6(address) => LeaseAttributes::at(BackendKind::Udp, None, Some(address)),
    }
}

fn may_reserve(
    config: &NetworkConfig,
    snapshot: &Snapshot,
    subnet: Prefixes,
    address: IpAddr,
) -> Result<(), ByHandError> {
    let networks = config.networks();
    let is_pods = |subnets: Prefixes| match address {
        IpAddr::V4(address) => subnets.v4().is_some_and(|it| it.contains(address)),
        IpAddr::V6(address) => subnets.v6().is_some_and(|it| it.contains(address)),
    };
    // Without IPv4 it is the other one by which nodes are known.
    let is_known_by = address.is_ipv4() == networks.v4().is_some();
    let why = if !is_known_by {
        let field = if networks.v4().is_some() { "PublicIP" } else { "PublicIPv6" };
        format!("{address} names no node here: nodes are known by their {field}")
    } else if !is_host_address(address) {
        format!("{address} is not the address of one host")
    } else if is_pods(subnet) || snapshot.taken_beside(None, networks).any(is_pods) {
        format!("{address} lies in a subnet of pods, where no datagram of the tunnel may go")
    } else if !config.is_leasable(subnet) {
        let [first, last] = config.bounds();
        format!("{subnet} is no subnet that nodes lease here: they are {first} to {last}")
    } else if let Some(other) =
        snapshot.taken_beside(None, networks).find(|other| other.overlaps(subnet))
    {
        let lease = snapshot.leases.iter().find(|lease| lease.subnets == other);
        let of = lease.map(|lease| format!(" of {}", lease.attributes.node_address()));
        format!("{subnet} is taken: the store has {other}{}", of.unwrap_or_default())
    } else if let Some(lease) =
        snapshot.leases.iter().find(|lease| lease.attributes.is_of_node_of(&node_of(address)))
    {
        format!("the node {address} has {} already: release that first", lease.subnets)
    } else {
        return Ok(());
    };
    Err(refused(why))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::control::lease::Lifetime;

    fn config() -> NetworkConfig {
        NetworkConfig::parse(br#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.0"}"#).unwrap()
    }

    fn snapshot() -> Snapshot {
        let subnets: Prefixes = "10.5.7.0/24".parse().unwrap();
        let attributes = LeaseAttributes::udp(Ipv4Addr::new(192, 0, 2, 7));
        let (key, lifetime) = (subnets.key(), Lifetime::Reservation);
        let lease = Lease { subnets, key, attributes, revision: 1, created_revision: 1, lifetime };
        Snapshot { leases: vec![lease.into()], ..Snapshot::default() }
    }

    #[test]
    fn only_a_free_subnet_is_reserved_for_a_node_without_one() {
        let refusal = |subnet: &str, last: u8| {
            let (subnet, ip) = (subnet.parse().unwrap(), Ipv4Addr::new(192, 0, 2, last));
            may_reserve(&config(), &snapshot(), subnet, ip.into())
        };
        assert!(refusal("10.5.8.0/24", 8).is_ok());
        let mut foreign = snapshot();
        Arc::make_mut(&mut foreign.leases[0]).subnets = "10.0.0.0/8".parse().unwrap();
        let (subnet, ip) = ("10.5.8.0/24".parse().unwrap(), Ipv4Addr::new(192, 0, 2, 8));
        may_reserve(&config(), &foreign, subnet, ip.into()).expect("a foreign key takes nothing");
        for subnet in ["10.6.8.0/24", "10.5.0.0/24", "10.5.8.0/25"] {
            let error = refusal(subnet, 8).unwrap_err().to_string();
            assert!(
                error.contains(subnet) && error.contains("10.5.1.0/24 to 10.5.255.0/24"),
                "{error}"
            );
        }
        let taken = refusal("10.5.7.0/24", 8).unwrap_err().to_string();
        assert!(taken.contains("10.5.7.0/24 of 192.0.2.7"), "{taken}");
        let second = refusal("10.5.8.0/24", 7).unwrap_err().to_string();
        assert!(second.contains("192.0.2.7 has 10.5.7.0/24"), "{second}");
        for pods in [[10, 5, 8, 1], [10, 5, 7, 9]].map(Ipv4Addr::from) {
            let subnet = "10.5.8.0/24".parse().unwrap();
            let error = may_reserve(&config(), &snapshot(), subnet, pods.into()).unwrap_err();
            assert!(error.to_string().starts_with(&pods.to_string()), "{pods}: {error}");
        }
        for nobody in [[127, 0, 0, 1], [224, 0, 0, 1], [255; 4], [0; 4]].map(Ipv4Addr::from) {
            let subnet = "10.5.8.0/24".parse().unwrap();
            let error = may_reserve(&config(), &snapshot(), subnet, nobody.into()).unwrap_err();
            assert!(error.to_string().starts_with(&nobody.to_string()), "{nobody:?}: {error}");
        }
    }
}
