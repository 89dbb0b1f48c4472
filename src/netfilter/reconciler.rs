//! Reconciles the rules: sets them at start, checks them at each resync, and logs what it does.
//! Decides when; `diff` decides what to change, `iptables` and `nftables` how it is spelled.

use std::fs::File;
use std::future::pending;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{debug, error, info, warn};

use crate::failure::{LogOnce, with_causes};
use crate::netfilter::diff::Trigger;
use crate::netfilter::iptables::{self, Ability, Place, SavedRules};
use crate::netfilter::nftables;
use crate::netfilter::program::{IP6TABLES, IPTABLES, Iptables, LOCK_WAIT_S, NFT, ProgramError};
use crate::netfilter::rules::{Family, Purpose, Wanted};
use crate::status::Kept;
use crate::words::words;

/// Longest pause after a temporary failure, such as a lock that is held.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// Attempts at start before a refusal counts: rules of others may change between our listing and
/// our transaction.
const START_ATTEMPTS_MAX: u32 = 3;

words! {
    /// The firewall that holds the rules.
    Flavour {
        /// iptables, whichever variant is installed.
        Iptables = "iptables",
        /// nft, in tables of our own.
        Nftables = "nftables",
    }
}

/// What can be asked for at once: nft lists the tables of both families.
const LISTINGS: [(Flavour, &[Family]); 3] = [
    (Flavour::Iptables, &[Family::V4]),
    (Flavour::Iptables, &[Family::V6]),
    (Flavour::Nftables, Family::ALL),
];

/// Why the rules could not be read or set.
#[derive(Debug, thiserror::Error)]
pub enum RuleError {
    /// A program failed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// nft's output can't be parsed.
    #[error(transparent)]
    List(#[from] nftables::ListError),
    /// A table of iptables contains rules of nft, and iptables cannot list it.
    #[error(
        "{program} cannot read its own tables, because rules of nft are in them ({complaint}): \
         move those to a table of their own, or set EnableNFTables",
        program = .0.list.name, complaint = .1
    )]
    Incompatible(Iptables, String),
}

/// Takes note of a check: whether it repaired something, unless it failed.
pub(super) fn note(kept: &mut Kept, is_repaired: Option<bool>) {
    kept.in_place = is_repaired.is_some();
    kept.settled |= kept.in_place;
    kept.checks += u64::from(kept.in_place);
    kept.failures += u64::from(!kept.in_place);
    kept.repairs += u64::from(is_repaired == Some(true));
}

impl RuleError {
    fn is_passing(&self) -> bool {
        matches!(self, Self::Program(error) if error.is_passing())
    }

    pub(super) fn is_missing_program(&self) -> bool {
        matches!(self, Self::Program(ProgramError::Missing(_)))
    }
}

/// Rules of an earlier run in a firewall, of families that nothing is wanted of there.
type Earlier = (Flavour, Vec<Family>, LogOnce);

/// Reconciles the rules of one daemon.
#[derive(Debug)]
pub struct RuleReconciler {
    flavour: Flavour,
    wanted: Wanted,
    resync: Duration,
    /// By family.
    abilities: [Option<Ability>; 2],
    /// By family: whether its start is over. What others put into the chains since then stays, also
    /// while the other family's start fails.
    has_begun: [bool; 2],
    logged: LogOnce,
    /// Where rules of an earlier run may be left.
    earlier: Vec<Earlier>,
    state: watch::Sender<Kept>,
    /// Whether the firewall refused the last attempt of a start, and is asked again.
    refused: watch::Sender<bool>,
}

impl RuleReconciler {
    /// Will check `wanted` every `resync`.
    pub fn new(flavour: Flavour, wanted: Wanted, resync: Duration) -> Self {
        let is_unwanted = |family: &Family| wanted.chains(*family).is_empty();
        let earlier = LISTINGS.iter().map(|(other, families)| {
            let families = families.iter().copied();
            let families = families.filter(|family| *other != flavour || is_unwanted(family));
            (*other, families.collect::<Vec<_>>(), LogOnce::default())
        });
        let earlier = earlier.filter(|(_, families, _)| !families.is_empty());
        Self {
            flavour,
            wanted,
            resync,
            abilities: [None; 2],
            has_begun: [false; 2],
            logged: LogOnce::default(),
            earlier: earlier.collect(),
            state: watch::Sender::new(Kept::default()),
            refused: watch::Sender::new(false),
        }
    }

