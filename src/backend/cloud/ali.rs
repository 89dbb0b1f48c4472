//! ali-vpc: the API of Alibaba Cloud's VPC. The route of this node leads to its instance.

use std::collections::BTreeMap;

use hyper::{Method, Request};
use jiff::Timestamp;
use serde_json::Value;

use super::error::CloudError;
use super::http::{Http, endpoint, metadata_base};
use super::plan::{Change, Entry, Leads, Own, Table};
use super::provider::{Found, PAGES_MAX, Result, endless, list, part_of_host, text};
use super::sign::{query, rpc_signature};
use crate::backend_kind::BackendKind;
use crate::config::network::AccessKey;

const METADATA: &str = "http://100.100.100.200";
const VERSION: &str = "2016-04-28";
/// The most that one answer has, of tables and of routes.
const PAGE: &str = "50";
const PAGE_OF_ROUTES: &str = "500";

pub(super) struct Ali {
    key: AccessKey,
    region: String,
    instance: String,
}

impl Ali {
    pub(super) fn new(key: AccessKey) -> Self {
        Self { key, region: String::new(), instance: String::new() }
    }

    /// Finds out where this instance is, and what is in the route tables of its network.
    pub(super) async fn look(&mut self, http: &Http) -> Result<Found> {
        let base = metadata_base(METADATA);
        let url = format!("{base}/latest/api/token");
        let asked = Some(("x-aliyun-ecs-metadata-token-ttl-seconds", "300"));
        // Where the service is not asked to be strict, an older one knows none.
        let token = http.metadata(Method::PUT, &url, asked).await?;
        let token = token.as_deref().map(|token| ("x-aliyun-ecs-metadata-token", token));
        let read = async |path: &str| {
            let url = format!("{base}/latest/meta-data/{path}");
            http.own(BackendKind::AliVpc, &url, token).await
        };
        self.region = part_of_host("region", read("region-id").await?, &['-'])?;
        self.instance = read("instance-id").await?;
        let (vpc, switch) = (read("vpc-id").await?, read("vswitch-id").await?);
        let asked = [("VpcId", vpc), ("PageSize", PAGE.to_owned())];
        let answer = self.ask(http, "DescribeRouteTableList", asked).await?;
        let id = table_of(&answer, &switch)?;
        let (mut entries, mut next) = (Vec::new(), String::new());
        for _ in 0..PAGES_MAX {
            let page = ("MaxResult", PAGE_OF_ROUTES.to_owned());
            let asked = [("RouteTableId", id.clone()), page, ("NextToken", next)];
            let asked = asked.into_iter().filter(|(_, value)| !value.is_empty());
            let answer = self.ask(http, "DescribeRouteEntryList", asked).await?;
            let routes = list("DescribeRouteEntryList", &answer, "/RouteEntrys/RouteEntry")?;
            entries.extend(routes.iter().filter_map(|route| entry(route, &self.instance)));
            next = text(&serde_json::from_str(&answer).unwrap_or_default(), "/NextToken");
            if next.is_empty() {
                let tables = vec![Table { id, entries }];
                return Ok(Found { tables, target: self.instance.clone(), trouble: None });
            }
        }
        Err(endless("DescribeRouteEntryList"))
    }

    /// Changes `table`, as the last look found it.
    pub(super) async fn apply(
        &self,
        http: &Http,
        own: &Own,
        table: &Table,
        change: &Change,
    ) -> Result {
        let of = |to: String, hop: &str| {
            [
                ("RouteTableId", table.id.clone()),
                ("DestinationCidrBlock", to),
                ("NextHopId", hop.to_owned()),
            ]
        };
        if let Change::Delete(entry) | Change::Replace(entry) = change {
            let asked = of(entry.destination.to_string(), &entry.id);
            self.ask(http, "DeleteRouteEntry", asked).await?;
        }
        if matches!(change, Change::Delete(_)) {
            return Ok(());
        }
        let asked = of(own.subnet.to_string(), &self.instance).into_iter();
        let asked = asked.chain([("NextHopType", "Instance".to_owned())]);
        self.ask(http, "CreateRouteEntry", asked).await.map(drop)
    }

