//! One input of the `node_objects` target: what the Kubernetes API says of Nodes, as a page of a
//! list or as one Node.
//!
//! What is said of a Node that can't be used goes into the log, so it must be one plain line. What
//! this node writes about itself must read the same afterwards.

use std::net::Ipv4Addr;

use serde_json::Value;
use weft::control::lease::{LeaseAttributes, RawJson};
use weft::control::store::kube_node::{Node, Page};

const PREFIX: &str = "flannel.alpha.coreos.com/";

/// Runs one input; panics on the first difference.
pub(crate) fn run(data: &[u8]) {
    match Page::parse(data) {
        Ok(page) => page.items.iter().for_each(|item| node(item.get().as_bytes())),
        Err(error) => assert_plain(&error),
    }
    node(data);
}

fn node(json: &[u8]) {
    let node = match Node::parse(json, PREFIX) {
        Ok(node) => node,
        Err(error) => return assert_plain(&error),
    };
    if let Err(detail) = node.overwrite() {
        assert_plain(&detail);
    }
    match node.lease() {
        None => {}
        Some(Err(rejected)) => assert_plain(&rejected.detail),
        Some(Ok(lease)) => {
            assert_eq!(node.subnets(), Ok(Some(lease.subnets)));
            assert_eq!(node.attributes().as_ref(), Ok(&lease.attributes));
            if node.overwrite().ok().flatten().is_none() {
                patched(json, &node, &lease.attributes);
            }
        }
    }
    let data = RawJson::from_text(r#"{"VtepMAC":"02:00:00:00:00:01"}"#.to_owned()).ok();
    let own = LeaseAttributes::of("vxlan", Ipv4Addr::new(192, 0, 2, 1), data);
    if node.overwrite().ok().flatten().is_none() {
        patched(json, &node, &own);
    }
}

/// Applies what would be written about this node, and reads it again.
fn patched(json: &[u8], node: &Node, own: &LeaseAttributes) {
    let Some(patch) = node.annotation_patch(own, PREFIX) else {
        let said = node.attributes();
        return assert_eq!(said.as_ref(), Ok(own), "nothing is written, though it differs");
    };
    let (Ok(mut object), Ok(patch)) =
        (serde_json::from_slice::<Value>(json), serde_json::from_str::<Value>(&patch))
    else {
        // Parsed as far as it matters; the rest may be what serde_json's Value refuses.
        return;
    };
    for (name, text) in patch["metadata"]["annotations"].as_object().into_iter().flatten() {
        match object["metadata"]["annotations"].as_object_mut() {
            Some(annotations) if text.is_null() => drop(annotations.remove(name)),
            _ => object["metadata"]["annotations"][name] = text.clone(),
        }
    }
    let again = Node::parse(object.to_string().as_bytes(), PREFIX).expect("it was one before");
    assert_eq!(again.attributes().as_ref(), Ok(own), "{patch}");
    assert_eq!(again.annotation_patch(own, PREFIX), None, "it is written twice: {patch}");
}

fn assert_plain(text: &str) {
    assert!(!text.contains(char::is_control), "not one plain line: {text:?}");
}