    /// The state of the rules, and each change of it.
    pub fn state(&self) -> watch::Receiver<Kept> {
        self.state.subscribe()
    }

    /// Whether the firewall refused the last attempt of a start: [`Self::run`] may end with that.
    pub fn refused(&self) -> watch::Receiver<bool> {
        self.refused.subscribe()
    }

    /// For a report: the firewall and the state of the rules; `None` without rules.
    pub fn kept(&self) -> Option<(Flavour, watch::Receiver<Kept>)> {
        (!self.wanted.is_nothing()).then(|| (self.flavour, self.state()))
    }

    /// Sets the rules, then checks them for ever. Ends with [`Trigger::Start`] only, where flanneld
    /// does not start either: without masquerading that was asked for, or without a working nft
    /// where the network configuration wants it. The rules stay when this is dropped.
    pub async fn run(mut self, mut trigger: Trigger) -> RuleError {
        if self.wanted.is_nothing() {
            self.state.send_modify(|state| state.settled = true);
            return pending().await;
        }
        self.announce();
        let is_required = self.wanted.masquerade || self.flavour == Flavour::Nftables;
        let mut refusals = 0;
        loop {
            let begun = tokio::time::Instant::now();
            let mut pause = None;
            match self.reconcile(trigger).await {
                Ok(_) => {
                    trigger = Trigger::Resync;
                    self.refused.send_replace(false);
                }
                Err(error) => {
                    refusals += u32::from(!error.is_passing());
                    let is_final = error.is_missing_program() || refusals >= START_ATTEMPTS_MAX;
                    let is_starting = trigger != Trigger::Resync;
                    if is_starting && is_final && is_required {
                        return error;
                    }
                    let is_undecided = is_starting && !is_final && is_required;
                    self.refused.send_replace(is_undecided && !error.is_passing());
                    self.logged.once(&with_causes(&error), |text| {
                        error!("Failed to ensure {} rules: {text}; retrying", self.flavour.name());
                    });
                    if is_final {
                        // flanneld runs without its forward rules, so nothing may wait for them.
                        self.state.send_modify(|state| state.settled = true);
                    }
                    let is_retried = error.is_passing() || (is_starting && !is_final);
                    pause = is_retried.then(|| self.resync.min(RETRY));
                }
            }
            // A little less than the resync: a rule removed right after a check is back within it.
            let rest = || (self.resync * 9 / 10).saturating_sub(begun.elapsed());
            sleep(pause.unwrap_or_else(rest)).await;
        }
    }

    fn announce(&self) {
        info!("Starting flannel in {} mode...", self.flavour.name());
        if self.wanted.masquerade {
            info!("Setting up masking rules");
        }
        if self.wanted.forward {
            let networks = self.wanted.networks;
            info!("Setting up forward rules: what is from or to {networks} is accepted");
        }
    }

    /// Checks the rules, and repairs them if needed; whether it did.
    pub async fn reconcile(&mut self, trigger: Trigger) -> Result<bool, RuleError> {
        let mut results = Vec::new();
        for family in Family::ALL.iter().copied() {
            if self.wanted.chains(family).is_empty() {
                continue;
            }
            let has_begun = self.has_begun[family as usize];
            let trigger = if has_begun { Trigger::Resync } else { trigger };
            let result = match self.flavour {
                Flavour::Iptables => self.reconcile_iptables(family, trigger).await,
                Flavour::Nftables => self.reconcile_nftables(family, trigger).await,
            };
            self.has_begun[family as usize] |= result.is_ok();
            results.push(result);
        }
        let result = any(results);
        let is_repaired = result.as_ref().ok();
        let is_repaired = is_repaired.map(|changed| *changed && trigger == Trigger::Resync);
        self.state.send_modify(|state| note(state, is_repaired));
        if result.is_ok() {
            if self.logged.forget() {
                info!("the {} rules are in place", self.flavour.name());
            }
            self.remove_earlier().await;
        }
        result
    }

