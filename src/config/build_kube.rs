//! Validates the flags of the Kubernetes store, and warns of flags that have no effect with it.

use std::ffi::OsString;
#[cfg(feature = "kube")]
use std::path::PathBuf;

use crate::config::build::OptionError;
#[cfg(feature = "kube")]
use crate::config::build::{PathPart, optional, url, value};
use crate::config::flag_table::{FLAGS, Settings};
#[cfg(feature = "kube")]
use crate::config::kube::{AnnotationPrefix, Environment, KubeOptions};
use crate::config::options::StoreOptions;

#[cfg(feature = "kube")]
pub(super) fn kube(
    settings: &Settings,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<StoreOptions, OptionError> {
    let Environment { node, wait_for_ever } = Environment::read(variable)?;
    let api_url = match optional(&settings.kube_api_url.value) {
        Some(text) if text.contains('@') => {
            let problem = "a URL must not hold a user: use --kubeconfig-file instead";
            return Err(value("--kube-api-url", problem.to_owned()));
        }
        Some(text) => Some(url("--kube-api-url", text, PathPart::Allowed)?),
        None => None,
    };
    Ok(StoreOptions::Kube(KubeOptions {
        api_url,
        kubeconfig: optional(&settings.kubeconfig_file.value).map(PathBuf::from),
        annotations: AnnotationPrefix::parse(&settings.kube_annotation_prefix.value)?,
        network_config: PathBuf::from(&settings.net_config_path.value),
        clear_network_unavailable: settings.set_node_network_unavailable.value,
        node,
        wait_for_ever,
    }))
}

/// `refuse_unbuilt` comes before.
#[cfg(not(feature = "kube"))]
pub(super) fn kube(
    _settings: &Settings,
    _variable: impl Fn(&str) -> Option<OsString>,
) -> Result<StoreOptions, OptionError> {
    Err(OptionError::NotBuilt {
        missing: "The Kubernetes subnet manager",
        given: "--kube-subnet-mgr".to_owned(),
    })
}

/// flanneld reads the flags of one store and says nothing about the others.
pub(super) fn warn_of_other_stores(settings: &mut Settings, warnings: &mut Vec<String>) {
    let with_kube = settings.kube_subnet_mgr.value;
    let (word, built) = (if with_kube { "with" } else { "without" }, cfg!(feature = "kube"));
    for flag in FLAGS.iter().filter(|_| built) {
        let is_idle = match flag.name {
            "subnet-lease-renew-margin" | "start-from-cache" => with_kube,
            "kube-annotation-prefix" | "kube-api-url" | "kubeconfig-file" | "net-config-path" => {
                !with_kube
            }
            "set-node-network-unavailable" => {
                !with_kube && !settings.set_node_network_unavailable.value
            }
            name => with_kube && name.starts_with("etcd-"),
        };
        if let Some(given) = flag.given(settings).filter(|_| is_idle) {
            warnings.push(format!("{given} has no effect {word} --kube-subnet-mgr"));
        }
    }
}
