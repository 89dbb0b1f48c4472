//! gce: Google Compute Engine's API. The route of this node has the name that flannel gives it, and
//! leads to its instance.

use std::time::Duration;

use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request, StatusCode};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::error::CloudError;
use super::gce_credentials::token;
use super::http::{Http, endpoint, metadata_base, variable};
use super::plan::{Change, Entry, Leads, Own, Table};
use super::provider::{Found, Result, list, text};
use crate::backend_kind::BackendKind;
use crate::config::options::Secret;
use crate::route::Prefix;

/// As `GCE_METADATA_HOST` has it.
const METADATA_HOST: &str = "169.254.169.254";
/// Who answers, as errors say it.
const WHOM: &str = "Google's API";
/// flannel's priority, which is Google's default.
const PRIORITY: u32 = 1000;
/// Between two looks whether an operation is done: flannel's.
const OPERATION_PAUSE: Duration = Duration::from_secs(1);
/// For how long weftd looks: flannel's 100 times.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(100);

/// One round's way to the API.
struct Session {
    token: Secret,
    project: String,
    /// `projects/P/zones/Z/instances/I`.
    instance: String,
    /// `projects/P/global/networks/N`.
    network: String,
}

pub(super) struct Gce {
    session: Option<Session>,
}

impl Gce {
    pub(super) fn new() -> Self {
        Self { session: None }
    }

    /// Finds out where this instance is, and what is in the route tables of its network.
    pub(super) async fn look(&mut self, http: &Http, own: &Own) -> Result<Found> {
        let session = Session::open(http, own).await?;
        let path = format!("/global/routes/{}", route_name(own.subnet));
        let entries = match session.ask(http, Method::GET, &path, None, "routes.get").await? {
            None => Vec::new(),
            Some(answer) => vec![session.entry(&answer, own)?],
        };
        let target = session.instance.clone();
        let id = last(&session.network).to_owned();
        self.session = Some(session);
        Ok(Found { tables: vec![Table { id, entries }], target, trouble: None })
    }

    /// Changes the network's routes, as the last look found them.
    pub(super) async fn apply(&self, http: &Http, own: &Own, change: &Change) -> Result {
        // Only after a look.
        let Some(session) = &self.session else { return Ok(()) };
        if !matches!(change, Change::Create) {
            let path = format!("/global/routes/{}", route_name(own.subnet));
            session.operate(http, Method::DELETE, &path, None, "routes.delete").await?;
        }
        if matches!(change, Change::Delete(_)) {
            return Ok(());
        }
        let route = json!({
            "name": route_name(own.subnet),
            "destRange": own.subnet.to_string(),
            "network": session.network,
            "nextHopInstance": session.instance,
            "priority": PRIORITY,
            "tags": [],
        });
        session.operate(http, Method::POST, "/global/routes", Some(&route), "routes.insert").await
    }
}

impl Session {
    async fn open(http: &Http, own: &Own) -> Result<Self> {
        let host = variable("GCE_METADATA_HOST").unwrap_or_else(|| METADATA_HOST.to_owned());
        let base = metadata_base(&format!("http://{host}"));
        let read = async |path: &str| {
            let url = format!("{base}/computeMetadata/v1/{path}");
            http.own(BackendKind::Gce, &url, Some(("metadata-flavor", "Google"))).await
        };
        let project = read("project/project-id").await?;
        let told = read("instance/?recursive=true").await?;
        let interfaces = list("the metadata service", &told, "/networkInterfaces")?;
        let address = own.address.to_string();
        let Some(interface) = interfaces.iter().find(|it| it["ip"] == address) else {
            return Err(CloudError::Unusable(format!(
                "none of this instance's network interfaces has the address {address}: choose one \
                 that has with --iface"
            )));
        };
        let told = serde_json::from_str(&told).unwrap_or_default();
        let [zone, name] = ["/zone", "/name"].map(|name| text(&told, name));
        let network = text(interface, "/network");
        let token =
            token(http, async || read("instance/service-accounts/default/token").await).await?;
        Ok(Self {
            token,
            instance: format!("projects/{project}/zones/{}/instances/{name}", last(&zone)),
            network: format!("projects/{project}/global/networks/{}", last(&network)),
            project,
        })
    }

    /// What the route of this name says. Names are the whole project's: one of another network is
    /// somebody else's, and stays.
    fn entry(&self, answer: &str, own: &Own) -> Result<Entry> {
        let route: Value = serde_json::from_str(answer).unwrap_or_default();
        let [network, range, hop] =
            ["/network", "/destRange", "/nextHopInstance"].map(|name| text(&route, name));
        let name = route_name(own.subnet);
        if !network.ends_with(&self.network) {
            return Err(CloudError::Unusable(format!(
                "the project has a route {name} of another network, {}: delete it, or choose \
                 another Network for one of the two overlays",
                last(&network)
            )));
        }
        let is_here = hop.ends_with(&self.instance) && range == own.subnet.to_string();
        let leads = match hop.is_empty() {
            true => Leads::Fixed,
            false if is_here => Leads::Here,
            false => Leads::Elsewhere,
        };
        Ok(Entry { destination: own.subnet, leads, id: name, hop })
    }

