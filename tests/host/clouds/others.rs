//! tencent-vpc, ali-vpc and gce against servers written after the references of their APIs, which
//! compute each signature anew. None of the three was run against the real service.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::cloud_site::{API, CloudSite, SOON, address};
use crate::support::lab::wait_until;

const SECRET: &str = "s3cret-of-the-test";

/// What differs between the providers.
struct Provider {
    kind: &'static str,
    name: &'static str,
    /// Permission of the operation that makes a route, as the fake takes it away and as weftd
    /// names it.
    denied: &'static str,
    named: &'static str,
    quota: &'static str,
}

const TENCENT: Provider = Provider {
    kind: "tencent-vpc",
    name: "tencent",
    denied: "vpc:CreateRoutes",
    named: "vpc:CreateRoutes",
    quota: "LimitExceeded.RouteQuota",
};
const ALI: Provider = Provider {
    kind: "ali-vpc",
    name: "ali",
    denied: "vpc:CreateRouteEntry",
    named: "vpc:CreateRouteEntry",
    quota: "QuotaExceeded.RouteEntry",
};
const GCE: Provider = Provider {
    kind: "gce",
    name: "gce",
    denied: "routes.insert",
    named: "compute.routes.create",
    quota: "quotaExceeded",
};

impl Provider {
    fn site(&self, hosts: usize) -> CloudSite {
        let mut site = CloudSite::new(hosts, &json!({"Type": self.kind}), false);
        site.environment.push(format!("WEFTD_CLOUD_ENDPOINT={API}"));
        if self.name == "tencent" {
            site.cloud("fault", &json!({"tencent": 1}));
            site.environment.push("WEFTD_CLOUD_METADATA=http://172.31.0.1".to_owned());
        }
        site.environment.push("ACCESS_KEY_ID=AKIDtest".to_owned());
        site.environment.push(format!("ACCESS_KEY_SECRET={SECRET}"));
        site
    }

    fn key(&self, subnet: &str) -> String {
        match self.name {
            "gce" => format!("flannel-{}", subnet.replace(['.', '/'], "-")),
            _ => subnet.to_owned(),
        }
    }

    /// What the provider calls the next hop of a host.
    fn hop(&self, host: usize) -> String {
        let instance = format!("i-{}", address(host).octets()[3]);
        match self.name {
            "tencent" => address(host).to_string(),
            "gce" => {
                format!("projects/test-project/zones/europe-west1-b/instances/{instance}")
            }
            _ => instance,
        }
    }

    fn leads(&self, site: &CloudSite, subnet: &str) -> Option<String> {
        let routes = site.cloud("routes", &Value::Null);
        let route = &routes[self.name][self.key(subnet)];
        let hop = if self.name == "gce" { &route["nextHopInstance"] } else { &route["hop"] };
        hop.as_str().map(str::to_owned)
    }

    #[track_caller]
    fn wait_for_route(&self, site: &CloudSite, subnet: &str, host: Option<usize>) {
        let expected = host.map(|host| self.hop(host));
        let what = format!("{}: {subnet} leads to {expected:?}", self.kind);
        wait_until(SOON, &what, || self.leads(site, subnet) == expected);
    }

    fn create(&self, site: &CloudSite, subnet: &str, host: usize) {
        if self.name == "gce" {
            let route = json!({
                "name": self.key(subnet), "destRange": subnet,
                "network": "projects/test-project/global/networks/default",
                "nextHopInstance": self.hop(host),
            });
            site.cloud("gce_route", &route);
        } else {
            let given = json!({"provider": self.name, "to": subnet, "hop": self.hop(host)});
            site.cloud("create", &given);
        }
    }

