//! aws-vpc: EC2's query API. The route of this node leads to the network interface that has the
//! external interface's address.

use std::collections::BTreeMap;

use hyper::Request;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use jiff::Timestamp;

use super::aws_answers::{is_answer, next_token, refusal, tables};
use super::aws_credentials::{self, Credentials};
use super::aws_metadata::{Metadata, endpoint_of};
use super::error::CloudError;
use super::http::Http;
use super::plan::{Change, Own, Table};
use super::provider::{Found, PAGES_MAX, Result, endless, part_of_host};
use super::sign::{Scheme, authorization, query};

/// The version of the API whose answers are understood here.
const VERSION: &str = "2016-11-15";
const FORM: &str = "application/x-www-form-urlencoded; charset=utf-8";

/// One round's way to the API.
struct Session {
    region: String,
    endpoint: String,
    credentials: Credentials,
    interface: String,
}

/// What is kept between rounds.
pub(super) struct Aws {
    tables: Vec<String>,
    /// The interface that forwards others' packets already, as far as weftd saw to it.
    forwarding: Option<String>,
    session: Option<Session>,
}

impl Aws {
    pub(super) fn new(tables: Vec<String>) -> Self {
        Self { tables, forwarding: None, session: None }
    }

    /// Finds out where this instance is, and what is in the route tables of its network.
    pub(super) async fn look(&mut self, http: &Http, own: &Own) -> Result<Found> {
        let metadata = Metadata::open(http).await?;
        let region = metadata.read("placement/region").await?;
        let region = part_of_host("region", region, &['-'])?;
        let domain = metadata.find("services/domain").await?;
        let domain = domain.unwrap_or_else(|| "amazonaws.com".to_owned());
        let domain = part_of_host("domain", domain, &['-', '.'])?;
        let directory = metadata.interface_with(own.address).await?;
        let interface = metadata.read(&format!("{directory}/interface-id")).await?;
        let subnet = metadata.read(&format!("{directory}/subnet-id")).await?;
        let vpc = metadata.read(&format!("{directory}/vpc-id")).await?;
        let credentials = aws_credentials::find(http, &metadata, (&region, &domain)).await?;
        let endpoint = endpoint_of("EC2", &format!("https://ec2.{region}.{domain}"));
        let session = Session { region, endpoint, credentials, interface };
        let trouble = self.forward_packets(http, &session).await.err();
        if let Some(error) = trouble.as_ref().filter(|error| error.asks_for_a_pause()) {
            return Err(error.clone());
        }
        let tables = self.tables_of(http, &session, &subnet, &vpc).await;
        let target = session.interface.clone();
        self.session = Some(session);
        Ok(Found { tables: tables?, target, trouble })
    }

    /// Has the interface send and receive packets of pods: it drops those that are not from or for
    /// its own address, else.
    async fn forward_packets(&mut self, http: &Http, session: &Session) -> Result<()> {
        if self.forwarding.as_ref() == Some(&session.interface) {
            return Ok(());
        }
        let parameters = [
            ("NetworkInterfaceId", session.interface.clone()),
            ("SourceDestCheck.Value", "false".to_owned()),
        ];
        session.ask(http, "ModifyNetworkInterfaceAttribute", parameters.into()).await?;
        self.forwarding = Some(session.interface.clone());
        Ok(())
    }

    /// The tables that are configured; else the one of the interface's subnet, else the main one.
    async fn tables_of(
        &self,
        http: &Http,
        session: &Session,
        subnet: &str,
        vpc: &str,
    ) -> Result<Vec<Table>> {
        let interface = &session.interface;
        let describe = async |mut parameters: Vec<(String, String)>| {
            const ACTION: &str = "DescribeRouteTables";
            let mut all = Vec::new();
            for _ in 0..PAGES_MAX {
                let answer = session.ask(http, ACTION, parameters.clone()).await?;
                all.extend(tables(&answer, interface).map_err(|why| {
                    CloudError::Unusable(format!("{ACTION}: no answer of EC2's: {why}"))
                })?);
                let next = next_token(&answer);
                if next.is_empty() {
                    return Ok(all);
                }
                parameters.retain(|(name, _)| name != "NextToken");
                parameters.push(("NextToken".to_owned(), next));
            }
            Err(endless(ACTION))
        };
        if !self.tables.is_empty() {
            let numbered = self.tables.iter().enumerate();
            let ids = numbered.map(|(at, id)| (format!("RouteTableId.{}", at + 1), id.clone()));
            return describe(ids.collect()).await;
        }
        let of_subnet = describe(filters(&[("association.subnet-id", subnet)])).await?;
        if !of_subnet.is_empty() {
            return Ok(of_subnet);
        }
        let main = filters(&[("association.main", "true"), ("vpc-id", vpc)]);
        let main = describe(main).await?;
        if main.is_empty() {
            return Err(CloudError::Unusable(format!(
                "neither the subnet {subnet} nor the VPC {vpc} has a route table: give RouteTableID"
            )));
        }
        Ok(main)
    }

