//! aws-vpc against moto, whose checks of signatures and permissions are on. What moto lacks the
//! proxy in front of it adds: black holes, the quota of a table, throttling.

use std::fs;

use serde_json::{Value, json};

use crate::support::cloud_site::{API, CloudSite, SOON, address};
use crate::support::lab::wait_until;
use crate::support::status::Status;

/// A site, and what moto calls things.
struct Aws {
    site: CloudSite,
    made: Value,
}

impl Aws {
    fn new(hosts: usize, backend: &Value) -> Self {
        let mut site = CloudSite::new(hosts, backend, true);
        site.environment.push(format!("AWS_ENDPOINT_URL={API}"));
        let addresses: Vec<_> = (0..hosts).map(|host| address(host).to_string()).collect();
        let made = site.cloud("aws/vpc", &json!(addresses));
        Self { site, made }
    }

    fn plain(hosts: usize) -> Self {
        Self::new(hosts, &json!({"Type": "aws-vpc"}))
    }

    fn interface(&self, host: usize) -> &str {
        self.made["enis"][address(host).to_string()].as_str().unwrap()
    }

    /// To which interface the route of a table leads.
    fn leads(&self, table: &str, subnet: &str) -> Option<String> {
        let routes = self.site.cloud("aws/routes", &self.made[table]);
        routes[subnet].as_str().map(str::to_owned)
    }

    #[track_caller]
    fn wait_for_route(&self, table: &str, subnet: &str, host: Option<usize>) {
        let expected = host.map(|host| self.interface(host).to_owned());
        let what = format!("in {table} {subnet} leads to {expected:?}");
        wait_until(SOON, &what, || self.leads(table, subnet) == expected);
    }

    fn route(&self, what: &str, subnet: &str, host: usize) {
        let given = json!({"table": self.made["main"], "to": subnet, "eni": self.interface(host)});
        self.site.cloud(what, &given);
    }

    /// Has the cloud's router do what the main table says.
    fn carry(&self, subnet: &str) {
        let (router, found) = (&self.site.network, self.leads("main", subnet));
        match (0..2).find(|host| found.as_deref() == Some(self.interface(*host))) {
            Some(host) => {
                let via = address(host).to_string();
                router.exec(&["ip", "route", "replace", subnet, "via", &via]);
            }
            None => _ = router.exec(&["ip", "route", "del", subnet]),
        }
    }

    fn secret(&self) -> &str {
        self.made["secret"].as_str().unwrap()
    }
}

