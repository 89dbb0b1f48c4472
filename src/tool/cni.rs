//! flannel's CNI plugin, and what puts it and its configuration on a node. The plugin makes the
//! configuration of another plugin, `bridge` unless one is named, from its own and from
//! `subnet.env`, and runs that one.
//!
//! What a pod was made with is kept where flannel's plugin keeps it and as it does, so that each
//! removes the pods of the other.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use rustix::fs::Mode;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::config::subnet_file::Previous;
use crate::config::whole_file;

/// Where the plugin goes unless its configuration says otherwise, as with flannel's.
const SUBNET_FILE: &str = "/run/flannel/subnet.env";
const STATE: &str = "/var/lib/cni/flannel";

/// The plugin's name until it is in a runtime's directory.
const PROGRAM: &str = "weft-cni";

/// Only root makes pods.
const STATE_MODE: Mode = Mode::from_raw_mode(0o600);
const PROGRAM_MODE: Mode = Mode::from_raw_mode(0o755);
/// The kubelet, the container runtime and people read it.
const CONFIGURATION_MODE: Mode = Mode::from_raw_mode(0o644);

/// Far beyond the configuration of one pod.
const STATE_BYTES_MAX: u64 = 1 << 20;
/// Far beyond any network configuration list or system call profile.
const CONFIGURATION_BYTES_MAX: u64 = 1 << 20;

/// What a runtime is told that asks; the result of an ADD is the other plugin's.
const VERSIONS: &str = "{\"cniVersion\":\"1.0.0\",\"supportedVersions\":\
                        [\"0.1.0\",\"0.2.0\",\"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\"]}\n";

/// The code of an error that CNI itself has none for.
const CODE: u32 = 100;

/// What a runtime asks for, by its environment.
#[derive(Debug)]
struct Call {
    command: String,
    container: String,
    /// Where plugins are, with a colon between the directories.
    path: String,
}

/// The plugin's configuration.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Asked {
    cni_version: String,
    name: String,
    subnet_file: Option<PathBuf>,
    data_dir: Option<PathBuf>,
    delegate: Map<String, Value>,
    ipam: Map<String, Value>,
    runtime_config: Option<Value>,
}

/// Puts the plugin, which lies beside this program, into a runtime's directory, whole at any time;
/// gives one line for the log.
pub(super) fn install(place: &Path) -> anyhow::Result<String> {
    let program = std::env::current_exe().context("where this program lies is unknown")?;
    let program = program.with_file_name(PROGRAM);
    let bytes = fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
    whole_file::write_for_others(place, &bytes, PROGRAM_MODE)?;
    Ok(format!("{} is in place\n", place.display()))
}

/// Checks and places `source`, a configuration, at `destination`, for the container that prepares a
/// node: a runtime that reads the directory meanwhile sees the old file or the new one. Gives one
/// line for the log.
pub(super) fn install_configuration(source: &Path, destination: &Path) -> anyhow::Result<String> {
    let bytes = whole_file::read(source, CONFIGURATION_BYTES_MAX)?;
    let bytes = bytes.with_context(|| format!("there is no {}", source.display()))?;
    // A damaged file in place would take the node's network away; the old one stays instead.
    serde_json::from_slice::<serde::de::IgnoredAny>(&bytes)
        .with_context(|| format!("{} is not copied: it is not JSON", source.display()))?;
    whole_file::write_for_others(destination, &bytes, CONFIGURATION_MODE)?;
    Ok(format!("{} is in place, from {}\n", destination.display(), source.display()))
}

/// Does what the runtime asks for. The other plugin prints its own result; an error is printed as
/// CNI has it, on stdout.
pub(super) fn run() -> (String, u8) {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let [command, container, path] = ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_PATH"].map(variable);
    let mut asked = Asked::default();
    let code = (|| {
        if command == "VERSION" {
            return Ok(None);
        }
        let mut text = Vec::new();
        io::stdin().read_to_end(&mut text).context("cannot read the configuration")?;
        asked = serde_json::from_slice(&text).context("cannot read the configuration")?;
        Call { command, container, path }.answer(&asked, Stdio::inherit()).map(Some)
    })();
    match code {
        Ok(None) => (VERSIONS.to_owned(), 0),
        Ok(Some(code)) => (String::new(), code),
        Err(error) => {
            let (version, message) = (&asked.cni_version, format!("{error:#}"));
            (json!({ "cniVersion": version, "code": CODE, "msg": message }).to_string(), 1)
        }
    }
}

