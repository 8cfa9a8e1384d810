//! The residual stream: every row that is added to it is rotated by its writer, and every reader takes rotated rows. An RMS norm in between does not change with a rotation, once its weight is folded
//! into its readers.
//!
//! A layer norm is an RMS norm of rows that have no mean: where all norms of the stream are layer norms, nothing depends on the mean of its rows, so every writer takes it away. Their weights are
//! folded into the readers as those of RMS norms are, and their biases become biases of the readers.
//!
//! The embedding table has rotated rows. Where it is the output head too, the weight of the final norm cannot be folded into it: rows are transformed back before that norm, and forth again behind it.
//! Rows of towers are rotated by the tower's last matrix. A stream that anything else writes or reads (a norm between a product and the stream; norms of both kinds; a layer norm before a table as output head) is left alone.

use super::{NormWeights, Rewrite, is_hidden, is_plain_product, only_reader, uses, width};
use crate::{
    ForgeError,
    families::Programs,
    pen::{Side, Written},
};
use qhx_ir::{Checked, Generator, Name, Op, OpKind, hadamard};
use std::collections::{BTreeSet, HashMap};

/// Rotates the stream; one whose norms are layer norms only if `centred`. A drafting program has the `shared` weights too: they are rotated, but nothing else is folded into them.
pub(super) fn rotate(programs: &mut Programs, centred: bool, shared: &BTreeSet<Name>) -> Result<(), ForgeError> {
    let uses = uses(&programs.programs);
    let Some((text, towers)) = programs.programs.split_first_mut() else { return Ok(()) };
    let program = text.program.clone();
    let Some(stream) = Stream::of(&program, &uses, shared).filter(|stream| centred || !stream.is_centred()) else { return Ok(()) };
    let Some(tower_products) = tower_products(towers, &stream.tower_outputs, &uses) else { return Ok(()) };
    for (tower, product) in tower_products {
        let mut rewrite = Rewrite { centred: stream.is_centred(), ..Rewrite::new(&mut towers[tower]) };
        rewrite.rotate_output(&product.op, stream.width);
        for stage in rewrite.program.stages.iter_mut().filter(|stage| stage.tap.as_ref() == Some(&product.path)) {
            (stage.rotated, stage.centred) = (true, stream.is_centred());
        }
        rewrite.finish()?;
    }
    let mut rewrite = Rewrite { centred: stream.is_centred(), ..Rewrite::new(text) };
    for &writer in &stream.writers {
        rewrite.rotate_output(&program.ops[writer].op, stream.width);
    }
    for &norm in &stream.norms {
        let NormWeights { gain, bias } = rewrite.take_weights(norm);
        for &reader in program.readers(&program.ops[norm].path) {
            bias.iter().for_each(|bias| rewrite.fold_bias(reader, bias));
            rewrite.rotate_input(&program.ops[reader].op, stream.width, gain.as_ref());
        }
    }
    for stage in &mut rewrite.program.stages {
        stage.rotated = stage.tap.as_ref().is_some_and(|tap| stream.rotated.contains(tap));
        stage.centred = stage.rotated && stream.is_centred();
    }
    rewrite.rotate(&stream.table, Side::Input { block: stream.width, gain: None });
    for &norm in &stream.before_table {
        program.ops[norm].op.inputs().into_iter().for_each(|rows| rewrite.transform(rows));
        rewrite.transform(&program.ops[norm].path);
    }
    for &norm in &stream.before_shared {
        program.ops[norm].op.inputs().into_iter().for_each(|rows| rewrite.transform(rows));
    }
    rewrite.finish()
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
    /// The weight that is looked up in.
    table: Name,
    /// What the look-up gives, and what follows from it.
    rotated: BTreeSet<Name>,
    /// The places of the products that are added to it.
    writers: Vec<usize>,
    /// The places of the norms that read it, and of which kind they all are.
    norms: Vec<usize>,
    kind: Option<NormKind>,
    /// The places of those norms that read it for the table as output head.
    before_table: Vec<usize>,
    /// The places of those norms that read it for a shared output head: their weights cannot be folded into it.
    before_shared: Vec<usize>,
    /// The outputs of towers that are put into it.
    tower_outputs: Vec<Name>,
}

#[derive(Clone, Copy, PartialEq)]
enum NormKind {
    Rms,
    Layer,
}

impl Stream {
    /// Follows the stream from a program's only look-up on; none where something stands in the way.
    fn of(program: &Checked, uses: &HashMap<Name, usize>, shared: &BTreeSet<Name>) -> Option<Self> {
        let mut tables = program.ops.iter().filter_map(|op| match &op.op {
            OpKind::Embed { table, .. } => Some((&op.path, table)),
            _ => None,
        });
        let (Some((embedded, table)), None) = (tables.next(), tables.next()) else { return None };
        let mut stream = Self {
            width: width(program, embedded).filter(|&width| hadamard::exists(width))?,
            table: table.clone(),
            rotated: BTreeSet::from([embedded.clone()]),
            writers: Vec::new(),
            norms: Vec::new(),
            kind: None,
            before_table: Vec::new(),
            before_shared: Vec::new(),
            tower_outputs: Vec::new(),
        };
        for (place, op) in program.ops.iter().enumerate() {
            if op.op.inputs().into_iter().any(|value| stream.has(value)) {
                stream.follow(program, place, op, uses, shared)?;
            }
        }
        let is_seen = stream.rotated.iter().any(|value| program.is_output(value));
        // Whoever else uses the table would get rotated rows.
        let known = 1 + stream.before_table.iter().map(|&norm| program.readers(&program.ops[norm].path).len()).sum::<usize>();
        (uses[&stream.table] == known && !is_seen).then_some(stream)
    }

    /// Whether its rows lose their mean.
    fn is_centred(&self) -> bool {
        self.kind == Some(NormKind::Layer)
    }

    fn has(&self, value: &Name) -> bool {
        self.rotated.contains(value)
    }

    /// Takes in an op that reads the stream; none where it cannot read rotated rows.
    fn follow(
        &mut self,
        program: &Checked,
        place: usize,
        Op { path, op }: &Op,
        uses: &HashMap<Name, usize>,
        shared: &BTreeSet<Name>,
    ) -> Option<()> {
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
            OpKind::RmsNorm { x, .. } | OpKind::LayerNorm { x, .. } => {
                is_hidden(program, path).then_some(())?;
                let readers = program.readers(path);
                let is_own = op.weights().into_iter().all(|weight| uses[weight] == 1);
                let kind = if matches!(op, OpKind::LayerNorm { .. }) { NormKind::Layer } else { NormKind::Rms };
                (*self.kind.get_or_insert(kind) == kind).then_some(())?;
                let reads_table = |&reader: &usize| match &program.ops[reader].op {
                    OpKind::Linear { weight, clip: None, .. } => *weight == self.table,
                    _ => false,
                };
                let is_shared = |weight: &Name| *weight != self.table && shared.contains(weight);
                if readers.iter().any(|&reader| program.ops[reader].op.weights().into_iter().any(is_shared)) {
                    only_reader(program, x)?;
                    self.before_shared.push(place);
                } else if is_own && readers.iter().all(is_plain) {
                    self.norms.push(place);
                } else {
                    (kind == NormKind::Rms).then_some(())?;
                    only_reader(program, x)?;
                    self.before_table.push(readers.iter().all(reads_table).then_some(place)?);
                }
            }
            OpKind::Gather { .. } => {
                is_hidden(program, path).then_some(())?;
                self.rotated.insert(path.clone());
            }
            _ => return None,
        }
        Some(())
    }
}
