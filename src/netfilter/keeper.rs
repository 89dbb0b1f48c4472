//! Keeps the rules in place: sets them at start, looks after them at each resync, and says what
//! it does. Decides when; what to change is `diff`'s, how it is spelled `iptables` and `nftables`.

use std::future::pending;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{debug, error, info, warn};

use crate::failure::{Told, with_causes};
use crate::netfilter::diff::Pass;
use crate::netfilter::iptables::{self, Ability};
use crate::netfilter::nftables;
use crate::netfilter::program::{
    IPTABLES, IPTABLES_RESTORE, IPTABLES_SAVE, LOCK_WAIT_S, Lines, NFT, ProgramError,
};
use crate::netfilter::rules::{Purpose, Wanted};

/// Longest pause after a failure that will pass, such as a lock that is held.
const RETRY: Duration = Duration::from_secs(1);

/// Tries at start before a refusal is believed: rules of others may change between our look and
/// our transaction.
const START_TRIES_MAX: u32 = 3;

/// Longest list that is read from nft: our own table, and the names of all.
const LIST_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Which of the kernel's firewalls holds the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// By way of iptables, whichever variant is installed.
    Iptables,
    /// By way of nft, in tables of our own.
    Nftables,
}

impl Flavour {
    /// As its users call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }
}

/// How the rules are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RuleState {
    /// Nobody needs to wait for them any more.
    pub is_settled: bool,
    /// The last look found or made them right.
    pub is_in_place: bool,
    /// Looks that succeeded.
    pub checks: u64,
    /// Times that something was missing after the start.
    pub repairs: u64,
    /// Looks and repairs that failed.
    pub failures: u64,
}

/// Why the rules could not be looked at or set.
#[derive(Debug, thiserror::Error)]
pub enum RuleError {
    /// A program did not do its work.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// nft's output can't be read.
    #[error(transparent)]
    List(#[from] nftables::ListError),
    /// Rules of nft's own in a table of iptables hide everything in there from it.
    #[error(
        "iptables cannot read its own tables, because rules of nft are in them ({0}): move those \
         to a table of their own, or set EnableNFTables"
    )]
    Incompatible(String),
}

impl RuleError {
    fn is_passing(&self) -> bool {
        matches!(self, Self::Program(error) if error.is_passing())
    }

    fn is_missing_program(&self) -> bool {
        matches!(self, Self::Program(ProgramError::Missing(_)))
    }
}

/// The keeper of one daemon's rules.
#[derive(Debug)]
pub struct RuleKeeper {
    flavour: Flavour,
    wanted: Wanted,
    resync: Duration,
    ability: Option<Ability>,
    /// Rules of the other flavour may still be there.
    is_other_due: bool,
    is_other_told: bool,
    told: Told,
    state: watch::Sender<RuleState>,
}

impl RuleKeeper {
    /// Will keep `wanted`, with a look at it every `resync`.
    #[must_use]
    pub fn new(flavour: Flavour, wanted: Wanted, resync: Duration) -> Self {
        Self {
            flavour,
            wanted,
            resync,
            ability: None,
            is_other_due: true,
            is_other_told: false,
            told: Told::default(),
            state: watch::Sender::new(RuleState::default()),
        }
    }

