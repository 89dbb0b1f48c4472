//! `weft config`: the options of a running daemon, those that were given first.

use crate::status::Setting;
use crate::tool::table;

/// The table.
pub(super) fn render(mut settings: Vec<Setting>) -> String {
    // Stable: each half stays in the order of the names.
    settings.sort_by_key(|setting| setting.given_by.is_none());
    let row = |Setting { name, value, given_by }| {
        vec![name, given_by.unwrap_or_else(|| "default".to_owned()), value]
    };
    let rows: Vec<_> = settings.into_iter().map(row).collect();
    table::render(&["OPTION", "FROM", "VALUE"], &rows, |_, _, shown| shown.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_comes_first() {
        let setting = |name: &str, value: &str, given_by: Option<&str>| Setting {
            name: name.to_owned(),
            value: value.to_owned(),
            given_by: given_by.map(str::to_owned),
        };
        let settings =
            vec![setting("engine", "auto", None), setting("iface", "eth0", Some("--iface"))];
        let expected = "OPTION  FROM     VALUE\niface   --iface  eth0\nengine  default  auto\n";
        assert_eq!(render(settings), expected);
    }
}
