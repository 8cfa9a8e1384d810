//! What `auto` and `split` mean: the way to place a model on GPU and processor that is fastest with this model on this machine.
//!
//! Of the ways that [`crate::planner`] knows, those that it expects to be good are timed when a model is loaded for the first time. What was found is remembered for
//! the model, the context, the machine, the driver and the version of qhx. Software Vulkan is never chosen by `auto`.

mod measure;
mod remembered;

pub(crate) use measure::{Trial, measure};

use crate::{
    DeviceChoice, Error, LoadOptions,
    planner::{ANSWER_TOKENS, Extent, Facts, PROMPT_TOKENS, Pair, Prediction, WallClock, Way},
    registry,
};
use qhx_ir::{Checked, Device, DeviceInfo};
use remembered::Key;
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, sync::Arc};

/// What was chosen, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AutoChoice {
    /// The device's name; `split` where there are several.
    pub device: String,
    /// Why that one.
    pub reason: String,
    /// What runs where; absent where nothing was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub way: Option<Way>,
    /// What was measured; absent where nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    /// What a split costs that was asked for by name though a single device is faster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// Whether it was measured just now.
    #[serde(skip)]
    pub is_new: bool,
}

/// How fast a model is in several ways.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// About the two devices.
    pub facts: Facts,
    /// The ways that were tried, as good as they were expected to be, and those that were not worth it.
    pub ways: Vec<Tried>,
}

/// A way, and how fast it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tried {
    /// What runs where.
    pub way: Way,
    /// What was expected; absent where it does not fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Prediction>,
    /// What was measured; absent where it was not tried, or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<Speed>,
    /// How it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The speed of a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// Tokens per second of decoding.
    pub decode_tokens_per_second: f64,
    /// Tokens per second of prefill; absent where the context has no room for a prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_tokens_per_second: Option<f64>,
}

/// So many splits are tried, and of those without hot experts so many in any case.
const MOST_TRIED: usize = 3;
const PLAIN_TRIED: usize = 2;
/// Under `auto` a split is not tried that is expected to take more than this times as long as the better device alone: predictions are that good.
const WORTH: f64 = 1.25;

impl Speed {
    /// How long a usual request takes: what is compared.
    pub fn seconds(&self) -> f64 {
        let prefill = self.prefill_tokens_per_second.map_or(0.0, |speed| PROMPT_TOKENS as f64 / speed);
        ANSWER_TOKENS as f64 / self.decode_tokens_per_second + prefill
    }

    fn is_sound(&self) -> bool {
        let sound = |speed: f64| speed.is_finite() && speed > 0.0;
        sound(self.decode_tokens_per_second) && self.prefill_tokens_per_second.is_none_or(sound)
    }

    fn shown(&self) -> String {
        let prefill = self.prefill_tokens_per_second.map_or_else(String::new, |prefill| format!(" and prefill {prefill:.1} tok/s"));
        format!("decode {:.1}{prefill}", self.decode_tokens_per_second)
    }
}

impl Tried {
    fn seconds(&self) -> Option<f64> {
        self.speed.map(|speed| speed.seconds())
    }
}

impl Measured {
    /// The fastest way, of splits alone if only these are asked for.
    pub fn best(&self, only_splits: bool) -> Option<&Tried> {
        let of = self.ways.iter().filter(|tried| tried.speed.is_some() && (tried.way.is_split() || !only_splits));
        of.min_by(|a, b| a.seconds().unwrap_or(f64::INFINITY).total_cmp(&b.seconds().unwrap_or(f64::INFINITY)))
    }

    /// How each way failed.
    pub(crate) fn failures(&self) -> String {
        let failed = self.ways.iter().filter_map(|tried| Some(format!("{}: {}", tried.way.name, tried.failure.as_ref()?)));
        failed.collect::<Vec<_>>().join("; ")
    }

    fn is_sound(&self) -> bool {
        let sound = |tried: &Tried| tried.speed.is_none_or(|s| s.is_sound()) && tried.predicted.is_none_or(|p| p.is_sound());
        self.facts.is_sound() && !self.ways.is_empty() && self.ways.iter().all(sound)
    }

    fn reason(&self) -> String {
        let shown = self.ways.iter().filter_map(|tried| match (&tried.speed, &tried.failure) {
            (Some(speed), _) => Some(format!("{}: {}", tried.way.name, speed.shown())),
            (None, Some(failure)) => Some(format!("{}: {failure}", tried.way.name)),
            (None, None) => None,
        });
        format!("measured, tok/s: {}", shown.collect::<Vec<_>>().join("; "))
    }
}

