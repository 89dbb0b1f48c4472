//! EC2's metadata service, and where AWS's services are.

use std::net::Ipv4Addr;

use hyper::Method;

use super::error::CloudError;
use super::http::{Http, variable};
use super::provider::Result;

const METADATA: &str = "http://169.254.169.254";

/// Tokens come to an end after so many hops, one unless the instance says otherwise.
const MORE_HOPS: &str = "in a container's network allow more hops (aws ec2 \
                         modify-instance-metadata-options --http-put-response-hop-limit 2)";

/// The metadata service, with a session's token where it has version 2.
pub(super) struct Metadata<'a> {
    http: &'a Http,
    base: String,
    token: Option<String>,
}

impl<'a> Metadata<'a> {
    /// Asks for a token. Version 1 knows none, and where version 2 is asked for, nothing is told
    /// without one.
    pub(super) async fn open(http: &'a Http) -> Result<Self> {
        if variable("AWS_EC2_METADATA_DISABLED").is_some_and(|it| it.eq_ignore_ascii_case("true")) {
            let text = "aws-vpc needs the metadata service: unset AWS_EC2_METADATA_DISABLED";
            return Err(CloudError::Unusable(text.to_owned()));
        }
        let base = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT");
        let base = base.map_or_else(|| METADATA.to_owned(), |it| it.trim_end_matches('/').into());
        let url = format!("{base}/latest/api/token");
        let asked = Some(("x-aws-ec2-metadata-token-ttl-seconds", "300"));
        match http.metadata(Method::PUT, &url, asked).await {
            Ok(token) => Ok(Self { http, base, token }),
            // More hops away than it answers with tokens, version 1 may be had.
            Err(error @ CloudError::NoAnswer { .. }) => {
                let without = Self { http, base, token: None };
                match without.find("").await {
                    Ok(Some(_)) => Ok(without),
                    Ok(None) | Err(_) => Err(CloudError::Unusable(format!(
                        "{error}, and without a token nothing is told; {MORE_HOPS}"
                    ))),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// What is there, if anything is.
    pub(super) async fn find(&self, path: &str) -> Result<Option<String>> {
        let url = format!("{}/latest/meta-data/{path}", self.base);
        let token = self.token.as_deref().map(|token| ("x-aws-ec2-metadata-token", token));
        self.http.metadata(Method::GET, &url, token).await
    }

    pub(super) async fn read(&self, path: &str) -> Result<String> {
        self.find(path).await?.ok_or_else(|| {
            CloudError::Unusable(format!(
                "the metadata service has no {path}: aws-vpc runs on EC2 instances; {MORE_HOPS}"
            ))
        })
    }

    /// The network interface with this address: its directory.
    pub(super) async fn interface_with(&self, address: Ipv4Addr) -> Result<String> {
        let all = self.read("network/interfaces/macs/").await?;
        for mac in all.lines().map(|line| line.trim_end_matches('/')) {
            let directory = format!("network/interfaces/macs/{mac}");
            let addresses = self.find(&format!("{directory}/local-ipv4s")).await?;
            let text = address.to_string();
            if addresses.is_some_and(|addresses| addresses.lines().any(|line| line.trim() == text))
            {
                return Ok(directory);
            }
        }
        Err(CloudError::Unusable(format!(
            "none of this instance's network interfaces has the address {address}: choose one that \
             has with --iface"
        )))
    }
}

/// Where a service is, if the environment says so as AWS's own tools want it.
pub(super) fn endpoint_of(service: &str, otherwise: &str) -> String {
    let given = variable(&format!("AWS_ENDPOINT_URL_{service}"));
    let given = given.or_else(|| variable("AWS_ENDPOINT_URL"));
    given.map_or_else(|| otherwise.to_owned(), |it| it.trim_end_matches('/').to_owned())
}
