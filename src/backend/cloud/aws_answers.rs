//! What EC2 and STS answer, which is XML. Pure.

use roxmltree::{Document, Node};

use super::plan::{Entry, Leads, Table};

/// What a route may lead to, as far as anybody has to be told.
const HOPS: [&str; 6] = [
    "networkInterfaceId",
    "instanceId",
    "gatewayId",
    "natGatewayId",
    "transitGatewayId",
    "vpcPeeringConnectionId",
];

/// Code and message of an error's answer.
pub(super) fn refusal(text: &str) -> Option<(String, String)> {
    let document = Document::parse(text).ok()?;
    let error = document.descendants().find(|node| node.tag_name().name() == "Error")?;
    Some((text_of(error, "Code"), text_of(error, "Message")))
}

/// Whether this is EC2's answer to `action`, and does not say that nothing came of it.
pub(super) fn is_answer(text: &str, action: &str) -> bool {
    let Ok(document) = Document::parse(text) else { return false };
    let root = document.root_element();
    let is_named = root.tag_name().name().strip_suffix("Response") == Some(action);
    // Lists have none.
    is_named && ["", "true"].contains(&text_of(root, "return").as_str())
}

/// What to ask for the next page of an answer with; empty after the last one.
pub(super) fn next_token(text: &str) -> String {
    let document = Document::parse(text).ok();
    document.map_or_else(String::new, |document| text_of(document.root_element(), "nextToken"))
}

/// The text of the child with this name, in whatever namespace; empty if there is none.
pub(super) fn text_of(node: Node<'_, '_>, name: &str) -> String {
    let mut children = node.children();
    let found = children.find(|child| child.tag_name().name() == name);
    found.and_then(|child| child.text()).unwrap_or_default().trim().to_owned()
}

/// The tables of an answer, with the routes to IPv4 prefixes; those to `interface` lead here.
pub(super) fn tables(text: &str, interface: &str) -> Result<Vec<Table>, roxmltree::Error> {
    let document = Document::parse(text)?;
    let is = |node: &Node<'_, '_>, name: &str| node.tag_name().name() == name;
    let sets = document.descendants().filter(|node| is(node, "routeTableSet"));
    let items = sets.flat_map(|set| set.children().filter(|node| is(node, "item")));
    let table = |item: Node<'_, '_>| {
        let routes = item.children().filter(|node| is(node, "routeSet"));
        let routes = routes.flat_map(|set| set.children().filter(|node| is(node, "item")));
        let id = text_of(item, "routeTableId");
        Table { id, entries: routes.filter_map(|route| entry(route, interface)).collect() }
    };
    Ok(items.map(table).collect())
}

fn entry(route: Node<'_, '_>, interface: &str) -> Option<Entry> {
    let destination = text_of(route, "destinationCidrBlock").parse().ok()?;
    let target = text_of(route, "networkInterfaceId");
    let is_of_instance = !target.is_empty() || !text_of(route, "instanceId").is_empty();
    // The VPC's own route may lead to an interface, and is the VPC's still.
    let is_made = !["CreateRouteTable", "EnableVgwRoutePropagation"]
        .contains(&text_of(route, "origin").as_str());
    let leads = match text_of(route, "state").as_str() {
        _ if !is_of_instance || !is_made => Leads::Fixed,
        "blackhole" => Leads::Nowhere,
        "active" if target == interface => Leads::Here,
        _ => Leads::Elsewhere,
    };
    let mut hops = HOPS.iter().map(|name| text_of(route, name));
    let hop = hops.find(|hop| !hop.is_empty()).unwrap_or_default();
    Some(Entry { destination, leads, id: String::new(), hop })
}

#[cfg(test)]
#[path = "aws_answers_tests.rs"]
mod tests;
