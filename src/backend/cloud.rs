//! The backends of clouds: the cloud's network carries the packets, by one route for each node,
//! which leads to its instance. weftd makes the own one before anything goes by it, and looks after
//! it from then on. What a provider's API is like is in the file of each.

#[cfg(feature = "ali-vpc")]
mod ali;
#[cfg(feature = "aws-vpc")]
mod aws;
#[cfg(feature = "aws-vpc")]
mod aws_answers;
#[cfg(feature = "aws-vpc")]
mod aws_credentials;
#[cfg(feature = "aws-vpc")]
mod aws_metadata;
pub mod error;
#[cfg(feature = "gce")]
mod gce;
#[cfg(feature = "gce")]
mod gce_credentials;
mod http;
mod keeper;
mod plan;
mod provider;
mod providers;
mod sign;
#[cfg(feature = "tencent-vpc")]
mod tencent;

use std::convert::Infallible;
use std::net::Ipv4Addr;

use tokio::sync::watch;
use tracing::info;

use crate::backend::error::{StartError, StartResult};
use crate::backend::family::CarriedFamily;
use crate::backend::kernel::{CloudRoute, KernelBackend, Means};
use crate::backend::setup::Setup;
use crate::backend_kind::BackendKind;
use crate::config::network::CloudBackendConfig;
use crate::route::Prefix;

use self::keeper::{Keeper, PeersReceiver};
use self::plan::Own;
use self::providers::{Provider, provider};

/// What a cloud's backend starts with.
pub(super) struct CloudReserved {
    kind: BackendKind,
    provider: Provider,
    previous_subnet: Option<Prefix>,
}

impl std::fmt::Debug for CloudReserved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.kind)
    }
}

/// Finds out what can be known without the cloud: whether this weftd knows it, and whether there is
/// a key, where that can't come later.
pub(super) fn prepare(
    kind: BackendKind,
    settings: &CloudBackendConfig,
    previous_subnet: Option<Prefix>,
) -> StartResult<CloudReserved> {
    let provider = provider(kind, settings).map_err(StartError::Cloud)?;
    info!("{kind}: this weftd was never tried in a real cloud of this kind, see docs/backends.md");
    Ok(CloudReserved { kind, provider, previous_subnet })
}

/// A running backend of a cloud.
pub struct CloudBackend {
    /// Follows the host and the peers, and leaves the kernel's tables empty.
    pub(super) kernel: KernelBackend,
    keeper: Keeper,
}

impl CloudBackend {
    /// Makes the own route. As long as that fails the start waits, for no packet would reach the
    /// pods. If the last run had this subnet, its route is taken to be there unless the cloud says
    /// that it isn't.
    pub(super) async fn start(setup: &Setup, reserved: CloudReserved) -> StartResult<Self> {
        let CloudReserved { kind, provider, previous_subnet } = reserved;
        let (Some(subnet), Some(range)) = (setup.subnets.v4(), setup.subnet_range) else {
            return Err(StartError::NoSubnet);
        };
        let Some(address) = Ipv4Addr::own(&setup.external) else {
            return Err(StartError::NoUnderlay);
        };
        let is_kept = previous_subnet == Some(subnet);
        let description = format!("{kind}: the route of the last run");
        let route = CloudRoute { is_in_place: is_kept, wrong: None, description };
        let own = Own { subnet, range, address };
        let route = watch::Sender::new(route);
        let mut keeper = Keeper::new(kind, provider, own, route, setup.cloud_period);
        keeper.register_in_time(&setup.control).await?;
        let means = Means::Cloud { kind, route: keeper.follow() };
        let kernel = KernelBackend::start(setup, means).await?;
        Ok(Self { kernel, keeper })
    }

    /// Follows the leases and looks after the route, which stays when this is dropped.
    pub async fn run(&mut self, leases: PeersReceiver) -> Infallible {
        let Self { kernel, keeper } = self;
        let plane = kernel.reporter.view(Vec::new(), None).state;
        let control = kernel.control();
        tokio::select! {
            never = kernel.run(leases.clone()) => never,
            never = keeper.run(leases, plane, control) => never,
        }
    }
}
