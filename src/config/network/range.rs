//! The range of subnets of one family: four keys of the configuration, with flannel's defaults,
//! checks and messages.

use std::net::{Ipv4Addr, Ipv6Addr};

use serde_json::Value;

use super::json::{self, NetworkConfigError, wrong};
use crate::route::{IpAddress, Prefix};

/// Smaller networks are split into four, and so is the least that an explicit length must leave.
const SUBNET_LENGTH_BEYOND_NETWORK: u8 = 2;

/// From which subnets nodes get theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubnetRange<A: IpAddress = Ipv4Addr> {
    /// The flat network of all pods.
    pub network: Prefix<A>,
    /// Length of each host's subnet.
    pub subnet_length_bits: u8,
    /// First subnet that may be leased.
    pub subnet_min: A,
    /// Last subnet that may be leased.
    pub subnet_max: A,
}

/// What flannel's configuration makes of a family.
pub trait ConfigFamily: IpAddress {
    /// What its keys begin with.
    const KEYS: &'static str;
    /// A network and a subnet's address, for messages.
    const EXAMPLES: (&'static str, &'static str);
    /// Networks up to the first length have subnets of the second, at least four of them.
    const SUBNET_LENGTH_DEFAULT: (u8, u8);
    /// What hosts forward no packets of (RFC 6890), and what it is.
    const NO_PODS: &'static [(&'static str, &'static str)];

    /// A subnet needs four addresses.
    const SUBNET_LENGTH_MAX: u8 = Self::BITS - 2;
    /// Four subnets of four addresses each.
    const NETWORK_LENGTH_MAX: u8 = Self::BITS - 4;
}

impl ConfigFamily for Ipv4Addr {
    const KEYS: &'static str = "";
    const EXAMPLES: (&'static str, &'static str) = ("10.5.0.0/16", "10.5.16.0");
    const SUBNET_LENGTH_DEFAULT: (u8, u8) = (22, 24);
    // 240.0.0.0/4 is none of them: Linux forwards it, and some networks have nothing else left.
    const NO_PODS: &'static [(&'static str, &'static str)] = &[
        ("0.0.0.0/8", "which stands for no host"),
        ("127.0.0.0/8", "which is each host's own"),
        ("224.0.0.0/4", "which is for multicast"),
    ];
}

impl ConfigFamily for Ipv6Addr {
    const KEYS: &'static str = "IPv6";
    const EXAMPLES: (&'static str, &'static str) = ("fd00:5::/48", "fd00:5:0:16::");
    const SUBNET_LENGTH_DEFAULT: (u8, u8) = (62, 64);
    const NO_PODS: &'static [(&'static str, &'static str)] = &[
        ("::/8", "where no host's addresses are"),
        ("fe80::/10", "which is each link's own"),
        ("ff00::/8", "which is for multicast"),
    ];
}

impl<A: ConfigFamily> SubnetRange<A> {
    /// Reads the keys of the family in `config`.
    pub(super) fn parse(config: &Value) -> Result<Self, NetworkConfigError> {
        let network = network(json::member(config, &key::<A>("Network")))?;
        let subnet_length_bits = subnet_length(config, network)?;
        // The first subnet is left out by default: its network address is the whole network's.
        let of = |address| Prefix::new(address, subnet_length_bits);
        let [first, last] = [network.network(), network.last()].map(of);
        let default = [first.and_then(Prefix::next), last].map(|it| it.map(Prefix::network));
        let bound = |key, default: Option<A>| {
            let given = bound(key, config, network, subnet_length_bits)?;
            Ok::<_, NetworkConfigError>(given.or(default).unwrap_or_else(|| network.network()))
        };
        let subnet_min = bound("SubnetMin", default[0])?;
        let subnet_max = bound("SubnetMax", default[1])?;
        if subnet_min > subnet_max {
            let [min, max] = ["SubnetMin", "SubnetMax"].map(key::<A>);
            return Err(NetworkConfigError::Invalid(format!(
                "{min} {subnet_min} is above {max} {subnet_max}, so no subnet can be leased"
            )));
        }
        Ok(Self { network, subnet_length_bits, subnet_min, subnet_max })
    }

    /// The keys of the family with every default spelled out.
    pub(super) fn write(&self, config: &mut Value) {
        let Self { network, subnet_length_bits, subnet_min, subnet_max } = self;
        config[key::<A>("Network")] = network.to_string().into();
        config[key::<A>("SubnetLen")] = (*subnet_length_bits).into();
        config[key::<A>("SubnetMin")] = subnet_min.to_string().into();
        config[key::<A>("SubnetMax")] = subnet_max.to_string().into();
    }