    async fn reconcile_iptables(
        &mut self,
        family: Family,
        trigger: Trigger,
    ) -> Result<bool, RuleError> {
        let programs = programs(family);
        let ability = match self.abilities[family as usize] {
            Some(ability) => ability,
            None => {
                let ability = ask_version(programs).await?;
                // It has tables of its own.
                if !ability.lists_chains {
                    make_lock();
                }
                *self.abilities[family as usize].insert(ability)
            }
        };
        let random_ports = self.wanted.random_ports && ability.is_modern;
        let wanted = Wanted { random_ports, ..self.wanted }.chains(family);
        let mut found = SavedRules::default();
        for (purpose, _) in &wanted {
            if !(ability.lists_chains && list_chains(programs, *purpose, &mut found).await?) {
                let table = iptables::PLACES[*purpose as usize].table;
                read_tables(programs, &["-t", table], &mut found).await?;
            }
        }
        let Some(text) = iptables::transaction(&wanted, &found, trigger) else { return Ok(false) };
        self.log_repair(family, trigger);
        restore(programs, &text, ability).await?;
        Ok(true)
    }

    async fn reconcile_nftables(
        &mut self,
        family: Family,
        trigger: Trigger,
    ) -> Result<bool, RuleError> {
        let (table, wanted) = (nftables::table(family), self.wanted.chains(family));
        let printed = list_table(table).await?;
        let found = printed.map(|text| nftables::ListedRules::parse(&text)).transpose()?;
        let found = found.unwrap_or_default();
        let Some(text) = nftables::transaction(table, &wanted, &found, trigger) else {
            return Ok(false);
        };
        self.log_repair(family, trigger);
        apply_nftables(&text).await?;
        Ok(true)
    }

    fn log_repair(&self, family: Family, trigger: Trigger) {
        if trigger == Trigger::Resync {
            let flavour = self.flavour.name();
            info!("Some {flavour} rules for {family} are missing or out of order; repairing them");
        }
    }

    /// Removes the rules of an earlier run from where nothing is wanted, until there are none.
    async fn remove_earlier(&mut self) {
        for (flavour, families, mut logged) in std::mem::take(&mut self.earlier) {
            let name = flavour.name();
            let is_unwanted = families.iter().all(|it| self.wanted.chains(*it).is_empty());
            match flavour.remove_rules(&families).await {
                Ok(true) => info!("removed the {name} rules of an earlier run"),
                Ok(false) => {}
                // A network without IPv6 does not ask for its rules again and again.
                Err(error) if is_unwanted && !error.is_passing() => {
                    let text = with_causes(&error);
                    info!("{name} rules of an earlier run for IPv6 are not looked for: {text}");
                }
                Err(error) => {
                    logged.once(&with_causes(&error), |text| {
                        warn!("{name} rules of an earlier run may be left: {text}; retrying");
                    });
                    self.earlier.push((flavour, families, logged));
                }
            }
        }
    }
}

impl Flavour {
    /// Removes the rules of flanneld and weftd for `families` from this firewall; whether there
    /// were any. One whose program is not installed has none.
    pub async fn remove_rules(self, families: &[Family]) -> Result<bool, RuleError> {
        let mut results = Vec::new();
        let is_meant = |family: &str, name: &str| {
            families.iter().any(|it| nftables::table(*it) == (family, name))
        };
        match self {
            Self::Nftables => results.push(remove_tables(is_meant).await),
            Self::Iptables => {
                for family in families {
                    results.push(remove_iptables(programs(*family)).await);
                }
            }
        }
        results.retain(|result| !result.as_ref().is_err_and(RuleError::is_missing_program));
        any(results)
    }
}

/// Whether any of them is true; the first error, if there is one.
fn any(results: Vec<Result<bool, RuleError>>) -> Result<bool, RuleError> {
    results.into_iter().try_fold(false, |any, result| Ok(any | result?))
}