/// A GPU and the processor: a model is to run on one of them, or on both.
pub(crate) struct Contest {
    pub(crate) pair: Pair,
    only_splits: bool,
    key: Key,
    folder: Option<PathBuf>,
    again: bool,
}

impl Contest {
    /// For a model that is to be loaded with these options. None where nothing is to be chosen: another device is asked for, or there is no GPU.
    pub(crate) fn new(fingerprint: &str, options: &LoadOptions) -> Result<Option<Self>, Error> {
        if options.placement.is_some() {
            return Ok(None);
        }
        let gpu = match options.device {
            DeviceChoice::Auto => registry::gpu_for_auto(&options.gpu),
            DeviceChoice::Split => {
                let none = || Error::absent(DeviceChoice::Split.to_string(), "there is no GPU to share the work with".to_owned());
                Some(registry::first_gpu(&options.gpu).ok_or_else(none)?)
            }
            _ => None,
        };
        let Some(DeviceInfo { name, .. }) = &gpu else { return Ok(None) };
        let only = |device| LoadOptions { device, ..options.clone() }.candidates().map(|mut devices| devices.swap_remove(0));
        let (Ok(processor), accelerator) = (only(DeviceChoice::Cpu), only(name.parse()?)?) else { return Ok(None) };
        let pair = Pair { accelerator, processor, clock: Arc::new(WallClock::default()) };
        Self::of_pair(fingerprint, pair, options).map(Some)
    }

    /// The same with two devices of the caller's own.
    pub(crate) fn of_pair(fingerprint: &str, pair: Pair, options: &LoadOptions) -> Result<Self, Error> {
        let key = Key::new(fingerprint, &pair.accelerator.open()?.describe(), &pair.processor.open()?.describe(), options);
        let only_splits = options.device == DeviceChoice::Split;
        Ok(Self { pair, only_splits, key, folder: options.gpu.cache.clone(), again: options.gpu.measure_again })
    }

    /// What was measured before, if it says what is asked for.
    pub(crate) fn recall(&self) -> Option<Measured> {
        let known = self.folder.as_deref().filter(|_| !self.again).and_then(|folder| remembered::load(folder, &self.key))?;
        known.best(self.only_splits).is_some().then_some(known)
    }

    /// Keeps what was measured; where that fails, the next load measures again.
    pub(crate) fn remember(&self, measured: &Measured) {
        if let Some(folder) = &self.folder {
            remembered::store(folder, &self.key, measured);
        }
    }

    /// The ways that fit, best first, with what is expected of them.
    pub(crate) fn plan(&self, program: &Checked, extent: Extent) -> Result<Measured, Error> {
        let facts = self.pair.measure(program)?;
        let ways = self.pair.ways(program, &facts, extent)?.into_iter();
        Ok(Measured {
            facts,
            ways: ways.map(|(way, predicted)| Tried { way, predicted: Some(predicted), speed: None, failure: None }).collect(),
        })
    }

    /// The places of the ways that are worth a try: each device alone, and the splits that may be faster than both.
    pub(crate) fn worth_trying(&self, ways: &[Tried]) -> Vec<usize> {
        let expected = |tried: &Tried| tried.predicted.map_or(f64::INFINITY, |predicted| predicted.seconds());
        let alone = ways.iter().filter(|tried| !tried.way.is_split()).map(expected).fold(f64::INFINITY, f64::min);
        let is_worth = |tried: &Tried| self.only_splits || expected(tried) < WORTH * alone;
        let (mut splits, mut plain) = (0, 0);
        let mut chosen = Vec::new();
        for (place, tried) in ways.iter().enumerate().filter(|(_, tried)| tried.predicted.is_some()) {
            let is_plain = tried.way.is_split() && tried.way.rules.hot_experts.is_none();
            splits += usize::from(tried.way.is_split());
            plain += usize::from(is_plain);
            // What hot experts give depends on a router that predictions do not know: the best splits without them are tried as well.
            let is_chosen = splits <= MOST_TRIED || (is_plain && plain <= PLAIN_TRIED);
            if !tried.way.is_split() || (is_chosen && is_worth(tried)) {
                chosen.push(place);
            }
        }
        chosen
    }

