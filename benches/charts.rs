//! Draws a benchmark's `results.json` as SVG: per metric one panel, per link one group of bars,
//! per plane one bar with its median and a whisker between the quartiles.
//!
//! Owns the drawing only; medians come from `scripts/bench-report.jq`. Scales begin at zero,
//! because bars are compared by length.

use std::fmt::{self, Write as _};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value};

const PANEL_WIDTH: f64 = 450.0;
const PANEL_HEIGHT: f64 = 230.0;
const COLUMNS: usize = 2;
/// Title and legend.
const HEAD_HEIGHT: f64 = 58.0;
/// Room inside a panel, around the bars: left of them the scale, above the panel's name.
const LEFT: f64 = 52.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 26.0;
const GROUP_GAP: f64 = 18.0;
const BAR_SLOT_WIDTH_MAX: f64 = 52.0;
/// About as many lines as the eye can use.
const TICKS: f64 = 5.0;
/// Narrower bars have no room for their figure.
const LABELLED_BAR_WIDTH_MIN: f64 = 20.0;

/// Chosen to stand out on white and on black, and to stay the same from run to run.
const COLOURS: &[(&str, &str)] = &[
    ("plain", "#8b949e"),
    ("vxlan", "#4c8bd6"),
    ("one-packet", "#d9822b"),
    ("straightforward", "#b07cc6"),
    ("weft-no-offload", "#a3b83c"),
    ("weft-mmsg", "#3fa35b"),
    ("weft-io_uring", "#1a9c9c"),
    ("weft", "#d6455d"),
    ("weft-fast", "#e377c2"),
];
const COLOUR_OF_OTHERS: &str = "#c9a227";

