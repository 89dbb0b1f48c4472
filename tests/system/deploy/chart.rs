//! The Helm chart, rendered by helm: as the manifest by default, and by flannel's values.

use std::collections::BTreeSet;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::deploy::manifest::{Objects, arguments, mounts_have_volumes, objects, parsed};
use crate::deploy::{deploy, text, tool};

/// The values of flannel's charts, 0.26 to 0.28.9, that set something on Linux. Those of Windows
/// are refused: weft has none.
const FLANNELS: &[&str] = &[
    "flannel.GBP",
    "flannel.args",
    "flannel.backend",
    "flannel.backendPort",
    "flannel.backendPortv6",
    "flannel.cniBinDir",
    "flannel.cniConf",
    "flannel.cniConfDir",
    "flannel.configMap.annotations",
    "flannel.configMap.labels",
    "flannel.daemonSet.annotations",
    "flannel.daemonSet.labels",
    "flannel.directRouting",
    "flannel.enableNFTables",
    "flannel.flannel_cni.image.repository",
    "flannel.flannel_cni.image.tag",
    "flannel.healthz.livenessProbe.initialDelaySeconds",
    "flannel.healthz.livenessProbe.periodSeconds",
    "flannel.healthz.port",
    "flannel.healthz.readinessProbe.initialDelaySeconds",
    "flannel.healthz.readinessProbe.periodSeconds",
    "flannel.image.repository",
    "flannel.image.tag",
    "flannel.image_cni.repository",
    "flannel.image_cni.tag",
    "flannel.keepaliveInterval",
    "flannel.mtu",
    "flannel.nodeSelector",
    "flannel.psk",
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
    "flannel.tunnelMode",
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
    // Without a cluster helm goes by one that is as old as itself.
    template_for(values, "1.36.2")
}

/// The same for this version of Kubernetes.
fn template_for(values: &[&str], version: &str) -> Result<String, String> {
    let chart = deploy("chart");
    let mut all = vec!["template", "weft", chart.to_str().unwrap(), "--namespace", "kube-flannel"];
    for value in values {
        all.extend(["--set", value]);
    }
    all.extend(["--kube-version", version]);
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
    let mut chart = rendered(&[]);
    // flannel's chart and flannel's manifest differ in this too.
    let tolerations = |objects: &mut Objects| {
        let daemons = objects.get_mut("DaemonSet kube-flannel-ds").unwrap();
        daemons["spec"]["template"]["spec"]["tolerations"].take()
    };
    let tolerated = |effect: &str| json!({ "effect": effect, "operator": "Exists" });
    let (execute, schedule) = (tolerated("NoExecute"), tolerated("NoSchedule"));
    assert_eq!(tolerations(&mut chart), json!([execute, schedule]), "of the chart");
    assert_eq!(tolerations(&mut manifest), json!([schedule]), "of the manifest");
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
    assert_eq!(arguments(&off), ["--ip-masq", "--kube-subnet-mgr", "--take-over"]);
    let container = &pod(&off)["containers"][0];
    assert_eq!(container["livenessProbe"], Value::Null, "without a port");
    assert_ne!(container["readinessProbe"], Value::Null, "an update would end the old pod at once");
    let moved = rendered(&["flannel.healthz.port=9090"]);
    assert_eq!(arguments(&moved)[2], "--healthz-port=9090");
    assert_eq!(pod(&moved)["containers"][0]["livenessProbe"]["httpGet"]["port"], 9090);
}

