//! The options of the Kubernetes store: flags and the variables that a pod's manifest sets. Pure.

use std::ffi::OsString;
use std::path::PathBuf;

use regex::Regex;

use crate::config::checked::{OptionError, Result, Variable};

/// Longest name of a Node or pod (RFC 1123, as Kubernetes validates it).
const NAME_CHARACTERS_MAX: usize = 253;

/// How to reach the API and what to write there.
#[derive(Debug, Clone)]
pub struct KubeOptions {
    /// `--kube-api-url`.
    pub api_url: Option<String>,
    /// `--kubeconfig-file`. Without it and without a URL: the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// What the names of the annotations begin with.
    pub annotations: AnnotationPrefix,
    /// The network configuration's file.
    pub network_config: PathBuf,
    /// Whether the Node's NetworkUnavailable condition is cleared.
    pub clear_network_unavailable: bool,
    /// How to find the Node's name.
    pub node: NodeSource,
    /// Whether a start waits for the API for ever, and not ten minutes.
    pub wait_for_ever: bool,
}

/// Where the Node's name comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeSource {
    /// `NODE_NAME`.
    Named(String),
    /// The pod's spec names the Node.
    Pod {
        /// `POD_NAMESPACE`.
        namespace: String,
        /// `POD_NAME`.
        name: String,
    },
}

/// A prefix of annotations that ends in a slash, or in a word and a hyphen.
#[derive(Debug, Clone)]
pub struct AnnotationPrefix(String);

impl AnnotationPrefix {
    /// flannel's rules: a domain, one slash at the most, and a word that may be missing.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let problem = if text.matches('/').count() > 1 {
            "prefix can contain at most single slash"
        } else if !is_like(text, r"([a-z0-9_-]+\.)+[a-z0-9_-]+(/[a-z0-9_-]*)?") {
            "prefix must be in a format: fqdn/[0-9a-z-_]*"
        } else {
            let (domain, word) = text.split_once('/').unwrap_or((text, ""));
            let hyphen = if word.is_empty() || word.ends_with('-') { "" } else { "-" };
            return Ok(Self(format!("{domain}/{word}{hyphen}")));
        };
        let prefix = "--kube-annotation-prefix: subnet/kube";
        Err(OptionError(format!("{prefix}: {problem}, not {text:?}")))
    }

    /// The whole name of an annotation.
    pub fn name(&self, annotation: &str) -> String {
        format!("{}{annotation}", self.0)
    }
}

/// What the environment adds to the flags: the Node, and whether a start waits for ever.
pub(super) fn environment(variable: Variable<'_>) -> Result<(NodeSource, bool)> {
    let value = |name: &str| match variable(name).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text).filter(|text| !text.is_empty())),
        Some(Err(raw)) => Err(wrong_variable(name, &raw.to_string_lossy(), "is not UTF-8")),
    };
    // There is no such queue here, but a malformed value is still an error.
    let depth_name = "EVENT_QUEUE_DEPTH";
    if let Some(depth) = value(depth_name)?.filter(|depth| depth.parse::<i64>().is_err()) {
        return Err(wrong_variable(depth_name, &depth, "format error: not a whole number"));
    }
    let wait_for_ever = value("CONT_WHEN_CACHE_NOT_READY")?.is_some_and(|text| text == "true");
    let object = |variable| value(variable)?.map(|text| name(variable, text)).transpose();
    let node = match (object("NODE_NAME")?, object("POD_NAMESPACE")?, object("POD_NAME")?) {
        (Some(node), _, _) => NodeSource::Named(node),
        (None, Some(namespace), Some(name)) => NodeSource::Pod { namespace, name },
        (None, _, _) => {
            let missing = "env variables POD_NAME and POD_NAMESPACE must be set, or NODE_NAME: \
                           --kube-subnet-mgr has to know its Node";
            return Err(OptionError(missing.to_owned()));
        }
    };
    Ok((node, wait_for_ever))
}

fn wrong_variable(name: &str, value: &str, problem: &str) -> OptionError {
    OptionError(format!("env {name}={value:?} {problem}"))
}

/// Whether the whole text is of this form.
fn is_like(text: &str, form: &str) -> bool {
    Regex::new(&format!("^({form})$")).is_ok_and(|form| form.is_match(text))
}

/// A name that goes into a URL as it is.
fn name(variable: &str, value: String) -> Result<String> {
    if value.len() <= NAME_CHARACTERS_MAX && is_like(&value, "[a-z0-9][a-z0-9.-]*") {
        Ok(value)
    } else {
        Err(wrong_variable(variable, &value, "is not the name of a Kubernetes object"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<(NodeSource, bool)> {
        environment(&|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn prefixes_are_completed_and_checked_as_flannel_does() {
        for (given, expected) in [
            ("flannel.alpha.coreos.com", "flannel.alpha.coreos.com/backend-type"),
            ("flannel.alpha.coreos.com/", "flannel.alpha.coreos.com/backend-type"),
            ("flannel.alpha.coreos.com/foo", "flannel.alpha.coreos.com/foo-backend-type"),
            ("flannel.alpha.coreos.com/foo-", "flannel.alpha.coreos.com/foo-backend-type"),
            ("a.b/0_9", "a.b/0_9-backend-type"),
        ] {
            let prefix = AnnotationPrefix::parse(given).unwrap();
            assert_eq!(prefix.name("backend-type"), expected, "{given}");
        }
        for given in ["", "/", "org", "org/foo", "a.b/c/d", "a.b/Foo", "A.b/", "a..b", "a.b/c d"] {
            let error = AnnotationPrefix::parse(given).unwrap_err().to_string();
            assert!(error.contains("--kube-annotation-prefix") && error.contains("prefix "));
        }
    }

    #[test]
    fn node_comes_from_variable_or_pod() {
        let node = |variables: &[(&str, &str)]| read(variables).map(|(node, _)| node);
        let pod = [("POD_NAME", "weft-x2"), ("POD_NAMESPACE", "kube-flannel")];
        let by_pod =
            NodeSource::Pod { namespace: "kube-flannel".to_owned(), name: "weft-x2".to_owned() };
        assert_eq!(node(&pod), Ok(by_pod));
        let named = [pod.as_slice(), &[("NODE_NAME", "n1.example")]].concat();
        assert_eq!(node(&named), Ok(NodeSource::Named("n1.example".to_owned())));
        for missing in [&pod[..1], &pod[1..], &[], &[("NODE_NAME", ""), pod[0]]] {
            let error = node(missing).unwrap_err().to_string();
            for name in ["POD_NAME", "POD_NAMESPACE", "NODE_NAME"] {
                assert!(error.contains(name), "{name} is not in: {error}");
            }
        }
        let slash = node(&[("NODE_NAME", "../pods")]).unwrap_err().to_string();
        assert!(slash.contains("NODE_NAME=\"../pods\""), "{slash}");
    }

    #[test]
    fn queue_depth_must_be_a_number() {
        let with = |depth| read(&[("NODE_NAME", "n1"), ("EVENT_QUEUE_DEPTH", depth)]);
        for depth in ["", "0", "1", "-5", "+7", "100000"] {
            assert!(with(depth).is_ok(), "{depth:?} was refused");
        }
        for depth in ["five", "5k", "1.5", " 5"] {
            let error = with(depth).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains("EVENT_QUEUE_DEPTH"), "{depth:?}: {error:?}");
        }
        let waits = |text| {
            let variables = [("NODE_NAME", "n1"), ("CONT_WHEN_CACHE_NOT_READY", text)];
            read(&variables).unwrap().1
        };
        assert!(waits("true") && !waits("True") && !waits("1") && !waits(""));
    }
}