    /// Changes `table`, as the last look found it.
    pub(super) async fn apply(
        &self,
        http: &Http,
        own: &Own,
        table: &Table,
        change: &Change,
    ) -> Result<()> {
        // Only after a look.
        let Some(session) = &self.session else { return Ok(()) };
        let (action, destination) = match change {
            Change::Delete(entry) => ("DeleteRoute", entry.destination),
            Change::Replace(_) => ("ReplaceRoute", own.subnet),
            Change::Create => ("CreateRoute", own.subnet),
        };
        let mut parameters = vec![
            ("RouteTableId".to_owned(), table.id.clone()),
            ("DestinationCidrBlock".to_owned(), destination.to_string()),
        ];
        if !matches!(change, Change::Delete(_)) {
            parameters.push(("NetworkInterfaceId".to_owned(), session.interface.clone()));
        }
        match session.ask(http, action, parameters).await {
            Err(error)
                if error.code() == Some("InvalidRoute.NotFound") && action == "DeleteRoute" =>
            {
                Ok(())
            }
            asked => asked.map(drop),
        }
    }
}

fn filters(all: &[(&str, &str)]) -> Vec<(String, String)> {
    let numbered = (1..).zip(all);
    let pairs = numbered.flat_map(|(at, (name, value))| {
        [
            (format!("Filter.{at}.Name"), (*name).to_owned()),
            (format!("Filter.{at}.Value.1"), (*value).to_owned()),
        ]
    });
    pairs.collect()
}

impl Session {
    async fn ask<K: Into<String>>(
        &self,
        http: &Http,
        action: &str,
        parameters: Vec<(K, String)>,
    ) -> Result<String> {
        let mut all: BTreeMap<String, String> =
            parameters.into_iter().map(|(name, value)| (name.into(), value)).collect();
        all.insert("Action".to_owned(), action.to_owned());
        all.insert("Version".to_owned(), VERSION.to_owned());
        let pairs: Vec<_> = all.iter().map(|(name, value)| (name.as_str(), value)).collect();
        let body = query(pairs.iter().map(|(name, value)| (name, *value)));
        let request = self.signed(Timestamp::now(), &body);
        let answer = http.ask(action, request, body).await?;
        let text = answer.text();
        if answer.status.is_success() {
            return answer.done(action, "EC2", is_answer(&text, action));
        }
        let (code, message) = refusal(&text).unwrap_or_default();
        let of = (action, &*format!("ec2:{action}"));
        Err(answer.refused(of, "EC2", (&code, &message)))
    }

    /// A request to the endpoint with the headers that prove who asks for `body`.
    fn signed(&self, now: Timestamp, body: &str) -> hyper::http::request::Builder {
        let host = self.endpoint.split("://").last().unwrap_or_default().to_owned();
        let time = now.strftime("%Y%m%dT%H%M%SZ").to_string();
        let mut headers = BTreeMap::from([
            ("content-type", FORM.to_owned()),
            ("host", host.clone()),
            ("x-amz-date", time.clone()),
        ]);
        let Credentials { key, token } = &self.credentials;
        if let Some(token) = token {
            headers.insert("x-amz-security-token", token.0.clone());
        }
        let scheme = Scheme {
            algorithm: "AWS4-HMAC-SHA256",
            secret_prefix: "AWS4",
            time: &time,
            scope: &[time.get(..8).unwrap_or_default(), &self.region, "ec2", "aws4_request"],
        };
        let proof = authorization(&scheme, (&key.id, &key.secret.0), &headers, body.as_bytes());
        let request = Request::post(format!("{}/", self.endpoint)).header(AUTHORIZATION, proof);
        let request = request.header(HOST, host).header(CONTENT_TYPE, FORM);
        let request = request.header("x-amz-date", time);
        match token {
            Some(token) => request.header("x-amz-security-token", &token.0),
            None => request,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_numbered() {
        let all = filters(&[("association.main", "true"), ("vpc-id", "vpc-1")]);
        let expected = [
            ("Filter.1.Name", "association.main"),
            ("Filter.1.Value.1", "true"),
            ("Filter.2.Name", "vpc-id"),
            ("Filter.2.Value.1", "vpc-1"),
        ];
        assert_eq!(all, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
