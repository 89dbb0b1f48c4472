//! etcd's own leases, which delete the keys bound to them when they end: grant, keep alive, revoke.

use std::time::Duration;

use etcd_client::Error as EtcdError;

use super::etcd_connection::Connection;
use crate::control::clock;
use crate::control::error::StoreResult;
use crate::failure::with_causes;

/// An etcd lease that we hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct EtcdLease {
    pub(super) id: i64,
    /// By the boot clock, counted from before the request.
    pub(super) expires: Duration,
    /// Whether it was granted just now, and has to go again if it is not needed.
    pub(super) fresh: bool,
}

/// What an answer says of the time that is left.
fn lasting(seconds: i64) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

impl Connection {
    /// Extends an etcd lease by its own time; `None` if it is gone, or shorter than `least`.
    pub(super) async fn keep_alive(
        &self,
        id: i64,
        least: Duration,
    ) -> StoreResult<Option<EtcdLease>> {
        let asked = clock::boot_time();
        let kept = self
            .call("keeping the lease alive", |mut client| async move {
                match client.lease_keep_alive(id).await {
                    Ok((mut keeper, mut answers)) => {
                        // The first answer has been read by the client, without its TTL.
                        keeper.keep_alive().await?;
                        let answer = answers.message().await?;
                        Ok(answer.map_or(0, |answer| answer.ttl()))
                    }
                    // The lease is gone; anything else is an error of the request.
                    Err(EtcdError::LeaseKeepAliveError(_)) => Ok(0),
                    Err(error) => Err(error),
                }
            })
            .await?;
        let lease = EtcdLease { id, expires: asked + lasting(kept), fresh: false };
        Ok((kept > 0 && lasting(kept) >= least).then_some(lease))
    }

    pub(super) async fn grant(&self, ttl: Duration) -> StoreResult<EtcdLease> {
        let asked = clock::boot_time();
        let seconds = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX);
        let response = self
            .call("asking for a lease", |mut client| async move {
                client.lease_grant(seconds, None).await
            })
            .await?;
        Ok(EtcdLease { id: response.id(), expires: asked + lasting(response.ttl()), fresh: true })
    }

    /// Best effort: an etcd lease that stays holds no key and lapses by itself.
    pub(super) async fn revoke(&self, id: i64) {
        let revoked = self
            .call("revoking a lease", |mut client| async move { client.lease_revoke(id).await })
            .await;
        if let Err(error) = revoked {
            tracing::debug!("Left an unused etcd lease to lapse: {}", with_causes(&error));
        }
    }
}
