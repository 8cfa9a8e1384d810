//! Rotations: a transformation of programs that leaves what they compute as it is and makes their weights and activations easier to round.
//!
//! A row of activations often has a few numbers that are a hundred times as large as the others, and one scale for all of them rounds the others away. The orthogonal transform of
//! [`qhx_ir::hadamard`], `R` below, spreads each number over the whole row. `R` is its own inverse, so `W · x = (W · R) · (R · x)`: it is folded into the weights on both sides of a
//! value wherever what lies between them commutes with it, and computed at run time where it does not.
//!
//! What is valid is found by looking at the ops; families know nothing of it:
//!
//! * `residual`: the residual stream, folded into everything that writes and reads it, together with what layer norms do beside scaling;
//! * `values`: the values of an attention, folded into the matrices before and after it;
//! * `inputs`: the inputs of products behind a gate, and behind the norms of a stream that cannot be rotated, at run time.
//!
//! A program that drafts has a few small matrices of its own, which stay as they are; it turns what it looks up in a `shared` table, and what it multiplies a shared head with.
//! Values of the text that it reads are not rotated.

mod inputs;
mod residual;
mod shared;
#[cfg(test)]
mod tests;
mod values;
mod weights;

use crate::{
    ForgeError, Precision,
    families::Programs,
    pen::{Folded, Recipe, Side, Written},
};
use qhx_ir::{ActivationForm, Checked, Dim, Encoding, ExpertBias, Generator, Name, Op, OpKind, Program, Weight};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What is rotated where a program allows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rotations {
    /// The residual stream.
    pub residual: bool,
    /// The residual stream also where its norms are layer norms.
    pub centred: bool,
    /// The values of attentions.
    pub values: bool,
    /// The inputs of products behind a gate.
    pub gated: bool,
    /// The inputs of products behind a norm, where the residual stream is not rotated.
    pub normed: bool,
}

impl Rotations {
    /// Everything that can be rotated.
    pub const ALL: Self = Self { residual: true, centred: true, values: true, gated: true, normed: true };

    /// What pays at a precision: everything where weights become integers by calibrated rounding. Without calibration nothing: spreading the large numbers of a weight over its rows makes the
    /// nearest integers worse (on a small model at 4 bits the divergence grew from 0.29 to 0.49), and floats gain nothing.
    pub fn for_precision(precision: Precision, calibrated: bool) -> Self {
        let is_integer = match precision {
            Precision::W8 | Precision::W8F16Head | Precision::W4 | Precision::W4Row | Precision::Bits(_) => true,
            // Experts are fused ops, of which only the stream can be rotated; all else is f16.
            Precision::MoeI8 | Precision::Native | Precision::F32 | Precision::F16 => false,
        };
        // A stream with layer norms gains at int8 alone: a mixture loses as much either way (docs/precision.md has the numbers).
        let centred = matches!(precision, Precision::W8 | Precision::W8F16Head);
        if calibrated && is_integer { Self { centred, ..Self::ALL } } else { Self::default() }
    }
}

/// Rotates what `rotations` names and the programs, none of which is rotated yet, allow; the rest stays as it is. Every program computes the same as before, up to the order of sums.
pub fn rotate(programs: &mut Programs, rotations: Rotations) -> Result<(), ForgeError> {
    let name = programs.draft.as_ref().map(|draft| draft.program.as_str());
    let place = programs.programs.iter().position(|written| Some(&*written.program.name) == name);
    let mut drafting = place.map(|place| programs.programs.remove(place));
    let shared = drafting.iter().flat_map(|written| written.program.weights.keys().cloned()).collect();
    let read = drafting.iter().flat_map(|written| &written.program.inputs).filter_map(|input| match &input.generator {
        Generator::TextValues(slot) => Some(slot.clone()),
        _ => None,
    });
    rotate_others(programs, rotations, &shared, &read.collect())?;
    if let (Some(written), Some(text)) = (&mut drafting, programs.programs.first()) {
        shared::follow(written, text)?;
    }
    if let (Some(place), Some(written)) = (place, drafting) {
        programs.programs.insert(place, written);
    }
    programs.rotations = rotations;
    programs.programs.iter_mut().try_for_each(with_row_scales)
}