#[test]
fn each_node_gets_its_route_and_gets_it_back() {
    let mut aws = Aws::plain(3);
    let subnets = aws.site.start_all();
    for (host, subnet) in subnets.iter().enumerate() {
        aws.wait_for_route("main", subnet, Some(host));
        let found = aws.site.cloud("aws/interface", &json!(aws.interface(host)));
        assert_eq!(found["check"], false, "the interface drops what is for pods");
        let lease = subnet.replace('/', "-");
        let lease = aws.site.dir.path().join("store/subnets").join(lease);
        let lease = fs::read_to_string(lease).unwrap();
        let plain = format!(r#"{{"PublicIP":"{}","PublicIPv6":null}}"#, address(host));
        assert!(lease.starts_with(plain.trim_end_matches('}')), "not flannel's: {lease}");
        let env = fs::read_to_string(aws.site.home(host).join("subnet.env")).unwrap();
        let expected = format!(
            "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET={}\nFLANNEL_MTU=1500\n\
             FLANNEL_IPMASQ=false\n",
            subnet.replace(".0/24", ".1/24")
        );
        assert_eq!(env, expected, "what flannel writes");
        aws.site.wait_for_status(host, &[r#""ready":true"#, aws.interface(host)]);
        for other in (0..3).filter(|other| *other != host) {
            let peer = format!(r#""via":"{}""#, address(other));
            aws.site.wait_for_status(host, &[&peer, r#""peers_programmed":2"#]);
        }
    }
    aws.route("aws/delete", &subnets[0], 0);
    aws.wait_for_route("main", &subnets[0], Some(0));
    aws.route("aws/delete", &subnets[1], 1);
    aws.route("aws/create", &subnets[1], 2);
    aws.wait_for_route("main", &subnets[1], Some(1));
    aws.site.cloud("blackhole", &json!(subnets[2]));
    let replaced = aws.site.count("aws ReplaceRoute");
    wait_until(SOON, "a black hole is replaced", || aws.site.count("aws ReplaceRoute") > replaced);
    assert_eq!(aws.leads("main", &subnets[2]), Some(aws.interface(2).to_owned()));
    for daemon in &mut aws.site.daemons {
        assert!(daemon.ended().is_none(), "weftd ended because of the cloud");
    }
    aws.site.nowhere(aws.secret());
}

#[test]
fn routes_that_nobody_has_go_and_others_stay() {
    let mut aws = Aws::plain(2);
    for (subnet, host) in [("10.5.200.0/24", 0), ("10.5.201.0/24", 1), ("10.9.0.0/24", 0)] {
        aws.route("aws/create", subnet, host);
    }
    aws.route("aws/create", "10.5.202.0/24", 1);
    aws.site.cloud("blackhole", &json!("10.5.202.0/24"));
    aws.route("aws/create", "10.9.1.0/24", 1);
    aws.site.cloud("blackhole", &json!("10.9.1.0/24"));
    // Nodes lease nothing of these lengths: an operator has made them.
    let operators = ["10.5.177.5/32", "10.5.180.0/28", "10.5.190.0/23", "10.5.128.0/17"];
    operators.iter().for_each(|subnet| aws.route("aws/create", subnet, 0));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", "10.5.200.0/24", None);
    aws.wait_for_route("main", "10.5.202.0/24", None);
    aws.wait_for_route("main", &own, Some(0));
    assert_eq!(aws.leads("main", "10.5.201.0/24"), Some(aws.interface(1).into()), "another's");
    assert_eq!(aws.leads("main", "10.9.0.0/24"), Some(aws.interface(0).into()), "no overlay's");
    assert_eq!(aws.leads("main", "10.9.1.0/24"), Some(aws.interface(1).into()), "no overlay's");
    for subnet in operators {
        assert_eq!(aws.leads("main", subnet), Some(aws.interface(0).into()), "{subnet} is gone");
    }
    // A part of the own subnet goes before the whole.
    let part = own.replace("/24", "/25");
    aws.route("aws/create", &part, 1);
    aws.site.wait_for_status(0, &[&part, "a part of this node's subnet", r#""ready":true"#]);
    assert_eq!(aws.leads("main", &part), Some(aws.interface(1).into()), "weftd has taken it");
    aws.route("aws/delete", &part, 1);
    aws.site.wait_for_status(0, &[r#""state":"ready""#]);
}

#[test]
fn a_route_that_is_taken_back_and_forth_is_told() {
    let mut aws = Aws::plain(2);
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
    for times in 1..=2 {
        aws.route("aws/delete", &own, 0);
        aws.route("aws/create", &own, 1);
        aws.wait_for_route("main", &own, Some(0));
        let told = || aws.site.daemons[0].complaints(aws.interface(1));
        wait_until(SOON, "a warning says from whom", || told() >= times);
    }
    let other = aws.interface(1);
    aws.site.wait_for_status(0, &[other, "again", "another cluster", r#""ready":true"#]);
}

#[test]
fn what_is_answered_as_done_and_is_not_is_no_route() {
    let mut aws = Aws::plain(1);
    aws.site.cloud("fault", &json!({"html": 1}));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    let told = |words: &[&str], fault: &str, next: &str| {
        aws.site.wait_for_status(0, words);
        assert!(aws.site.subnet(0).is_none(), "pods start that nobody reaches");
        aws.site.cloud("fault", &json!({fault: 0, next: 1}));
    };
    told(&["is not EC2", "<html><body>Please log in"], "html", "empty");
    told(&["is not EC2", "can't be read"], "empty", "pretend");
    told(&["does not show the route"], "pretend", "redirect");
    told(&["http://login.example.org/"], "redirect", "meta-html");
    told(&["is not the metadata service", "log in"], "meta-html", "endless");
    told(&["DescribeRouteTables: after 20 pages"], "endless", "none");
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
}

#[test]
fn tokens_that_do_not_arrive_are_done_without_or_explained() {
    let mut aws = Aws::plain(1);
    aws.site.cloud("fault", &json!({"token-hang": 1}));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    aws.site.wait_for_status(0, &["hop-limit", r#""ready":false"#]);
    aws.site.cloud("fault", &json!({"imds-v1": 1}));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
}

/// Two hosts of which each sends to the other, and the cloud's router between their pods.
#[test]
fn a_peer_without_its_route_is_silent_and_the_route_is_named() {
    let mut aws = Aws::plain(2);
    let subnets = aws.site.start_all();
    aws.site.network.exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
    for (host, subnet) in subnets.iter().enumerate() {
        aws.carry(subnet);
        aws.site.hosts[host].exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"]);
    }
    // The first has a bridge with the pods' gateway; the second has no pod yet.
    let host = &aws.site.hosts[0];
    host.exec(&["ip", "link", "add", "cni0", "type", "bridge"]);
    host.exec(&["ip", "link", "set", "cni0", "up"]);
    host.address("cni0", &subnets[0].replace(".0/24", ".1/24"));
    // No pings: what answers to those of a peer is no use of it.
    let datagrams = |from: usize| {
        let to = address(1 - from);
        let script = format!(
            "import socket, time\n\
             s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
             s.bind(('', 9999))\n\
             while True:\n    s.sendto(b'x', ('{to}', 9999))\n    time.sleep(0.2)\n"
        );
        aws.site.hosts[from].spawn(&["python3", "-c", &script])
    };
    let _traffic = [datagrams(0), datagrams(1)];
    for host in 0..2 {
        aws.site.wait_for_status(host, &[r#""state":"ok""#]);
    }
    drop(aws.site.daemons.remove(1));
    aws.route("aws/delete", &subnets[1], 1);
    aws.carry(&subnets[1]);
    let named = ["the route to that subnet", "source/destination check", "the host itself answers"];
    aws.site.wait_for_status(0, &[&[r#""state":"silent""#][..], &named].concat());
    aws.route("aws/create", &subnets[1], 1);
    aws.carry(&subnets[1]);
    aws.site.wait_for_status(0, &[r#""state":"ok""#]);
}

#[test]
fn without_the_store_nothing_of_others_is_touched() {
    let mut aws = Aws::plain(2);
    let subnets = aws.site.start_all();
    aws.site.daemons.truncate(1);
    let subnets_dir = aws.site.dir.path().join("store/subnets");
    // With a single peer it depends on the moment whether its lease was one of most.
    let mut others = vec![subnets[1].replace('/', "-")];
    for number in 210..213 {
        let lease = format!("10.5.{number}.0-24");
        let data = json!({"PublicIP": format!("172.31.0.{number}"), "PublicIPv6": null});
        fs::write(subnets_dir.join(&lease), data.to_string()).unwrap();
        others.push(lease);
    }
    aws.site.wait_for_status(0, &[r#""peers":4"#]);
    let away = aws.site.dir.path().join("store/away");
    let stays = |what: &str| {
        let rounds = aws.site.count("aws DescribeRouteTables") + 8;
        wait_until(SOON, "weftd looks on", || aws.site.count("aws DescribeRouteTables") > rounds);
        let other = Some(aws.interface(1).to_owned());
        assert_eq!(aws.leads("main", &subnets[0]), other, "taken from another node {what}");
        let left = Some(aws.interface(0).to_owned());
        assert_eq!(aws.leads("main", "10.5.200.0/24"), left, "deleted {what}");
    };
    // Nothing can be made in its place.
    fs::rename(&subnets_dir, &away).unwrap();
    fs::write(&subnets_dir, "").unwrap();
    aws.site.wait_for_status(0, &[r#""up":false"#]);
    aws.route("aws/delete", &subnets[0], 0);
    aws.route("aws/create", &subnets[0], 1);
    aws.route("aws/create", "10.5.200.0/24", 0);
    aws.site.wait_for_status(0, &["stays until the store confirms"]);
    stays("without the store");
    // Another one, in which this node alone registers again.
    fs::remove_file(&subnets_dir).unwrap();
    fs::create_dir(&subnets_dir).unwrap();
    aws.site.wait_for_status(0, &[r#""up":true"#, r#""peers_held":4"#]);
    stays("with an empty store");
    for lease in others {
        fs::copy(away.join(&lease), subnets_dir.join(&lease)).unwrap();
    }
    aws.wait_for_route("main", &subnets[0], Some(0));
    aws.wait_for_route("main", "10.5.200.0/24", None);
}

#[test]
fn tables_that_are_named_are_used_all() {
    let aws = Aws::plain(1);
    let tables = json!([aws.made["main"], aws.made["other"]]);
    let config = json!({
        "Network": "10.5.0.0/16", "Backend": {"Type": "aws-vpc", "RouteTableID": tables},
    });
    fs::write(aws.site.dir.path().join("store/config"), config.to_string()).unwrap();
    let _daemon = aws.site.weftd(0, &[]);
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
    aws.wait_for_route("other", &own, Some(0));
}

#[test]
fn throttling_and_broken_answers_pass() {
    let mut aws = Aws::plain(1);
    aws.site.cloud("fault", &json!({"throttle": 2, "busy": 1, "reset": 1, "half": 1}));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
    // A storm later on: nothing is given up, requests stay few, and the node stays ready.
    aws.site.cloud("fault", &json!({"throttle": 1_000_000}));
    aws.site.wait_for_status(0, &["RequestLimitExceeded", r#""ready":true"#]);
    let asked = aws.site.count("aws DescribeRouteTables");
    aws.route("aws/delete", &own, 0);
    std::thread::sleep(std::time::Duration::from_secs(4));
    let asked = aws.site.count("aws DescribeRouteTables") - asked;
    assert!(asked <= 16, "{asked} requests in four periods of a storm");
    aws.site.cloud("fault", &json!({"throttle": 0}));
    aws.wait_for_route("main", &own, Some(0));
    aws.site.wait_for_status(0, &[r#""state":"ready""#]);
    assert!(aws.site.daemons[0].ended().is_none(), "weftd ended because of the cloud");
}

#[test]
fn an_api_that_hangs_keeps_nothing_else_waiting() {
    let mut aws = Aws::plain(1);
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    aws.site.wait_for_subnet(0);
    aws.site.cloud("fault", &json!({"hang": 1000}));
    aws.site.wait_for_status(0, &["does not answer", r#""ready":true"#]);
    let home = aws.site.home(0);
    assert!(Status::try_of(&home).is_some(), "the status waits for the cloud");
}

#[test]
fn what_the_account_lacks_is_named() {
    let mut aws = Aws::plain(1);
    let all = ["ec2:DescribeRouteTables", "ec2:ModifyNetworkInterfaceAttribute"];
    aws.site.cloud("aws/policy", &json!(all));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    aws.site.wait_for_status(0, &["ec2:CreateRoute", r#""ready":false"#]);
    assert!(aws.site.subnet(0).is_none(), "pods start that nobody reaches");
    assert!(aws.site.daemons[0].complaints("ec2:CreateRoute") >= 1);
    // Without the right to change the interface, weftd goes on and says so.
    let some = ["ec2:DescribeRouteTables", "ec2:CreateRoute"];
    aws.site.cloud("aws/policy", &json!(some));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
    let daemon = aws.site.daemons.remove(0);
    drop(daemon);
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    aws.site.wait_for_status(0, &["ec2:ModifyNetworkInterfaceAttribute", r#""ready":true"#]);
    aws.site.cloud("aws/policy", &json!(["ec2:*"]));
    aws.site.wait_for_status(0, &[r#""state":"ready""#]);
}

#[test]
fn wrong_keys_a_wrong_clock_and_a_full_table_are_named() {
    let mut aws = Aws::plain(1);
    let key = format!("AWS_ACCESS_KEY_ID={}", aws.made["key"].as_str().unwrap());
    let wrong = ["AWS_SECRET_ACCESS_KEY=n0t-the-s3cret", key.as_str()];
    aws.site.daemons.push(aws.site.weftd(0, &wrong));
    aws.site.wait_for_status(0, &["the credentials are not valid", "AuthFailure"]);
    // EC2 says the same of a clock that is wrong.
    aws.site.cloud("fault", &json!({"date": -3600}));
    aws.site.wait_for_status(0, &["the clock of this host is wrong", "AuthFailure"]);
    aws.site.cloud("fault", &json!({"date": 0}));
    aws.site.nowhere("n0t-the-s3cret");
    aws.site.daemons.clear();
    aws.site.cloud("fault", &json!({"skew": 1_000_000}));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    aws.site.wait_for_status(0, &["RequestExpired", "clock"]);
    aws.site.cloud("fault", &json!({"skew": 0}));
    aws.site.cloud("quota", &json!(1));
    aws.site.wait_for_status(0, &["RouteLimitExceeded", "quota"]);
    aws.site.cloud("quota", &json!(1000));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
}

#[test]
fn keys_come_from_the_files_and_version_1_of_the_metadata_service_is_enough() {
    let mut aws = Aws::plain(1);
    let is = json!({"address": address(0).to_string(), "is": {"role": ""}});
    aws.site.cloud("host", &is);
    aws.site.cloud("fault", &json!({"imds-v1": 1}));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    aws.site.wait_for_status(0, &["no credentials", "IAM role"]);
    aws.site.daemons.clear();
    let file = aws.site.dir.path().join("credentials");
    let keys = format!(
        "[node]\naws_access_key_id = {}\naws_secret_access_key = {}\n",
        aws.made["key"].as_str().unwrap(),
        aws.secret()
    );
    fs::write(&file, keys).unwrap();
    let file = format!("AWS_SHARED_CREDENTIALS_FILE={}", file.display());
    aws.site.daemons.push(aws.site.weftd(0, &[&file, "AWS_PROFILE=node"]));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
    aws.site.nowhere(aws.secret());
}

#[test]
fn a_restart_does_not_wait_for_the_cloud() {
    let mut aws = Aws::plain(1);
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
    aws.site.daemons.clear();
    aws.site.cloud("fault", &json!({"busy": 1_000_000}));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    aws.site.wait_for_status(0, &["HTTP 503", r#""ready":true"#]);
    assert_eq!(aws.site.subnet(0), Some(own), "another subnet than before");
}

#[test]
fn a_restart_misses_a_route_that_is_gone() {
    let mut aws = Aws::plain(1);
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
    aws.site.daemons.clear();
    // As after a change of the backend: subnet.env is there, and no route.
    aws.route("aws/delete", &own, 0);
    aws.site.cloud("aws/policy", &json!(["ec2:DescribeRouteTables"]));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    aws.site.wait_for_status(0, &["ec2:CreateRoute", r#""ready":false"#]);
    aws.site.cloud("aws/policy", &json!(["ec2:*"]));
    aws.wait_for_route("main", &own, Some(0));
    aws.site.wait_for_status(0, &[r#""ready":true"#]);
}

#[test]
fn an_instance_with_another_address_looks_at_once() {
    let mut aws = Aws::plain(1);
    aws.site.environment.retain(|it| !it.starts_with("BRIEF_CLOUD_MS"));
    aws.site.daemons.push(aws.site.weftd(0, &[]));
    let own = aws.site.wait_for_subnet(0);
    aws.wait_for_route("main", &own, Some(0));
    aws.route("aws/delete", &own, 0);
    aws.site.cloud("moved", &json!(["172.31.0.11", "172.31.0.21"]));
    let host = &aws.site.hosts[0];
    host.exec(&["ip", "address", "add", "172.31.0.21/24", "dev", "wire0"]);
    host.exec(&["ip", "address", "del", "172.31.0.11/24", "dev", "wire0"]);
    host.exec(&["ip", "address", "replace", "172.31.0.21/24", "dev", "wire0"]);
    host.exec(&["ip", "route", "replace", "default", "via", "172.31.0.1"]);
    aws.wait_for_route("main", &own, Some(0));
}
