//! What each mechanism of io_uring is worth to the dataplane, in nanoseconds: the figures behind
//! the choices of the ring engine. A program of the benchmark, not of the product.
//!
//! Owns the order of the parts and the table. Must run as root on two idle cores; all traffic
//! stays in a network namespace that ends with the process.
#![expect(clippy::print_stdout, reason = "the table is what the program is for")]

#[path = "ring_choices/batches.rs"]
mod batches;
#[path = "ring_choices/lab.rs"]
mod lab;
#[path = "ring_choices/raw.rs"]
mod raw;
#[path = "ring_choices/waking.rs"]
mod waking;

use std::process::Command;

use anyhow::{Result, bail};

const USAGE: &str = "\
usage: ring-choices [PART]...
Parts: reads, receives, writes, sends, setups, refusals, turns, waking. All of them by default.
Each part takes a few seconds, waking half a minute.";

const PARTS: [&str; 8] =
    ["reads", "receives", "writes", "sends", "setups", "refusals", "turns", "waking"];

fn main() -> Result<()> {
    let mut parts: Vec<String> = std::env::args().skip(1).collect();
    if let Some(part) = parts.iter().find(|part| !PARTS.contains(&part.as_str())) {
        bail!("no such part: {part}\n{USAGE}");
    }
    if parts.is_empty() {
        parts = PARTS.map(str::to_owned).to_vec();
    }
    let lab = lab::Lab::open()?;
    let feeder = lab::Feeder::start(&lab)?;
    lab::pin_worker()?;
    println!("{}", machine());
    let mut table = Table::default();
    for part in parts {
        match part.as_str() {
            "reads" => batches::tun_reads(&mut table, &lab, &feeder)?,
            "receives" => batches::receives(&mut table, &lab, &feeder)?,
            "writes" => batches::tun_writes(&mut table, &lab)?,
            "sends" => batches::sends(&mut table, &lab)?,
            "setups" => batches::setups(&mut table, &lab, &feeder)?,
            "refusals" => batches::refusals(&mut table, &lab)?,
            "turns" => batches::turns(&mut table, &lab, &feeder)?,
            _ => waking::all(&lab)?,
        }
    }
    Ok(())
}

/// What the figures hold for.
fn machine() -> String {
    let system = rustix::system::uname();
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| line.split(": ").nth(1)).unwrap_or("unknown");
    let cores = processors.lines().filter(|line| line.starts_with("processor")).count();
    format!(
        "Kernel {}, {cores} cores of {model}, commit {}, {}.",
        system.release().to_string_lossy(),
        said("git", &["describe", "--always", "--dirty"]),
        said("date", &["-u", "+%F"]),
    )
}

/// The first line that a program prints.
fn said(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.ok().filter(|text| !text.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}

/// Prints rows as they come, under a heading per subject.
#[derive(Default)]
struct Table {
    what: String,
    /// The first row of the subject, which others are compared with.
    first: f64,
}

impl Table {
    fn cost(&mut self, what: &str, name: &str, wall: &mut [f64], cpu: &mut [f64]) {
        let (low, middle, high) = quartiles(wall);
        if what != self.what {
            println!("\n{what}\n");
            println!("| by | ns | quartiles | CPU ns | against the first |");
            println!("|---|---|---|---|---|");
            what.clone_into(&mut self.what);
            self.first = middle;
        }
        let (_, cpu, _) = quartiles(cpu);
        let change = (middle / self.first - 1.0) * 100.0;
        println!("| {name} | {middle:.0} | {low:.0}-{high:.0} | {cpu:.0} | {change:+.0} % |");
    }
}

fn quartiles(samples: &mut [f64]) -> (f64, f64, f64) {
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples[(samples.len() as f64 * share) as usize];
    (at(0.25), at(0.5), at(0.75))
}
