//! tencent-vpc: the API of Tencent Cloud's VPC. The route of this node leads to the instance that
//! has the external interface's address, by that address.

use std::collections::BTreeMap;

use hyper::Request;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::error::CloudError;
use super::http::{Http, endpoint, metadata_base};
use super::plan::{Change, Entry, Leads, Own, Table};
use super::provider::{Found, PAGES_MAX, Result, endless, list, text};
use super::sign::{Scheme, authorization};
use crate::backend_kind::BackendKind;
use crate::config::network::AccessKey;

const METADATA: &str = "http://metadata.tencentyun.com";
const VERSION: &str = "2017-03-12";
const DESCRIBE: &str = "DescribeRouteTables";
const JSON: &str = "application/json; charset=utf-8";
/// The most tables that one answer has; a VPC may have ten, unless somebody asked for more.
const TABLES_MAX: usize = 100;
/// A route to an instance, by its address.
const TO_INSTANCE: &str = "NORMAL_CVM";
/// A route that a user has made.
const OF_USER: &str = "USER";

pub(super) struct Tencent {
    key: AccessKey,
    region: String,
}

impl Tencent {
    pub(super) fn new(key: AccessKey) -> Self {
        Self { key, region: String::new() }
    }

    /// Finds out where this instance is, and what is in the route tables of its network.
    pub(super) async fn look(&mut self, http: &Http, own: &Own) -> Result<Found> {
        let base = metadata_base(METADATA);
        let read = async |path: String| {
            let url = format!("{base}/latest/meta-data/{path}");
            http.own(BackendKind::TencentVpc, &url, None).await
        };
        self.region = read("placement/region".to_owned()).await?;
        let mac = read("mac".to_owned()).await?;
        let of_interface = |name| format!("network/interfaces/macs/{mac}/{name}");
        let vpc = read(of_interface("vpc-id")).await?;
        let subnet = read(of_interface("subnet-id")).await?;
        let table = table(&self.tables(http, &vpc).await?, &subnet, own)?;
        Ok(Found { tables: vec![table], target: own.address.to_string(), trouble: None })
    }

    /// All route tables of a VPC.
    async fn tables(&self, http: &Http, vpc: &str) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        for _ in 0..PAGES_MAX {
            let asked = json!({
                "Filters": [{ "Name": "vpc-id", "Values": [vpc] }],
                "Offset": all.len().to_string(),
                "Limit": TABLES_MAX.to_string(),
            });
            let answer = self.ask(http, DESCRIBE, &asked).await?;
            all.extend(list(DESCRIBE, &answer, "/Response/RouteTableSet")?);
            let told: Value = serde_json::from_str(&answer).unwrap_or_default();
            let count = told.pointer("/Response/TotalCount").and_then(Value::as_u64);
            if count.is_none_or(|count| all.len() as u64 >= count) {
                return Ok(all);
            }
        }
        Err(endless(DESCRIBE))
    }

    /// Changes `table`, as the last look found it.
    pub(super) async fn apply(
        &self,
        http: &Http,
        own: &Own,
        table: &Table,
        change: &Change,
    ) -> Result {
        if let Change::Delete(entry) | Change::Replace(entry) = change {
            let id: u64 = entry.id.parse().map_err(|_not_a_number| {
                CloudError::Unusable(format!("{DESCRIBE}: a route has the id {}", entry.id))
            })?;
            let asked = json!({ "RouteTableId": table.id, "Routes": [{ "RouteId": id }] });
            self.ask(http, "DeleteRoutes", &asked).await?;
        }
        if matches!(change, Change::Delete(_)) {
            return Ok(());
        }
        let asked = json!({
            "RouteTableId": table.id,
            "Routes": [{
                "DestinationCidrBlock": own.subnet.to_string(),
                "GatewayType": TO_INSTANCE,
                "GatewayId": own.address.to_string(),
                "Enabled": true,
            }],
        });
        self.ask(http, "CreateRoutes", &asked).await.map(drop)
    }

    async fn ask(&self, http: &Http, action: &str, asked: &Value) -> Result<String> {
        let endpoint = endpoint("https://vpc.tencentcloudapi.com");
        let body = asked.to_string();
        let request = self.signed(&endpoint, Timestamp::now(), action, &body);
        let answer = http.ask(action, request, body).await?;
        let text = answer.text();
        let told: Value = serde_json::from_str(&text).unwrap_or_default();
        let failed = told.pointer("/Response/Error");
        let whom = "Tencent Cloud's API";
        if answer.status.is_success() && failed.is_none() {
            return answer.done(action, whom, !self::text(&told, "/Response/RequestId").is_empty());
        }
        let [code, message] = ["/Code", "/Message"]
            .map(|name| failed.map(|it| self::text(it, name)).unwrap_or_default());
        let of = (action, &*format!("vpc:{action}"));
        Err(answer.refused(of, whom, (&code, &message)))
    }

    fn signed(
        &self,
        endpoint: &str,
        now: Timestamp,
        action: &str,
        body: &str,
    ) -> hyper::http::request::Builder {
        let host = endpoint.split("://").last().unwrap_or_default().to_owned();
        let (time, day) = (now.as_second().to_string(), now.strftime("%Y-%m-%d").to_string());
        let headers = BTreeMap::from([
            ("content-type", JSON.to_owned()),
            ("host", host.clone()),
            ("x-tc-action", action.to_lowercase()),
        ]);
        let scheme = Scheme {
            algorithm: "TC3-HMAC-SHA256",
            secret_prefix: "TC3",
            time: &time,
            scope: &[&day, "vpc", "tc3_request"],
        };
        let key = (self.key.id.as_str(), self.key.secret.0.as_str());
        let proof = authorization(&scheme, key, &headers, body.as_bytes());
        Request::post(format!("{endpoint}/"))
            .header(AUTHORIZATION, proof)
            .header(CONTENT_TYPE, JSON)
            .header(HOST, host)
            .header("x-tc-action", action)
            .header("x-tc-region", &self.region)
            .header("x-tc-timestamp", time)
            .header("x-tc-version", VERSION)
    }
}

