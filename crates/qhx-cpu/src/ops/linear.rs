//! Products with weights: rows are put into their stated form once, then all matrices that read them are multiplied in one step.

use super::{Frame, Run, shortlist::Shortlist, unit_rows};
use crate::{
    kernels::{
        Instructions,
        columns::Panel,
        convert,
        dot::{self, Dots},
        integer::{self, ActivationRows, activation::Layout},
        map::{self, Binary, Unary},
    },
    matrix::{Matrix, Plain},
    memory::{OUTPUTS, Rows, View},
    work::{Chunks, Tile, Tiles, for_each},
};
use half::{bf16, f16};
use qhx_ir::{ActivationForm, Encoding};
use std::ops::Range;

/// Puts the rows of `x` into the form in which they enter products.
#[derive(Debug)]
pub(crate) struct Prepare {
    pub(crate) x: View,
    pub(crate) columns: usize,
    pub(crate) form: ActivationForm,
    pub(crate) clip: Option<[f32; 2]>,
    pub(crate) out: View,
}

/// Products of the same rows with several matrices.
#[derive(Debug)]
pub(crate) struct Linear {
    /// The rows: as they are, or what a [`Prepare`] made of them.
    pub(crate) x: View,
    /// Numbers that a row of `x` takes: its columns, or what its prepared form needs.
    pub(crate) x_width: usize,
    pub(crate) columns: usize,
    pub(crate) form: ActivationForm,
    /// [`OUTPUTS`] at most.
    pub(crate) products: Vec<Product>,
    /// Where there is one product, of which callers may want the largest number only.
    pub(crate) shortlist: Option<Box<Shortlist>>,
}

/// One matrix.
#[derive(Debug)]
pub(crate) struct Product {
    pub(crate) weight: Matrix,
    pub(crate) bias: Option<Plain>,
    pub(crate) clip: Option<[f32; 2]>,
    pub(crate) out: View,
}

impl Prepare {
    pub(crate) fn scratch(&self) -> usize {
        self.clip.map_or(0, |_| self.columns)
    }

    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let (run, ([out], inputs, scratch)) = (frame.run, frame.memory.split([&self.out]));
        let x = inputs.rows(&self.x, self.columns);
        let width = prepared_width(self.form, self.columns);
        let unit = unit_rows(self.columns);
        for_each(run.pool, Chunks::new(out, unit * width), scratch, |number, part, scratch| {
            for (i, part) in part.chunks_mut(width).enumerate() {
                prepare_row(&run, self.form, self.clip, x.row(number * unit + i), part, scratch);
            }
        });
    }
}

/// Numbers that a prepared row takes.
pub(crate) fn prepared_width(form: ActivationForm, columns: usize) -> usize {
    match form.is_integer() {
        true => Layout::new(columns).width(),
        false => columns.next_multiple_of(16) + LINE,
    }
}

/// Numbers in a cache line.
const LINE: usize = 16;

/// Whether rows of so many numbers, densely one after the other, meet in the same few places of a cache. Then they are copied apart.
pub(crate) fn rows_collide(columns: usize) -> bool {
    columns % 1024 == 0
}

/// Puts one row into its form; `scratch` has room for it where it is clipped.
pub(crate) fn prepare_row(run: &Run<'_>, form: ActivationForm, clip: Option<[f32; 2]>, x: &[f32], out: &mut [f32], scratch: &mut [f32]) {
    let x = match clip {
        None => x,
        Some([low, high]) => {
            let clipped = &mut scratch[..x.len()];
            map::unary(run.instructions, Unary::Clamp(low, high), x, clipped);
            &*clipped
        }
    };
    if form.is_integer() {
        return Layout::new(x.len()).quantise(run.instructions, form == ActivationForm::I8Row, x, out);
    }
    let out = &mut out[..x.len()];
    out.copy_from_slice(x);
    if form == ActivationForm::F16 {
        convert::round_to_f16(run.instructions, out);
    }
}

/// Rows in the form in which they enter products.
#[derive(Clone, Copy)]
pub(crate) enum Prepared<'a> {
    /// Numbers.
    Float(Rows<'a>),
    /// Quants and scales, and the number of rows.
    Integer(ActivationRows<'a>, usize),
}

impl<'a> Prepared<'a> {
    /// `rows` as [`prepare_row`] made them, or for f32 as they are.
    pub(crate) fn new(form: ActivationForm, columns: usize, rows: Rows<'a>) -> Self {
        let (true, Some((numbers, stride))) = (form.is_integer(), rows.strided()) else { return Self::Float(rows) };
        let by_row = form == ActivationForm::I8Row;
        Self::Integer(ActivationRows { layout: Layout::new(columns), numbers, stride, by_row, packed: None }, rows.count)
    }

    /// Packs few rows for all products with them, in a part of `scratch`; gives the rest.
    fn pack<'s: 'a>(&mut self, run: &Run<'_>, scratch: &'s mut [f32]) -> &'s mut [f32] {
        let Self::Integer(x, count) = self else { return scratch };
        let Some(room) = integer::packed_rows(run.instructions, *count, x.layout.columns()) else { return scratch };
        let (room, rest) = scratch.split_at_mut(room);
        integer::pack_rows(run.instructions, x, *count, room);
        x.packed = Some(room);
        rest
    }

    fn count(&self) -> usize {
        match self {
            Self::Float(rows) => rows.count,
            Self::Integer(_, count) => *count,
        }
    }
}

