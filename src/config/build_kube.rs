//! Validates the flags of the Kubernetes store, and warns of flags that have no effect with it.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::config::checked::{OptionError, PathPart, optional, url};
use crate::config::flag_table::FlagValues;
use crate::config::kube::{AnnotationPrefix, KubeOptions, environment};
use crate::config::options::StoreOptions;

pub(super) fn kube(
    flags: &FlagValues,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<StoreOptions, OptionError> {
    let (node, wait_for_ever) = environment(variable)?;
    let api_url = optional(&flags.kube_api_url)
        .map(|text| url("--kube-api-url", text, PathPart::Allowed, "--kubeconfig-file"));
    Ok(StoreOptions::Kube(KubeOptions {
        api_url: api_url.transpose()?,
        kubeconfig: optional(&flags.kubeconfig_file).map(PathBuf::from),
        annotations: AnnotationPrefix::parse(&flags.kube_annotation_prefix)?,
        network_config: PathBuf::from(&flags.net_config_path),
        clear_network_unavailable: flags.set_node_network_unavailable,
        node,
        wait_for_ever,
    }))
}

/// flanneld reads the flags of one store and says nothing about the others.
pub(super) fn warn_of_other_stores(flags: &FlagValues, warnings: &mut Vec<String>) {
    let with_kube = flags.kube_subnet_mgr;
    let word = if with_kube { "with" } else { "without" };
    for (flag, given) in &flags.given {
        let is_idle = match *flag {
            "subnet-lease-renew-margin" | "start-from-cache" => with_kube,
            "kube-annotation-prefix" | "kube-api-url" | "kubeconfig-file" | "net-config-path" => {
                !with_kube
            }
            "set-node-network-unavailable" => !with_kube && !flags.set_node_network_unavailable,
            name => with_kube && name.starts_with("etcd-"),
        };
        if is_idle {
            warnings.push(format!("{given} has no effect {word} --kube-subnet-mgr"));
        }
    }
}
