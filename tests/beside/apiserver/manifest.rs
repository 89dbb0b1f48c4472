//! What is in `deploy/kubernetes` and `deploy/chart`, judged by the API and by its controllers.

use std::path::Path;
use std::process::Command;

use crate::plane::{Plane, START_TIMEOUT};
use crate::site::{ACCOUNT, NAMESPACE, Site, name};
use crate::support::lab::wait_until;

/// What weftd asks of the API.
const NEEDED: [(&str, &str); 4] =
    [("get", "pods"), ("list", "nodes"), ("watch", "nodes"), ("patch", "nodes/status")];
/// What an account that is stolen from a node must not do.
const FORBIDDEN: [(&str, &str); 12] = [
    ("list", "pods"),
    ("create", "pods"),
    ("patch", "nodes"),
    ("update", "nodes"),
    ("update", "nodes/status"),
    ("delete", "nodes"),
    ("get", "secrets"),
    ("list", "secrets"),
    ("get", "configmaps"),
    ("create", "serviceaccounts/token"),
    ("bind", "clusterroles"),
    ("impersonate", "users"),
];

#[test]
fn the_api_takes_the_manifest_and_its_role_is_just_enough() {
    let site = Site::new(Plane::start(1, &[]), "vxlan");
    let plane = &site.plane;
    println!("{}", plane.kubectl(&["version"]).trim());
    let manifest = site.manifest();
    let again = plane.kubectl(&["apply", "-f", manifest.to_str().unwrap()]);
    assert_eq!(again.matches(" unchanged").count(), 6, "the API changed something:\n{again}");
    let manifest = manifest.to_str().unwrap();
    plane.kubectl(&["apply", "--dry-run=server", "-f", manifest]);
    plane.kubectl(&["apply", "--server-side", "--force-conflicts", "-f", manifest]);
    let may = |(verb, resource): (&str, &str)| {
        let (resource, part) = resource.split_once('/').unwrap_or((resource, ""));
        let part = format!("--subresource={part}");
        let asked = ["auth", "can-i", verb, resource, &part, "-n", NAMESPACE, "--as", ACCOUNT];
        plane.try_as("admin", &asked).is_ok_and(|answer| answer.trim() == "yes")
    };
    for needed in NEEDED {
        assert!(may(needed), "the role does not allow {needed:?}");
    }
    for forbidden in FORBIDDEN {
        assert!(!may(forbidden), "the role allows {forbidden:?}");
    }
    if plane.has_controller() {
        plane.register(&name(0));
        wait_until(START_TIMEOUT, "the controller makes a pod of the DaemonSet", || {
            let pods = plane.get(&["pods", "-n", NAMESPACE]);
            pods["items"].as_array().unwrap().len() == 1
        });
        let pod = plane.get(&["pods", "-n", NAMESPACE])["items"][0].clone();
        assert_eq!(pod["spec"]["serviceAccountName"], "flannel");
        assert_eq!(pod["spec"]["priority"], 2_000_001_000, "weft would be evicted like any pod");
        let profile = &pod["spec"]["containers"][0]["securityContext"]["seccompProfile"];
        assert_eq!(profile["localhostProfile"], "weft/weftd.json", "the profile was dropped");
    }
}

#[test]
fn the_api_takes_what_helm_renders() {
    let plane = Plane::without_controller(1, &[]);
    plane.kubectl(&["create", "namespace", NAMESPACE]);
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/chart");
    let helm = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../tools/helm");
    for values in [
        "flannel.backend=vxlan",
        "flannel.backend=udp,flannel.mtu=1400,flannel.fast.engine=mmsg",
        "netpol.enabled=true,flannel.enableNFTables=true",
        "global.commonLabels.a=b,global.commonAnnotations.c=d,flannel.healthz.port=0",
    ] {
        let mut command = Command::new(&helm);
        command.arg("template").arg("weft").arg(&chart).args(["-n", NAMESPACE, "--set", values]);
        command.arg(format!("--kube-version=1.{}", plane.minor()));
        let output = command.output().expect("helm is fetched by scripts/setup --test");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "helm template --set {values}: {complaint}");
        let rendered = plane.path("rendered.yaml");
        std::fs::write(&rendered, output.stdout).unwrap();
        let rendered = rendered.to_str().unwrap();
        let applied = plane.kubectl(&["apply", "--dry-run=server", "-f", rendered]);
        assert!(applied.contains("daemonset.apps/kube-flannel-ds created"), "{values}: {applied}");
    }
}
