//! The host module against real kernels' tables, each test in a network namespace of its own.
//! Needs root and ip(8). Never touches the namespace that the tests were started in.

#![expect(clippy::unwrap_used, reason = "a test's helpers fail as the test does")]

use std::error::Error;
use std::net::Ipv4Addr;
use std::time::Duration;

use regex::Regex;
use weft::config::options::InterfaceOptions;
use weft::host::follower::{Following, HostFollower};
use weft::host::interface::{ExternalInterface, InterfaceError, discover};
use weft::host::listing::Listing;
use weft::host::netlink::events::Events;
use weft::host::netlink::{self, routes};
use weft::host::overlay::{Overlay, OverlayDesired, OverlayError, OverlayPart};
use weft::host::state::{LinkId, RouteProtocol, RouteSpec};
use weft::route::Prefix;

use crate::namespace::Namespace;
use crate::support::pace::{Stopwatch, repair_limit, within};

/// After so long without news there are none to come: the kernel reports changes of carrier up to a
/// second after their cause (linkwatch), and later on a busy machine.
const QUIET: Duration = Duration::from_secs(3);

/// What is promised for each repair.
fn repair_max() -> Duration {
    repair_limit(Duration::from_secs(1))
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn discover_in(
    namespace: &Namespace,
    options: &InterfaceOptions,
) -> (Result<ExternalInterface, InterfaceError>, String) {
    namespace.enter(|| async { discover(options).await })
}

fn chosen(namespace: &Namespace, options: &InterfaceOptions) -> String {
    match discover_in(namespace, options).0 {
        Ok(found) => {
            let (address, public_address) = (found.address(), found.node_address());
            format!("{} {address} {public_address} {}", found.name, found.mtu_bytes)
        }
        Err(error) => chain(&error),
    }
}

fn named(interface: &str) -> InterfaceOptions {
    InterfaceOptions { interfaces: vec![interface.to_owned()], ..InterfaceOptions::default() }
}

fn reaching(destination: &str) -> InterfaceOptions {
    InterfaceOptions { can_reach: destination.parse().ok(), ..InterfaceOptions::default() }
}

#[test]
fn lowest_metric_default_route_selects_the_interface() {
    let namespace = Namespace::with_links();
    namespace.ip("address add 192.0.2.2/24 dev eth0");
    namespace.ip("address add 198.51.100.2/24 dev eth1");
    namespace.ip("link set eth1 mtu 9000");
    let default = InterfaceOptions::default();
    assert!(chosen(&namespace, &default).contains("--iface"), "no word of what to do");

    namespace.ip("route add default via 192.0.2.1 metric 200");
    assert_eq!(chosen(&namespace, &default), "eth0 192.0.2.2 192.0.2.2 1500");

    namespace.ip("route add default via 198.51.100.1 metric 100");
    let (found, _) = discover_in(&namespace, &default);
    let found = found.unwrap();
    assert_eq!(found.name, "eth1");
    assert_eq!(found.mtu_bytes, 9000);
    assert!(namespace.ip("link show eth1").starts_with(&format!("{}:", found.index)));

    // A default in another table is none of ours.
    namespace.ip("route add default dev eth0 table 77");
    assert!(chosen(&namespace, &default).starts_with("eth1 "));
}

#[test]
fn a_multipath_default_is_refused() {
    let namespace = Namespace::with_links();
    namespace.ip("address add 192.0.2.2/24 dev eth0");
    namespace.ip("address add 198.51.100.2/24 dev eth1");
    namespace
        .ip("route add default nexthop via 192.0.2.1 dev eth0 nexthop via 198.51.100.1 dev eth1");
    let (missed, _) = discover_in(&namespace, &InterfaceOptions::default());
    assert!(matches!(missed, Err(InterfaceError::None(_))), "{missed:?}");
    assert_eq!(chosen(&namespace, &named("eth1")), "eth1 198.51.100.2 198.51.100.2 1500");
}

#[test]
fn the_address_is_chosen_by_its_flags() {
    let namespace = Namespace::with_links();
    namespace.ip("address add 169.254.7.7/16 dev eth0 scope link");
    assert_eq!(chosen(&namespace, &named("eth0")), "eth0 169.254.7.7 169.254.7.7 1500");
    namespace.ip("address add 10.0.0.1/24 dev eth0 valid_lft 600 preferred_lft 600");
    assert_eq!(chosen(&namespace, &named("eth0")), "eth0 10.0.0.1 10.0.0.1 1500");
    namespace.ip("address add 10.0.1.1/24 dev eth0");
    assert_eq!(chosen(&namespace, &named("eth0")), "eth0 10.0.1.1 10.0.1.1 1500");
    namespace.ip("address change 10.0.1.1/24 dev eth0 valid_lft 600 preferred_lft 0");
    assert_eq!(chosen(&namespace, &named("eth0")), "eth0 10.0.0.1 10.0.0.1 1500");
    // Asked for by name, any address of the interface will do.
    assert_eq!(chosen(&namespace, &named("10.0.1.1")), "eth0 10.0.1.1 10.0.1.1 1500");
    // Of a point-to-point link the near end counts.
    namespace.ip("address add 10.9.0.1 peer 10.9.0.2 dev eth1");
    assert_eq!(chosen(&namespace, &named("eth1")), "eth1 10.9.0.1 10.9.0.1 1500");
    let (missed, _) = discover_in(&namespace, &named("10.9.0.2"));
    assert!(matches!(missed, Err(InterfaceError::None(_))), "{missed:?}");
}

#[test]
fn unmatched_pattern_lists_all_addresses() {
    let namespace = Namespace::with_links();
    namespace.ip("address add 192.0.2.2/24 dev eth0");
    namespace.ip("address add 10.44.0.2/24 dev eth0");
    let pattern = |text| InterfaceOptions {
        regexes: vec![Regex::new(text).unwrap()],
        ..InterfaceOptions::default()
    };
    assert_eq!(chosen(&namespace, &pattern(r"^10\.44\.")), "eth0 10.44.0.2 10.44.0.2 1500");
    let text = chosen(&namespace, &pattern("wlan"));
    for candidate in ["lo:none", "eth0:192.0.2.2, eth0:10.44.0.2", "eth1:none", "far-eth1:none"] {
        assert!(text.contains(candidate), "{text}");
    }
}

#[test]
fn can_reach_follows_the_kernels_routes() {
    let namespace = Namespace::with_links();
    namespace.ip("address add 192.0.2.2/24 dev eth0");
    namespace.ip("address add 198.51.100.2/24 dev eth1");
    namespace.ip("address add 10.44.0.2/24 dev eth1");
    namespace.ip("route add 203.0.113.0/24 via 198.51.100.1 src 10.44.0.2");
    assert_eq!(chosen(&namespace, &reaching("203.0.113.9")), "eth1 10.44.0.2 10.44.0.2 1500");
    assert_eq!(chosen(&namespace, &reaching("192.0.2.9")), "eth0 192.0.2.2 192.0.2.2 1500");

    let (missed, log) = discover_in(&namespace, &reaching("172.31.0.1"));
    assert!(matches!(missed, Err(InterfaceError::None(_))), "{missed:?}");
    // ENETUNREACH.
    assert!(log.contains("os error 101") && log.contains("172.31.0.1"), "{log}");
    let (missed, log) = discover_in(&namespace, &reaching("2001:db8::1"));
    assert!(missed.is_err());
    assert!(log.contains("IPv6"), "{log}");
}

#[test]
fn edit_errors_name_operation_and_object() {
    let namespace = Namespace::with_links();
    let index = index_of(&namespace, "eth0");
    let (inside, namespace) = (&namespace, &namespace);
    namespace.enter(|| async move {
        let eth0 = netlink::link_named("eth0").await.unwrap().unwrap().id;
        assert_eq!(eth0.index, index);
        assert_eq!(netlink::link_named("nope").await.unwrap(), None);
        let address = Ipv4Addr::new(192, 0, 2, 2);
        netlink::add_address(&eth0, address, 24).await.unwrap();
        let again = netlink::add_address(&eth0, address, 24).await.unwrap_err();
        assert!(again.is_already_there(), "{again:?}");
        for part in ["192.0.2.2/24", "eth0", &format!("{index}"), "(os error 17)"] {
            assert!(chain(&again).contains(part), "{part} is not named: {}", chain(&again));
        }
        let mut route = RouteSpec {
            gateway: Some(Ipv4Addr::new(192, 0, 2, 1)),
            metric: 7,
            ..RouteSpec::into_device("10.1.0.0/16".parse().unwrap(), eth0.clone())
        };
        netlink::add_route(&route).await.unwrap();
        assert!(netlink::add_route(&route).await.unwrap_err().is_already_there());
        route.gateway = Some(Ipv4Addr::new(192, 0, 2, 3));
        netlink::replace_route(&route).await.unwrap();
        let read = routes::routes_to::<Ipv4Addr>(|_| true).await.unwrap();
        let read: Vec<_> = read.iter().filter(|r| r.destination == route.destination).collect();
        assert_eq!(read.len(), 1);
        assert_eq!(read[0].next_hops[0].gateway, Some("192.0.2.3".parse().unwrap()));
        assert_eq!((read[0].metric, read[0].protocol), (7, RouteProtocol::BOOT));
        assert_eq!(read[0].mtu_bytes, None);
        route.mtu_bytes = Some(1300);
        netlink::replace_route(&route).await.unwrap();
        let read = routes::routes_to(|to| to == route.destination).await.unwrap();
        let mtus: Vec<_> = read.iter().map(|route| route.mtu_bytes).collect();
        assert_eq!(mtus, [Some(1300)], "in place of the one without: {read:?}");
        netlink::remove_route(&route).await.unwrap();
        let gone = netlink::remove_route(&route).await.unwrap_err();
        assert!(gone.is_already_gone(), "{gone:?}");
        inside.ip("route add 10.1.0.0/16 dev eth0 scope link metric 7");
        let unscoped = RouteSpec { gateway: None, mtu_bytes: None, ..route.clone() };
        netlink::remove_route(&unscoped).await.expect("a route of another scope goes, too");
        assert!(gone.to_string().contains("remove route 10.1.0.0/16 via 192.0.2.3 dev eth0"));
        netlink::remove_address(&eth0, address, 24).await.unwrap();
        let gone = netlink::remove_address(&eth0, address, 24).await.unwrap_err();
        assert!(gone.is_already_gone(), "{gone:?}");
        let lost = LinkId { index: 987_654, name: "lost0".to_owned() };
        let error = netlink::set_mtu(&lost, 1400).await.unwrap_err();
        assert!(error.is_already_gone(), "{error:?}");
        assert!(error.to_string().contains("set MTU 1400 on lost0"), "{error}");
    });
}

#[test]
fn routes_elsewhere_are_neither_listed_nor_news() {
    let namespace = Namespace::with_links();
    let own: Prefix = "10.5.0.0/16".parse().unwrap();
    namespace.enter(|| async {
        let all = routes::routes_to::<Ipv4Addr>(|_| true).await.unwrap();
        assert_eq!(all, [], "a namespace whose main table is not there yet");
        namespace.ip("address add 192.0.2.2/24 dev eth0");
        for number in 0..200 {
            namespace.ip(&format!("route add 10.7.{number}.0/24 via 192.0.2.1"));
        }
        namespace.ip("route add 10.5.7.0/24 via 192.0.2.1 metric 5");
        namespace.ip("route add 10.5.7.0/24 via 192.0.2.3");
        namespace.ip("route add 10.5.8.0/24 via 192.0.2.1 table 100");
        let found = routes::routes_to(|to| own.covers(to)).await.unwrap();
        let metrics: Vec<_> = found.iter().map(|route| route.metric).collect();
        assert_eq!(metrics, [0, 5], "of one destination the one that wins comes first: {found:?}");
        assert_eq!(
            routes::routes_to::<Ipv4Addr>(|_| true).await.unwrap().len(),
            203,
            "one is the link's"
        );

        let mut events = Events::subscribe(false).unwrap().only_about(&[own], &[]);
        while tokio::time::timeout(QUIET, events.changed()).await.is_ok() {}
        for number in 0..20 {
            namespace.ip(&format!("route del 10.7.{number}.0/24"));
        }
        namespace.ip("route add 10.5.9.0/24 via 192.0.2.1 table 100");
        let news = tokio::time::timeout(QUIET, events.changed()).await;
        assert!(news.is_err(), "routes elsewhere: {news:?}");
        namespace.ip("route del 10.5.7.0/24 via 192.0.2.3");
        let news = tokio::time::timeout(10 * QUIET, events.changed()).await;
        assert!(matches!(news, Ok(Ok(()))), "a route inside: {news:?}");
        namespace.ip("link set eth0 mtu 1400");
        let news = tokio::time::timeout(10 * QUIET, events.changed()).await;
        assert!(matches!(news, Ok(Ok(()))), "a link: {news:?}");
    });
}

#[test]
fn burst_of_edits_is_one_event() {
    const SOON: Duration = Duration::from_millis(500);
    let namespace = Namespace::with_links();
    namespace.enter(|| async {
        let mut events = Events::subscribe(false).unwrap();
        while tokio::time::timeout(QUIET, events.changed()).await.is_ok() {}
        for command in [
            "address add 192.0.2.2/24 dev eth0",
            "route add 10.7.0.0/16 dev eth0",
            "link set eth0 mtu 1400",
        ] {
            namespace.ip(command);
            let news = tokio::time::timeout(SOON, events.changed()).await;
            assert!(matches!(news, Ok(Ok(()))), "{command}: {news:?}");
        }
        while tokio::time::timeout(QUIET, events.changed()).await.is_ok() {}

        let eth1 = netlink::link_named("eth1").await.unwrap().unwrap().id;
        for last in 1..=200 {
            netlink::add_address(&eth1, Ipv4Addr::new(10, 8, 0, last), 32).await.unwrap();
        }
        tokio::time::timeout(SOON, events.changed()).await.unwrap().unwrap();
        let more = tokio::time::timeout(Duration::from_millis(100), events.changed()).await;
        assert!(more.is_err(), "a burst was reported twice");

        // News that a cancelled wait had taken are reported by the next one.
        let mut cancelled = 0;
        for mtu in 1300..1310 {
            namespace.ip(&format!("link set eth0 mtu {mtu}"));
            if tokio::time::timeout(Duration::from_millis(10), events.changed()).await.is_err() {
                cancelled += 1;
                tokio::time::timeout(SOON, events.changed()).await.unwrap().unwrap();
            }
        }
        assert!(cancelled > 0, "no wait was cancelled");
    });
}

fn index_of(namespace: &Namespace, name: &str) -> u32 {
    let line = namespace.ip(&format!("link show {name}"));
    line.split(':').next().unwrap().parse().unwrap()
}

fn network() -> Prefix {
    "10.5.0.0/16".parse().unwrap()
}

fn with_tun() -> (Namespace, OverlayDesired) {
    let namespace = Namespace::with_links();
    namespace.ip("address add 192.0.2.2/24 dev eth0");
    namespace.ip("tuntap add dev flannel0 mode tun");
    let desired = OverlayDesired {
        device: LinkId { index: index_of(&namespace, "flannel0"), name: "flannel0".to_owned() },
        mtu_bytes: 1472,
        v4: Some(OverlayPart::of(network(), Some("10.5.72.0/24".parse().unwrap()))),
        v6: None,
    };
    (namespace, desired)
}

async fn follower() -> HostFollower {
    let interface = named("eth0");
    let external = discover(&interface).await.unwrap();
    let networks = vec![network()];
    let period = Duration::from_secs(60);
    let (follow_address, all_route_events) = (true, false);
    HostFollower::new(Following {
        external,
        interface,
        follow_address,
        networks,
        networks_v6: Vec::new(),
        all_route_events,
        period,
    })
    .unwrap()
}

/// Reconciles the overlay at each change, as the udp backend does.
async fn hold(host: &mut HostFollower, overlay: &mut Overlay) -> OverlayError {
    loop {
        let listing = host.next().await;
        match overlay.reconcile(&listing).await {
            Ok(_) => host.finish(true),
            Err(OverlayError::Netlink(error)) => host.fail(&error),
            Err(error) => return error,
        }
    }
}

async fn reconcile(overlay: &mut Overlay) -> Vec<String> {
    let listing = Listing::read(&[network()], &[]).await.unwrap();
    overlay.reconcile(&listing).await.unwrap()
}

/// What `ip` says about the device, in the form of a flannel host.
fn assert_complete(namespace: &Namespace) {
    let link = namespace.ip("link show flannel0");
    assert!(link.contains("mtu 1472") && link.contains("qlen 3000"), "{link}");
    assert!(link.contains(",UP"), "{link}");
    let addresses = namespace.ip("-4 -oneline address show dev flannel0");
    assert!(addresses.contains("inet 10.5.72.0/32 scope global flannel0"), "{addresses}");
    assert_eq!(addresses.lines().count(), 1, "{addresses}");
    let routes = namespace.ip("-details route show 10.5.0.0/16");
    assert!(
        routes.starts_with("unicast 10.5.0.0/16 dev flannel0 proto boot ")
            && routes.contains("scope global"),
        "{routes}"
    );
    assert_eq!(routes.lines().count(), 1, "{routes}");
}

#[test]
fn new_device_looks_like_flannels() {
    let (namespace, desired) = with_tun();
    namespace.enter(|| async {
        let mut overlay = Overlay::establish(desired).await.unwrap();
        assert_complete(&namespace);
        assert_eq!(reconcile(&mut overlay).await, [""; 0]);
    });
}

#[test]
fn foreign_route_refuses_the_start() {
    let (namespace, desired) = with_tun();
    for (foreign, named) in [
        ("10.5.0.0/16 via 192.0.2.1", "10.5.0.0/16 via 192.0.2.1 dev eth0"),
        ("blackhole 10.5.0.0/16", "blackhole 10.5.0.0/16"),
    ] {
        namespace.ip(&format!("route add {foreign}"));
        let (error, _) = namespace.enter(|| async { Overlay::check(&desired).await.unwrap_err() });
        assert!(matches!(error, OverlayError::ForeignRoute(_)), "{error:?}");
        assert!(error.to_string().contains(&format!("route del {named})")), "{error}");
        // The advice works as it stands.
        namespace.ip(&format!("route del {named}"));
    }
    // Routes that ours wins against, inside the network, and around it, are no conflict.
    namespace.ip("route add 10.5.0.0/16 dev eth1 metric 50");
    namespace.ip("route add blackhole 10.5.0.0/16 metric 60");
    namespace.ip("route add 10.5.72.0/24 dev eth1");
    namespace.ip("route add 10.0.0.0/8 dev eth1");
    namespace.enter(|| async {
        Overlay::check(&desired).await.unwrap();
        Overlay::establish(desired).await.unwrap();
        namespace.ip("route del 10.5.0.0/16 dev eth1 metric 50");
        namespace.ip("route del blackhole 10.5.0.0/16 metric 60");
        assert_complete(&namespace);
    });
}

#[test]
fn removed_settings_return_within_a_second() {
    let (namespace, desired) = with_tun();
    let (longest, log) = namespace.enter(|| async {
        let mut host = follower().await;
        let mut overlay = Overlay::establish(desired).await.unwrap();
        let mut longest = Duration::ZERO;
        let damage = async {
            for command in [
                "address del 10.5.72.0/32 dev flannel0",
                "route del 10.5.0.0/16 dev flannel0",
                "link set flannel0 down",
                "address flush dev flannel0",
                "address add 10.5.99.1/16 dev flannel0",
            ] {
                settle().await;
                namespace.ip(command);
                let start = Stopwatch::start();
                while !is_complete(&namespace) {
                    assert!(start.elapsed() < repair_max(), "not restored after: {command}");
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                longest = longest.max(start.elapsed());
            }
            // The kernel shows a repair before its line is written.
            settle().await;
        };
        tokio::select! {
            error = hold(&mut host, &mut overlay) => panic!("{error}"),
            () = damage => {}
        }
        assert_complete(&namespace);
        longest
    });
    println!("longest repair: {longest:?}");
    for repaired in ["10.5.72.0/32", "10.5.0.0/16", "10.5.99.1/16"] {
        assert!(log.lines().any(|line| line.contains(repaired)), "{repaired} in {log}");
    }
}

fn is_complete(namespace: &Namespace) -> bool {
    let addresses = namespace.ip("-4 -oneline address show dev flannel0");
    addresses.contains("inet 10.5.72.0/32")
        && addresses.lines().count() == 1
        && namespace.ip("route show 10.5.0.0/16").contains("dev flannel0")
        && namespace.ip("link show flannel0").contains(",UP")
}

/// Lets the events of the own edits pass, so that the next measurement starts from rest.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(200)).await;
}

#[test]
fn foreign_mtu_is_logged_and_kept() {
    let (namespace, desired) = with_tun();
    let ((), log) = namespace.enter(|| async {
        let mut overlay = Overlay::establish(desired).await.unwrap();
        namespace.ip("link set flannel0 mtu 1300");
        for _ in 0..3 {
            assert_eq!(reconcile(&mut overlay).await, [""; 0]);
        }
        assert!(namespace.ip("link show flannel0").contains("mtu 1300"));
        // Nor does a change of the underlay overrule it, until it is taken back.
        assert!(!overlay.follow_mtu(1372).await.unwrap());
        assert!(namespace.ip("link show flannel0").contains("mtu 1300"));
        namespace.ip("link set flannel0 mtu 1372");
        assert_eq!(reconcile(&mut overlay).await, [""; 0]);
        assert!(overlay.follow_mtu(1400).await.unwrap());
        assert_eq!(reconcile(&mut overlay).await, [""; 0]);
        assert!(namespace.ip("link show flannel0").contains("mtu 1400"));
    });
    let lines: Vec<_> = log.lines().collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line.contains("flannel0")), "{log}");
    assert!(lines[0].contains("1472") && lines[0].contains("1300"), "what was changed: {log}");
    assert!(lines[1].contains("1372"), "that it is as it was: {log}");
}