/// Rotates all programs but the one that drafts, which has the `shared` weights and reads the slots in `read`.
fn rotate_others(programs: &mut Programs, rotations: Rotations, shared: &BTreeSet<Name>, read: &BTreeSet<Name>) -> Result<(), ForgeError> {
    for written in &mut programs.programs {
        if rotations.values {
            values::rotate(written, read)?;
        }
        if rotations.gated {
            inputs::rotate(written, inputs::is_gated)?;
        }
    }
    if rotations.residual {
        residual::rotate(programs, rotations.centred, shared)?;
    }
    if let Some(text) = programs.programs.first_mut().filter(|_| rotations.normed) {
        inputs::rotate(text, inputs::is_normed)?;
    }
    Ok(())
}

/// Lets rotated rows meet int8 weights with one scale for the whole row, where all products that read them can. Their numbers are all of about the same size, so that a scale for every 32 gains little, and
/// products are faster. Not before a router, which takes other experts after the slightest change.
fn with_row_scales(written: &mut Written) -> Result<(), ForgeError> {
    let Written { program: checked, recipes, .. } = &*written;
    if checked.ops.iter().any(|op| matches!(op.op, OpKind::Route { .. })) {
        return Ok(());
    }
    let takes_row_scales = |op: &OpKind| match op {
        OpKind::Linear { weight, activation: ActivationForm::I8Block32, .. } => {
            checked.weights[weight].encoding == Encoding::I8Row && recipes[weight].has_rotated_inputs()
        }
        _ => false,
    };
    let mut program = Program::clone(checked);
    for op in &mut program.ops {
        if let OpKind::Linear { x, activation, .. } = &mut op.op
            && checked.readers(x).iter().all(|&reader| takes_row_scales(&checked.ops[reader].op))
        {
            *activation = ActivationForm::I8Row;
        }
    }
    written.program = Checked::new(program)?;
    Ok(())
}

/// Changes to a program and its recipes that are made together.
struct Rewrite<'w> {
    written: &'w mut Written,
    program: Program,
    /// New ops, each with the place of the op that it follows.
    inserted: BTreeMap<usize, Op>,
    /// Whether weights lose the mean of what is rotated.
    centred: bool,
}

/// What a norm does to its rows beside scaling them to one size: each is multiplied by the gain, then the bias is added.
struct NormWeights {
    gain: Option<Recipe>,
    bias: Option<Recipe>,
}

impl<'w> Rewrite<'w> {
    fn new(written: &'w mut Written) -> Self {
        Self { program: Program::clone(&written.program), inserted: BTreeMap::new(), centred: false, written }
    }

    /// Rotates a weight that one op uses.
    fn rotate(&mut self, weight: &Name, side: Side) {
        if let Some(recipe) = self.written.recipes.get_mut(weight) {
            *recipe = recipe.rotated(side, self.centred);
        }
    }

    /// Rotates the outputs of a product: its matrix, and its bias if it has one.
    fn rotate_output(&mut self, product: &OpKind, block: usize) {
        match product {
            OpKind::Linear { weight, bias, .. } => {
                self.rotate(weight, Side::Output { block });
                bias.iter().for_each(|bias| self.rotate(bias, Side::Input { block, gain: None }));
            }
            OpKind::Experts { down, .. } => self.rotate(down, Side::Output { block }),
            other => unreachable!("{} is no product", other.name()),
        }
    }

    /// Rotates the inputs of a product, after they were multiplied by `gain`.
    fn rotate_input(&mut self, product: &OpKind, block: usize, gain: Option<&Recipe>) {
        let weights = match product {
            OpKind::Linear { weight, .. } => vec![weight],
            OpKind::Experts { gate, up, .. } => vec![gate, up],
            other => unreachable!("{} is no product", other.name()),
        };
        weights.into_iter().for_each(|weight| self.rotate(weight, Side::Input { block, gain: gain.cloned() }));
    }

    /// Transforms a value at run time: a new op behind the one that makes it, which all its readers read instead.
    fn transform(&mut self, value: &Name) {
        let checked = &self.written.program;
        let rotated = Name::from(format!("{value}.rotated"));
        for &reader in checked.readers(value) {
            read_instead(&mut self.program.ops[reader].op, value, &rotated);
        }
        if let Some(maker) = checked.maker(value) {
            self.inserted.insert(maker, Op { path: rotated, op: OpKind::Hadamard { x: value.clone() } });
        }
    }

    /// Takes the weights of a norm out of it. A layer norm becomes an RMS norm: the rows that it reads have lost their mean.
    fn take_weights(&mut self, norm: usize) -> NormWeights {
        let op = &mut self.program.ops[norm].op;
        let (gain, bias) = match op {
            OpKind::RmsNorm { weight, .. } => (weight.take(), None),
            OpKind::LayerNorm { x, weight, bias, eps } => {
                let taken = (Some(weight.clone()), bias.take());
                *op = OpKind::RmsNorm { x: x.clone(), weight: None, eps: *eps };
                taken
            }
            other => unreachable!("{} is no norm", other.name()),
        };
        let mut take = |name: Option<Name>| {
            name.and_then(|name| {
                self.program.weights.remove(&name);
                self.written.recipes.remove(&name)
            })
        };
        NormWeights { gain: take(gain), bias: take(bias) }
    }