impl Call {
    /// The exit code of the other plugin; 0 where there is nothing to do.
    fn answer(&self, asked: &Asked, output: Stdio) -> anyhow::Result<u8> {
        let container = &self.container;
        // It becomes the name of a file.
        ensure!(
            !container.starts_with('.') && !container.is_empty() && !container.contains('/'),
            "CNI_CONTAINERID is {container:?}, which is no container's identifier"
        );
        let state = asked.data_dir.as_deref().unwrap_or_else(|| STATE.as_ref()).join(container);
        match self.command.as_str() {
            "ADD" => {
                let configuration = Value::Object(delegated(asked)?);
                let text = configuration.to_string();
                whole_file::write(&state, text.as_bytes(), STATE_MODE)?;
                self.hand_on(&configuration, output)
            }
            "DEL" => {
                // A pod that is gone, or was never made: nothing is left to remove.
                let Some(text) = whole_file::read(&state, STATE_BYTES_MAX)? else { return Ok(0) };
                let configuration = serde_json::from_slice(&text)
                    .with_context(|| format!("{} is not JSON", state.display()))?;
                let code = self.hand_on(&configuration, output)?;
                if code == 0 {
                    fs::remove_file(&state)
                        .with_context(|| format!("cannot remove {}", state.display()))?;
                }
                Ok(code)
            }
            // As flannel's plugin: the runtime asks the other plugins of the list as well.
            "CHECK" => Ok(0),
            other => bail!("CNI_COMMAND is {other:?}: expected ADD, DEL, CHECK or VERSION"),
        }
    }

    /// Runs the plugin that `configuration` names, with this environment.
    fn hand_on(&self, configuration: &Value, output: Stdio) -> anyhow::Result<u8> {
        let kind = configuration["type"].as_str().unwrap_or_default();
        ensure!(!kind.is_empty() && !kind.contains('/'), "the delegate's type is {kind:?}");
        let mut places = self.path.split(':').map(|directory| Path::new(directory).join(kind));
        let program = places
            .find(|program| program.is_file())
            .with_context(|| format!("there is no CNI plugin {kind} in {}", self.path))?;
        let started = Command::new(&program).stdin(Stdio::piped()).stdout(output).spawn();
        let mut child = started.with_context(|| format!("cannot start {}", program.display()))?;
        if let Some(mut input) = child.stdin.take() {
            // One that does not listen says why by its exit code.
            input.write_all(configuration.to_string().as_bytes()).ok();
        }
        let status = child.wait().with_context(|| format!("cannot await {kind}"))?;
        Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
    }
}