    /// The first and the last subnet that may be leased.
    pub fn bounds(&self) -> [Prefix<A>; 2] {
        let of = |address| Prefix::new(address, self.subnet_length_bits).unwrap_or(self.network);
        [of(self.subnet_min), of(self.subnet_max)]
    }

    /// Whether `subnet` may be leased: of the right length and between the bounds.
    pub fn leasable(&self, subnet: Prefix<A>) -> bool {
        subnet.length_bits() == self.subnet_length_bits
            && (self.subnet_min..=self.subnet_max).contains(&subnet.network())
    }
}

fn key<A: ConfigFamily>(name: &str) -> String {
    format!("{}{name}", A::KEYS)
}

fn network<A: ConfigFamily>(given: Option<&Value>) -> Result<Prefix<A>, NetworkConfigError> {
    let network: Option<Prefix<A>> = given.and_then(Value::as_str).and_then(|it| it.parse().ok());
    let (key, example) = (key::<A>("Network"), A::EXAMPLES.0);
    match (network, given) {
        // flannel takes the network of everything for "not given".
        (Some(network), _) if network.length_bits() > 0 => check_forwarded(network),
        (None, Some(other)) => {
            Err(wrong(&key, &format!("an {} network such as \"{example}\"", A::NAME), other))
        }
        (Some(_), _) | (None, None) => Err(NetworkConfigError::Invalid(format!(
            "please define a correct {key} parameter in the flannel config, such as {example}"
        ))),
    }
}

fn check_forwarded<A: ConfigFamily>(network: Prefix<A>) -> Result<Prefix<A>, NetworkConfigError> {
    let holds = |prefix: &str| prefix.parse().is_ok_and(|no_pods| network.overlaps(no_pods));
    match A::NO_PODS.iter().find(|(prefix, _)| holds(prefix)) {
        None => Ok(network),
        Some((prefix, what)) => Err(NetworkConfigError::Invalid(format!(
            "{} {network} has addresses of {prefix}, {what}: no host forwards their packets; \
             choose a private network, such as {}",
            key::<A>("Network"),
            A::EXAMPLES.0
        ))),
    }
}

fn subnet_length<A: ConfigFamily>(
    config: &Value,
    network: Prefix<A>,
) -> Result<u8, NetworkConfigError> {
    let (key, longest) = (key::<A>("SubnetLen"), A::SUBNET_LENGTH_MAX);
    let wanted = match json::member(config, &key) {
        None | Some(Value::Null) => 0,
        Some(value) => value
            .as_u64()
            .ok_or_else(|| wrong(&key, &format!("a number from 1 to {longest}"), value))?,
    };
    let network_length = network.length_bits();
    let shortest = network_length.saturating_add(SUBNET_LENGTH_BEYOND_NETWORK);
    let (for_default, default) = A::SUBNET_LENGTH_DEFAULT;
    let problem = match u8::try_from(wanted) {
        Ok(0) if network_length <= for_default => return Ok(default),
        Ok(0) if network_length <= A::NETWORK_LENGTH_MAX => return Ok(shortest),
        Ok(0) => format!(
            "network is too small. Minimum useful network prefix is /{}, it is {network}",
            A::NETWORK_LENGTH_MAX
        ),
        Ok(length) if length <= longest && length >= shortest => return Ok(length),
        Ok(length) if length <= longest => format!(
            "network must be able to accommodate at least four subnets: {network} in /{wanted}"
        ),
        Ok(_) | Err(_) => format!("{key} must be less than /{}, it is {wanted}", longest + 1),
    };
    Err(NetworkConfigError::Invalid(problem))
}

/// Reads the least or the greatest subnet. As in flannel, the address of nothing stands for "not
/// given".
fn bound<A: ConfigFamily>(
    name: &str,
    config: &Value,
    network: Prefix<A>,
    length: u8,
) -> Result<Option<A>, NetworkConfigError> {
    let key = key::<A>(name);
    let Some(value) = json::member(config, &key) else { return Ok(None) };
    let address: Option<A> = value.as_str().and_then(|text| text.parse().ok());
    let address = address.ok_or_else(|| {
        wrong(&key, &format!("an {} address such as \"{}\"", A::NAME, A::EXAMPLES.1), value)
    })?;
    if A::mask(0) == address.bits() {
        return Ok(None);
    }
    if !network.contains(address) {
        return Err(NetworkConfigError::Invalid(format!(
            "{key} is not in the range of the {}: {address} is outside {network}",
            self::key::<A>("Network")
        )));
    }
    if Prefix::new(address, length).is_none_or(|subnet| subnet.network() != address) {
        return Err(NetworkConfigError::Invalid(format!(
            "{key} is not on a {} boundary: {address} with /{length}",
            self::key::<A>("SubnetLen")
        )));
    }
    Ok(Some(address))
}
