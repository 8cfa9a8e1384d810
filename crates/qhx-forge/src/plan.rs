//! Plans: which precision and which activation form each stage gets.
//!
//! A family writes its programs at one precision. A plan writes them at every precision that one of its stages asks for and takes each stage's weights and
//! products from the right one: families and their pen know nothing of it.

use crate::{
    Config, ForgeError,
    families::{Family, Programs},
    precision::{Precision, StoredTensors},
};
use qhx_ir::{ActivationForm, Checked, Name, OpKind, Program};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// What a stage gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// How its weights are stored.
    pub precision: Precision,
    /// Whether rows become integers where its weights are; otherwise they stay f32.
    pub integer: bool,
}

impl From<Precision> for Level {
    fn from(precision: Precision) -> Self {
        Self { precision, integer: true }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.precision, if self.integer { "" } else { " with f32 activations" })
    }
}

/// Which level each stage has.
#[derive(Clone, Debug, PartialEq)]
pub struct PrecisionPlan {
    /// What the bundle is called; absent: its base precision.
    pub label: Option<String>,
    /// Of every stage that is not named.
    pub base: Precision,
    /// Stages with a level of their own.
    pub stages: BTreeMap<Name, Level>,
}

impl From<Precision> for PrecisionPlan {
    fn from(base: Precision) -> Self {
        Self { label: None, base, stages: BTreeMap::new() }
    }
}

impl PrecisionPlan {
    /// What the manifest calls the precision.
    pub fn label(&self) -> String {
        self.label.clone().unwrap_or_else(|| self.base.to_string())
    }

    /// The level of a stage.
    pub fn level(&self, stage: &str) -> Level {
        self.stages.get(stage).copied().unwrap_or(self.base.into())
    }

    /// The programs of a model at this plan.
    pub fn write(&self, family: &Family, config: Config<'_>, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
        let mut programs = (family.write)(config, self.base, tensors)?;
        let mut others: Vec<(Precision, Programs)> = Vec::new();
        for level in self.stages.values() {
            if level.precision != self.base && !others.iter().any(|(precision, _)| *precision == level.precision) {
                others.push((level.precision, (family.write)(config, level.precision, tensors)?));
            }
        }
        if self.stages.is_empty() {
            return Ok(programs);
        }
        for (i, written) in programs.programs.iter_mut().enumerate() {
            let of =
                |precision: Precision| others.iter().find(|(p, _)| *p == precision).map(|(_, programs)| &*programs.programs[i].program);
            written.program = Checked::new(self.merge(&written.program, &of))?;
        }
        Ok(programs)
    }

    /// `base` with the weights and products of each stage taken from the program of its precision.
    fn merge<'a>(&self, base: &Checked, of: &dyn Fn(Precision) -> Option<&'a Program>) -> Program {
        let mut merged = Program::clone(base);
        let owners = Owners::of(base);
        let level_of = |weight: &str| owners.stage(weight).map(|stage| self.level(&base.stages[stage].name));
        for (name, weight) in &mut merged.weights {
            let other = level_of(name).and_then(|level| of(level.precision));
            if let Some(other) = other.and_then(|program| program.weights.get(name)) {
                weight.encoding = other.encoding;
            }
        }
        for (i, op) in merged.ops.iter_mut().enumerate() {
            let Some(weight) = op.op.weights().first().map(|name| (*name).clone()) else { continue };
            let Some(level) = level_of(&weight) else { continue };
            // Programs of one family differ in nothing but encodings and forms, so ops have the same places.
            let form = form_of(&of(level.precision).unwrap_or(base).ops[i].op);
            set_form(&mut op.op, if level.integer { form } else { ActivationForm::F32 });
        }
        merged
    }
}

/// The stage that decides on each weight: the last one that uses it (a tied table is the head's). Stages by their places.
pub struct Owners {
    owners: BTreeMap<Name, usize>,
    weights: Vec<Vec<Name>>,
    users: Vec<Vec<usize>>,
}

impl Owners {
    /// Of a program's weights.
    pub fn of(program: &Checked) -> Self {
        let mut owners = BTreeMap::new();
        for (place, op) in program.ops.iter().enumerate() {
            owners.extend(op.op.weights().into_iter().map(|weight| (weight.clone(), program.stage_of_op(place))));
        }
        let mut weights = vec![Vec::new(); program.stages.len()];
        owners.iter().for_each(|(weight, &stage)| weights[stage].push(weight.clone()));
        let mut users = vec![Vec::new(); program.stages.len()];
        for (place, op) in program.ops.iter().enumerate() {
            let stages: BTreeSet<usize> = op.op.weights().into_iter().map(|weight| owners[weight]).collect();
            stages.into_iter().for_each(|stage| users[stage].push(place));
        }
        Self { owners, weights, users }
    }

    /// The stage that decides on a weight.
    pub fn stage(&self, weight: &str) -> Option<usize> {
        self.owners.get(weight).copied()
    }

    /// The weights that a stage decides on, by name.
    pub fn weights(&self, stage: usize) -> &[Name] {
        &self.weights[stage]
    }

    /// The places of the ops, of any stage, that use one of them.
    pub fn users(&self, stage: usize) -> &[usize] {
        &self.users[stage]
    }
}

/// The form in which rows enter an op's products.
pub fn form_of(op: &OpKind) -> ActivationForm {
    match op {
        OpKind::Linear { activation, .. } => *activation,
        OpKind::Experts { form, .. } => *form,
        _ => ActivationForm::F32,
    }
}

fn set_form(op: &mut OpKind, new: ActivationForm) {
    match op {
        OpKind::Linear { activation, .. } => *activation = new,
        OpKind::Experts { form, .. } => *form = new,
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families;
    use qhx_ir::Encoding;
    use std::path::Path;

    fn write(plan: &PrecisionPlan, name: &str) -> Checked {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name).join("config.json");
        let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let config = Config::new(&config);
        plan.write(families::of(config).unwrap(), config, &()).unwrap().programs[0].program.clone()
    }

    #[test]
    fn stages_get_what_the_plan_says() {
        let mut plan = PrecisionPlan::from(Precision::W8);
        plan.stages.insert("layers.1.attn".into(), Level { precision: Precision::W8, integer: false });
        plan.stages.insert("layers.1.ffn".into(), Precision::W4.into());
        plan.stages.insert("lm_head".into(), Precision::F16.into());
        let (base, mixed) = (write(&Precision::W8.into(), "gemma4"), write(&plan, "gemma4"));
        let of = |program: &Program, path: &str| {
            let op = program.ops.iter().find(|op| *op.path == *path).unwrap();
            (program.weights[op.op.weights()[0]].encoding, form_of(&op.op))
        };
        assert_eq!(of(&mixed, "layers.1.attn.q_proj"), (Encoding::I8Row, ActivationForm::F32));
        assert_eq!(of(&mixed, "layers.1.ffn.down_proj"), (Encoding::I4_BLOCK32, ActivationForm::I8Block32));
        assert_eq!(of(&mixed, "lm_head.logits"), (Encoding::F16, ActivationForm::F32));
        assert_eq!(of(&mixed, "embed.embed_tokens").0, Encoding::F16, "a tied table is stored once");
        for path in [
            "layers.0.attn.q_proj",
            "layers.2.ffn.down_proj",
            "per_layer_embed.embed_tokens_per_layer",
            "layers.1.ffn.post_feedforward_layernorm",
        ] {
            assert_eq!(of(&mixed, path), of(&base, path), "{path}");
        }
    }
}
