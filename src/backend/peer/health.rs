//! Asks the peers of one backend how they are, and publishes it: carries out what `machine`
//! decides, and tells it what came.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::warn;

use super::capture::Capture;
use super::echoes::{ECHO_BYTES, Echo, Echoes};
use super::evidence::{Ask, Evidence, LOOK, Reached, Sample};
use super::machine::Machine;
use super::state::{Obstacle, Reachability};
use crate::packet::echo::{Answer, Message, Reason, Reply, TTL};
use crate::route::{Families, Prefixes};

/// Messages that come within this time are taken together, so that a flood of them is no load. The
/// kernel says when each came.
const GATHER: Duration = Duration::from_millis(50);

/// With no router in between, and with one: see [`Manner::may_expire`].
const EXPIRING: [u8; 2] = [1, 2];

/// Until a tick that only a look brings forward.
const LONG: Duration = Duration::from_secs(3600);

/// What is particular to a backend.
#[derive(Debug, Clone, Copy)]
pub(in crate::backend) struct Manner {
    /// Over which peers are asked.
    pub(in crate::backend) families: Families<(), ()>,
    /// Of the tunnel, if there is one.
    pub(in crate::backend) port: Option<u16>,
    /// With so many routers left, an echo to what is behind a peer expires there.
    pub(in crate::backend) ttl: u8,
    /// Whether the echoes that peers are asked for may expire there as well, for nobody may have
    /// the address: with no router in between, and with one that counts, which a cloud may have.
    pub(in crate::backend) may_expire: bool,
    /// Whether the kernel tells of use at times only.
    pub(in crate::backend) is_use_rare: bool,
}

#[derive(Debug)]
pub(in crate::backend) struct Health {
    manner: Manner,
    pub(in crate::backend) machine: Machine,
    /// `None` without the right to raw sockets; then nobody is asked.
    pub(in crate::backend) echoes: Option<Echoes>,
    capture: Capture,
    next_look: Instant,
    next_tick: Instant,
    /// Whether an answer may come any moment.
    is_waiting: bool,
    /// When messages were last taken.
    received: Instant,
    published: watch::Sender<Arc<Reachability>>,
}

impl Health {
    pub(in crate::backend) fn open(manner: Manner) -> Self {
        let echoes = Echoes::open(manner.families, manner.is_use_rare).inspect_err(|error| {
            warn!(
                "peers are not asked how they are, and paths not measured: no raw ICMP socket \
                 ({error}); grant CAP_NET_RAW"
            );
        });
        Self {
            manner,
            machine: Machine::new(manner.is_use_rare, fastrand::u64(..)),
            echoes: echoes.ok(),
            capture: Capture::new(manner.port),
            next_look: Instant::now(),
            next_tick: Instant::now(),
            is_waiting: false,
            received: Instant::now(),
            published: watch::Sender::default(),
        }
    }

    /// How the peers are, and each change of it.
    pub(in crate::backend) fn view(&self) -> watch::Receiver<Arc<Reachability>> {
        self.published.subscribe()
    }

    /// Whether peers without IPv4 are asked, as far as anybody is.
    pub(in crate::backend) fn asks_over_ipv6(&self) -> bool {
        self.echoes.as_ref().is_none_or(Echoes::has_ipv6)
    }

    /// Whether to look at counts now; the next look is `period` later.
    pub(in crate::backend) fn is_look_due(&mut self, period: Duration, now: Instant) -> bool {
        let is_due = now >= self.next_look;
        if is_due {
            self.next_look = now + period;
        }
        is_due
    }

    /// Takes in what was counted of each peer, and publishes how they are.
    pub(in crate::backend) fn look(
        &mut self,
        count: impl FnMut(IpAddr, &[Reached]) -> Sample,
        path_mtus: &BTreeMap<Prefixes, u16>,
        now: Instant,
    ) {
        self.machine.look(count, now);
        if self.machine.is_use_in_doubt() {
            self.next_look = self.next_look.min(now + LOOK);
        }
        self.next_tick = now;
        let contacts = self.machine.contacts(now);
        let path_mtus = path_mtus.clone();
        self.published.send_replace(Arc::new(Reachability { contacts, path_mtus }));
    }