/// The table of `subnet`, else the VPC's main one. What users have not made is the VPC's own.
fn table(all: &[Value], subnet: &str, own: &Own) -> Result<Table> {
    let of_subnet = |table: &&Value| {
        let all = table["AssociationSet"].as_array().into_iter().flatten();
        all.into_iter().any(|association| association["SubnetId"] == subnet)
    };
    let found = all.iter().find(of_subnet).or_else(|| all.iter().find(|it| it["Main"] == true));
    let table = found.ok_or_else(|| {
        CloudError::Unusable(format!("neither the subnet {subnet} nor its VPC has a route table"))
    })?;
    let entry = |route: &Value| {
        let is_made = route["GatewayType"] == TO_INSTANCE && route["RouteType"] == OF_USER;
        let is_here = route["GatewayId"] == own.address.to_string();
        Some(Entry {
            destination: text(route, "/DestinationCidrBlock").parse().ok()?,
            leads: match (is_here, route["Enabled"] == true) {
                _ if !is_made => Leads::Fixed,
                (true, true) => Leads::Here,
                (true, false) => Leads::Nowhere,
                (false, _) => Leads::Elsewhere,
            },
            id: route["RouteId"].to_string(),
            hop: text(route, "/GatewayId"),
        })
    };
    let routes = table["RouteSet"].as_array().into_iter().flatten();
    Ok(Table { id: text(table, "/RouteTableId"), entries: routes.filter_map(entry).collect() })
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::own;
    use super::*;

    #[test]
    fn the_table_of_the_subnet_is_taken_else_the_main_one() {
        let own = Own { address: "172.16.0.3".parse().unwrap(), ..own() };
        let route = |id: u64, to: &str, by: &str, kind: &str, enabled: bool| {
            json!({
                "RouteId": id, "DestinationCidrBlock": to, "GatewayType": "NORMAL_CVM",
                "GatewayId": by, "RouteType": kind, "Enabled": enabled,
                "RouteDescription": "", "RouteItemId": "rti-1",
            })
        };
        let all = json!([
            { "RouteTableId": "rtb-main", "Main": true, "AssociationSet": [], "RouteSet": [] },
            {
                "RouteTableId": "rtb-own", "Main": false,
                "AssociationSet": [{ "SubnetId": "subnet-1", "RouteTableId": "rtb-own" }],
                "RouteSet": [
                    route(1, "10.5.3.0/24", "172.16.0.3", "USER", true),
                    route(2, "10.5.4.0/24", "172.16.0.4", "USER", true),
                    route(3, "10.5.5.0/24", "172.16.0.3", "USER", false),
                    route(4, "172.16.0.0/16", "172.16.0.3", "NETD", true),
                    { "RouteId": 5, "DestinationIpv6CidrBlock": "::/0", "GatewayType": "EIP",
                      "GatewayId": "0", "RouteType": "USER", "Enabled": true },
                ],
            },
        ]);
        let all = all.as_array().unwrap();
        let found = table(all, "subnet-1", &own).unwrap();
        assert_eq!(found.id, "rtb-own");
        let leads: Vec<_> = found.entries.iter().map(|it| (it.id.as_str(), it.leads)).collect();
        let expected = [
            ("1", Leads::Here),
            ("2", Leads::Elsewhere),
            ("3", Leads::Nowhere),
            ("4", Leads::Fixed),
        ];
        assert_eq!(leads, expected);
        assert_eq!(table(all, "subnet-2", &own).unwrap().id, "rtb-main");
        assert!(list(DESCRIBE, "{}", "/Response/RouteTableSet").is_err(), "half an answer");
    }
}
