//! The words of `weft`. Help, manual pages and completions are made from these definitions.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use serde::Serialize;

use crate::route::{PrefixError, Prefixes};

/// Where daemons write it unless told otherwise.
const SUBNET_FILE: &str = "/run/flannel/subnet.env";

/// Below the lists of every help text.
const EXIT_CODES: &str = "\
Exit codes:
  0  all is well, or done
  1  status: the node is degraded or not ready; ready: it is not; peers: one is silent or not set
     up; ping: packets are lost, or do not pass; cluster: one of these; check: one failed; explain:
     the packet does not go
  2  weftd does not answer, the arguments are wrong, or what was asked for failed";

/// Asks a running weftd about itself and its overlay network, and cleans up after it.
#[derive(Debug, Parser)]
#[command(name = "weft", version, after_help = EXIT_CODES)]
pub(super) enum Command {
    /// What is wrong with this node, if anything is; then lease, dataplane, and every dropped
    /// packet by reason.
    Status {
        #[command(flatten)]
        answered: Answered,
        /// Again every two seconds, until interrupted; with -o json a line each time.
        #[arg(short, long)]
        watch: bool,
    },
    /// Whether this container's weftd, or this host's, does its work: what a readiness probe asks.
    /// Pods of two versions on one node share the socket, and only one of them answers there.
    Ready {
        /// Waits so long until it does; for one that does not answer at all, up to 5 s more.
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        wait: u64,
        #[command(flatten)]
        daemon: Daemon,
    },
    /// A row for each other node: whether it can be heard, its round trip, path MTU and packets.
    Peers(Answered),
    /// All nodes in one table: lease, backend, and whether host and overlay answer this one, with
    /// round trips.
    Cluster(Answered),
    /// Pings another node's host, its end of the tunnel, and the tunnel with full packets, and says
    /// what follows; it works against flanneld as well.
    Ping(PingArguments),
    /// Looks for what keeps weftd from starting or packets from flowing on this host, with what was
    /// found and what to do. Changes nothing; works before a start and beside a running weftd.
    Check(CheckArguments),
    /// What this host does with a packet between two addresses, by the dataplane's own rules and
    /// the peers that weftd knows now.
    Explain {
        #[command(flatten)]
        question: Question,
        #[command(flatten)]
        answered: Answered,
    },
    /// Packets that the udp backend's workers drop, with the reason and where to look: samples, as
    /// they are dropped. Nothing is sampled while nobody asks.
    Drops(DropsArguments),
    /// The leases in the store itself, with weftd or without it. What would end a node that lives
    /// is refused.
    #[command(subcommand)]
    Lease(LeaseCommand),
    /// Every option of the running daemon with its value and where it comes from: those that were
    /// given first.
    Config(Answered),
    /// All that can be found out, as one text without secrets, to send to somebody.
    Bugreport {
        #[command(flatten)]
        daemon: Daemon,
        /// The daemon's --subnet-file.
        #[arg(long, value_name = "PATH", default_value = SUBNET_FILE)]
        subnet_file: PathBuf,
    },
    /// The last 256 warnings and changes of state, the oldest first.
    Log(Daemon),
    /// The counters in Prometheus text format.
    Metrics(Daemon),
    /// Removes what weftd and flanneld have left on this host: devices, routes, filters, rules,
    /// subnet.env and its cache. Stop them first.
    Cleanup {
        /// The daemon's --subnet-file.
        #[arg(long, value_name = "PATH", default_value = SUBNET_FILE)]
        subnet_file: PathBuf,
    },
    /// Copies a JSON file to its place, which holds the old one or the new one at any time; also
    /// what weft does under the name install-conf.
    InstallConf {
        /// The file to copy.
        file: PathBuf,
        /// Where it goes.
        place: PathBuf,
    },
    /// Puts weft-cni, flannel's CNI plugin, into a container runtime's directory.
    InstallCni {
        /// Where it goes, such as /opt/cni/bin/flannel.
        place: PathBuf,
    },
    /// The completions of a shell, to be put where it looks for them.
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Writes the manual pages of weft into a directory.
    Man {
        /// The directory, such as /usr/local/share/man/man1.
        directory: PathBuf,
    },
    /// The version.
    Version,
}

#[derive(Debug, Args)]
pub(super) struct PingArguments {
    /// The node: its name, public address or subnet; or the address of a pod there, to be pinged
    /// as well.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub(super) node: Option<String>,
    /// Every node, 64 at a time.
    #[arg(long)]
    pub(super) all: bool,
    /// A pod on that node, to be pinged as well.
    #[arg(long, value_name = "IP", conflicts_with = "all")]
    pub(super) pod: Option<IpAddr>,
    #[command(flatten)]
    pub(super) answered: Answered,
}

#[derive(Debug, Default, Args)]
pub(super) struct CheckArguments {
    #[command(flatten)]
    pub(super) answered: Answered,
    /// The daemon's --subnet-file.
    #[arg(long, value_name = "PATH", default_value = SUBNET_FILE)]
    pub(super) subnet_file: PathBuf,
    /// The port in the network configuration (Backend.Port), if weftd does not run yet.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) port: Option<u16>,
    /// The daemon's --iface, if it does not run yet.
    #[arg(long, value_name = "NAME|ADDRESS")]
    pub(super) iface: Option<String>,
    /// The daemon's --etcd-endpoints, to see whether they answer.
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub(super) etcd_endpoints: Vec<String>,
    /// What is well, too.
    #[arg(short, long)]
    pub(super) verbose: bool,
}