    /// Takes in what came. `own` are this host's addresses; echoes of other lengths than ours are
    /// handed to `others`, if they came the way that they must.
    pub(in crate::backend) fn receive(
        &mut self,
        own: &[IpAddr],
        now: Instant,
        mut others: impl FnMut(Reply),
    ) {
        // An age beyond this is none: the clock was set.
        let unread = now.duration_since(std::mem::replace(&mut self.received, now));
        let Self { manner, machine, echoes: Some(echoes), capture, .. } = self else { return };
        let mut captured = Vec::new();
        // Before the socket, which has by then what was captured, unless a rule takes it away.
        capture.receive(|packet, interface, host, evidence| {
            evidence.iter().for_each(|evidence| machine.note(host, *evidence, now));
            let message = Message::read(packet).and_then(|message| echoes.read(&message));
            captured.extend(message.map(|message| (interface, Duration::ZERO, message)));
        });
        let mut messages = echoes.receive();
        let by_socket = messages.len();
        messages.extend(captured);
        for (number, (interface, age, message)) in messages.into_iter().enumerate() {
            let meaning = meaning(message, interface, machine, *manner, own);
            let Some((host, evidence)) = meaning else { continue };
            match (message, evidence) {
                (Answer::Reply(reply), _) if reply.total_bytes != ECHO_BYTES => others(reply),
                (_, Evidence::Echoed(_) | Evidence::Expired(_) | Evidence::Returned(_))
                    if number >= by_socket =>
                {
                    machine.note(host, Evidence::Overheard, now);
                }
                _ => machine.note(host, evidence, now - age.min(unread)),
            }
        }
    }

    /// Sends the echoes that are due. Gives those with which to try the way to the host itself.
    pub(in crate::backend) fn tick(&mut self, now: Instant) -> Vec<Ask> {
        if now < self.next_tick {
            return Vec::new();
        }
        self.next_tick = now + LONG;
        let Self { manner, machine, echoes: Some(echoes), capture, .. } = self else {
            return Vec::new();
        };
        let mut asks = machine.tick(now);
        let mut all = Vec::with_capacity(asks.len());
        for &Ask { host, target, beyond, asks_host, sequence } in &asks {
            let ttls: &[u8] = if manner.may_expire { &EXPIRING } else { &[TTL] };
            let beyond = beyond.map(|beyond| (beyond, manner.ttl));
            let echo = |(to, ttl)| Echo { of: Some(host), to, ttl, sequence };
            all.extend(ttls.iter().map(|ttl| (target, *ttl)).chain(beyond).map(echo));
            if asks_host && host != target {
                // One that can't be sent says nothing of the tunnel.
                all.push(Echo { of: None, to: host, ttl: TTL, sequence });
            }
        }
        echoes.send(&all, |echo, error| {
            if let Some((host, evidence)) = echo.of.zip(refusal(error)) {
                machine.note(host, evidence, now);
            }
        });
        capture.watch(machine.in_question(now), machine.external, now);
        self.is_waiting = machine.is_waiting(now);
        self.next_tick = now + machine.until_tick(now).unwrap_or(LONG);
        asks.retain(|ask| ask.asks_host);
        asks
    }

    /// The peers in use that left an echo unanswered.
    pub(in crate::backend) fn in_question(&self, now: Instant) -> BTreeSet<IpAddr> {
        self.machine.in_question(now).map(|(host, _)| host).collect()
    }

    /// This host can't send to that one.
    pub(in crate::backend) fn note_error(&mut self, host: IpAddr, error: &io::Error) {
        // A firewall of this host may drop echoes, and not be meant for what carries packets. Of a
        // buffer that is full for a moment nothing follows.
        let is_passing =
            Errno::from_io_error(error).is_some_and(|it| it == Errno::AGAIN || it == Errno::NOBUFS);
        if let Some(errno) = error.raw_os_error().filter(|_| !is_passing) {
            let evidence = Evidence::Unsendable(Obstacle::Errno(errno));
            self.machine.note(host, evidence, Instant::now());
        }
    }

