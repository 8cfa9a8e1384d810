//! Plans: how each weight is stored, in which form rows meet it, and what is rotated before.
//!
//! A family writes its programs at one precision; a plan then changes the weights that it names: families and their pen know nothing of it.

use crate::{
    Config, ForgeError,
    families::{Family, Programs},
    precision::{Precision, StoredTensors, activation_of},
    rotate::{Rotations, rotate},
};
use qhx_ir::{ActivationForm, Checked, Encoding, Name, OpKind, Program};
use std::collections::{BTreeMap, BTreeSet};

/// What is stored how.
#[derive(Clone, Debug, PartialEq)]
pub struct PrecisionPlan {
    /// What the bundle is called; absent: its base precision.
    pub label: Option<String>,
    /// Of everything that is not named below.
    pub base: Precision,
    /// Weights with an encoding of their own.
    pub encodings: BTreeMap<Name, Encoding>,
    /// Weights that rows meet in a form of their own.
    pub activations: BTreeMap<Name, ActivationForm>,
    /// What is rotated before it is rounded, where the program allows it.
    pub rotations: Rotations,
}

impl From<Precision> for PrecisionPlan {
    fn from(base: Precision) -> Self {
        Self { label: None, base, encodings: BTreeMap::new(), activations: BTreeMap::new(), rotations: Rotations::default() }
    }
}

impl PrecisionPlan {
    /// What the manifest calls the precision.
    pub fn label(&self) -> String {
        self.label.clone().unwrap_or_else(|| self.base.to_string())
    }

    /// The programs of a model at this plan.
    pub fn write(&self, family: &Family, config: Config<'_>, tensors: &dyn StoredTensors) -> Result<Programs, ForgeError> {
        self.write_prepared(family, config, tensors, |_| Ok(()))
    }

    /// The same of programs that were changed as `prepare` does, before anything is rotated.
    pub(crate) fn write_prepared(
        &self,
        family: &Family,
        config: Config<'_>,
        tensors: &dyn StoredTensors,
        prepare: impl FnOnce(&mut Programs) -> Result<(), ForgeError>,
    ) -> Result<Programs, ForgeError> {
        let mut programs = (family.write)(config, self.base, tensors)?;
        prepare(&mut programs)?;
        change(&mut programs, |program| {
            for (name, encoding) in &self.encodings {
                if let Some(weight) = program.weights.get_mut(name) {
                    weight.encoding = *encoding;
                }
            }
            set_forms(program, |weight| self.encodings.get(weight).map(|encoding| activation_of(*encoding)));
        })?;
        rotate(&mut programs, self.rotations)?;
        change(&mut programs, |program| set_forms(program, |weight| self.activations.get(weight).copied()))?;
        Ok(programs)
    }
}

/// Changes every program.
fn change(programs: &mut Programs, change: impl Fn(&mut Program)) -> Result<(), ForgeError> {
    for written in &mut programs.programs {
        let mut program = Program::clone(&written.program);
        change(&mut program);
        written.program = Checked::new(program)?;
    }
    Ok(())
}

/// Sets the form of every op for whose first weight there is one.
fn set_forms(program: &mut Program, form_for: impl Fn(&Name) -> Option<ActivationForm>) {
    for op in &mut program.ops {
        let new = op.op.weights().first().and_then(|weight| form_for(weight));
        if let (OpKind::Linear { activation: form, .. } | OpKind::Experts { form, .. }, Some(new)) = (&mut op.op, new) {
            *form = new;
        }
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

/// The weights of a program that rows are looked up in, or that make the logits, with their encodings.
pub fn tables(program: &Checked) -> impl Iterator<Item = (Name, Encoding)> {
    let heads = program.outputs.iter().filter(|output| *output.name == *"logits").flat_map(|_| program.stages.len().checked_sub(1));
    let of_heads = heads.flat_map(|stage| program.ops_of_stage(stage)).map(|&op| &program.ops[op].op);
    let looked_up = program.ops.iter().map(|op| &op.op).filter(|op| matches!(op, OpKind::Embed { .. } | OpKind::Interpolate { .. }));
    let names = of_heads.filter(|op| matches!(op, OpKind::Linear { .. })).chain(looked_up).flat_map(|op| op.weights());
    names.map(|name| (name.clone(), program.weights[name].encoding)).collect::<BTreeMap<_, _>>().into_iter()
}

/// The form in which rows enter an op's products.
pub fn form_of(op: &OpKind) -> ActivationForm {
    match op {
        OpKind::Linear { activation, .. } => *activation,
        OpKind::Experts { form, .. } => *form,
        _ => ActivationForm::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families;
    use std::path::Path;

    fn write(plan: &PrecisionPlan, name: &str) -> Checked {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name).join("config.json");
        let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let config = Config::new(&config);
        plan.write(families::of(config).unwrap(), config, &()).unwrap().programs[0].program.clone()
    }

    #[test]
    fn weights_get_what_the_plan_says() {
        let mut plan = PrecisionPlan::from(Precision::W8);
        plan.activations.insert("layers.1.self_attn.q_proj.weight".into(), ActivationForm::F32);
        plan.encodings.insert("layers.1.mlp.down_proj.weight".into(), Encoding::I4_BLOCK32);
        plan.encodings.insert("embed_tokens.weight".into(), Encoding::F16);
        let (base, mixed) = (write(&Precision::W8.into(), "gemma4"), write(&plan, "gemma4"));
        let of = |program: &Program, path: &str| {
            let op = program.ops.iter().find(|op| *op.path == *path).unwrap();
            (program.weights[op.op.weights()[0]].encoding, form_of(&op.op))
        };
        assert_eq!(of(&mixed, "layers.1.attn.q_proj"), (Encoding::I8Row, ActivationForm::F32));
        assert_eq!(of(&mixed, "layers.1.ffn.down_proj"), (Encoding::I4_BLOCK32, ActivationForm::I8Block32));
        assert_eq!(of(&mixed, "lm_head.logits"), (Encoding::F16, ActivationForm::F32), "the output head is the table");
        assert_eq!(of(&mixed, "embed.embed_tokens").0, Encoding::F16);
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