/// The other plugin's configuration: what is asked for, and what follows from `subnet.env` where it
/// is not said.
fn delegated(asked: &Asked) -> anyhow::Result<Map<String, Value>> {
    let path = asked.subnet_file.as_deref().unwrap_or_else(|| SUBNET_FILE.as_ref());
    let place = path.display();
    ensure!(
        path.exists(),
        "there is no {place}: weftd has no subnet yet, or does not run on this node; its log says \
         why"
    );
    let lease = Previous::read(path)?;
    let (Some(networks), Some(subnets), Some(mtu_bytes)) =
        (lease.networks, lease.subnets, lease.mtu_bytes)
    else {
        bail!("{place} does not name the network, the subnet and the MTU: restart weftd");
    };
    let mut delegate = asked.delegate.clone();
    for key in ["name", "ipam"] {
        ensure!(!delegate.contains_key(key), "\"delegate\" may not have {key:?}: it follows");
    }
    let mut ipam = asked.ipam.clone();
    ipam.entry("type").or_insert_with(|| "host-local".into());
    let range = |subnet| json!([{ "subnet": subnet }]);
    ipam.insert("ranges".to_owned(), subnets.texts().map(range).collect());
    let routes = ipam.entry("routes").or_insert_with(|| json!([]));
    let routes = routes.as_array_mut().context("\"routes\" of \"ipam\" is no list")?;
    routes.extend(networks.texts().map(|network| json!({ "dst": network })));
    let is_bridge = delegate.entry("type").or_insert_with(|| "bridge".into()) == "bridge";
    delegate.entry("ipMasq").or_insert_with(|| (!lease.masquerade).into());
    delegate.entry("mtu").or_insert_with(|| mtu_bytes.into());
    if is_bridge {
        // A bridge keeps the address of an earlier subnet, and no pod would start beside it.
        for key in ["isGateway", "forceAddress"] {
            delegate.entry(key).or_insert_with(|| true.into());
        }
    }
    delegate.insert("name".to_owned(), asked.name.clone().into());
    delegate.insert("ipam".to_owned(), ipam.into());
    if !asked.cni_version.is_empty() {
        delegate.insert("cniVersion".to_owned(), asked.cni_version.clone().into());
    }
    if let Some(runtime) = &asked.runtime_config {
        delegate.insert("runtimeConfig".to_owned(), runtime.clone());
    }
    Ok(delegate)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A node with a plugin `bridge` that keeps what it is told.
    struct Node(tempfile::TempDir);

    impl Node {
        fn new() -> Self {
            let node = Self(tempfile::tempdir().unwrap());
            let told = node.path("told");
            node.has_bridge(&format!("#!/bin/sh\ncat >{}\n", told.display()));
            node.has_subnet("true");
            node
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        /// Has another process write the program. Were it written by this one, a child that a
        /// thread of another test starts just then could hold it open, and the kernel executes
        /// nothing that somebody may write to.
        fn has_bridge(&self, script: &str) {
            let (text, program) = (self.path("bridge.text"), self.path("bridge"));
            fs::write(&text, script).unwrap();
            let installed = Command::new("install").arg("-m755").args([text, program]).status();
            assert!(installed.unwrap().success());
        }

        fn has_subnet(&self, masquerade: &str) {
            let text = format!(
                "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_MTU=1450\n\
                 FLANNEL_IPMASQ={masquerade}\nOTHER=1\n"
            );
            fs::write(self.path("subnet.env"), text).unwrap();
        }

        fn asked(&self, delegate: Value) -> Asked {
            let text = json!({
                "cniVersion": "0.3.1", "name": "cbr0", "type": "flannel", "delegate": delegate,
                "subnetFile": self.path("subnet.env"), "dataDir": self.path("state"),
            });
            serde_json::from_value(text).unwrap()
        }

        fn call(&self, command: &str, asked: &Asked) -> anyhow::Result<u8> {
            let path = format!("/nonexistent:{}", self.0.path().display());
            let call = Call { command: command.to_owned(), container: "c1".to_owned(), path };
            call.answer(asked, Stdio::null())
        }

        fn told(&self) -> Value {
            serde_json::from_slice(&fs::read(self.path("told")).unwrap()).unwrap()
        }
    }

    #[test]
    fn pod_is_made_as_by_flannels_plugin_and_removed_the_same_way() {
        let node = Node::new();
        let asked = node.asked(json!({ "hairpinMode": true, "isDefaultGateway": true }));
        assert_eq!(node.call("ADD", &asked).unwrap(), 0);
        let made = json!({
            "cniVersion": "0.3.1", "name": "cbr0", "type": "bridge", "hairpinMode": true,
            "isDefaultGateway": true, "isGateway": true, "forceAddress": true,
            "ipMasq": false, "mtu": 1450,
            "ipam": {
                "type": "host-local", "ranges": [[{ "subnet": "10.244.3.0/24" }]],
                "routes": [{ "dst": "10.244.0.0/16" }],
            },
        });
        assert_eq!(node.told(), made);
        assert!(node.path("state/c1").exists());
        let env = node.path("subnet.env");
        let both = "FLANNEL_IPV6_NETWORK=fd00:5::/48\nFLANNEL_IPV6_SUBNET=fd00:5:0:3::1/64\n";
        let text = fs::read_to_string(&env).unwrap();
        fs::write(&env, both.to_owned() + &text).unwrap();
        assert_eq!(node.call("ADD", &asked).unwrap(), 0);
        let ranges = json!([[{ "subnet": "10.244.3.0/24" }], [{ "subnet": "fd00:5:0:3::/64" }]]);
        assert_eq!(node.told()["ipam"]["ranges"], ranges, "pods get addresses of both families");
        assert_eq!(node.told()["ipam"]["routes"][1]["dst"], "fd00:5::/48");
        fs::write(&env, text).unwrap();
        assert_eq!(node.call("ADD", &asked).unwrap(), 0);
        // With the daemon gone, and by what was kept, not by what is asked for now.
        fs::remove_file(node.path("subnet.env")).unwrap();
        fs::remove_file(node.path("told")).unwrap();
        assert_eq!(node.call("DEL", &node.asked(json!({ "mtu": 1 }))).unwrap(), 0);
        assert_eq!(node.told(), made);
        assert!(!node.path("state/c1").exists());
        fs::remove_file(node.path("bridge")).unwrap();
        assert_eq!(node.call("DEL", &asked).unwrap(), 0, "a second time there is nothing to do");
    }

    #[test]
    fn what_the_configuration_says_stays() {
        let node = Node::new();
        node.has_subnet("false");
        let mut asked = node.asked(json!({ "type": "bridge", "mtu": 1300 }));
        asked.ipam = serde_json::from_value(json!({
            "type": "dhcp", "routes": [{ "dst": "192.0.2.0/24" }]
        }))
        .unwrap();
        asked.runtime_config = Some(json!({ "mac": "0e:00:00:00:00:01" }));
        assert_eq!(node.call("ADD", &asked).unwrap(), 0);
        let told = node.told();
        assert_eq!((&told["mtu"], &told["ipMasq"]), (&json!(1300), &json!(true)));
        assert_eq!(told["ipam"]["type"], "dhcp");
        let routes = json!([{ "dst": "192.0.2.0/24" }, { "dst": "10.244.0.0/16" }]);
        assert_eq!(told["ipam"]["routes"], routes);
        assert_eq!(told["runtimeConfig"]["mac"], "0e:00:00:00:00:01");
        let asked = node.asked(json!({ "ipMasq": false, "type": "ptp" }));
        let delegate = delegated(&asked).unwrap();
        assert_eq!(delegate["ipMasq"], false);
        assert!(!delegate.contains_key("isGateway"), "that is the plugin bridge's");
    }

    #[test]
    fn refusals_say_what_is_missing() {
        let node = Node::new();
        let plain = node.asked(json!({}));
        let refused = |asked: &Asked| format!("{:#}", node.call("ADD", asked).unwrap_err());
        assert!(refused(&node.asked(json!({ "ipam": {} }))).contains("ipam"));
        assert!(refused(&node.asked(json!({ "type": "../evil" }))).contains("../evil"));
        assert!(refused(&node.asked(json!({ "type": "ptp" }))).contains("no CNI plugin ptp"));
        fs::write(node.path("subnet.env"), "FLANNEL_NETWORK=10.244.0.0/16\n").unwrap();
        assert!(refused(&plain).contains("does not name"));
        fs::remove_file(node.path("subnet.env")).unwrap();
        let error = refused(&plain);
        assert!(error.contains("subnet.env") && error.contains("weftd"), "{error}");
        for container in ["", "../c1", ".c1"] {
            let call = Call {
                command: "DEL".to_owned(),
                container: container.to_owned(),
                path: String::new(),
            };
            assert!(call.answer(&plain, Stdio::null()).is_err(), "{container:?}");
        }
    }

    #[test]
    fn exit_code_of_the_other_plugin_is_handed_on_and_its_pod_kept() {
        let node = Node::new();
        let asked = node.asked(json!({}));
        assert_eq!(node.call("ADD", &asked).unwrap(), 0);
        node.has_bridge("#!/bin/sh\nexit 7\n");
        assert_eq!(node.call("DEL", &asked).unwrap(), 7);
        assert!(node.path("state/c1").exists());
    }

    #[test]
    fn file_is_replaced_whole_and_world_readable() {
        let directory = tempfile::tempdir().unwrap();
        let (source, destination) =
            (directory.path().join("cni-conf.json"), directory.path().join("net.d/10.conflist"));
        fs::write(&source, r#"{"name":"cbr0"}"#).unwrap();
        let line = install_configuration(&source, &destination).unwrap();
        assert!(line.contains("10.conflist"), "{line}");
        fs::write(&source, r#"{"name":"cbr1"}"#).unwrap();
        install_configuration(&source, &destination).unwrap();
        assert_eq!(fs::read_to_string(&destination).unwrap(), r#"{"name":"cbr1"}"#);
        let mode = fs::metadata(&destination).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644);
        let names = fs::read_dir(destination.parent().unwrap()).unwrap().count();
        assert_eq!(names, 1, "something was left beside the file");
        // Installers leave the directories of CNI to other users; only root can.
        if std::os::unix::fs::chown(destination.parent().unwrap(), Some(1000), None).is_ok() {
            install_configuration(&source, &destination).unwrap();
        }
    }

    #[test]
    fn missing_or_broken_source_keeps_old_file() {
        let directory = tempfile::tempdir().unwrap();
        let (source, destination) = (directory.path().join("a"), directory.path().join("b"));
        fs::write(&destination, "{}").unwrap();
        let error = install_configuration(&source, &destination).unwrap_err().to_string();
        assert!(error.contains(&source.display().to_string()), "{error}");
        fs::write(&source, r#"{"name":"#).unwrap();
        assert!(
            install_configuration(&source, &destination)
                .unwrap_err()
                .to_string()
                .contains("not JSON")
        );
        assert_eq!(fs::read_to_string(&destination).unwrap(), "{}");
    }
}