    /// Until there may be something to do, `at_most` so long. Cancel-safe.
    pub(in crate::backend) async fn pause(&self, at_most: Duration) {
        let now = Instant::now();
        let until = self.next_look.min(self.next_tick).saturating_duration_since(now);
        let pause = at_most.min(until);
        // Where use is told at times only, it must be known when the kernel answered others.
        let is_urgent = self.is_waiting || self.manner.is_use_rare;
        match self.echoes.as_ref().filter(|_| is_urgent) {
            Some(echoes) => {
                sleep((self.received + GATHER).saturating_duration_since(now).min(pause)).await;
                timeout(pause, echoes.readable()).await.ok();
            }
            // Other answers wait in the socket: none is urgent before something is due.
            None => sleep(pause).await,
        }
    }
}

/// What a message that came by this interface shows of which peer; `None` if it came another way
/// than it must. Answers have a token that only their peer has seen, so those from outside of a
/// tunnel may come by any interface: on a host with several in one network they do.
fn meaning(
    message: Answer,
    interface: u32,
    machine: &Machine,
    Manner { port, may_expire, .. }: Manner,
    own: &[IpAddr],
) -> Option<(IpAddr, Evidence)> {
    let neighbour = Evidence::Unsendable(Obstacle::Neighbour);
    let answerer = |address| {
        let (host, by) = machine.place_of(address)?;
        (by == interface || by == machine.external).then_some(host)
    };
    match message {
        Answer::Asked(asker) => {
            let (host, by) = machine.place_of(asker)?;
            (by == interface).then_some((host, Evidence::Asked))
        }
        Answer::Reply(reply) => {
            let host = answerer(reply.source)?;
            let is_target = machine.is_target(reply.source);
            let evidence =
                if is_target { Evidence::Echoed(reply.sequence) } else { Evidence::HostAnswered };
            Some((host, evidence))
        }
        // The kernel takes a packet of IPv4 from one of its own addresses from nobody but itself.
        Answer::Lost { by, destination, code, .. } if own.contains(&by) => {
            let (host, _) = machine.place_of(destination)?;
            let reason = code.map(|code| Reason::of(by, code));
            (reason == Some(Reason::NoHost)).then_some((host, neighbour))
        }
        Answer::Lost { by, destination, sequence, code } => {
            let (host, _) = machine.place_of(destination)?;
            // Of another address, an echo expires only where packets go in circles.
            let is_beyond = machine.is_beyond(destination);
            let evidence = match code {
                None if may_expire && !is_beyond => Evidence::Returned(sequence),
                None if !is_beyond => return None,
                None | Some(_) => Evidence::Expired(sequence),
            };
            // Another router, to which a wrong route leads, is no peer.
            (answerer(by) == Some(host)).then_some((host, evidence))
        }
        Answer::Refused { by, code, source, destination, echo_to } => {
            let (host, _) = machine.place_of(destination.ip())?;
            let asked = echo_to.and_then(|address| machine.place_of(address));
            let has_echo = asked.is_some_and(|(asked, _)| asked == host);
            let reason = Reason::of(by, code);
            if Some(destination.port()) != port || !own.contains(&source) {
                None
            } else if own.contains(&by) {
                let forbidden = Evidence::Unsendable(Obstacle::Errno(Errno::PERM.raw_os_error()));
                let evidence = if reason == Reason::NoHost { neighbour } else { forbidden };
                // That of IPv6 takes it from others, too.
                (by.is_ipv4() || has_echo).then_some((host, evidence))
            } else {
                // Of routers nothing is known, but that they have seen an echo to it. Who knows no
                // way does not refuse.
                let is_refusal = matches!(reason, Reason::NoPort | Reason::Forbidden);
                let is_on_path = by == host || has_echo;
                (is_on_path && interface == machine.external && is_refusal)
                    .then_some((host, Evidence::Refused { by, code }))
            }
        }
    }
}