    /// The fastest way of those that were measured.
    pub(crate) fn best<'a>(&self, measured: &'a Measured) -> Option<&'a Tried> {
        measured.best(self.only_splits)
    }

    /// The devices of a way, the one for everything else first.
    pub(crate) fn devices(&self, way: &Way) -> Vec<Arc<dyn Device>> {
        let Pair { accelerator, processor, .. } = &self.pair;
        let first_is_accelerator = way.rules.default.as_deref() == Some(accelerator.name());
        let (first, other) = if first_is_accelerator { (accelerator, processor) } else { (processor, accelerator) };
        if way.is_split() { vec![first.clone(), other.clone()] } else { vec![first.clone()] }
    }

    /// The options that load a way.
    pub(crate) fn options(&self, way: &Way, options: &LoadOptions) -> LoadOptions {
        LoadOptions { placement: way.is_split().then(|| way.rules.clone()), ..options.clone() }
    }

    /// The choice that follows from what was measured.
    pub(crate) fn choice(&self, measured: Measured, best: &Tried, is_new: bool) -> AutoChoice {
        let Tried { way, .. } = best;
        let device = if way.is_split() { DeviceChoice::Split.to_string() } else { way.name.clone() };
        let alone = measured.ways.iter().filter(|tried| !tried.way.is_split() && tried.seconds() < best.seconds());
        let alone = alone
            .filter(|tried| tried.speed.is_some())
            .min_by(|a, b| a.seconds().partial_cmp(&b.seconds()).unwrap_or(std::cmp::Ordering::Equal));
        let cost = alone.and_then(|alone| {
            let (ours, theirs) = (best.speed?, alone.speed?);
            let slower = 100.0 * (ours.seconds() / theirs.seconds() - 1.0);
            Some(format!(
                "a usual request takes {slower:.0} % longer ({}) than on {} alone (tok/s: {} against {})",
                way.name,
                alone.way.name,
                ours.shown(),
                theirs.shown()
            ))
        });
        AutoChoice { device, reason: measured.reason(), way: Some(way.clone()), measured: Some(measured), cost, is_new }
    }

    /// The processor, because the GPU cannot be used.
    pub(crate) fn processor(&self, reason: String) -> AutoChoice {
        AutoChoice { device: self.pair.processor.name().to_owned(), reason, way: None, measured: None, cost: None, is_new: false }
    }

    /// The error, where nothing but a split was asked for.
    pub(crate) fn refuse(&self, error: Error) -> Result<Error, Error> {
        if self.only_splits { Err(error) } else { Ok(error) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::planner::{DeviceFacts, Way};

    pub(crate) fn facts() -> Facts {
        let device = DeviceFacts {
            pause_seconds: 1e-5,
            call_seconds: 1e-5,
            op_seconds: 1e-6,
            read_bytes_per_second: 1e10,
            products_per_second: 1e11,
            copied_bytes_per_second: 1e10,
        };
        Facts { accelerator: device, processor: device, together: 1.0 }
    }

    pub(crate) fn tried(way: Way, decode: f64, prefill: f64) -> Tried {
        let speed = Speed { decode_tokens_per_second: decode, prefill_tokens_per_second: Some(prefill) };
        Tried { way, predicted: None, speed: Some(speed), failure: None }
    }

    #[test]
    fn the_time_of_a_usual_request_decides() {
        let best = |gpu: (f64, f64), cpu: (f64, f64)| {
            let ways = vec![tried(Way::alone("gpu"), gpu.0, gpu.1), tried(Way::alone("cpu"), cpu.0, cpu.1)];
            let measured = Measured { facts: facts(), ways };
            assert_eq!(measured.best(true), None);
            measured.best(false).unwrap().way.name.clone()
        };
        assert_eq!(best((100.0, 1000.0), (90.0, 900.0)), "gpu");
        assert_eq!(best((90.0, 900.0), (100.0, 1000.0)), "cpu");
        assert_eq!(best((90.0, 2000.0), (100.0, 100.0)), "gpu", "it decodes a little slower and reads prompts much faster");
        let failed = Tried { speed: None, failure: Some("lost".into()), ..tried(Way::alone("gpu"), 1.0, 1.0) };
        let measured = Measured { facts: facts(), ways: vec![failed, tried(Way::alone("cpu"), 1.0, 1.0)] };
        assert_eq!(measured.best(false).unwrap().way.name, "cpu");
        assert!(measured.reason().contains("gpu: lost; cpu: decode 1.0"), "{}", measured.reason());
    }
}
