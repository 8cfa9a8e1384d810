//! What a person wishes: a small file that says which stage runs where.
//!
//! ```toml
//! default = "npu"                     # what nothing below names; absent: the device that was asked for
//! decode = "cpu"                      # writing tokens; `prefill` is reading the prompt
//! overlap = 24                        # calls of so many rows are computed in two halves side by side; `false`: none
//! together = 2.4                      # two devices that read at once take 2.4 times as long as one: let them take turns
//!
//! [stages]                            # the beginning of a path; the longest one counts, in both phases
//! "audio" = "npu"
//! "layers.*.attn" = "npu"             # any one word
//! "layers.3.ffn.down_proj" = "cpu"
//!
//! [hot_experts]                       # of experts that stand on another device than the default one
//! count = 120                         # so many stay on the default one: those that are chosen most often
//! transfer_from = 24                  # others are transferred for calls in which so many rows chose them
//! ```

use super::{Phase, tower_stage};
use crate::{Error, split::HotExperts};
#[cfg(feature = "placement-files")]
use qhx_bundle::files::read_given;
use qhx_bundle::target::PlacementRules;
use qhx_ir::Checked;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroUsize,
};

/// Which stage is to run where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rules {
    /// The device of everything that nothing else names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<String>,
    /// The device that reads prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<String>,
    /// The device that writes tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<String>,
    /// Whether two devices compute two halves of a call side by side; absent: those of many rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<Overlap>,
    /// How many times as long as one of them two devices take that read memory at the same time. Where it is more than 2 they take turns; absent: they do not ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<Together>,
    /// Devices by stage: the first words of an op's path, of the text program or (as `vision…`, `audio…`) of a tower; `*` is any one word.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub stages: BTreeMap<String, String>,
    /// The experts that stay on the default device though their ops are on another: those that are chosen most often.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hot_experts: Option<HotExperts>,
}

/// Which calls are computed in two halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected `true`, `false` or a number of rows, 1 or more")]
pub enum Overlap {
    /// Those of many rows, or none.
    Whether(bool),
    /// Those of so many rows or more.
    From(NonZeroUsize),
}

/// A measured ratio, 1 or more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Together(f64);

impl Eq for Together {}

impl TryFrom<f64> for Together {
    type Error = String;
    fn try_from(ratio: f64) -> Result<Self, String> {
        match ratio.is_finite() && ratio >= 1.0 {
            true => Ok(Self(ratio)),
            false => Err(format!("`together` must be 1 or more, found {ratio}")),
        }
    }
}

impl From<Together> for f64 {
    fn from(Together(ratio): Together) -> Self {
        ratio
    }
}

/// A placement file is a page of text, no more.
#[cfg(feature = "placement-files")]
const MOST_BYTES: u64 = 1 << 20;
/// Stands for any one word of a path.
const ANY: &str = "*";
/// More rules than a model has stages: every op is held to each of them.
const MOST_RULES: usize = 4096;
/// So many names are listed beside one that is unknown.
const LISTED_NAMES: usize = 12;

impl Rules {
    /// Reads a file.
    #[cfg(feature = "placement-files")]
    pub fn read(path: &std::path::Path) -> Result<Self, Error> {
        let wrong = |reason: String| Error::Placement { reason: format!("{}: {reason}", path.display()) };
        let bytes = read_given(path, MOST_BYTES)?;
        let text = String::from_utf8(bytes).map_err(|_| wrong("is not UTF-8".into()))?;
        Self::from_toml(&text).map_err(|error| match error {
            Error::Placement { reason } => wrong(reason),
            other => other,
        })
    }

    /// Reads the text of a file.
    #[cfg(feature = "placement-files")]
    pub fn from_toml(text: &str) -> Result<Self, Error> {
        toml::from_str(text).map_err(|e| Error::Placement { reason: e.to_string().trim_end().to_owned() })
    }

