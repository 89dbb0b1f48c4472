//! The APIs of all clouds that this weftd has, as one.

#[cfg(feature = "ali-vpc")]
use super::ali::Ali;
#[cfg(feature = "aws-vpc")]
use super::aws::Aws;
use super::error::CloudError;
#[cfg(feature = "gce")]
use super::gce::Gce;
use super::http::{Http, variable};
use super::plan::{Change, Own, Table};
use super::provider::{Found, Result};
#[cfg(feature = "tencent-vpc")]
use super::tencent::Tencent;
use crate::backend_kind::BackendKind;
use crate::config::network::{AccessKey, CloudBackendConfig};
use crate::config::options::Secret;

/// A cloud's API.
pub(super) enum Provider {
    #[cfg(feature = "ali-vpc")]
    Ali(Ali),
    #[cfg(feature = "aws-vpc")]
    Aws(Aws),
    #[cfg(feature = "gce")]
    Gce(Gce),
    #[cfg(feature = "tencent-vpc")]
    Tencent(Tencent),
}

impl Provider {
    /// Looks anew each time: an instance may be moved, an interface replaced, credentials expire.
    pub(super) async fn look(&mut self, http: &Http, own: &Own) -> Result<Found> {
        match *self {
            #[cfg(feature = "ali-vpc")]
            Self::Ali(ref mut it) => it.look(http).await,
            #[cfg(feature = "aws-vpc")]
            Self::Aws(ref mut it) => it.look(http, own).await,
            #[cfg(feature = "gce")]
            Self::Gce(ref mut it) => it.look(http, own).await,
            #[cfg(feature = "tencent-vpc")]
            Self::Tencent(ref mut it) => it.look(http, own).await,
        }
    }

    pub(super) async fn apply(
        &self,
        http: &Http,
        own: &Own,
        table: &Table,
        change: &Change,
    ) -> Result {
        match *self {
            #[cfg(feature = "ali-vpc")]
            Self::Ali(ref it) => it.apply(http, own, table, change).await,
            #[cfg(feature = "aws-vpc")]
            Self::Aws(ref it) => it.apply(http, own, table, change).await,
            #[cfg(feature = "gce")]
            Self::Gce(ref it) => it.apply(http, own, change).await,
            #[cfg(feature = "tencent-vpc")]
            Self::Tencent(ref it) => it.apply(http, own, table, change).await,
        }
    }
}

/// The API of the backend, if this weftd has it and there is a key where that can't come later.
pub(super) fn provider(kind: BackendKind, settings: &CloudBackendConfig) -> Result<Provider> {
    match kind {
        #[cfg(feature = "aws-vpc")]
        BackendKind::AwsVpc => Ok(Provider::Aws(Aws::new(settings.route_tables.clone()))),
        #[cfg(feature = "gce")]
        BackendKind::Gce => Ok(Provider::Gce(Gce::new())),
        #[cfg(feature = "ali-vpc")]
        BackendKind::AliVpc => Ok(Provider::Ali(Ali::new(access_key(kind, settings)?))),
        #[cfg(feature = "tencent-vpc")]
        BackendKind::TencentVpc => Ok(Provider::Tencent(Tencent::new(access_key(kind, settings)?))),
        unbuilt => Err(CloudError::Unusable(format!(
            "this weftd was built without the backend {unbuilt} (cargo feature {unbuilt})"
        ))),
    }
}

/// That of the configuration, else of the environment, by flannel's names.
fn access_key(kind: BackendKind, settings: &CloudBackendConfig) -> Result<AccessKey> {
    let given = settings.access_key.clone();
    let of_environment = || {
        let (id, secret) = variable("ACCESS_KEY_ID").zip(variable("ACCESS_KEY_SECRET"))?;
        Some(AccessKey { id, secret: Secret(secret) })
    };
    given.or_else(of_environment).ok_or_else(|| {
        CloudError::Unusable(format!(
            "ACCESS_KEY_ID and ACCESS_KEY_SECRET must be provided: {kind} needs both in weftd's \
             environment, or AccessKeyID and AccessKeySecret in the Backend of the network \
             configuration"
        ))
    })
}
