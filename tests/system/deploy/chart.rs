//! The Helm chart, rendered by helm: as the manifest by default, and by flannel's values.

use std::collections::BTreeSet;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::deploy::manifest::{Objects, arguments, mounts_have_volumes, objects, parsed};
use crate::deploy::{deploy, text, tool};

/// The values of flannel's chart, v0.27 and later, that set something on Linux. Those of WireGuard
/// and of Windows are left out: weft has neither.
const FLANNELS: &[&str] = &[
    "flannel.GBP",
    "flannel.args",
    "flannel.backend",
    "flannel.backendPort",
    "flannel.cniBinDir",
    "flannel.cniConf",
    "flannel.cniConfDir",
    "flannel.configMap.annotations",
    "flannel.configMap.labels",
    "flannel.daemonSet.annotations",
    "flannel.daemonSet.labels",
    "flannel.directRouting",
    "flannel.enableNFTables",
    "flannel.healthz.port",
    "flannel.image.repository",
    "flannel.image.tag",
    "flannel.image_cni.repository",
    "flannel.image_cni.tag",
    "flannel.mtu",
    "flannel.nodeSelector",
    "flannel.rbac.annotations",
    "flannel.rbac.clusterRole.annotations",
    "flannel.rbac.clusterRole.labels",
    "flannel.rbac.clusterRoleBinding.annotations",
    "flannel.rbac.clusterRoleBinding.labels",
    "flannel.rbac.labels",
    "flannel.resources.requests.cpu",
    "flannel.resources.requests.memory",
    "flannel.serviceAccount.annotations",
    "flannel.serviceAccount.labels",
    "flannel.skipCNIConfigInstallation",
    "flannel.tolerations",
    "flannel.vni",
    "global.commonAnnotations",
    "global.commonLabels",
    "global.imagePullSecrets",
    "netpol.args",
    "netpol.enabled",
    "netpol.image.repository",
    "netpol.image.tag",
    "podCidr",
    "podCidrv6",
];

fn helm(arguments: &[&str]) -> Output {
    let mut command = Command::new(tool("helm"));
    command.args(arguments).output().expect("helm is fetched by scripts/setup --test")
}

/// The chart with `values` set.
fn template(values: &[&str]) -> Result<String, String> {
    let chart = deploy("chart");
    let mut all = vec!["template", "weft", chart.to_str().unwrap(), "--namespace", "kube-flannel"];
    for value in values {
        all.extend(["--set", value]);
    }
    let output = helm(&all);
    let stderr = String::from_utf8(output.stderr).unwrap();
    if output.status.success() {
        Ok(String::from_utf8(output.stdout).unwrap())
    } else {
        Err(stderr)
    }
}

#[track_caller]
fn rendered(values: &[&str]) -> Objects {
    let yaml = template(values).unwrap_or_else(|complaint| panic!("{values:?}: {complaint}"));
    let objects = objects(&yaml);
    mounts_have_volumes(&objects);
    objects
}

fn pod(objects: &Objects) -> &Value {
    &objects["DaemonSet kube-flannel-ds"]["spec"]["template"]["spec"]
}

fn network(objects: &Objects) -> Value {
    let data = &objects["ConfigMap kube-flannel-cfg"]["data"]["net-conf.json"];
    serde_json::from_str(data.as_str().unwrap()).unwrap()
}

/// Paths of the values that are no maps, or empty ones.
fn keys(value: &Value, above: &str, found: &mut BTreeSet<String>) {
    match value.as_object() {
        Some(map) if !map.is_empty() => {
            for (key, value) in map {
                let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
                keys(value, &path, found);
            }
        }
        _ => {
            found.insert(above.to_owned());
        }
    }
}