    /// How the rules are, and each change of that.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<RuleState> {
        self.state.subscribe()
    }

    /// For a report: the firewall that it works on, and how the rules are; `None` if it has none.
    #[must_use]
    pub fn kept(&self) -> Option<(Flavour, watch::Receiver<RuleState>)> {
        (!self.wanted.is_nothing()).then(|| (self.flavour, self.state()))
    }

    /// Sets the rules, then looks after them for ever. Ends at the start only, with what flanneld
    /// does not start without: masquerading that was asked for, and a working nft where the
    /// network configuration wants it. The rules stay when this is dropped.
    pub async fn keep(mut self) -> RuleError {
        if self.wanted.is_nothing() {
            self.state.send_modify(|state| state.is_settled = true);
            return pending().await;
        }
        self.announce();
        if let Err(error) = self.start().await {
            return error;
        }
        let mut pause = self.look_period();
        loop {
            sleep(pause).await;
            let begun = tokio::time::Instant::now();
            let result = self.pass(Pass::Check).await;
            pause = match &result {
                Err(error) if error.is_passing() => self.retry_pause(),
                Ok(_) | Err(_) => self.look_period().saturating_sub(begun.elapsed()),
            };
            if let Err(error) = result {
                self.tell(&error);
            }
        }
    }

    /// A little less than the resync: what is gone right after a look is back within it.
    fn look_period(&self) -> Duration {
        self.resync * 9 / 10
    }

    fn retry_pause(&self) -> Duration {
        self.resync.min(RETRY)
    }

    fn announce(&self) {
        info!("Starting flannel in {} mode...", self.flavour.name());
        if self.wanted.masquerade {
            info!("Setting up masking rules");
        }
        if self.wanted.forward {
            let network = self.wanted.network;
            info!("Setting up forward rules: what is from or to {network} is accepted");
        }
    }

    async fn start(&mut self) -> Result<(), RuleError> {
        let is_vital = self.wanted.masquerade || self.flavour == Flavour::Nftables;
        let mut refusals = 0;
        loop {
            let Err(error) = self.pass(Pass::First).await else { return Ok(()) };
            refusals += u32::from(!error.is_passing());
            let is_final = error.is_missing_program() || refusals >= START_TRIES_MAX;
            if is_final && is_vital {
                return Err(error);
            }
            self.tell(&error);
            if is_final {
                // flanneld runs without its forward rules, so nobody may wait for them.
                self.state.send_modify(|state| state.is_settled = true);
            }
            sleep(if is_final { self.look_period() } else { self.retry_pause() }).await;
        }
    }

    /// One look, and the repair if there is one to make.
    pub async fn pass(&mut self, pass: Pass) -> Result<bool, RuleError> {
        let result = match self.flavour {
            Flavour::Iptables => self.pass_iptables(pass).await,
            Flavour::Nftables => self.pass_nftables(pass).await,
        };
        match &result {
            Ok(is_changed) => self.succeeded(*is_changed && pass == Pass::Check),
            Err(_) => self.state.send_modify(|state| {
                state.is_in_place = false;
                state.failures += 1;
            }),
        }
        if result.is_ok() && self.is_other_due {
            self.is_other_due = !self.remove_other().await;
        }
        result
    }

    fn succeeded(&mut self, is_repair: bool) {
        if self.told.forget() {
            info!("the {} rules are in place", self.flavour.name());
        }
        self.state.send_modify(|state| {
            state.is_settled = true;
            state.is_in_place = true;
            state.checks += 1;
            state.repairs += u64::from(is_repair);
        });
    }

    /// Says why it failed, when that is news.
    fn tell(&mut self, error: &RuleError) {
        let flavour = self.flavour.name();
        self.told.once(&with_causes(error), |text| {
            error!("Failed to ensure {flavour} rules: {text}; trying again");
        });
    }

    async fn pass_iptables(&mut self, pass: Pass) -> Result<bool, RuleError> {
        let ability = match self.ability {
            Some(ability) => ability,
            None => *self.ability.insert(ask_iptables().await?),
        };
        let random_ports = self.wanted.random_ports && ability.random_ports;
        let wanted = Wanted { random_ports, ..self.wanted }.chains();
        let mut found = iptables::Found::default();
        for (purpose, _) in &wanted {
            if !(ability.lists_chains && list_chains(*purpose, &mut found).await?) {
                read_iptables(&["-t", iptables::table_of(*purpose)], &mut found).await?;
            }
        }
        let Some(text) = iptables::transaction(&wanted, &found, pass) else { return Ok(false) };
        if pass == Pass::Check {
            tell_of_repair(Flavour::Iptables);
        }
        restore(&text, ability).await?;
        Ok(true)
    }

    async fn pass_nftables(&mut self, pass: Pass) -> Result<bool, RuleError> {
        let found = read_nftables().await?;
        let apply = |wanted: Wanted, found| async move {
            let Some(text) = nftables::transaction(&wanted.chains(), found, pass) else {
                return Ok(false);
            };
            if pass == Pass::Check {
                tell_of_repair(Flavour::Nftables);
            }
            NFT.run(&["-f", "-"], &text, |_| {}).await.map(|()| true)
        };
        let result = apply(self.wanted, &found).await;
        let may_be_old = self.wanted.masquerade && self.wanted.random_ports && pass == Pass::First;
        match result {
            Err(ProgramError::Refused { complaint, .. }) if may_be_old => {
                let plain = Wanted { random_ports: false, ..self.wanted };
                let is_changed = apply(plain, &found).await?;
                warn!("nftables: random fully unsupported, going on without: {complaint}");
                self.wanted = plain;
                Ok(is_changed)
            }
            result => Ok(result?),
        }
    }

    /// Takes out what an earlier run left in the other firewall; whether that is done with.
    async fn remove_other(&mut self) -> bool {
        let (other, result) = match self.flavour {
            Flavour::Iptables => (Flavour::Nftables, remove_nftables().await),
            Flavour::Nftables => (Flavour::Iptables, remove_iptables().await),
        };
        match result {
            Ok(true) => info!("removed the {} rules of an earlier run", other.name()),
            Ok(false) => {}
            Err(error) if error.is_missing_program() => {
                debug!("no look for {} rules of an earlier run: {error}", other.name());
            }
            Err(error) => {
                let (name, text) = (other.name(), with_causes(&error));
                if !std::mem::replace(&mut self.is_other_told, true) {
                    warn!("{name} rules of an earlier run may be left, trying again: {text}");
                }
                return false;
            }
        }
        true
    }
}