impl Linear {
    pub(crate) fn scratch(&self) -> usize {
        let shortlist = self.shortlist.as_ref().map_or(0, |_| Shortlist::scratch(&self.products[0].weight));
        let product = self.products.iter().map(|p| product_scratch(&p.weight)).max().unwrap_or(0);
        // What is packed once for all threads is taken from it, too.
        product.max(shortlist) + integer::most_packed(self.columns)
    }

    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) {
        let run = frame.run;
        // Steps have eight outputs at most: the places beyond this step's products are empty.
        let nothing = View { first: qhx_ir::Dim::Fixed(0), ..self.products[0].out };
        let outs: [&View; OUTPUTS] = std::array::from_fn(|i| self.products.get(i).map_or(&nothing, |p| &p.out));
        let (outs, inputs, scratch) = frame.memory.split(outs);
        let mut x = Prepared::new(self.form, self.columns, inputs.rows(&self.x, self.x_width));
        let scratch = x.pack(&run, scratch);
        if let Some(shortlist) = self.shortlist.as_ref().filter(|_| run.largest_only && x.count() == 1)
            && shortlist.run(&run, &self.products[0].weight, &x, outs[0], scratch)
        {
            return;
        }
        let mut places = self.products.iter();
        let cuts = outs.map(|out| {
            let weight = &places.next()?.weight;
            run.reads(weight.rows * weight.bytes_per_row());
            let (tile_rows, tile_columns) = tile_shape(run.instructions, x.count(), weight, weight.rows, self.form);
            (!out.is_empty()).then(|| Tiles::new(out, weight.rows, tile_rows, tile_columns))
        });
        for_each(run.pool, &cuts[..], scratch, |_, (place, mut tile), scratch| {
            let Product { weight, bias, clip, .. } = &self.products[place];
            product(&run, weight, 0, &x, &mut tile, scratch);
            finish(&run, bias.as_ref().map(Plain::numbers), *clip, &mut tile);
        });
    }
}

/// Adds the bias of all of a matrix's rows to a tile of its products, and bounds them.
pub(crate) fn finish(run: &Run<'_>, bias: Option<&[f32]>, clip: Option<[f32; 2]>, tile: &mut Tile<'_, f32>) {
    if bias.is_none() && clip.is_none() {
        return;
    }
    let columns = tile.first_column..tile.first_column + tile.columns;
    for row in 0..tile.rows {
        let row = tile.row(row);
        if let Some(bias) = bias {
            map::binary_into_left(run.instructions, Binary::Add, row, &bias[columns.clone()]);
        }
        if let Some([low, high]) = clip {
            map::unary_in_place(run.instructions, Unary::Clamp(low, high), row);
        }
    }
}

/// Rows of the matrix in one packed panel.
const PANEL: usize = 32;

/// Up to how many rows each stored row of the matrix is read once for all of them; from there on, panels of it are packed or decoded for a matrix product. The results
/// are the same to the last bit: see [`crate::kernels::columns`] and [`integer`].
fn few_rows(instructions: Instructions, weight: &Matrix, form: ActivationForm) -> usize {
    match weight.integer_rows(0..0).filter(|_| form.is_integer()) {
        Some(weights) => integer::few_rows(instructions, &weights, form == ActivationForm::I8Row),
        None => FEW_FLOAT_ROWS,
    }
}

/// [`few_rows`] of products in f32.
const FEW_FLOAT_ROWS: usize = 16;

/// The rows of x and the rows of the matrix that make up one unit, where so many `outputs` of it are computed: all of them, or those of an expert.
pub(crate) fn tile_shape(instructions: Instructions, rows: usize, weight: &Matrix, outputs: usize, form: ActivationForm) -> (usize, usize) {
    let columns = match rows > few_rows(instructions, weight, form) {
        true if form.is_integer() => integer::unit_rows(instructions, weight.columns),
        // Several panels meet the same part of x while it is at hand.
        true => PANEL * (weight.rows / 512).clamp(1, 4),
        false => {
            // Enough bytes to be worth a unit, enough units to share out, and groups of rows that fill vectors. All threads wait for the last unit, so those of small
            // matrices are small.
            let bytes: usize = if outputs < weight.rows { 16384 } else { 8192 };
            let least = bytes.div_ceil(weight.bytes_per_row());
            (outputs / 64).clamp(least, least.max(512)).next_multiple_of(16)
        }
    };
    (512, columns)
}