#[test]
fn helm_finds_nothing_wrong() {
    let chart = deploy("chart");
    let output = helm(&["lint", "--strict", chart.to_str().unwrap()]);
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{report}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn without_values_the_chart_is_the_manifest() {
    let mut manifest = objects(&text("kubernetes/weft.yml"));
    // helm makes the namespace that it is told, or finds it.
    manifest.remove("Namespace kube-flannel");
    let chart = rendered(&[]);
    for (name, object) in &manifest {
        assert_eq!(chart.get(name), Some(object), "{name}: left the chart, right the manifest");
    }
    assert_eq!(chart.len(), manifest.len());
}

#[test]
fn flannels_values_keep_keys_ours_are_separate() {
    let mut there = BTreeSet::new();
    keys(&parsed(&text("chart/values.yaml"))[0], "", &mut there);
    let (ours, flannels): (BTreeSet<_>, BTreeSet<_>) =
        there.into_iter().partition(|key| key.starts_with("flannel.fast."));
    let expected: BTreeSet<_> = FLANNELS.iter().map(|key| (*key).to_owned()).collect();
    assert_eq!(flannels, expected, "left: values.yaml; right: flannel's chart");
    assert!(ours.len() >= 6, "{ours:?}");
}

#[test]
fn probes_and_their_port_follow_one_value() {
    let off = rendered(&["flannel.healthz.port=0"]);
    assert_eq!(arguments(&off), ["--ip-masq", "--kube-subnet-mgr"]);
    for field in ["ports", "livenessProbe", "readinessProbe"] {
        assert_eq!(pod(&off)["containers"][0][field], Value::Null, "{field} without a port");
    }
    let moved = rendered(&["flannel.healthz.port=9090"]);
    assert_eq!(arguments(&moved)[2], "--healthz-port=9090");
    let ports = json!([{ "name": "healthz", "containerPort": 9090, "protocol": "TCP" }]);
    assert_eq!(pod(&moved)["containers"][0]["ports"], ports);
}

#[test]
fn the_network_configuration_follows_the_values() {
    let udp = ["flannel.backend=udp", "flannel.backendPort=8285", "flannel.mtu=1400"];
    let backend = json!({ "Type": "udp", "Port": 8285, "MTU": 1400 });
    assert_eq!(network(&rendered(&udp))["Backend"], backend);
    let vxlan = ["flannel.vni=7", "flannel.directRouting=true", "flannel.GBP=true"];
    let backend = json!({ "Type": "vxlan", "VNI": 7, "DirectRouting": true, "GBP": true });
    assert_eq!(network(&rendered(&vxlan))["Backend"], backend);
    let gateway = network(&rendered(&["flannel.backend=host-gw", "flannel.enableNFTables=true"]));
    assert_eq!(gateway["Backend"], json!({ "Type": "host-gw" }));
    assert_eq!(gateway["EnableNFTables"], true);
    let both = network(&rendered(&["podCidr=10.1.0.0/16", "podCidrv6=2001:db8::/56"]));
    assert_eq!([&both["Network"], &both["IPv6Network"]], ["10.1.0.0/16", "2001:db8::/56"]);
    assert_eq!(both["EnableIPv6"], true);
    assert_eq!(network(&rendered(&["podCidr="]))["EnableIPv4"], false);
    let complaint = template(&["flannel.backend=wireguard"]).unwrap_err();
    assert!(complaint.contains("flannel.backend is wireguard"), "{complaint}");
}

#[test]
fn the_pod_follows_the_values() {
    let objects = rendered(&[
        "flannel.image.repository=registry.example/weft",
        "flannel.image.tag=9",
        "flannel.image_cni.repository=registry.example/flannel-cni-plugin",
        "flannel.image_cni.tag=8",
        "flannel.cniBinDir=/usr/lib/cni",
        "flannel.cniConfDir=/etc/cni/other.d",
        "flannel.nodeSelector.kubernetes\\.io/arch=amd64",
        "global.imagePullSecrets[0].name=a-secret",
        "flannel.tolerations[0].operator=Exists",
        "flannel.args={--kube-subnet-mgr,--iface=eth1}",
    ]);
    let pod = pod(&objects);
    assert_eq!(pod["containers"][0]["image"], "registry.example/weft:9");
    assert_eq!(pod["initContainers"][1]["image"], "registry.example/weft:9");
    let plugin = &pod["initContainers"][0];
    assert_eq!(plugin["image"], "registry.example/flannel-cni-plugin:8");
    assert_eq!(plugin["command"], json!(["cp"]), "of flannel's image, which has no weft");
    assert_eq!(pod["nodeSelector"], json!({ "kubernetes.io/arch": "amd64" }));
    assert_eq!(pod["imagePullSecrets"], json!([{ "name": "a-secret" }]));
    assert_eq!(pod["tolerations"][0]["operator"], "Exists");
    let paths: Vec<_> = pod["volumes"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|volume| volume["hostPath"]["path"].as_str())
        .collect();
    assert!(paths.contains(&"/usr/lib/cni") && paths.contains(&"/etc/cni/other.d"), "{paths:?}");
    assert_eq!(arguments(&objects)[..2], ["--kube-subnet-mgr", "--iface=eth1"]);
    let skipped = rendered(&["flannel.skipCNIConfigInstallation=true"]);
    let steps = self::pod(&skipped)["initContainers"].as_array().unwrap();
    assert!(steps.iter().all(|step| step["name"] != "install-cni"), "{steps:?}");
}

#[test]
fn labels_and_annotations_prefer_the_nearest() {
    let objects = rendered(&[
        "global.commonLabels.a=far",
        "global.commonLabels.b=far",
        "global.commonAnnotations.note=far",
        "flannel.rbac.labels.b=middle",
        "flannel.rbac.labels.c=middle",
        "flannel.rbac.clusterRole.labels.c=near",
        "flannel.daemonSet.annotations.note=near",
    ]);
    let labels = &objects["ClusterRole flannel"]["metadata"]["labels"];
    let expected = json!({ "k8s-app": "flannel", "a": "far", "b": "middle", "c": "near" });
    assert_eq!(labels, &expected);
    let note = |name: &str| objects[name]["metadata"]["annotations"]["note"].clone();
    assert_eq!(note("DaemonSet kube-flannel-ds"), "near");
    assert_eq!(note("ServiceAccount flannel"), "far");
}

#[test]
fn network_policies_bring_their_container_and_their_rights() {
    let objects = rendered(&["netpol.enabled=true"]);
    let containers = pod(&objects)["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 2);
    assert_eq!(containers[1]["command"], json!(["/bin/netpol"]));
    let rules = objects["ClusterRole flannel"]["rules"].as_array().unwrap();
    let has = |resource: &str| rules.iter().any(|rule| rule["resources"][0] == resource);
    assert!(has("networkpolicies") && has("adminnetworkpolicies"), "{rules:?}");
}

#[test]
fn own_values_become_known_flags() {
    let objects = rendered(&[
        "flannel.fast.engine=mmsg",
        "flannel.fast.offload=tso\\,gso",
        "flannel.fast.workers=2",
        "flannel.fast.logFormat=json",
        "flannel.fast.fastPath=auto",
        "flannel.fast.peerCheck=strict",
        "flannel.fast.guard=true",
        "flannel.fast.metrics.port=9469",
        "flannel.fast.metrics.podMonitor=true",
        "flannel.fast.tun=false",
        "flannel.fast.seccomp.install=false",
    ]);
    let ours = [
        "--engine=mmsg",
        "--offload=tso,gso",
        "--workers=2",
        "--log-format=json",
        "--fast-path=auto",
        "--peer-check=strict",
        "--guard",
        "--metrics-address=0.0.0.0:9469",
    ];
    assert_eq!(arguments(&objects)[3..], ours);
    let monitor = &objects["PodMonitor kube-flannel"]["spec"];
    let endpoint = &monitor["podMetricsEndpoints"][0];
    let port = &pod(&objects)["containers"][0]["ports"][1];
    assert_eq!((&endpoint["port"], &port["containerPort"]), (&port["name"], &9469.into()));
    let labels = &objects["DaemonSet kube-flannel-ds"]["spec"]["template"]["metadata"]["labels"];
    assert_eq!(monitor["selector"]["matchLabels"]["app"], labels["app"]);
    let lonely = template(&["flannel.fast.metrics.podMonitor=true"]).unwrap_err();
    assert!(lonely.contains("needs flannel.fast.metrics.port"), "{lonely}");
    let security = &pod(&objects)["containers"][0]["securityContext"]["seccompProfile"];
    assert_eq!(security, &json!({ "type": "RuntimeDefault" }));
    let data = objects["ConfigMap kube-flannel-cfg"]["data"].as_object().unwrap();
    assert!(!data.contains_key("seccomp.json"));
}