    /// Makes a vector that was added to the inputs of a product, which are not rotated yet, a bias of the product.
    fn fold_bias(&mut self, product: usize, vector: &Recipe) {
        let mut op = self.program.ops[product].op.clone();
        match &mut op {
            OpKind::Linear { weight, bias, .. } => *bias = Some(self.folded(weight, bias.as_ref(), vector)),
            OpKind::Experts { gate, up, bias, .. } => {
                let own = bias.as_ref();
                *bias = Some(ExpertBias {
                    gate: self.folded(gate, own.map(|own| &own.gate), vector),
                    up: self.folded(up, own.map(|own| &own.up), vector),
                });
            }
            other => unreachable!("{} is no product", other.name()),
        }
        self.program.ops[product].op = op;
    }

    /// The bias of one of a product's matrices with what a vector becomes behind it.
    fn folded(&mut self, matrix: &Name, bias: Option<&Name>, vector: &Recipe) -> Name {
        let shape = self.program.weights[matrix].shape.clone();
        let name = bias.cloned().unwrap_or_else(|| format!("{}.bias", matrix.strip_suffix(".weight").unwrap_or(matrix)).into());
        let folded = Folded {
            matrix: self.written.recipes[matrix].clone(),
            vector: vector.clone(),
            bias: self.written.recipes.get(&name).cloned(),
            shape: shape.clone(),
        };
        self.program.weights.insert(name.clone(), Weight { shape: shape[..shape.len() - 1].to_vec(), encoding: Encoding::F32 });
        self.written.recipes.insert(name.clone(), Recipe::Folded(Box::new(folded)));
        name
    }

    fn finish(mut self) -> Result<(), ForgeError> {
        let ops = std::mem::take(&mut self.program.ops);
        for (place, op) in ops.into_iter().enumerate() {
            self.program.ops.push(op);
            self.program.ops.extend(self.inserted.remove(&place));
        }
        self.written.program = Checked::new(self.program)?;
        Ok(())
    }
}

/// Lets an op that reads rows read others; of the kinds that stand behind a value that is transformed.
fn read_instead(op: &mut OpKind, old: &Name, new: &Name) {
    let read = match op {
        OpKind::Linear { x, .. } | OpKind::Experts { x, .. } | OpKind::RmsNorm { x, .. } | OpKind::Gather { x, .. } => vec![x],
        OpKind::Add { a, b } => vec![a, b],
        OpKind::ScatterRows { x, rows, .. } | OpKind::ScatterAddRows { x, rows, .. } => vec![x, rows],
        other => unreachable!("{} reads no transformed rows", other.name()),
    };
    read.into_iter().filter(|name| *name == old).for_each(|name| *name = new.clone());
}

/// How often each weight is used, by all programs.
fn uses<'p>(programs: impl IntoIterator<Item = &'p Written>) -> HashMap<Name, usize> {
    let mut uses = HashMap::new();
    for written in programs {
        for weight in written.program.ops.iter().flat_map(|op| op.op.weights()) {
            *uses.entry(weight.clone()).or_default() += 1;
        }
    }
    uses
}

/// Whether an op is a product that bounds neither its input nor its output, and whose weights nobody else uses.
fn is_plain_product(op: &OpKind, uses: &HashMap<Name, usize>) -> bool {
    matches!(op, OpKind::Linear { clip: None, .. } | OpKind::Experts { .. }) && op.weights().into_iter().all(|weight| uses[weight] == 1)
}

/// Whether nothing but ops of the program sees a value: it is no output and no tap.
fn is_hidden(program: &Checked, value: &Name) -> bool {
    !program.is_output(value) && program.stages_shown_by(value).is_empty()
}

/// The one op that reads a value, where nothing else sees it.
fn only_reader(program: &Checked, value: &Name) -> Option<usize> {
    match program.readers(value) {
        &[reader] if is_hidden(program, value) => Some(reader),
        _ => None,
    }
}

/// The last dimension of a value where it is a number.
fn width(program: &Checked, value: &Name) -> Option<usize> {
    match program.value_type(value).shape.last() {
        Some(&Dim::Fixed(width)) => Some(width),
        _ => None,
    }
}