/// A packet that is asked about.
#[derive(Debug, Clone, Copy, Args, Serialize)]
pub(super) struct Question {
    /// Where the packet comes from, such as a pod's address.
    pub(super) source: IpAddr,
    /// Where it goes, by the same family.
    pub(super) destination: IpAddr,
    /// Bytes of the packet, header included.
    #[arg(long = "length", value_name = "BYTES", default_value_t = 84,
          value_parser = clap::value_parser!(u16).range(20..))]
    pub(super) length_bytes: u16,
    /// It may not be fragmented, as TCP asks for; IPv6's never are on their way.
    #[arg(long = "df")]
    pub(super) dont_fragment: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum LeaseCommand {
    /// A row for each lease and reservation, and what is there that can't be used.
    List {
        #[command(flatten)]
        store: StoreArguments,
        /// As JSON.
        #[arg(short, long, value_name = "FORMAT")]
        output: Option<Output>,
    },
    /// One entry as it is in the store, as JSON.
    Show {
        /// The subnet, such as 10.5.7.0/24, or the node's public address.
        what: String,
        #[command(flatten)]
        store: StoreArguments,
    },
    /// Assigns a free subnet to a node, which takes it when it starts, and keeps it for ever.
    Reserve {
        /// Such as 10.5.7.0/24, or 10.5.7.0/24,fd00:5:0:7::/64 where nodes have both.
        #[arg(value_parser = subnets)]
        subnets: Prefixes,
        /// The node's PublicIP; its PublicIPv6 in a network without IPv4.
        address: IpAddr,
        #[command(flatten)]
        store: StoreArguments,
    },
    /// Takes a lease or reservation back, of a node that is gone.
    Release {
        /// Such as 10.5.7.0/24, or 10.5.7.0/24,fd00:5:0:7::/64 where nodes have both.
        #[arg(value_parser = subnets)]
        subnets: Prefixes,
        /// Nobody uses the subnet any more: you have looked.
        #[arg(long)]
        node_is_gone: bool,
        #[command(flatten)]
        store: StoreArguments,
    },
}

/// Subnets to the letter: what `10.5.7.9/24` means is for the operator to say.
fn subnets(text: &str) -> Result<Prefixes, String> {
    let subnets: Prefixes = text.parse().map_err(|error: PrefixError| error.to_string())?;
    if subnets.to_string() == text { Ok(subnets) } else { Err(format!("is {subnets} meant?")) }
}

/// Where the leases are.
#[derive(Debug, Args)]
pub(super) struct StoreArguments {
    /// Flags as weftd takes them, behind --: `-- --etcd-endpoints=http://192.0.2.1:2379`. Variables
    /// such as FLANNELD_ETCD_ENDPOINTS count, too.
    #[arg(last = true, value_name = "FLAGS OF WEFTD")]
    pub(super) flags: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(super) struct DropsArguments {
    /// Until interrupted.
    #[arg(short, long, conflicts_with = "seconds")]
    pub(super) follow: bool,
    /// For so long.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    pub(super) seconds: u64,
    /// Writes the packets, their first 256 bytes, to a pcapng file as well, with the reason as
    /// comment.
    #[arg(short, long, value_name = "FILE")]
    pub(super) write: Option<PathBuf>,
    #[command(flatten)]
    pub(super) answered: Answered,
}

/// What is asked of a daemon and printed.
#[derive(Debug, Default, Args)]
pub(super) struct Answered {
    #[command(flatten)]
    pub(super) daemon: Daemon,
    /// All of the answer, as one JSON object with a schema number.
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) output: Option<Output>,
}

/// Whom to ask.
#[derive(Debug, Default, Args)]
pub(super) struct Daemon {
    /// The daemon's --status-socket.
    #[arg(long, value_name = "PATH", default_value = "/run/flannel/weft.sock")]
    pub(super) socket: PathBuf,
}

/// How an answer is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// As JSON.
    Json,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(words: &[&str]) -> Result<Command, clap::Error> {
        Command::try_parse_from(["weft"].iter().chain(words))
    }

    #[test]
    fn the_definitions_are_sound() {
        Command::command().debug_assert();
    }

    #[test]
    fn a_subnet_is_not_rounded() {
        assert!(parse(&["lease", "reserve", "10.5.7.0/24", "192.0.2.7"]).is_ok());
        for text in ["10.5.7.9/24", "10.5.7.0/024", "10.5.7.0"] {
            parse(&["lease", "reserve", text, "192.0.2.7"]).expect_err(text);
            parse(&["lease", "release", text]).expect_err(text);
        }
    }

    #[test]
    fn both_value_forms_parse_unknown_words_are_named() {
        for words in [&["metrics", "--socket", "/x"][..], &["metrics", "--socket=/x"]] {
            let Command::Metrics(daemon) = parse(words).unwrap() else {
                panic!("{words:?} are other words")
            };
            assert_eq!(daemon.socket, PathBuf::from("/x"));
        }
        let Command::Status { answered, watch } = parse(&["status", "-o", "json", "-w"]).unwrap()
        else {
            panic!("status is another word")
        };
        assert_eq!((answered.output, watch), (Some(Output::Json), true));
        for words in
            [&["fly"][..], &["status", "--what"], &["status", "-o", "yaml"], &["status", "-o"]]
        {
            let error = parse(words).expect_err("accepted").to_string();
            assert!(error.contains(words.last().unwrap().trim_matches('-')), "{error}");
        }
    }
}