#[test]
fn surge_is_for_clusters_that_know_it() {
    let strategy = |values: &[&str], version: &str| {
        let yaml = template_for(values, version).unwrap();
        objects(&yaml)["DaemonSet kube-flannel-ds"]["spec"]["updateStrategy"].clone()
    };
    let surge = json!({ "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } });
    assert_eq!(strategy(&[], "1.22.0"), surge);
    assert_eq!(strategy(&[], "1.36.2-gke.1"), surge);
    assert_eq!(strategy(&[], "1.21.14"), Value::Null);
    let on_delete = "flannel.fast.updateStrategy.type=OnDelete";
    for version in ["1.36.2", "1.21.14"] {
        assert_eq!(strategy(&[on_delete], version), json!({ "type": "OnDelete" }));
    }
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
    let ipip = network(&rendered(&["flannel.backend=ipip", "flannel.directRouting=true"]));
    assert_eq!(ipip["Backend"], json!({ "Type": "ipip", "DirectRouting": true }));
    assert_eq!(network(&rendered(&["podCidr=10.1.0.0/16"]))["Network"], "10.1.0.0/16");
    let wireguard = [
        "flannel.backend=wireguard",
        "flannel.backendPort=7",
        "flannel.backendPortv6=8",
        "flannel.psk=dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=",
        "flannel.tunnelMode=auto",
        "flannel.keepaliveInterval=25",
        "flannel.mtu=1400",
    ];
    let backend = json!({
        "Type": "wireguard",
        "ListenPort": 7,
        "ListenPortV6": 8,
        "PSK": "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=",
        "Mode": "auto",
        "PersistentKeepaliveInterval": 25,
        "MTU": 1400,
    });
    assert_eq!(network(&rendered(&wireguard))["Backend"], backend);
    let plain = network(&rendered(&["flannel.backend=wireguard"]));
    assert_eq!(plain["Backend"], json!({ "Type": "wireguard" }));
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
    let plain =
        rendered(&["flannel.healthz.livenessProbe=null", "flannel.healthz.readinessProbe=null"]);
    let probe = &self::pod(&plain)["containers"][0]["livenessProbe"];
    assert_eq!(probe["httpGet"]["port"], 8081, "without settings of its own: {probe}");
    let skipped = rendered(&["flannel.skipCNIConfigInstallation=true"]);
    let steps = self::pod(&skipped)["initContainers"].as_array().unwrap();
    assert!(steps.iter().all(|step| step["name"] != "install-cni"), "{steps:?}");
}

/// What users of flannel's chart have: the keys of its values, as 0.26 and 0.28.9 have them.
const VALUES_0_26: &[&str] = &[
    "global.imagePullSecrets=null",
    "podCidr=10.244.0.0/16",
    "podCidrv6=",
    "flannel.image.repository=docker.io/flannel/flannel",
    "flannel.image.tag=v0.26.0",
    "flannel.image_cni.repository=docker.io/flannel/flannel-cni-plugin",
    "flannel.image_cni.tag=v1.5.1-flannel2",
    "flannel.enableNFTables=false",
    "flannel.args={--ip-masq,--kube-subnet-mgr}",
    "flannel.backend=vxlan",
    "flannel.tolerations[0].effect=NoExecute",
    "flannel.tolerations[0].operator=Exists",
    "netpol.enabled=false",
    "netpol.args={--v=2}",
    "netpol.image.repository=registry.example/kube-network-policies",
    "netpol.image.tag=v0.4.0",
];
const VALUES_0_28: &[&str] = &[
    "global.imagePullSecrets=null",
    "flannel.image.repository=ghcr.io/flannel-io/flannel",
    "flannel.image.tag=v0.28.9",
    "flannel.flannel_cni.image.repository=ghcr.io/flannel-io/flannel-cni-plugin",
    "flannel.flannel_cni.image.tag=v1.9.1-flannel3",
    "flannel.cniBinDir=/opt/cni/bin",
    "flannel.cniConfDir=/etc/cni/net.d",
    "flannel.skipCNIConfigInstallation=false",
    "flannel.backendPort=8472",
    "flannel.mtu=1400",
    "flannel.vni=1",
    "flannel.GBP=false",
    "flannel.directRouting=false",
    "flannel.cniConf=\\{\\}",
    "flannel.resources.requests.cpu=100m",
    "flannel.healthz.port=8081",
    "flannel.healthz.livenessProbe.initialDelaySeconds=11",
    "flannel.healthz.readinessProbe.periodSeconds=12",
    "flannel.nodeSelector.zone=a",
    "netpol.image.tag=v1.0.0",
];

#[test]
fn flannels_own_values_run_weft() {
    for (values, plugin) in [
        (VALUES_0_26, "docker.io/flannel/flannel-cni-plugin:v1.5.1-flannel2"),
        (VALUES_0_28, "ghcr.io/flannel-io/flannel-cni-plugin:v1.9.1-flannel3"),
    ] {
        let objects = rendered(values);
        let pod = pod(&objects);
        assert_eq!(pod["containers"][0]["image"], concat!("weft:", env!("CARGO_PKG_VERSION")));
        assert_eq!(pod["initContainers"][0]["image"], plugin);
    }
    let newer = rendered(VALUES_0_28);
    let container = &pod(&newer)["containers"][0];
    assert_eq!(container["livenessProbe"]["initialDelaySeconds"], 11);
    assert_eq!(container["readinessProbe"]["periodSeconds"], 12);
}

#[test]
fn a_misspelt_value_is_refused() {
    for (value, complaint) in [
        ("podCIDR=10.1.0.0/16", "Additional property podCIDR is not allowed"),
        ("podCidr=10.1.0.0", "podCidr: Does not match pattern"),
        ("podCidr=10.1.0.0/", "podCidr: Does not match pattern"),
        ("flannel.arg={--ip-masq}", "flannel: Additional property arg is not allowed"),
        ("flannel.image.name=x", "flannel.image: Additional property name is not allowed"),
        ("flannel.fast.workes=2", "flannel.fast: Additional property workes is not allowed"),
        ("flannel.fast.engine=fast", "flannel.fast.engine must be one of the following"),
        ("flannel.fast.workers=257", "flannel.fast.workers: Must be less than or equal to 256"),
        ("flannel.healthz.port=high", "flannel.healthz.port: Invalid type"),
        ("netpol.enable=true", "netpol: Additional property enable is not allowed"),
    ] {
        let told = template(&[value]).unwrap_err();
        assert!(told.contains(complaint), "{value}: {told}");
    }
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    for (value, complaint) in [
        ("flannel.psk=key", "flannel.psk is for the backend wireguard"),
        ("flannel.tunnelMode=separate", "flannel.tunnelMode is for the backend wireguard"),
        ("flannel.keepaliveInterval=5", "flannel.keepaliveInterval is for the backend"),
        ("flannel.backendPortv6=51821", "flannel.backendPortv6 is for the backend wireguard"),
        ("flannel.macPrefix=0E-2A", "flannel.macPrefix: it is for nodes with Windows"),
        ("flannel.backend=ipsec", "flannel.backend is ipsec"),
        ("podCidr=", "podCidr and podCidrv6 are empty"),
    ] {
        let told = template(&[value]).unwrap_err();
        assert!(told.contains(complaint), "{value}: {told}");
    }
    rendered(&["flannel.psk=null", "podCidrv6="]);
    let both = network(&rendered(&["podCidrv6=2001:db8::/56"]));
    let of_v6 = [&both["EnableIPv6"], &both["IPv6Network"]].map(ToString::to_string);
    assert_eq!(of_v6, ["true", r#""2001:db8::/56""#], "vxlan has it: {both}");
    let alone = network(&rendered(&["podCidr=", "podCidrv6=2001:db8::/56"]));
    assert_eq!(alone["EnableIPv4"], false, "the network has no IPv4: {alone}");
    assert!(alone.get("Network").is_none() && alone["EnableIPv6"] == true, "{alone}");
    let udp = ["podCidr=", "podCidrv6=2001:db8::/56", "flannel.backend=udp"];
    assert!(template(&udp).is_err(), "udp needs IPv4");
    let ipip = ["podCidr=", "podCidrv6=2001:db8::/56", "flannel.backend=ipip"];
    assert!(template(&ipip).unwrap_err().contains("backend ipip needs IPv4"));
}

#[test]
fn the_chart_has_the_version_of_the_programs() {
    let chart = &parsed(&text("chart/Chart.yaml"))[0];
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    let values = &parsed(&text("chart/values.yaml"))[0];
    assert_eq!(values["flannel"]["image"]["tag"], env!("CARGO_PKG_VERSION"));
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
    assert_eq!(arguments(&objects)[4..], ours);
    let monitor = &objects["PodMonitor kube-flannel"]["spec"];
    let target = &monitor["podMetricsEndpoints"][0]["relabelings"][2];
    assert_eq!(
        (&target["targetLabel"], &target["replacement"]),
        (&"__address__".into(), &"$1:9469".into())
    );
    let labels = &objects["DaemonSet kube-flannel-ds"]["spec"]["template"]["metadata"]["labels"];
    assert_eq!(monitor["selector"]["matchLabels"]["app"], labels["app"]);
    let lonely = template(&["flannel.fast.metrics.podMonitor=true"]).unwrap_err();
    assert!(lonely.contains("needs flannel.fast.metrics.port"), "{lonely}");
    let security = &pod(&objects)["containers"][0]["securityContext"]["seccompProfile"];
    assert_eq!(security, &json!({ "type": "RuntimeDefault" }));
    let data = objects["ConfigMap kube-flannel-cfg"]["data"].as_object().unwrap();
    assert!(!data.contains_key("seccomp.json"));
}