/// Light by default, dark where the reader's system is.
const STYLE: &str = "\
<style>
  text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1f2328; }
  .title { font-size: 15px; font-weight: 600; }
  .name { font-weight: 600; }
  .small { font-size: 10px; }
  .figure { font-size: 9px; }
  .paper { fill: #ffffff; }
  .grid { stroke: #d1d9e0; }
  .whisker { stroke: #1f2328; stroke-width: 1.2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .paper { fill: #0d1117; }
    .grid { stroke: #3d444d; }
    .whisker { stroke: #e6edf3; }
  }
</style>
";

/// What the charts need of `results.json`.
#[derive(Deserialize)]
struct Results {
    families: Vec<Family>,
    metrics: Vec<Metric>,
    /// One per link and plane: `link`, `plane`, and a [`Spread`] under each metric's name.
    summary: Vec<Map<String, Value>>,
}

/// Metrics that share a chart.
#[derive(Deserialize)]
struct Family {
    id: String,
    title: String,
}

#[derive(Deserialize)]
struct Metric {
    name: String,
    family: String,
    title: String,
    decimals: usize,
}

#[derive(Deserialize, Clone, Copy)]
struct Spread {
    median: f64,
    q1: f64,
    q3: f64,
}

struct Bar {
    link: String,
    plane: String,
    spread: Spread,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(results), Some(folder)) = (arguments.next(), arguments.next()) else {
        bail!("usage: bench-charts RESULTS.JSON DIRECTORY");
    };
    let text = std::fs::read(&results).with_context(|| format!("read {results}"))?;
    let results: Results =
        serde_json::from_slice(&text).with_context(|| format!("understand {results}"))?;
    for family in &results.families {
        let Some(chart) = chart(&results, family)? else { continue };
        let path = Path::new(&folder).join(format!("{}.svg", family.id));
        std::fs::write(&path, chart).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// The chart of a family; `None` when nothing of it was measured.
fn chart(results: &Results, family: &Family) -> Result<Option<String>> {
    let panels: Vec<_> = results
        .metrics
        .iter()
        .filter(|metric| metric.family == family.id)
        .map(|metric| (metric, bars(results, metric)))
        .filter(|(_, bars)| !bars.is_empty())
        .collect();
    if panels.is_empty() {
        return Ok(None);
    }
    let rows = panels.len().div_ceil(COLUMNS);
    let width = PANEL_WIDTH * COLUMNS as f64;
    let height = HEAD_HEIGHT + PANEL_HEIGHT * rows as f64;
    let mut svg = String::new();
    writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\">\n<title>{}</title>",
        escape(&family.title)
    )?;
    svg.push_str(STYLE);
    writeln!(svg, "<rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>")?;
    writeln!(svg, "<text class=\"title\" x=\"12\" y=\"22\">{}</text>", escape(&family.title))?;
    legend(&mut svg, &in_order(panels.iter().flat_map(|(_, bars)| bars), |bar| &bar.plane))?;
    for (index, (metric, bars)) in panels.iter().enumerate() {
        let left = PANEL_WIDTH * (index % COLUMNS) as f64;
        let top = HEAD_HEIGHT + PANEL_HEIGHT * (index / COLUMNS) as f64;
        writeln!(svg, "<g transform=\"translate({left} {top})\">")?;
        panel(&mut svg, metric, bars)?;
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    Ok(Some(svg))
}

/// What was measured of a metric, link by link.
fn bars(results: &Results, metric: &Metric) -> Vec<Bar> {
    let bar = |row: &Map<String, Value>| {
        let text = |name: &str| Some(row.get(name)?.as_str()?.to_owned());
        let spread = Spread::deserialize(row.get(&metric.name)?).ok()?;
        Some(Bar { link: text("link")?, plane: text("plane")?, spread })
    };
    results.summary.iter().filter_map(bar).collect()
}

/// The distinct values, in the order in which they first appear.
fn in_order<'b>(
    bars: impl Iterator<Item = &'b Bar>,
    value: impl Fn(&'b Bar) -> &'b String,
) -> Vec<&'b str> {
    let mut found: Vec<&str> = Vec::new();
    for bar in bars {
        let value = value(bar).as_str();
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

fn legend(svg: &mut String, planes: &[&str]) -> fmt::Result {
    let mut x = 12.0;
    for plane in planes {
        let (colour, text) = (colour(plane), escape(plane));
        writeln!(svg, "<rect x=\"{x}\" y=\"36\" width=\"11\" height=\"11\" fill=\"{colour}\"/>")?;
        writeln!(svg, "<text x=\"{}\" y=\"46\">{text}</text>", x + 16.0)?;
        x += 34.0 + 7.0 * plane.len() as f64;
    }
    Ok(())
}

fn panel(svg: &mut String, metric: &Metric, bars: &[Bar]) -> fmt::Result {
    let highest = bars.iter().map(|bar| bar.spread.q3.max(bar.spread.median)).fold(0.0, f64::max);
    let scale = Scale::new(highest);
    writeln!(svg, "<text class=\"name\" x=\"12\" y=\"18\">{}</text>", escape(&metric.title))?;
    for index in 0..=scale.steps() {
        let value = scale.step * index as f64;
        let (y, right) = (scale.y(value), PANEL_WIDTH - RIGHT);
        writeln!(svg, "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>")?;
        let (x, y, text) = (LEFT - 6.0, y + 3.5, scale.label(value));
        writeln!(
            svg,
            "<text class=\"small\" x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{text}</text>"
        )?;
    }
    let links = in_order(bars.iter(), |bar| &bar.link);
    let gaps = GROUP_GAP * (links.len() + 1) as f64;
    let slot = (PANEL_WIDTH - LEFT - RIGHT - gaps) / bars.len() as f64;
    let slot = slot.min(BAR_SLOT_WIDTH_MAX);
    let mut x = LEFT;
    for link in links {
        x += GROUP_GAP;
        let first = x;
        for bar in bars.iter().filter(|bar| bar.link == link) {
            draw_bar(svg, metric, bar, &scale, (x, slot))?;
            x += slot;
        }
        let (middle, y) = (f64::midpoint(first, x), PANEL_HEIGHT - BOTTOM + 16.0);
        let text = escape(link);
        writeln!(svg, "<text x=\"{middle:.1}\" y=\"{y}\" text-anchor=\"middle\">{text}</text>")?;
    }
    Ok(())
}

/// One bar in the `slot` that begins at x and is so wide.
fn draw_bar(
    svg: &mut String,
    metric: &Metric,
    bar: &Bar,
    scale: &Scale,
    (x, slot): (f64, f64),
) -> fmt::Result {
    let Spread { median, q1, q3 } = bar.spread;
    let (width, middle, decimals) = (slot * 0.82, x + slot * 0.41, metric.decimals);
    let (top, base) = (scale.y(median), scale.y(0.0));
    let (low, high) = (scale.y(q1), scale.y(q3));
    writeln!(
        svg,
        "<g><title>{} {}: {median:.decimals$} ({q1:.decimals$}–{q3:.decimals$})</title>\
         <rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{}\"/>\
         <path class=\"whisker\" fill=\"none\" d=\"M{middle:.1} {low:.1}V{high:.1}\
         M{:.1} {low:.1}h6M{:.1} {high:.1}h6\"/></g>",
        escape(&bar.link),
        escape(&bar.plane),
        base - top,
        colour(&bar.plane),
        middle - 3.0,
        middle - 3.0,
    )?;
    if width < LABELLED_BAR_WIDTH_MIN {
        return Ok(());
    }
    let y = high.min(top) - 3.0;
    writeln!(
        svg,
        "<text class=\"figure\" x=\"{middle:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">\
         {median:.decimals$}</text>"
    )
}

/// From values to heights: round steps from zero to at least the highest value.
struct Scale {
    step: f64,
    top: f64,
}

impl Scale {
    fn new(highest: f64) -> Self {
        let rough = highest.max(f64::MIN_POSITIVE) / TICKS;
        let magnitude = 10_f64.powf(rough.log10().floor());
        let round = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * magnitude >= rough);
        let step = round.unwrap_or(10.0) * magnitude;
        Self { step, top: step * (highest / step).ceil().max(1.0) }
    }

    fn steps(&self) -> usize {
        (self.top / self.step).round() as usize
    }

    /// Distance from the panel's upper edge.
    fn y(&self, value: f64) -> f64 {
        let (base, height) = (PANEL_HEIGHT - BOTTOM, PANEL_HEIGHT - BOTTOM - TOP);
        base - height * (value / self.top).clamp(0.0, 1.0)
    }

    /// With as many decimals as the step has.
    fn label(&self, value: f64) -> String {
        let decimals = (-self.step.log10().floor()).max(0.0) as usize;
        format!("{value:.decimals$}")
    }
}

fn colour(plane: &str) -> &'static str {
    let known = COLOURS.iter().find(|(name, _)| *name == plane);
    known.map_or(COLOUR_OF_OTHERS, |(_, colour)| colour)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> Results {
        let spread = |median: f64| {
            let (q1, q3) = (median * 0.9, median * 1.1);
            serde_json::json!({"n": 5, "median": median, "q1": q1, "q3": q3})
        };
        let row = |link: &str, plane: &str, value: f64| {
            serde_json::json!({"link": link, "plane": plane, "tcp1": spread(value),
                "udp64": {"n": 0}})
        };
        let value = serde_json::json!({
            "families": [{"id": "tcp", "title": "TCP <bulk>"}, {"id": "udp", "title": "UDP"}],
            "metrics": [
                {"name": "tcp1", "family": "tcp", "title": "tcp1 Gb/s", "decimals": 2},
                {"name": "udp64", "family": "udp", "title": "udp64 kpps", "decimals": 0}],
            "summary": [row("pass", "vxlan", 14.0), row("pass", "weft", 7.0),
                row("wire", "vxlan", 7.0), row("wire", "weft", 6.0)],
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn scale_has_round_steps_and_fits_highest_value() {
        let cases = [(0.93, 0.2, 1.0), (1.0, 0.2, 1.0), (18.2, 5.0, 20.0), (196.0, 50.0, 200.0)];
        for (highest, step, top) in cases.into_iter().chain([(1201.0, 500.0, 1500.0)]) {
            let scale = Scale::new(highest);
            let close = |left: f64, right: f64| (left / right - 1.0).abs() < 1e-9;
            assert!(close(scale.step, step), "step {} for {highest}", scale.step);
            assert!(close(scale.top, top), "top {} for {highest}", scale.top);
        }
        let nothing = Scale::new(0.0);
        assert!(nothing.step > 0.0 && nothing.y(0.0).is_finite());
    }

    #[test]
    fn heights_are_proportional_and_start_at_zero() {
        let scale = Scale::new(20.0);
        let base = scale.y(0.0);
        assert!((base - (PANEL_HEIGHT - BOTTOM)).abs() < 1e-9);
        let length = |value: f64| base - scale.y(value);
        assert!((length(20.0) / length(5.0) - 4.0).abs() < 1e-9);
        assert!((scale.y(1e9) - TOP).abs() < 1e-9, "nothing leaves the panel");
        assert_eq!(scale.label(15.0), "15");
        assert_eq!(Scale::new(0.93).label(0.2), "0.2");
    }

    #[test]
    fn chart_has_bar_per_link_and_plane() {
        let results = results();
        let svg = chart(&results, &results.families[0]).unwrap().unwrap();
        let count = |text: &str| svg.matches(text).count();
        assert_eq!(count("class=\"whisker\""), 4);
        assert_eq!(count("<title>pass vxlan: 14.00 (12.60–15.40)</title>"), 1);
        assert_eq!(count(">pass</text>"), 1);
        assert!(svg.contains("TCP &lt;bulk&gt;") && svg.contains("prefers-color-scheme: dark"));
        assert!(chart(&results, &results.families[1]).unwrap().is_none());
    }

    #[test]
    fn planes_keep_their_colours() {
        let distinct: std::collections::BTreeSet<_> =
            COLOURS.iter().map(|(_, colour)| colour).collect();
        assert_eq!(distinct.len(), COLOURS.len());
        assert_eq!((colour("weft"), colour("new")), ("#d6455d", COLOUR_OF_OTHERS));
    }
}