/// Scratch numbers for [`product`].
pub(crate) fn product_scratch(weight: &Matrix) -> usize {
    (2 * PANEL * dot::MOST_OF_A_PIECE)
        .max(4 * weight.columns.next_multiple_of(16))
        .max(integer::panel_scratch(integer::most_unit_rows(weight.columns), weight.columns))
}

/// Fills `tile`: row `i` of x times rows `first_row + j` of the matrix, for the tile's rows i and columns j.
pub(crate) fn product(run: &Run<'_>, weight: &Matrix, first_row: usize, x: &Prepared<'_>, tile: &mut Tile<'_, f32>, scratch: &mut [f32]) {
    let rows = first_row + tile.first_column..first_row + tile.first_column + tile.columns;
    match x {
        Prepared::Integer(x, _) => {
            let Some(weights) = weight.integer_rows(rows) else { unreachable!("checked: integer forms have integer weights") };
            match tile.rows <= integer::few_rows(run.instructions, &weights, x.by_row) {
                true => integer::products(run.instructions, &weights, x, tile.first_row, tile, scratch),
                false => integer::matrix_products(run.instructions, &weights, x, tile.first_row, tile, scratch),
            }
        }
        Prepared::Float(x) => {
            let Some((x, stride)) = x.strided() else { unreachable!("rows that are not a stride apart are prepared") };
            let x = &x[tile.first_row * stride..];
            match tile.rows <= FEW_FLOAT_ROWS {
                true => float_rows(run, weight, rows.start, (x, stride), tile, scratch),
                false => float_panels(run, weight, rows.start, (x, stride), tile, scratch),
            }
        }
    }
}

/// Few rows: each stored row is read once and multiplied with all of them.
fn float_rows(run: &Run<'_>, weight: &Matrix, first: usize, (x, x_stride): (&[f32], usize), tile: &mut Tile<'_, f32>, scratch: &mut [f32]) {
    let (k, w_rows, x_rows) = (weight.columns, tile.columns, tile.rows);
    let (bytes, stride) = weight.data(first..first + w_rows);
    macro_rules! dots {
        ($type:ty) => {{
            let (w, w_stride) = (bytemuck::cast_slice::<u8, $type>(bytes), stride / size_of::<$type>());
            Dots { x, x_stride, x_rows, w, w_stride, w_rows, k }.into_tile(run.instructions, tile)
        }};
    }
    match weight.encoding {
        Encoding::F32 => dots!(f32),
        Encoding::F16 => dots!(f16),
        Encoding::Bf16 => dots!(bf16),
        Encoding::I8Row | Encoding::Block(_) => {
            let w_stride = k.next_multiple_of(16);
            for column in (0..w_rows).step_by(4) {
                let w_rows = (w_rows - column).min(4);
                for row in 0..w_rows {
                    weight.decode(run.instructions, first + column + row, 0, &mut scratch[row * w_stride..][..k]);
                }
                let dots = Dots { x, x_stride, x_rows, w: &*scratch, w_stride, w_rows, k };
                dots.into_tile(run.instructions, &mut tile.columns_from(column, w_rows));
            }
        }
    }
}

/// Many rows: panels of the matrix are decoded and turned, then multiplied in register tiles.
fn float_panels(
    run: &Run<'_>,
    weight: &Matrix,
    first: usize,
    (x, x_stride): (&[f32], usize),
    tile: &mut Tile<'_, f32>,
    scratch: &mut [f32],
) {
    let piece = dot::piece(weight.columns);
    for at in (0..weight.columns).step_by(piece) {
        let k = (weight.columns - at).min(piece);
        for column in (0..tile.columns).step_by(PANEL) {
            let n = (tile.columns - column).min(PANEL);
            let panel = pack_panel(run, weight, first + column..first + column + n, at..at + k, scratch);
            panel.products_into_tile(run.instructions, &x[at..], x_stride, at > 0, &mut tile.columns_from(column, n));
        }
    }
}

/// Some columns of some rows as a panel. Quants are decoded first.
fn pack_panel<'s>(run: &Run<'_>, weight: &Matrix, rows: Range<usize>, columns: Range<usize>, scratch: &'s mut [f32]) -> Panel<'s> {
    let (n, k) = (rows.len(), columns.len());
    let (decoded, room) = scratch.split_at_mut(PANEL * k);
    let (bytes, stride) = weight.data(rows.clone());
    macro_rules! pack {
        ($type:ty) => {{
            let numbers = &bytemuck::cast_slice::<u8, $type>(bytes)[columns.start..];
            Panel::pack(run.instructions, numbers, stride / size_of::<$type>(), n, k, room)
        }};
    }
    match weight.encoding {
        Encoding::F32 => pack!(f32),
        Encoding::F16 => pack!(f16),
        Encoding::Bf16 => pack!(bf16),
        Encoding::I8Row | Encoding::Block(_) => {
            for (row, decoded) in rows.zip(decoded.chunks_mut(k)) {
                weight.decode(run.instructions, row, columns.start, decoded);
            }
            Panel::pack(run.instructions, decoded, k, n, k, room)
        }
    }
}