fn tell_of_repair(flavour: Flavour) {
    info!("Some {} rules are missing or out of order; repairing them", flavour.name());
}

async fn ask_iptables() -> Result<Ability, ProgramError> {
    let mut line = Vec::new();
    IPTABLES.run(&["--version"], "", |chunk| line.extend_from_slice(chunk)).await?;
    let line = String::from_utf8_lossy(&line);
    debug!("{}", line.trim());
    Ok(Ability::of_version(&line))
}

/// Reads the two chains of `purpose`; false, and nothing read, if the kernel's own cannot be
/// listed. If ours cannot, it counts as missing: iptables tells that in words that differ by its
/// version, and the transaction that makes a chain empties one that is there.
async fn list_chains(purpose: Purpose, found: &mut iptables::Found) -> Result<bool, ProgramError> {
    let (table, mut read) = (iptables::table_of(purpose), found.clone());
    let [own, base] = iptables::chains_of(purpose);
    read.take_line(&format!("*{table}"));
    for chain in [base, own] {
        let (mut lines, mut chain_read) = (Lines::default(), read.clone());
        let take = |chunk: &[u8]| lines.take(chunk, |line| chain_read.take_line(line));
        match IPTABLES.run(&["-t", table, "-S", chain], "", take).await {
            Ok(()) => read = chain_read,
            Err(ProgramError::Refused { .. }) if chain == own => {}
            Err(ProgramError::Refused { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    *found = read;
    Ok(true)
}

async fn read_iptables(arguments: &[&str], found: &mut iptables::Found) -> Result<(), RuleError> {
    let (mut lines, mut incompatible) = (Lines::default(), None);
    let take = |chunk: &[u8]| {
        lines.take(chunk, |line| {
            if iptables::is_incompatible(line) {
                incompatible = Some(line.trim_start_matches(['#', ' ']).to_owned());
            }
            found.take_line(line);
        });
    };
    IPTABLES_SAVE.run(arguments, "", take).await?;
    incompatible.map_or(Ok(()), |line| Err(RuleError::Incompatible(line)))
}

async fn restore(text: &str, ability: Ability) -> Result<(), ProgramError> {
    let wait = format!("--wait={LOCK_WAIT_S}");
    let mut arguments = vec!["--noflush"];
    arguments.extend(ability.waits.then_some(wait.as_str()));
    IPTABLES_RESTORE.run(&arguments, text, |_| {}).await
}

async fn remove_iptables() -> Result<bool, RuleError> {
    let ability = ask_iptables().await?;
    let mut found = iptables::Found::default();
    // Without a table's name it looks at those that are there, and makes none.
    read_iptables(&[], &mut found).await?;
    match iptables::removal(&found) {
        Some(text) => Ok(restore(&text, ability).await.map(|()| true)?),
        None => Ok(false),
    }
}

async fn list(arguments: &[&str]) -> Result<String, ProgramError> {
    let mut text = Vec::new();
    let take = |chunk: &[u8]| {
        let room = LIST_BYTES_MAX.saturating_sub(text.len());
        text.extend_from_slice(&chunk[..chunk.len().min(room)]);
    };
    NFT.run(arguments, "", take).await?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

async fn read_nftables() -> Result<nftables::Found, RuleError> {
    match list(&["-j", "list", "table", "ip", nftables::TABLE]).await {
        Ok(text) => Ok(nftables::Found::parse(&text)?),
        // nft has one exit code for all failures.
        Err(ProgramError::Refused { complaint, .. })
            if complaint.contains("No such file or directory") =>
        {
            Ok(nftables::Found::default())
        }
        Err(error) => Err(error.into()),
    }
}

async fn remove_nftables() -> Result<bool, RuleError> {
    let tables = nftables::own_tables(&list(&["-j", "list", "tables"]).await?)?;
    match nftables::removal(&tables) {
        Some(text) => Ok(NFT.run(&["-f", "-"], &text, |_| {}).await.map(|()| true)?),
        None => Ok(false),
    }
}