    /// Has something done, and waits until it is.
    async fn operate(
        &self,
        http: &Http,
        method: Method,
        path: &str,
        body: Option<&Value>,
        operation: &str,
    ) -> Result {
        // What is not there is deleted.
        let Some(answer) = self.ask(http, method, path, body, operation).await? else {
            return Ok(());
        };
        match timeout(OPERATION_TIMEOUT, self.finish(http, &answer, operation)).await {
            Ok(finished) => finished,
            Err(_elapsed) => {
                let text = format!("{operation}: still not done; weftd looks again");
                Err(CloudError::Unusable(text))
            }
        }
    }

    /// Waits for the operation of this answer, for as long as it takes.
    async fn finish(&self, http: &Http, answer: &str, operation: &str) -> Result {
        let mut now: Value = serde_json::from_str(answer).unwrap_or_default();
        let name = text(&now, "/name");
        loop {
            if let Some(error) = now.pointer("/error/errors/0") {
                let of = (operation, permission(operation));
                let [code, message] = ["/code", "/message"].map(|name| text(error, name));
                return Err(CloudError::refused(of, 200, &code, &message));
            }
            if now["status"] == "DONE" {
                return Ok(());
            }
            sleep(OPERATION_PAUSE).await;
            let path = format!("/global/operations/{name}");
            let asked = self.ask(http, Method::GET, &path, None, "globalOperations.get").await?;
            now = serde_json::from_str(&asked.unwrap_or_default()).unwrap_or_default();
        }
    }

    /// `None` if it is not there.
    async fn ask(
        &self,
        http: &Http,
        method: Method,
        path: &str,
        body: Option<&Value>,
        operation: &str,
    ) -> Result<Option<String>> {
        let endpoint = endpoint("https://compute.googleapis.com");
        let url = format!("{endpoint}/compute/v1/projects/{}{path}", self.project);
        let request = Request::builder()
            .method(method)
            .uri(url)
            .header(AUTHORIZATION, format!("Bearer {}", self.token.0))
            .header(CONTENT_TYPE, "application/json");
        let body = body.map(Value::to_string).unwrap_or_default();
        let answer = http.ask(operation, request, body).await?;
        let told = answer.text();
        match answer.status {
            status if status.is_success() => {
                // Routes and operations have one.
                answer.done(operation, WHOM, named(&told)).map(Some)
            }
            StatusCode::NOT_FOUND if operation != "routes.insert" => Ok(None),
            _ => {
                let failed = serde_json::from_str(&told).unwrap_or_default();
                let [reason, kind, message] =
                    ["/error/errors/0/reason", "/error/status", "/error/message"]
                        .map(|name| text(&failed, name));
                let code = if reason.is_empty() { kind } else { reason };
                Err(answer.refused((operation, permission(operation)), WHOM, (&code, &message)))
            }
        }
    }
}

fn named(answer: &str) -> bool {
    let answer: Value = serde_json::from_str(answer).unwrap_or_default();
    !text(&answer, "/name").is_empty()
}

/// The permission that Google's documents name for an operation.
fn permission(operation: &str) -> &'static str {
    match operation {
        "routes.insert" => {
            "compute.routes.create, compute.networks.updatePolicy or compute.instances.use"
        }
        "routes.delete" => "compute.routes.delete or compute.networks.updatePolicy",
        "routes.get" => "compute.routes.get",
        _ => "compute.globalOperations.get",
    }
}

/// flannel's name for the route to a subnet.
fn route_name(subnet: Prefix) -> String {
    format!("flannel-{}", subnet.to_string().replace(['.', '/'], "-"))
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::own;
    use super::*;

    #[test]
    fn what_has_no_name_is_neither_a_route_nor_an_operation() {
        assert!(named(r#"{"name":"flannel-10-5-3-0-24"}"#));
        for other in ["", "{}", r#"{"name":""}"#, "<html>login</html>"] {
            assert!(!named(other), "{other} is taken for a route of another network");
        }
    }

    #[test]
    fn the_name_is_flannel_s() {
        assert_eq!(route_name(own().subnet), "flannel-10-5-3-0-24");
    }

    #[test]
    fn a_route_leads_here_or_elsewhere_or_is_another_networks() {
        let session = Session {
            token: Secret("t0ken".to_owned()),
            project: "p".to_owned(),
            instance: "projects/p/zones/z/instances/i".to_owned(),
            network: "projects/p/global/networks/n".to_owned(),
        };
        let of = |network: &str, instance: &str, range: &str| {
            let base = "https://www.googleapis.com/compute/v1/projects/p";
            let route = json!({
                "kind": "compute#route", "name": "flannel-10-5-3-0-24", "destRange": range,
                "network": format!("{base}/global/networks/{network}"),
                "nextHopInstance": format!("{base}/zones/z/instances/{instance}"),
            });
            session.entry(&route.to_string(), &own()).map(|entry| entry.leads)
        };
        assert_eq!(of("n", "i", "10.5.3.0/24"), Ok(Leads::Here));
        assert_eq!(of("n", "j", "10.5.3.0/24"), Ok(Leads::Elsewhere));
        assert_eq!(of("n", "i", "10.5.3.0/25"), Ok(Leads::Elsewhere));
        let peering = json!({
            "name": "flannel-10-5-3-0-24", "destRange": "10.5.3.0/24",
            "network": "projects/p/global/networks/n", "nextHopPeering": "p1",
        });
        let entry = session.entry(&peering.to_string(), &own()).unwrap();
        assert_eq!(entry.leads, Leads::Fixed, "an operator's route is replaced");
        let error = of("m", "j", "10.5.3.0/24").unwrap_err().to_string();
        assert!(error.contains("flannel-10-5-3-0-24"), "another network's is deleted: {error}");
    }
}