fn programs(family: Family) -> Iptables {
    match family {
        Family::V4 => IPTABLES,
        Family::V6 => IP6TABLES,
    }
}

async fn ask_version(programs: Iptables) -> Result<Ability, ProgramError> {
    let version = programs.list.run(&["--version"], "").await?;
    debug!("{}", version.trim_end());
    Ok(Ability::of_version(&version))
}

/// Makes the file that iptables locks while it changes rules, as iptables would with the first
/// change: that may be a repair, when weftd may read the file but not make it any more.
fn make_lock() {
    let named = std::env::var_os("XTABLES_LOCKFILE").map(PathBuf::from);
    let path = named.unwrap_or_else(|| PathBuf::from("/run/xtables.lock"));
    let made = File::options().create(true).append(true).mode(0o600).open(&path);
    if let Err(error) = made {
        warn!(
            "cannot make {}, without which iptables can't repair its rules: {error}",
            path.display()
        );
    }
}

/// Reads the two chains of `purpose`; false, and nothing read, if the kernel's own cannot be
/// listed. If ours cannot, it counts as missing: the words for that differ by iptables' version,
/// and the transaction that makes a chain empties one that is there.
async fn list_chains(
    programs: Iptables,
    purpose: Purpose,
    found: &mut SavedRules,
) -> Result<bool, ProgramError> {
    let Place { table, base, chain: own, .. } = iptables::PLACES[purpose as usize];
    found.take_line(&format!("*{table}"));
    for chain in [base, own] {
        match programs.list.run(&["-t", table, "-S", chain], "").await {
            Ok(text) => text.lines().for_each(|line| found.take_line(line)),
            Err(ProgramError::Refused { .. }) if chain == own => {}
            Err(ProgramError::Refused { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

async fn read_tables(
    programs: Iptables,
    arguments: &[&str],
    found: &mut SavedRules,
) -> Result<(), RuleError> {
    let text = programs.save.run(arguments, "").await?;
    if let Some(line) = text.lines().find(|line| iptables::is_incompatible(line)) {
        let line = line.trim_start_matches(['#', ' ']).to_owned();
        return Err(RuleError::Incompatible(programs, line));
    }
    text.lines().for_each(|line| found.take_line(line));
    Ok(())
}

async fn restore(programs: Iptables, text: &str, ability: Ability) -> Result<(), ProgramError> {
    let wait = format!("--wait={LOCK_WAIT_S}");
    let mut arguments = vec!["--noflush"];
    arguments.extend(ability.is_modern.then_some(wait.as_str()));
    programs.restore.run(&arguments, text).await.map(drop)
}

async fn remove_iptables(programs: Iptables) -> Result<bool, RuleError> {
    let mut found = SavedRules::default();
    // Without a table's name it lists the existing ones, and creates none.
    read_tables(programs, &[], &mut found).await?;
    let Some(text) = iptables::removal(&found) else { return Ok(false) };
    restore(programs, &text, ask_version(programs).await?).await?;
    Ok(true)
}

/// Has nft carry out a transaction.
pub(super) async fn apply_nftables(text: &str) -> Result<(), ProgramError> {
    NFT.run(&["-f", "-"], text).await.map(drop)
}

/// What nft prints of a table of this family and name; nothing if it is not there.
pub(super) async fn list_table(
    (family, name): (&str, &str),
) -> Result<Option<String>, ProgramError> {
    match NFT.run(&["-j", "list", "table", family, name], "").await {
        Err(error) if error.is_absence() => Ok(None),
        printed => printed.map(Some),
    }
}

/// Removes the tables that `is_meant` takes by family and name; whether there were any.
pub(super) async fn remove_tables(
    is_meant: impl Fn(&str, &str) -> bool,
) -> Result<bool, RuleError> {
    match nftables::removal(&NFT.run(&["-j", "list", "tables"], "").await?, is_meant)? {
        Some(text) => Ok(apply_nftables(&text).await.map(|()| true)?),
        None => Ok(false),
    }
}
