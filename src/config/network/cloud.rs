//! The `Backend` object's keys of the clouds, with flannel's names.

use serde_json::Value;

use crate::config::checked::Secret;

use super::json::{NetworkConfigError, member, text, wrong_type};

/// Names and proves who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessKey {
    /// Its name.
    pub id: String,
    /// What it is proved with.
    pub secret: Secret,
}

/// The keys of a cloud's backend.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CloudBackendConfig {
    /// The route tables of aws-vpc; found if none is named.
    pub route_tables: Vec<String>,
    /// The access key of ali-vpc and tencent-vpc, which may be in the environment instead.
    pub access_key: Option<AccessKey>,
}

impl CloudBackendConfig {
    /// Reads aws-vpc's key from `BackendConfig::settings`.
    pub fn parse_aws(settings: &Value) -> Result<Self, NetworkConfigError> {
        let Some(given) = member(settings, "RouteTableID").filter(|it| !it.is_null()) else {
            return Ok(Self::default());
        };
        const KEY: &str = "Backend.RouteTableID";
        let table = |value: &Value| match value.as_str() {
            None => Err(wrong_type(KEY, "a string or a list of strings", value)),
            Some("") => Err(empty(KEY)),
            Some(id) => Ok(id.to_owned()),
        };
        let route_tables: Vec<_> = match given.as_array() {
            Some(all) => all.iter().map(table).collect::<Result<_, _>>()?,
            None => vec![table(given)?],
        };
        match route_tables.is_empty() {
            true => Err(empty(KEY)),
            false => Ok(Self { route_tables, ..Self::default() }),
        }
    }

    /// Reads the keys of ali-vpc and tencent-vpc. What is there is not repeated. Where one half is
    /// missing, the environment's is taken, as by flannel.
    pub fn parse_keyed(settings: &Value) -> Result<Self, NetworkConfigError> {
        let given = |name| Ok(text(settings, name, "a string", true)?.filter(|it| !it.is_empty()));
        let both = given("AccessKeyID")?.zip(given("AccessKeySecret")?);
        let access_key = both
            .map(|(id, secret)| AccessKey { id: id.to_owned(), secret: Secret(secret.to_owned()) });
        Ok(Self { access_key, ..Self::default() })
    }
}

fn empty(key: &str) -> NetworkConfigError {
    NetworkConfigError::Invalid(format!("{key} in the network configuration must not be empty"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn route_tables_are_a_string_or_a_list() {
        let of = |value| CloudBackendConfig::parse_aws(&json!({ "routetableid": value }));
        for (value, expected) in [
            (json!(null), vec![]),
            (json!("rtb-1"), vec!["rtb-1"]),
            (json!(["rtb-1", "rtb-2"]), vec!["rtb-1", "rtb-2"]),
        ] {
            assert_eq!(of(value).unwrap().route_tables, expected);
        }
        for bad in [json!(""), json!([]), json!(["rtb-1", 7]), json!(7), json!({})] {
            let error = of(bad).unwrap_err().to_string();
            assert!(error.contains("Backend.RouteTableID"), "{error}");
        }
        for nothing in [json!(""), json!([])] {
            assert!(of(nothing).unwrap_err().to_string().contains("empty"));
        }
        let error = of(json!({"AccessKeySecret": "s3cret"})).unwrap_err().to_string();
        assert!(error.contains("an object") && !error.contains("s3cret"), "{error}");
    }

    #[test]
    fn an_access_key_is_whole_or_not_there_and_its_secret_is_not_shown() {
        let of = |value: &Value| CloudBackendConfig::parse_keyed(value);
        let given = json!({"AccessKeyID": "AKID", "accesskeysecret": "s3cret"});
        let config = of(&given).unwrap();
        let key = config.access_key.clone().unwrap();
        assert_eq!((key.id.as_str(), key.secret.0.as_str()), ("AKID", "s3cret"));
        assert!(!format!("{config:?}").contains("s3cret"));
        assert!(!super::super::shown(&given).to_string().contains("s3cret"), "in `weft lease`");
        for half in [json!({"AccessKeyID": "AKID"}), json!({"AccessKeySecret": "s"}), json!({})] {
            assert_eq!(of(&half).unwrap().access_key, None, "the environment's is not taken");
        }
        let error = of(&json!({"AccessKeySecret": ["s3cret"]})).unwrap_err().to_string();
        assert!(error.contains("AccessKeySecret") && !error.contains("s3cret"), "{error}");
    }
}