    /// Routes appear, are repaired, and nothing of others is touched.
    fn keeps_routes(&self) {
        let mut site = self.site(3);
        self.create(&site, "10.9.0.0/24", 0);
        self.create(&site, "10.5.201.0/24", 1);
        self.create(&site, "10.5.200.0/24", 0);
        let subnets = site.start_all();
        for (host, subnet) in subnets.iter().enumerate() {
            self.wait_for_route(&site, subnet, Some(host));
            site.wait_for_status(host, &[r#""ready":true"#]);
        }
        site.cloud("delete", &json!({"provider": self.name, "to": self.key(&subnets[0])}));
        self.wait_for_route(&site, &subnets[0], Some(0));
        self.create(&site, &subnets[1], 2);
        self.wait_for_route(&site, &subnets[1], Some(1));
        if self.name != "gce" {
            self.wait_for_route(&site, "10.5.200.0/24", None);
            self.wait_for_route(&site, "10.5.201.0/24", None);
        }
        assert_eq!(self.leads(&site, "10.9.0.0/24"), Some(self.hop(0)), "not of the overlay");
        for daemon in &mut site.daemons {
            assert!(daemon.ended().is_none(), "weftd ended because of the cloud");
        }
        site.nowhere(SECRET);
    }

    /// What fails passes, or is named.
    fn names_what_fails(&self) {
        let mut site = self.site(1);
        site.cloud("fault", &json!({"throttle": 2, "reset": 1, "half": 1}));
        site.cloud("denied", &json!([self.denied]));
        site.daemons.push(site.weftd(0, &[]));
        for (fault, words) in [
            ("html", "log in"),
            ("empty", "can't be read"),
            ("pretend", "does not show the route"),
            ("redirect", "http://login.example.org/"),
            ("endless", "after 20 pages"),
        ] {
            if (self.name, fault) == ("gce", "endless") {
                continue;
            }
            site.cloud("fault", &json!({fault: 1}));
            site.cloud("denied", &json!([]));
            site.wait_for_status(0, &[words, r#""ready":false"#]);
            assert!(site.subnet(0).is_none(), "pods start that nobody reaches: {fault}");
            site.cloud("denied", &json!([self.denied]));
            site.cloud("fault", &json!({fault: 0}));
        }
        site.wait_for_status(0, &[self.named, r#""ready":false"#]);
        assert!(site.subnet(0).is_none(), "pods start that nobody reaches");
        site.cloud("denied", &json!([]));
        site.cloud("quota", &json!(0));
        site.wait_for_status(0, &[self.quota, "quota"]);
        site.cloud("quota", &json!(1000));
        let own = site.wait_for_subnet(0);
        self.wait_for_route(&site, &own, Some(0));
        if self.name != "gce" {
            site.cloud("fault", &json!({"late": 1}));
            site.wait_for_status(0, &["the clock of this host is wrong", r#""ready":true"#]);
            site.daemons.clear();
            site.cloud("fault", &json!({"late": 0}));
            let wrong = "ACCESS_KEY_SECRET=n0t-the-s3cret";
            site.daemons.push(site.weftd(0, &[wrong]));
            site.wait_for_status(0, &["the credentials are not valid"]);
            site.nowhere("n0t-the-s3cret");
        }
    }
}

#[test]
fn tencent_keeps_routes() {
    TENCENT.keeps_routes();
}

#[test]
fn tencent_names_what_fails() {
    TENCENT.names_what_fails();
}

#[test]
fn tencent_leaves_the_clouds_own_route_and_says_so() {
    let mut site = TENCENT.site(1);
    site.daemons.push(site.weftd(0, &[]));
    let own = site.wait_for_subnet(0);
    TENCENT.wait_for_route(&site, &own, Some(0));
    let deleted = site.count("tencent DeleteRoutes");
    let of_network = json!({
        "provider": "tencent", "to": own, "hop": "ccn-1", "kind": "ccn",
    });
    site.cloud("create", &of_network);
    site.wait_for_status(0, &["is the cloud's own", "choose another Network", r#""ready":false"#]);
    assert_eq!(site.count("tencent DeleteRoutes"), deleted, "the network's own route is gone");
    assert_eq!(TENCENT.leads(&site, &own).as_deref(), Some("ccn-1"));
}

#[test]
fn ali_keeps_routes() {
    ALI.keeps_routes();
}

#[test]
fn ali_names_what_fails() {
    ALI.names_what_fails();
}

#[test]
fn gce_keeps_routes() {
    GCE.keeps_routes();
}

#[test]
fn gce_names_what_fails() {
    GCE.names_what_fails();
}

#[test]
fn gce_leaves_another_networks_route_and_says_so() {
    let mut site = GCE.site(1);
    for third in 1..=100 {
        let route = json!({
            "name": format!("flannel-10-5-{third}-0-24"), "destRange": "10.5.0.0/24",
            "network": "projects/test-project/global/networks/other",
            "nextHopInstance": GCE.hop(0),
        });
        site.cloud("gce_route", &route);
    }
    site.daemons.push(site.weftd(0, &[]));
    site.wait_for_status(0, &["of another network, other"]);
    assert_eq!(site.count("gce routes.delete"), 0, "somebody else's route is gone");
}

#[test]
fn gce_says_what_a_start_waits_for() {
    let mut site = GCE.site(1);
    site.cloud("fault", &json!({"running": 1}));
    site.daemons.push(site.weftd(0, &[]));
    site.wait_for_status(0, &["has not finished a change", r#""ready":false"#]);
    site.cloud("fault", &json!({"running": 0}));
    let own = site.wait_for_subnet(0);
    GCE.wait_for_route(&site, &own, Some(0));
}

#[test]
fn gce_takes_a_service_account_from_a_file() {
    let mut site = GCE.site(1);
    let run = |argv: &[&str]| {
        let output = Command::new("openssl").args(argv).output().unwrap();
        assert!(output.status.success(), "{argv:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let key = site.dir.path().join("key.pem").display().to_string();
    run(&["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", &key]);
    let modulus = run(&["rsa", "-in", &key, "-noout", "-modulus"]);
    let modulus = modulus.trim().strip_prefix("Modulus=").unwrap();
    site.cloud("public_key", &json!({"modulus": modulus, "exponent": 65537}));
    let pem = fs::read_to_string(&key).unwrap();
    let file = site.dir.path().join("account.json");
    let account = json!({
        "type": "service_account", "client_email": "weft@test-project.iam.gserviceaccount.com",
        "private_key": pem, "token_uri": format!("{API}/token"),
    });
    fs::write(&file, account.to_string()).unwrap();
    let given = format!("GOOGLE_APPLICATION_CREDENTIALS={}", file.display());
    site.daemons.push(site.weftd(0, &[&given]));
    let own = site.wait_for_subnet(0);
    GCE.wait_for_route(&site, &own, Some(0));
    site.nowhere("file-t0ken");
}

#[test]
fn without_a_key_the_start_is_refused() {
    for kind in ["ali-vpc", "tencent-vpc"] {
        let site = CloudSite::new(1, &json!({"Type": kind}), false);
        let mut daemon = site.weftd(0, &[]);
        let status = daemon.wait(SOON);
        assert_eq!(status.code(), Some(1), "{}", daemon.output());
        assert_eq!(daemon.complaints("ACCESS_KEY_ID"), 1, "{}", daemon.output());
    }
}
