//! Checks what the flags of the Kubernetes store mean, and which flags have no meaning beside it.

use std::ffi::OsString;
#[cfg(feature = "kube")]
use std::path::PathBuf;

use crate::config::build::OptionError;
#[cfg(feature = "kube")]
use crate::config::build::{PathPart, optional, url, value};
use crate::config::flag_table::{Settings, Source};
use crate::config::go_flags::environment_name;
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
pub(super) fn warn_of_other_stores(settings: &Settings, warnings: &mut Vec<String>) {
    let with_kube = settings.kube_subnet_mgr.value;
    let flags = [
        ("etcd-endpoints", settings.etcd_endpoints.source, with_kube),
        ("etcd-prefix", settings.etcd_prefix.source, with_kube),
        ("etcd-cafile", settings.etcd_cafile.source, with_kube),
        ("etcd-certfile", settings.etcd_certfile.source, with_kube),
        ("etcd-keyfile", settings.etcd_keyfile.source, with_kube),
        ("etcd-username", settings.etcd_username.source, with_kube),
        ("etcd-password", settings.etcd_password.source, with_kube),
        ("subnet-lease-renew-margin", settings.subnet_lease_renew_margin.source, with_kube),
        ("start-from-cache", settings.start_from_cache.source, with_kube),
        ("kube-annotation-prefix", settings.kube_annotation_prefix.source, !with_kube),
        ("kube-api-url", settings.kube_api_url.source, !with_kube),
        ("kubeconfig-file", settings.kubeconfig_file.source, !with_kube),
        ("net-config-path", settings.net_config_path.source, !with_kube),
        (
            "set-node-network-unavailable",
            settings.set_node_network_unavailable.source,
            !with_kube && !settings.set_node_network_unavailable.value,
        ),
    ];
    let (word, built) = (if with_kube { "with" } else { "without" }, cfg!(feature = "kube"));
    for (name, source, _) in flags.iter().filter(|(_, _, is_idle)| *is_idle && built) {
        let given = match source {
            Source::Default => continue,
            Source::Environment => environment_name(name),
            Source::CommandLine => format!("--{name}"),
        };
        warnings.push(format!("{given} has no effect {word} --kube-subnet-mgr"));
    }
}
