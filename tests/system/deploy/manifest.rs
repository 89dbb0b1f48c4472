//! The DaemonSet manifest: Kubernetes' own types read every field of it, and what flannel's users
//! rely on is there.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::deploy::text;

/// Objects by kind and name.
pub(crate) type Objects = BTreeMap<String, Value>;

/// What a YAML parser sees in `yaml`.
#[track_caller]
pub(crate) fn parsed(yaml: &str) -> Value {
    const PROGRAM: &str =
        "import json,sys,yaml; print(json.dumps([d for d in yaml.safe_load_all(sys.stdin) if d]))";
    let mut python = Command::new("/usr/bin/python3")
        .args(["-c", PROGRAM])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    python.stdin.take().unwrap().write_all(yaml.as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "no YAML: {complaint}\n{yaml}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The objects of a manifest, each of which Kubernetes' types take in whole.
#[track_caller]
pub(crate) fn objects(yaml: &str) -> Objects {
    let documents = parsed(yaml);
    let documents = documents.as_array().unwrap().iter();
    documents
        .map(|object| {
            let kind = object["kind"].as_str().unwrap();
            match kind {
                "Namespace" => whole::<Namespace>(object),
                "ServiceAccount" => whole::<ServiceAccount>(object),
                "ClusterRole" => whole::<ClusterRole>(object),
                "ClusterRoleBinding" => whole::<ClusterRoleBinding>(object),
                "ConfigMap" => whole::<ConfigMap>(object),
                "DaemonSet" => whole::<DaemonSet>(object),
                // The Prometheus operator's own, of which Kubernetes has no types.
                "PodMonitor" => {}
                other => panic!("the test knows no {other}"),
            }
            (format!("{kind} {}", object["metadata"]["name"].as_str().unwrap()), object.clone())
        })
        .collect()
}

/// A field that Kubernetes does not know, or with a value of another type, is lost or refused on
/// the way through its type.
#[track_caller]
fn whole<T: Serialize + DeserializeOwned>(object: &Value) {
    let typed: T = serde_json::from_value(object.clone())
        .unwrap_or_else(|error| panic!("Kubernetes refuses this: {error}\n{object:#}"));
    let known = serde_json::to_value(&typed).unwrap();
    assert_eq!(&known, object, "left: what Kubernetes knows of it; right: what is written");
}

/// Names of what a pod mounts and of what it has.
#[track_caller]
pub(crate) fn mounts_have_volumes(objects: &Objects) {
    let pod = &objects["DaemonSet kube-flannel-ds"]["spec"]["template"]["spec"];
    let names = |list: &Value| {
        let list = list.as_array().cloned().unwrap_or_default();
        list.iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let volumes = names(&pod["volumes"]);
    let mut mounted = Vec::new();
    for list in ["initContainers", "containers"] {
        for container in pod[list].as_array().unwrap() {
            mounted.extend(names(&container["volumeMounts"]));
        }
    }
    for name in &mounted {
        assert!(volumes.contains(name), "{name} is mounted and there is no such volume");
    }
    for name in &volumes {
        assert!(mounted.contains(name), "the volume {name} is mounted nowhere");
    }
    let selector = &objects["DaemonSet kube-flannel-ds"]["spec"]["selector"]["matchLabels"];
    let labels = &objects["DaemonSet kube-flannel-ds"]["spec"]["template"]["metadata"]["labels"];
    // Flannel's: Kubernetes refuses another one where that is applied over, for ever.
    assert_eq!(selector, &json!({ "app": "flannel" }));
    assert_eq!(labels["app"], "flannel", "Kubernetes refuses a selector that misses its pods");
}

/// The arguments of weftd's container; weftd knows each flag.
#[track_caller]
pub(crate) fn arguments(objects: &Objects) -> Vec<String> {
    let container =
        &objects["DaemonSet kube-flannel-ds"]["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["command"], json!(["/opt/bin/flanneld"]));
    let arguments: Vec<String> = serde_json::from_value(container["args"].clone()).unwrap();
    // Flags are read before the version is told, so that an unknown one ends with 2.
    let mut weftd = Command::new(env!("CARGO_BIN_EXE_weftd"));
    let output = weftd.args(&arguments).arg("--version").output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "weftd does not know {arguments:?}: {complaint}");
    arguments
}

#[test]
fn kubernetes_takes_the_manifest_in_whole() {
    let objects = objects(&text("kubernetes/weft.yml"));
    let names: Vec<_> = objects.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "ClusterRole flannel",
            "ClusterRoleBinding flannel",
            "ConfigMap kube-flannel-cfg",
            "DaemonSet kube-flannel-ds",
            "Namespace kube-flannel",
            "ServiceAccount flannel",
        ],
        "flannel's names, so that applying one replaces the other"
    );
    mounts_have_volumes(&objects);
    let expected = ["--ip-masq", "--kube-subnet-mgr", "--healthz-port=8081", "--take-over"];
    assert_eq!(arguments(&objects), expected);
}

/// Two pods on a node for a moment: neither has what the other needs, and none is ready by the
/// other's answer.
#[test]
fn an_update_starts_the_next_pod_beside_the_last() {
    let objects = objects(&text("kubernetes/weft.yml"));
    let spec = &objects["DaemonSet kube-flannel-ds"]["spec"];
    let surge = json!({ "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } });
    assert_eq!(spec["updateStrategy"], surge);
    let container = &spec["template"]["spec"]["containers"][0];
    assert_eq!(container["ports"], Value::Null, "on the host's network each is a hostPort");
    assert_eq!(
        container["readinessProbe"]["exec"]["command"],
        json!(["/usr/bin/weft", "ready", "--wait=8"])
    );
}

#[test]
fn weftd_has_required_rights_only() {
    let objects = objects(&text("kubernetes/weft.yml"));
    let rules = json!([
        { "apiGroups": [""], "resources": ["pods"], "verbs": ["get"] },
        { "apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"] },
        { "apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"] },
    ]);
    assert_eq!(objects["ClusterRole flannel"]["rules"], rules);
    let pod = &objects["DaemonSet kube-flannel-ds"]["spec"]["template"]["spec"];
    assert_eq!(pod["hostNetwork"], true);
    for (field, value) in [("hostPID", &Value::Null), ("hostIPC", &Value::Null)] {
        assert_eq!(&pod[field], value, "weftd needs no {field}");
    }
    let security = &pod["containers"][0]["securityContext"];
    let expected = json!({
        "privileged": false,
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": { "drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW", "BPF", "SYS_NICE"] },
        "seccompProfile": { "type": "Localhost", "localhostProfile": "weft/weftd.json" },
    });
    assert_eq!(security, &expected);
}

#[test]
fn configuration_is_flannels_profile_reaches_node() {
    let objects = objects(&text("kubernetes/weft.yml"));
    let data = &objects["ConfigMap kube-flannel-cfg"]["data"];
    let json = |key: &str| -> Value {
        let text = data[key].as_str().unwrap();
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{key}: {error}"))
    };
    let network = json!({
        "Network": "10.244.0.0/16", "EnableNFTables": false, "Backend": { "Type": "vxlan" },
    });
    assert_eq!(json("net-conf.json"), network);
    let types: Vec<_> = json("cni-conf.json")["plugins"]
        .as_array()
        .unwrap()
        .iter()
        .map(|plugin| plugin["type"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(types, ["flannel", "portmap"]);
    let profile: Value = serde_json::from_str(&text("chart/files/weftd-seccomp.json")).unwrap();
    assert_eq!(json("seccomp.json"), profile, "the manifest holds another profile than the chart");
    let pod = &objects["DaemonSet kube-flannel-ds"]["spec"]["template"]["spec"];
    let steps = pod["initContainers"].as_array().unwrap();
    let last = |step: &Value| step["args"].as_array().unwrap().last().unwrap().clone();
    let placed: Vec<_> = steps.iter().map(last).collect();
    assert!(placed.contains(&json!("/opt/cni/bin/flannel")), "{placed:?}");
    assert!(placed.contains(&json!("/etc/cni/net.d/10-flannel.conflist")), "{placed:?}");
    assert!(placed.contains(&json!("/seccomp/weft/weftd.json")), "{placed:?}");
    let volumes = pod["volumes"].as_array().unwrap();
    let seccomp = volumes.iter().find(|volume| volume["name"] == "seccomp").unwrap();
    // The kubelet looks for weft/weftd.json below seccomp/ of its directory.
    assert_eq!(seccomp["hostPath"]["path"], "/var/lib/kubelet/seccomp");
}

#[test]
fn unknown_kubernetes_field_is_found() {
    let broken = text("kubernetes/weft.yml").replace("readinessProbe:", "readynessProbe:");
    assert!(std::panic::catch_unwind(|| objects(&broken)).is_err(), "a misspelt field got through");
    let broken = text("kubernetes/weft.yml").replace("periodSeconds: 30", "periodSeconds: x");
    assert!(std::panic::catch_unwind(|| objects(&broken)).is_err(), "a word is no time");
}
