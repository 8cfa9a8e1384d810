//! The residual stream: every row that is added to it is rotated by its writer, and every reader takes rotated rows. An RMS norm in between does not change with a rotation, once its weight is folded
//! into its readers.
//!
//! The embedding table stays as it is, for it may be the output head too: rows are transformed after the look-up, and back before the final norm. Rows of towers are rotated by the tower's last
//! matrix. A stream that anything else writes or reads (a norm between a product and the stream; a layer norm, which has a mean and a bias) is left alone.

use super::{Draft, is_hidden, is_plain_product, only_reader, uses, width};
use crate::{ForgeError, families::Programs, pen::Written};
use qhx_ir::{Checked, Generator, Name, Op, OpKind, hadamard};
use std::collections::{BTreeSet, HashMap};

pub(super) fn rotate(programs: &mut Programs) -> Result<(), ForgeError> {
    let uses = uses(&programs.programs);
    let Some((text, towers)) = programs.programs.split_first_mut() else { return Ok(()) };
    let program = text.program.clone();
    let Some(stream) = Stream::of(&program, &uses) else { return Ok(()) };
    let Some(tower_products) = tower_products(towers, &stream.tower_outputs, &uses) else { return Ok(()) };
    for (tower, product) in tower_products {
        let mut draft = Draft::new(&mut towers[tower]);
        draft.rotate_output(&product.op, stream.width);
        draft.program.stages.iter_mut().filter(|stage| stage.tap.as_ref() == Some(&product.path)).for_each(|stage| stage.rotated = true);
        draft.finish()?;
    }
    let mut draft = Draft::new(text);
    for &writer in &stream.writers {
        draft.rotate_output(&program.ops[writer].op, stream.width);
    }
    for &norm in &stream.norms {
        let gain = draft.take_gain(norm);
        for &reader in program.readers(&program.ops[norm].path) {
            draft.rotate_input(&program.ops[reader].op, stream.width, gain.as_ref());
        }
    }
    for stage in &mut draft.program.stages {
        stage.rotated = stage.tap.as_ref().is_some_and(|tap| stream.rotated.contains(tap));
    }
    draft.transform(&stream.embedded);
    stream.wanted.iter().for_each(|rows| draft.transform(rows));
    draft.finish()
}

/// The linears at the end of towers that make outputs of these names, each with its tower; none where an output comes from anything else, or from nowhere.
fn tower_products(towers: &[Written], outputs: &[Name], uses: &HashMap<Name, usize>) -> Option<Vec<(usize, Op)>> {
    let mut products = Vec::new();
    for name in outputs {
        let mut is_made = false;
        for (tower, Written { program, .. }) in towers.iter().enumerate() {
            for output in program.outputs.iter().filter(|output| output.name == *name) {
                let maker = &program.ops[program.maker(&output.value).filter(|_| program.readers(&output.value).is_empty())?];
                let is_product = matches!(maker.op, OpKind::Linear { .. }) && is_plain_product(&maker.op, uses);
                products.push(is_product.then(|| (tower, maker.clone()))?);
                is_made = true;
            }
        }
        is_made.then_some(())?;
    }
    Some(products)
}

/// A residual stream that can be rotated.
struct Stream {
    width: usize,
    /// What the look-up gives.
    embedded: Name,
    /// What follows from it by additions.
    rotated: BTreeSet<Name>,
    /// The places of the products that are added to it.
    writers: Vec<usize>,
    /// The places of the norms that read it.
    norms: Vec<usize>,
    /// The rows whose logits are wanted.
    wanted: Vec<Name>,
    /// The outputs of towers that are put into it.
    tower_outputs: Vec<Name>,
}

impl Stream {
    /// Follows the stream from a program's only look-up on; none where something stands in the way.
    fn of(program: &Checked, uses: &HashMap<Name, usize>) -> Option<Self> {
        let mut tables = program.ops.iter().filter(|op| matches!(op.op, OpKind::Embed { .. }));
        let (Some(embed), None) = (tables.next(), tables.next()) else { return None };
        let mut stream = Self {
            width: width(program, &embed.path).filter(|&width| hadamard::exists(width))?,
            embedded: embed.path.clone(),
            rotated: BTreeSet::new(),
            writers: Vec::new(),
            norms: Vec::new(),
            wanted: Vec::new(),
            tower_outputs: Vec::new(),
        };
        for (place, op) in program.ops.iter().enumerate() {
            if op.op.inputs().into_iter().any(|value| stream.has(value)) {
                stream.follow(program, place, op, uses)?;
            }
        }
        let is_seen = stream.rotated.iter().any(|value| program.is_output(value));
        (!stream.wanted.is_empty() && !is_seen).then_some(stream)
    }

    fn has(&self, value: &Name) -> bool {
        *value == self.embedded || self.rotated.contains(value)
    }

    /// Takes in an op that reads the stream; none where it cannot read rotated rows.
    fn follow(&mut self, program: &Checked, place: usize, Op { path, op }: &Op, uses: &HashMap<Name, usize>) -> Option<()> {
        let is_plain = |&reader: &usize| is_plain_product(&program.ops[reader].op, uses);
        match op {
            OpKind::Add { a, b } if self.has(a) != self.has(b) => {
                let added = if self.has(a) { b } else { a };
                only_reader(program, added)?;
                self.writers.push(program.maker(added).filter(is_plain)?);
                self.rotated.insert(path.clone());
            }
            OpKind::ScatterRows { x, rows, .. } | OpKind::ScatterAddRows { x, rows, .. } if self.has(x) && !self.has(rows) => {
                let input = program.inputs.iter().find(|input| input.name == *rows)?;
                self.tower_outputs.push(match &input.generator {
                    Generator::SoftRows => "soft_rows".into(),
                    Generator::DeepstackRows(number) => format!("deepstack.{number}").into(),
                    _ => return None,
                });
                self.rotated.insert(path.clone());
            }
            OpKind::RmsNorm { weight, .. } => {
                let is_own = weight.iter().all(|weight| uses[weight] == 1);
                (is_own && is_hidden(program, path) && program.readers(path).iter().all(is_plain)).then_some(())?;
                self.norms.push(place);
            }
            OpKind::Gather { .. } => {
                let is_norm = |&reader: &usize| matches!(program.ops[reader].op, OpKind::RmsNorm { .. });
                (is_hidden(program, path) && program.readers(path).iter().all(is_norm)).then_some(())?;
                self.wanted.push(path.clone());
            }
            _ => return None,
        }
        Some(())
    }
}