    async fn ask(
        &self,
        http: &Http,
        action: &str,
        parameters: impl IntoIterator<Item = (&'static str, String)>,
    ) -> Result<String> {
        let endpoint = endpoint(&format!("https://vpc.{}.aliyuncs.com", self.region));
        let mut all: BTreeMap<&str, String> = parameters.into_iter().collect();
        all.insert("Action", action.to_owned());
        all.insert("RegionId", self.region.clone());
        let nonce = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let body = self.signed(all, Timestamp::now(), nonce);
        let request = Request::post(format!("{endpoint}/"))
            .header("content-type", "application/x-www-form-urlencoded");
        let answer = http.ask(action, request, body).await?;
        let text = answer.text();
        let told = serde_json::from_str(&text).unwrap_or_default();
        let [id, code, message] =
            ["/RequestId", "/Code", "/Message"].map(|name| self::text(&told, name));
        let whom = "Alibaba Cloud's API";
        if answer.status.is_success() {
            return answer.done(action, whom, !id.is_empty());
        }
        let of = (action, &*format!("vpc:{action}"));
        Err(answer.refused(of, whom, (&code, &message)))
    }

    fn signed(&self, mut all: BTreeMap<&str, String>, now: Timestamp, nonce: String) -> String {
        all.insert("Format", "JSON".to_owned());
        all.insert("Version", VERSION.to_owned());
        all.insert("AccessKeyId", self.key.id.clone());
        all.insert("SignatureMethod", "HMAC-SHA1".to_owned());
        all.insert("SignatureVersion", "1.0".to_owned());
        all.insert("SignatureNonce", nonce);
        all.insert("Timestamp", now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        let signature = rpc_signature("POST", &all, &self.key.secret.0);
        all.insert("Signature", signature);
        query(&all)
    }
}

/// The table of a vSwitch, else the one that the VPC has from the start.
fn table_of(answer: &str, switch: &str) -> Result<String> {
    let all = list("DescribeRouteTableList", answer, "/RouterTableList/RouterTableListType")?;
    let is_own = |table: &&Value| {
        let switches = table.pointer("/VSwitchIds/VSwitchId").and_then(Value::as_array);
        switches.is_some_and(|all| all.iter().any(|id| id == switch))
    };
    let of_system = || all.iter().find(|table| table["RouteTableType"] == "System");
    let found = all.iter().find(is_own).or_else(of_system);
    found.map(|table| text(table, "/RouteTableId")).ok_or_else(|| {
        CloudError::Unusable(format!("neither the vSwitch {switch} nor its VPC has a route table"))
    })
}

/// One to an instance or interface that users have made is weftd's to change.
fn entry(route: &Value, instance: &str) -> Option<Entry> {
    let hops = route.pointer("/NextHops/NextHop").and_then(Value::as_array);
    let hop = text(route, "/NextHops/NextHop/0/NextHopId");
    let kind = text(route, "/NextHops/NextHop/0/NextHopType");
    let is_single = hops.is_some_and(|hops| hops.len() == 1);
    let is_of_instance = ["Instance", "NetworkInterface"].contains(&kind.as_str());
    let leads = match route["Type"] == "Custom" && is_single && is_of_instance {
        false => Leads::Fixed,
        true if hop == instance => Leads::Here,
        true => Leads::Elsewhere,
    };
    let destination = text(route, "/DestinationCidrBlock").parse().ok()?;
    Some(Entry { destination, leads, id: hop.clone(), hop })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_table_of_the_switch_is_taken_else_the_system_s() {
        let answer = json!({ "RequestId": "r", "TotalCount": 2, "RouterTableList": {
            "RouterTableListType": [
                { "RouteTableId": "vtb-sys", "RouteTableType": "System", "VSwitchIds": {} },
                { "RouteTableId": "vtb-own", "RouteTableType": "Custom",
                  "VSwitchIds": { "VSwitchId": ["vsw-1", "vsw-2"] } },
            ],
        }})
        .to_string();
        assert_eq!(table_of(&answer, "vsw-2").unwrap(), "vtb-own");
        assert_eq!(table_of(&answer, "vsw-3").unwrap(), "vtb-sys");
        assert!(table_of("{}", "vsw-1").is_err(), "half an answer is an empty list");
    }

    #[test]
    fn routes_lead_here_or_elsewhere_or_are_fixed() {
        let route = |to: &str, kind: &str, hops: &[(&str, &str)]| {
            let hops = hops.iter().map(|(kind, id)| json!({"NextHopId": id, "NextHopType": kind}));
            let route = json!({
                "DestinationCidrBlock": to, "Type": kind, "Status": "Available",
                "RouteEntryId": "rte-1",
                "NextHops": { "NextHop": hops.collect::<Vec<_>>() },
            });
            entry(&route, "i-1").map(|entry| entry.leads)
        };
        let [here, other] = ["i-1", "i-2"].map(|id| ("Instance", id));
        assert_eq!(route("10.5.3.0/24", "Custom", &[here]), Some(Leads::Here));
        assert_eq!(route("10.5.3.0/24", "Custom", &[other]), Some(Leads::Elsewhere));
        assert_eq!(route("10.5.3.0/24", "System", &[here]), Some(Leads::Fixed));
        assert_eq!(route("10.5.3.0/24", "Custom", &[("VpcPeer", "pcc")]), Some(Leads::Fixed));
        assert_eq!(
            route("10.5.3.0/24", "Custom", &[here, other]),
            Some(Leads::Fixed),
            "half of it"
        );
        assert_eq!(route("fd00::/64", "Custom", &[here]), None);
    }
}