    /// The text of a file that says the same.
    #[cfg(feature = "placement-files")]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_default()
    }

    /// Those that speak of these programs.
    pub fn of_programs<'a>(&self, programs: impl IntoIterator<Item = &'a Checked>) -> Self {
        let paths = paths(programs);
        let stages = self.stages.iter().filter(|(stage, _)| paths.iter().any(|path| matches(path, stage)));
        Self { stages: stages.map(|(stage, device)| (stage.clone(), device.clone())).collect(), ..self.clone() }
    }

    /// All devices that are named, the default one first.
    pub fn devices(&self) -> Vec<&str> {
        let named = [&self.default, &self.prefill, &self.decode].into_iter().flatten().chain(self.stages.values());
        let mut all: Vec<&str> = Vec::new();
        for name in named {
            if !all.contains(&name.as_str()) {
                all.push(name);
            }
        }
        all
    }

    /// The device for a path of a program in a phase, and the rule that says so. A tower has no phases.
    pub(crate) fn device(&self, program: &Checked, path: &str, phase: Phase) -> Option<(&str, String)> {
        let tower = is_tower(program);
        let path = if tower { tower_stage(program, path) } else { path.to_owned() };
        let under = self.stages.iter().filter(|(stage, _)| matches(&path, stage));
        // Of two as long, the one that names more.
        let weight = |stage: &str| (stage.split('.').count(), stage.split('.').filter(|word| *word != ANY).count());
        if let Some((stage, device)) = under.max_by_key(|(stage, _)| weight(stage)) {
            return Some((device, format!("the placement says so of `{stage}`")));
        }
        let by_phase = match phase {
            _ if tower => None,
            Phase::Prefill => self.prefill.as_ref().map(|device| (device, "prefill")),
            Phase::Decode => self.decode.as_ref().map(|device| (device, "decode")),
        };
        let (device, rule) = by_phase.or(self.default.as_ref().map(|device| (device, "default")))?;
        Some((device, format!("the placement's `{rule}`")))
    }

    /// Whether they are few enough to hold every op to each of them.
    pub(super) fn check_count(&self) -> Result<(), Error> {
        match self.stages.len() {
            0..=MOST_RULES => Ok(()),
            n => {
                let reason = format!("it names {n} stages; at most {MOST_RULES} are allowed (`*` stands for any one word)");
                Err(Error::Placement { reason })
            }
        }
    }

    /// Whether every stage that is named is one of these programs.
    pub fn check<'a>(&self, programs: impl IntoIterator<Item = &'a Checked>) -> Result<(), Error> {
        self.check_count()?;
        let paths = paths(programs);
        match self.stages.keys().find(|stage| !paths.iter().any(|path| matches(path, stage))) {
            None => Ok(()),
            Some(stage) => Err(Error::Placement { reason: format!("no stage is called `{stage}`: {}", near(stage, &paths)) }),
        }
    }
}

impl From<&PlacementRules> for Rules {
    fn from(PlacementRules { default, prefill, decode, stages }: &PlacementRules) -> Self {
        Self { default: default.clone(), prefill: prefill.clone(), decode: decode.clone(), stages: stages.clone(), ..Self::default() }
    }
}

impl From<Rules> for PlacementRules {
    fn from(Rules { default, prefill, decode, stages, .. }: Rules) -> Self {
        Self { default, prefill, decode, stages }
    }
}

/// The paths of all ops, those of towers with the tower's name before them.
fn paths<'a>(programs: impl IntoIterator<Item = &'a Checked>) -> Vec<String> {
    let of = |program: &'a Checked| {
        program.ops.iter().map(move |op| if is_tower(program) { tower_stage(program, &op.path) } else { op.path.to_string() })
    };
    programs.into_iter().flat_map(of).collect()
}

/// Whether a path begins with the words of `stage`.
fn matches(path: &str, stage: &str) -> bool {
    let mut words = path.split('.');
    stage.split('.').all(|wanted| words.next().is_some_and(|word| wanted == ANY || word == wanted))
}

fn is_tower(program: &Checked) -> bool {
    &*program.name != qhx_bundle::manifest::TEXT_PROGRAM
}

/// What stands where an unknown name leaves the known ones.
fn near(stage: &str, paths: &[String]) -> String {
    let parts: Vec<&str> = stage.split('.').collect();
    let known = (1..parts.len()).rev().find(|&n| paths.iter().any(|path| matches(path, &parts[..n].join("."))));
    let start = parts[..known.unwrap_or(0)].join(".");
    let inside = paths.iter().filter(|path| start.is_empty() || matches(path, &start));
    let next = inside.filter_map(|path| path.split('.').nth(known.unwrap_or(0)).map(str::to_owned));
    let mut names: Vec<String> = next.collect::<BTreeSet<_>>().into_iter().collect();
    names.sort_by_key(|name| (name.parse::<u64>().ok(), name.clone()));
    let more = names.len().saturating_sub(LISTED_NAMES);
    let mut listed = names[..names.len() - more].join(", ");
    if more > 0 {
        listed += &format!(" and {more} more");
    }
    match (start.is_empty(), names.is_empty()) {
        (true, _) => format!("there are {listed}"),
        (false, true) => format!("`{start}` is a single op"),
        (false, false) => format!("under `{start}` there are {listed}"),
    }
}

#[cfg(all(test, feature = "placement-files"))]
mod tests {
    use super::*;
    use qhx_ir::conformance::models;
    use std::path::Path;

    fn text() -> Checked {
        let mut program = (*models::tiny(0)[0].program).clone();
        program.name = qhx_bundle::manifest::TEXT_PROGRAM.into();
        Checked::new(program).unwrap()
    }