/// What a refused echo says of this host's routes, or of its firewall, which need not be meant for
/// what carries packets. Of a full buffer nothing follows.
fn refusal(error: io::Error) -> Option<Evidence> {
    let of_routes = [
        Errno::INVAL,
        Errno::ACCESS,
        Errno::NETUNREACH,
        Errno::HOSTUNREACH,
        Errno::NETDOWN,
        Errno::NODEV,
    ];
    let errno = Errno::from_io_error(&error)?;
    if errno == Errno::PERM {
        return Some(Evidence::Unasked);
    }
    let obstacle = Obstacle::Errno(errno.raw_os_error());
    of_routes.contains(&errno).then_some(Evidence::Unsendable(obstacle))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;
    use crate::backend::peer::evidence::Hosts;
    use crate::packet::echo::Answer::{Lost, Refused, Reply as Echo};

    const OWN: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 9));
    const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    const TARGET: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 5, 1, 0));
    const BEYOND: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 5, 1, 254));
    const ROUTER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 254));
    const EXTERNAL: u32 = 2;
    const TUNNEL: u32 = 7;
    const POD: u32 = 9;

    /// What a message shows of the host, which leases a subnet behind this interface.
    fn shown(message: Answer, by: u32, lease: u32) -> Option<Evidence> {
        let mut machine = Machine::new(false, 1);
        let subnet = "10.5.1.0/24".parse().unwrap();
        let reached = Reached { subnet, target: TARGET, interface: lease };
        machine.set_hosts(Hosts::from([(HOST, vec![reached])]), EXTERNAL);
        shown_by(message, by, &machine, manner(8285))
    }

    fn manner(port: u16) -> Manner {
        let families = Families::new(Some(()), Some(())).unwrap();
        Manner { families, port: Some(port), ttl: 1, may_expire: false, is_use_rare: false }
    }

    fn shown_by(message: Answer, by: u32, machine: &Machine, manner: Manner) -> Option<Evidence> {
        let meaning = meaning(message, by, machine, manner, &[OWN]);
        meaning.map(|(host, evidence)| (assert_eq!(host, HOST), evidence).1)
    }

    /// As in a cloud, where nobody may have the address that is asked.
    #[test]
    fn an_echo_that_expires_at_the_host_that_it_is_for_is_answered() {
        let mut machine = Machine::new(false, 1);
        let subnet = "10.5.1.0/24".parse().unwrap();
        let reached = Reached { subnet, target: TARGET, interface: EXTERNAL };
        machine.set_hosts(Hosts::from([(HOST, vec![reached])]), EXTERNAL);
        let expired = |by| Lost { by, destination: TARGET, sequence: 7, code: None };
        let of = |by, may_expire| {
            shown_by(expired(by), EXTERNAL, &machine, Manner { may_expire, ..manner(8285) })
        };
        assert_eq!(of(HOST, true), Some(Evidence::Returned(7)));
        assert_eq!(of(ROUTER, true), None, "the cloud's router is taken for the peer");
        assert_eq!(of(HOST, false), None);
    }

    fn reply(source: IpAddr) -> Answer {
        Echo(Reply { source, total_bytes: 84, token: 0, sequence: 7 })
    }

    #[test]
    fn what_went_through_the_tunnel_must_come_out_of_it() {
        let expired = Lost { by: TARGET, destination: BEYOND, sequence: 7, code: None };
        for (message, evidence) in [
            (reply(TARGET), Evidence::Echoed(7)),
            (expired, Evidence::Expired(7)),
            (Answer::Asked(TARGET), Evidence::Asked),
        ] {
            assert_eq!(shown(message, TUNNEL, TUNNEL), Some(evidence));
            for by in [EXTERNAL, POD, 0] {
                assert_eq!(shown(message, by, TUNNEL), None, "{message:?} by {by}");
            }
            assert_eq!(shown(message, EXTERNAL, EXTERNAL), Some(evidence), "without a tunnel");
        }
        let in_circles = Lost { by: TARGET, destination: TARGET, sequence: 7, code: None };
        assert_eq!(shown(in_circles, TUNNEL, TUNNEL), None, "it went in circles");
        assert_eq!(shown(Answer::Asked(TARGET), POD, EXTERNAL), None);
        assert_eq!(shown(reply(HOST), EXTERNAL, TUNNEL), Some(Evidence::HostAnswered));
        assert_eq!(shown(reply(ROUTER), EXTERNAL, TUNNEL), None);
    }

    #[test]
    fn a_refusal_is_of_the_host_or_by_who_has_seen_an_echo() {
        let refusal = |by, source, port, echo_to, interface| {
            let destination = SocketAddr::new(HOST, port);
            let answer = Refused { by, code: 3, source, destination, echo_to };
            shown(answer, interface, TUNNEL)
        };
        let refused = |by| Some(Evidence::Refused { by, code: 3 });
        assert_eq!(refusal(HOST, OWN, 8285, None, EXTERNAL), refused(HOST));
        assert_eq!(refusal(ROUTER, OWN, 8285, Some(TARGET), EXTERNAL), refused(ROUTER));
        assert_eq!(refusal(ROUTER, OWN, 8285, None, EXTERNAL), None, "nothing of ours");
        let another = Some(IpAddr::V4(Ipv4Addr::new(10, 5, 2, 0)));
        assert_eq!(refusal(ROUTER, OWN, 8285, another, EXTERNAL), None, "an echo to another");
        assert_eq!(refusal(HOST, OWN, 8285, Some(TARGET), POD), None, "from a pod");
        assert_eq!(refusal(HOST, OWN, 8285, Some(TARGET), TUNNEL), None, "out of the tunnel");
        assert_eq!(refusal(HOST, ROUTER, 8285, Some(TARGET), EXTERNAL), None, "of somebody else");
        assert_eq!(refusal(HOST, OWN, 53, Some(TARGET), EXTERNAL), None, "of another program");
        let own = |code, expected| {
            let destination = SocketAddr::new(HOST, 8285);
            let refused = Refused { by: OWN, code, source: OWN, destination, echo_to: None };
            let lost = Lost { by: OWN, destination: TARGET, sequence: 7, code: Some(code) };
            assert_eq!(shown(refused, 1, TUNNEL), Some(expected), "code {code}");
            let is_neighbour = expected == Evidence::Unsendable(Obstacle::Neighbour);
            assert_eq!(shown(lost, 1, TUNNEL).is_some(), is_neighbour, "{code}");
        };
        own(1, Evidence::Unsendable(Obstacle::Neighbour));
        for by_firewall in [3, 9, 10, 13] {
            own(by_firewall, Evidence::Unsendable(Obstacle::Errno(1)));
        }
    }

    /// What a message of IPv6 by `by` shows of a host without IPv4, behind a tunnel.
    fn shown_of_ipv6(message: Answer) -> Option<Evidence> {
        let mut machine = Machine::new(false, 1);
        let subnet = "fd00:5:1::/64".parse().unwrap();
        let reached = Reached { subnet, target: ip("fd00:5:1::"), interface: TUNNEL };
        machine.set_hosts(Hosts::from([(ip("fd99::1"), vec![reached])]), EXTERNAL);
        let meaning = meaning(message, EXTERNAL, &machine, manner(8472), &[ip("fd99::9")]);
        meaning.map(|(host, evidence)| (assert_eq!(host, ip("fd99::1")), evidence).1)
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn messages_of_ipv6_show_the_same_by_their_own_codes() {
        let neighbour = Evidence::Unsendable(Obstacle::Neighbour);
        let [host, own, target] = ["fd99::1", "fd99::9", "fd00:5:1::"].map(ip);
        for (code, evidence) in [(3, Some(neighbour)), (1, None), (0, None)] {
            let (by, destination, code) = (own, target, Some(code));
            let lost = Lost { by, destination, sequence: 7, code };
            assert_eq!(shown_of_ipv6(lost), evidence, "{code:?}");
        }
        let beyond = ip("fd00:5:1:0:ffff:ffff:ffff:fffe");
        let expired = Lost { by: host, destination: beyond, sequence: 7, code: None };
        assert_eq!(shown_of_ipv6(expired), Some(Evidence::Expired(7)), "the host is a router");
        let refused = |by, code, echo_to| {
            let destination = SocketAddr::new(host, 8472);
            shown_of_ipv6(Refused { by, code, source: own, destination, echo_to })
        };
        for code in [1, 4, 6] {
            assert_eq!(refused(host, code, None), Some(Evidence::Refused { by: host, code }));
        }
        for code in [0, 3] {
            assert_eq!(refused(host, code, None), None, "no way is no refusal: {code}");
        }
        assert_eq!(refused(own, 3, Some(target)), Some(neighbour));
        assert_eq!(refused(own, 3, None), None, "anybody may say so in this host's name");
    }
}