#[test]
fn own_route_returns_after_a_foreign_one() {
    let (namespace, desired) = with_tun();
    let ((), log) = namespace.enter(|| async {
        let mut overlay = Overlay::establish(desired).await.unwrap();
        namespace.ip("route replace 10.5.0.0/16 via 192.0.2.1");
        for _ in 0..3 {
            assert_eq!(reconcile(&mut overlay).await, [""; 0]);
        }
        namespace.ip("route del 10.5.0.0/16 via 192.0.2.1");
        assert_eq!(reconcile(&mut overlay).await.len(), 1);
        assert_complete(&namespace);
    });
    assert_eq!(log.matches("10.5.0.0/16 via 192.0.2.1 dev eth0").count(), 1, "{log}");
}

#[test]
fn deleted_device_is_noticed_within_a_second() {
    let (namespace, desired) = with_tun();
    namespace.enter(|| async {
        let mut host = follower().await;
        let mut overlay = Overlay::establish(desired).await.unwrap();
        let start = Stopwatch::start();
        let damage = async {
            settle().await;
            namespace.ip("link del flannel0");
            std::future::pending::<()>().await;
        };
        let held = async {
            tokio::select! {
                error = hold(&mut host, &mut overlay) => error,
                () = damage => unreachable!("the damage never ends"),
            }
        };
        let error = within(2 * repair_max(), held).await.expect("the loss is noticed");
        assert!(matches!(error, OverlayError::DeviceGone(_)), "{error:?}");
        assert!(error.to_string().contains("flannel0"), "{error}");
        assert!(start.elapsed() < repair_max() + Duration::from_millis(200));
    });
}