    #[test]
    fn the_longest_name_counts_then_the_phase_then_the_default() {
        let program = text();
        let rules = Rules::from_toml(
            "default = \"a\"\nprefill = \"b\"\n[stages]\nlayers = \"c\"\n\"layers.1\" = \"d\"\n\"layers.1.attn\" = \"e\"\naudio = \"f\"",
        );
        let rules = rules.unwrap();
        let device = |path: &str, phase| rules.device(&program, path, phase).unwrap().0.to_owned();
        for phase in Phase::ALL {
            assert_eq!(
                [device("layers.0.ffn.up", phase), device("layers.1.ffn", phase), device("layers.1.attn.q", phase)],
                ["c", "d", "e"]
            );
            assert_eq!(device("layers.10.ffn", phase), "c", "a name ends at a dot");
        }
        assert_eq!((device("embed", Phase::Prefill), device("embed", Phase::Decode)), ("b".into(), "a".into()));
        let mut tower = (*program).clone();
        tower.name = "audio".into();
        let tower = Checked::new(tower).unwrap();
        assert_eq!(rules.device(&tower, "layers.1.attn.q", Phase::Prefill).unwrap().0, "f");
        let plain = Rules { stages: BTreeMap::new(), ..rules.clone() };
        assert_eq!(plain.device(&tower, "embed", Phase::Prefill).unwrap().0, "a", "a tower does not read prompts");
        let any = Rules::from_toml("[stages]\n\"layers.*.ffn\" = \"a\"\n\"layers.1\" = \"b\"\n\"layers.0.ffn\" = \"c\"").unwrap();
        let device = |path: &str| any.device(&program, path, Phase::Decode).map(|(device, _)| device);
        let found = ["layers.1.ffn.up", "layers.1.attn", "layers.0.ffn.up", "layers.0.attn"].map(device);
        assert_eq!(found, [Some("a"), Some("b"), Some("c"), None]);
        assert_eq!(rules.devices(), ["a", "b", "f", "c", "d", "e"]);
        assert_eq!(Rules::default().device(&program, "embed", Phase::Decode), None);
    }

    #[test]
    fn what_is_wrong_is_told() {
        let wrong = |text: &str| Rules::from_toml(text).unwrap_err().to_string();
        assert!(wrong("prefil = \"npu\"").contains("unknown field `prefil`"), "{}", wrong("prefil = \"npu\""));
        assert!(wrong("default = 3").contains("expected a string"));
        assert!(wrong("[stages").contains("line 1"));
        assert!(wrong("[hot_experts]\ntransfer_from = 3").contains("missing field `count`"));
        assert!(wrong("together = 0.5").contains("must be 1 or more"));
        for overlap in ["0", "-3", "\"yes\""] {
            assert!(wrong(&format!("overlap = {overlap}")).contains("expected `true`, `false` or a number of rows"), "{overlap}");
        }
        for (overlap, expected) in [("false", Overlap::Whether(false)), ("24", Overlap::From(24.try_into().unwrap()))] {
            let rules = Rules::from_toml(&format!("overlap = {overlap}")).unwrap();
            assert_eq!((rules.overlap, rules.to_toml()), (Some(expected), format!("overlap = {overlap}\n")));
        }
        assert_eq!(Rules::from_toml("together = 2.5").unwrap().together.map(f64::from), Some(2.5));
        assert!(wrong("[hot_experts]\ncount = -1").contains("invalid value"));
        let hot =
            Rules::from_toml("default = \"gpu\"\n[hot_experts]\ncount = 3\ntransfer_from = 9\n[stages]\n\"layers.1\" = \"cpu\"").unwrap();
        assert_eq!(hot.hot_experts, Some(HotExperts { count: 3, transfer_from: Some(9) }));
        assert_eq!(Rules::from_toml(&hot.to_toml()).unwrap(), hot);
        assert!(Rules::read(Path::new("no/such.toml")).unwrap_err().to_string().contains("cannot read no/such.toml"));
        let unknown = |stage: &str| {
            let rules = Rules { stages: BTreeMap::from([(stage.to_owned(), "cpu".to_owned())]), ..Rules::default() };
            rules.check([&text()]).map_err(|e| e.to_string())
        };
        assert_eq!(unknown("layers.1.attn"), Ok(()));
        let error = unknown("layers.7.attn").unwrap_err();
        assert!(error.contains("no stage is called `layers.7.attn`: under `layers` there are 0, 1"), "{error}");
        assert_eq!(unknown("*.*.attn"), Ok(()));
        let many = (0..=MOST_RULES).map(|i| (format!("layers.{i}"), "cpu".to_owned())).collect();
        let error = Rules { stages: many, ..Rules::default() }.check([&text()]).unwrap_err().to_string();
        assert!(error.contains("it names 4097 stages; at most 4096 are allowed"), "{error}");
        let both = Rules::from_toml("decode = \"cpu\"\n[stages]\n\"layers.1\" = \"a\"\naudio = \"b\"").unwrap();
        let own = both.of_programs([&text()]);
        assert_eq!((own.decode.as_deref(), own.stages.keys().map(String::as_str).collect::<Vec<_>>()), (Some("cpu"), vec!["layers.1"]));
        assert_eq!(Rules::from(&PlacementRules::from(both.clone())), both);
        let error = unknown("layers.*.atn").unwrap_err();
        assert!(error.contains("under `layers.*` there are attn, deepstack, ffn"), "{error}");
        let error = unknown("layer").unwrap_err();
        assert!(error.contains("there are embed, layers"), "{error}");
    }
}
