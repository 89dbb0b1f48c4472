//! `weft config`: the options of a running daemon, those that were given first.

use serde_json::Value;

use crate::tool::table;

/// The table, from what weftd answered to `/config`.
pub(super) fn render(answer: &Value) -> String {
    let mut settings: Vec<_> = answer["settings"].as_array().into_iter().flatten().collect();
    // Stable: each half stays in the order of the names.
    settings.sort_by_key(|setting| setting["given_by"].is_null());
    let row = |setting: &&Value| {
        let text = |name: &str| setting[name].as_str().unwrap_or_default().to_owned();
        let by = setting["given_by"].as_str().unwrap_or("default").to_owned();
        vec![text("name"), by, text("value")]
    };
    let rows: Vec<_> = settings.iter().map(row).collect();
    table::render(&["OPTION", "FROM", "VALUE"], &rows, |_, _, shown| shown.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_was_given_comes_first() {
        let answer = json!({ "settings": [
            { "name": "engine", "value": "auto", "given_by": null },
            { "name": "iface", "value": "eth0", "given_by": "--iface" },
        ] });
        let expected = "OPTION  FROM     VALUE\niface   --iface  eth0\nengine  default  auto\n";
        assert_eq!(render(&answer), expected);
    }
}
