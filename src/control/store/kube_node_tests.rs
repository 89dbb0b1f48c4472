//! Nodes as Kubernetes writes them, and as nobody should.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::backend_kind::BackendKind;
use crate::control::lease::Lifetime;

const P: &str = "flannel.alpha.coreos.com/";

fn node(annotations: Value, spec: Value) -> Value {
    json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": {
            "name": "n2", "uid": "u", "resourceVersion": "42",
            "creationTimestamp": "2026-11-21T08:30:00Z", "annotations": annotations,
        },
        "spec": spec,
        "status": {"images": [{"names": ["a"]}]},
    })
}

fn vxlan() -> Value {
    json!({
        format!("{P}kube-subnet-manager"): "true",
        format!("{P}backend-type"): "vxlan",
        format!("{P}backend-data"): r#"{"VNI":1,"VtepMAC":"aa:bb:cc:dd:ee:ff"}"#,
        format!("{P}public-ip"): "192.0.2.2",
        "other": "annotation",
    })
}

fn parse(node: &Value) -> Node {
    Node::parse(node.to_string().as_bytes(), P).unwrap()
}

#[test]
fn node_gives_lease_with_backend_data() {
    let spec = json!({"podCIDR": "10.244.2.0/24", "podCIDRs": ["10.244.2.0/24", "fd00:2::/64"]});
    let lease = parse(&node(vxlan(), spec)).lease().unwrap().unwrap();
    let subnets = lease.subnets.to_string();
    assert_eq!((lease.key.as_str(), subnets.as_str()), ("n2", "10.244.2.0/24,fd00:2::/64"));
    assert_eq!((lease.revision, lease.lifetime), (42, Lifetime::Reservation));
    assert_eq!(lease.created_revision, 1_795_249_800, "the older Node would not be told");
    assert_eq!(lease.attributes.backend_type, BackendKind::Vxlan.into());
    let data = lease.attributes.backend_data.unwrap();
    assert_eq!(data.0.get(), r#"{"VNI":1,"VtepMAC":"aa:bb:cc:dd:ee:ff"}"#);
}

#[test]
fn wrong_data_of_ipv6_costs_no_peer() {
    let mut annotations = vxlan();
    annotations[format!("{P}public-ipv6")] = "nonsense".into();
    annotations[format!("{P}backend-v6-data")] = "{".into();
    let lease = parse(&node(annotations, json!({"podCIDR": "10.244.2.0/24"}))).lease();
    let attributes = lease.unwrap().unwrap().attributes;
    assert_eq!(attributes.backend_v6_data, None);
    assert_eq!(attributes.unreadable_ipv6.as_deref(), Some("\"nonsense\""), "nobody tells of it");
}

#[test]
fn only_marker_makes_node_a_peer() {
    let spec = json!({"podCIDR": "10.244.2.0/24"});
    for marker in [Value::Null, "false".into(), "True".into(), "".into()] {
        let mut annotations = vxlan();
        let key = format!("{P}kube-subnet-manager");
        if marker.is_null() {
            annotations.as_object_mut().unwrap().remove(&key);
        } else {
            annotations[key] = marker;
        }
        assert!(parse(&node(annotations, spec.clone())).lease().is_none());
    }
}

#[test]
fn patch_contains_only_differences() {
    let found = parse(&node(vxlan(), json!({"podCIDR": "10.244.2.0/24"})));
    let lease = found.lease().unwrap().unwrap();
    assert_eq!(found.annotation_patch(&lease.attributes, P), None);
    let udp = LeaseAttributes::udp(lease.attributes.public_ip.unwrap());
    let expected = format!(
        r#"{{"metadata":{{"annotations":{{"{P}backend-data":"null","{P}backend-type":""}}}}}}"#
    );
    assert_eq!(found.annotation_patch(&udp, P), Some(expected));
    let mut dual = vxlan();
    dual[format!("{P}public-ipv6")] = "fd99::1".into();
    let found = parse(&node(dual, json!({})));
    let expected = format!(r#"{{"metadata":{{"annotations":{{"{P}public-ipv6":null}}}}}}"#);
    let said = found.annotation_patch(&lease.attributes, P);
    assert_eq!(said, Some(expected), "others send IPv6 to a node that has none any more");
    // A tunnel over IPv4 that carries IPv6.
    let backend_v6_data = RawJson::from_text(r#"{"Version":1}"#.to_owned()).ok();
    let found = parse(&node(vxlan(), json!({})));
    let both = LeaseAttributes { backend_v6_data, ..lease.attributes.clone() };
    let expected = json!({"metadata": {"annotations": {
        format!("{P}backend-v6-data"): r#"{"Version":1}"#
    }}});
    assert_eq!(found.annotation_patch(&both, P), Some(expected.to_string()));
    let mut overwritten = vxlan();
    overwritten[format!("{P}public-ip-overwrite")] = "198.51.100.7".into();
    let found = parse(&node(overwritten, json!({})));
    let expected = format!(r#"{{"metadata":{{"annotations":{{"{P}public-ip":"198.51.100.7"}}}}}}"#);
    assert_eq!(found.annotation_patch(&lease.attributes, P), Some(expected));
}

#[test]
fn backend_data_must_be_one_json_value() {
    let mut annotations = vxlan();
    annotations[format!("{P}backend-data")] = r#"1,"PublicIP":"203.0.113.1""#.into();
    let found = parse(&node(annotations, json!({"podCIDR": "10.244.2.0/24"})));
    let rejected = found.lease().unwrap().unwrap_err();
    assert_eq!(rejected.reason, RejectReason::BadValue, "{rejected:?}");
}

#[test]
fn what_is_no_node_is_refused() {
    let mut odd = node(json!({}), json!({}));
    odd["metadata"]["resourceVersion"] = "abc".into();
    let error = Node::parse(odd.to_string().as_bytes(), P).unwrap_err();
    assert!(error.contains("resourceVersion"), "{error}");
    for broken in [node(json!({"a": 1}), json!({})), json!({})] {
        Node::parse(broken.to_string().as_bytes(), P).unwrap_err();
    }
}

proptest! {
    #[test]
    fn any_annotation_or_subnet_parses_or_errors(
        public_ip in ".{0,40}",
        data in r#"[\[\]{}",:a0-9 ]{0,40}"#,
        cidrs in prop::collection::vec("[0-9a-f./:]{0,20}", 0..4),
    ) {
        let mut annotations = vxlan();
        annotations[format!("{P}public-ip")] = public_ip.into();
        annotations[format!("{P}backend-data")] = data.into();
        let found = parse(&node(annotations, json!({"podCIDRs": cidrs})));
        let lease = found.lease().expect("its marker is there");
        prop_assert!(lease.is_err() || found.subnets().is_ok_and(|subnets| subnets.is_some()));
        let udp = LeaseAttributes::udp(Ipv4Addr::LOCALHOST);
        prop_assert!(found.annotation_patch(&udp, P).is_some());
    }
}

#[test]
fn broken_node_costs_no_other_node() {
    let text = r#"{"kind":"NodeList","items":[{"metadata":{"name":"a","resourceVersion":"4"}},
        {"metadata":7}],"metadata":{"resourceVersion":"7","continue":"x\"["}}"#;
    let page = Page::parse(text.as_bytes()).unwrap();
    assert_eq!((page.revision, page.next.as_str(), page.items.len()), (7, "x\"[", 2));
    let read = |item: &RawValue| Node::parse(item.get().as_bytes(), P);
    assert_eq!(read(page.items[0]).unwrap().name, "a");
    assert!(read(page.items[1]).is_err());
}

#[test]
fn empty_list_parses_and_half_does_not() {
    for items in ["", r#""items":null,"#, r#""items":[],"#] {
        let text = format!(r#"{{{items}"metadata":{{"resourceVersion":"3"}}}}"#);
        assert!(Page::parse(text.as_bytes()).unwrap().items.is_empty(), "{text}");
        for end in 0..text.len() {
            assert!(Page::parse(&text.as_bytes()[..end]).is_err(), "{:?}", &text[..end]);
        }
    }
}

#[test]
fn a_node_of_a_network_without_ipv4_says_nothing_of_it() {
    let spec = || json!({"podCIDR": "fd00:5:0:2::/64", "podCIDRs": ["fd00:5:0:2::/64"]});
    let found = parse(&node(json!({}), spec()));
    let subnets = found.subnets().unwrap().unwrap();
    assert_eq!(subnets.to_string(), "fd00:5:0:2::/64");
    let data = RawJson::from_text(r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:01"}"#.to_owned()).ok();
    let address = "fd99::2".parse().ok();
    let own = LeaseAttributes::at(BackendKind::Vxlan, None, address);
    let own = LeaseAttributes { backend_v6_data: data, ..own };
    let patch = found.annotation_patch(&own, P).expect("a Node without annotations");
    let patch: serde_json::Value = serde_json::from_str(&patch).unwrap();
    let said = patch["metadata"]["annotations"].as_object().unwrap().clone();
    let names: Vec<_> = said.keys().map(|name| name.strip_prefix(P).unwrap()).collect();
    let expected = ["backend-type", "backend-v6-data", "kube-subnet-manager", "public-ipv6"];
    assert_eq!(names, expected, "an address that no Node has: {said:?}");
    // And is read by others, of flannel's as well, which may say 0.0.0.0.
    let mut theirs = said;
    for public_ip in [None, Some("0.0.0.0")] {
        theirs.extend(public_ip.map(|it| (format!("{P}public-ip"), it.into())));
        let lease = parse(&node(theirs.clone().into(), spec())).lease().unwrap().unwrap();
        assert_eq!((lease.subnets, &lease.attributes), (subnets, &own), "{public_ip:?}");
    }
    // A Node that had IPv4 takes back what it said of it.
    theirs.insert(format!("{P}public-ip"), "192.0.2.2".into());
    let before = parse(&node(theirs.into(), spec()));
    let expected = format!(r#"{{"metadata":{{"annotations":{{"{P}public-ip":null}}}}}}"#);
    assert_eq!(before.annotation_patch(&own, P), Some(expected));
}
