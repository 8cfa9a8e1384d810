//! Mixture of experts: rows are put in order of their experts, so that each used expert is one matrix product and no other expert is read.

use super::{
    Frame, Run,
    linear::{Prepared, finish, prepare_row, prepared_width, product, product_scratch, tile_shape},
    rows::within,
    unit_rows,
};
use crate::{
    kernels::map::{self, Binary},
    matrix::{Matrix, Plain},
    memory::{Rows, View},
    work::{Chunks, Grouped, for_each},
};
use qhx_ir::{Activation, ActivationForm, DeviceError};

#[derive(Debug)]
pub(crate) struct Experts {
    pub(crate) x: View,
    /// i32 `[S, k]`.
    pub(crate) chosen: View,
    pub(crate) weights: View,
    /// i32: where each expert is, or below 0; absent: where its number says.
    pub(crate) held: Option<View>,
    /// Experts per row.
    pub(crate) k: usize,
    /// Number of experts that are there.
    pub(crate) experts: usize,
    /// Which step with experts of the program it is.
    pub(crate) number: usize,
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
    /// Of gate and up: `[experts, ffn]` each.
    pub(crate) bias: Option<[Plain; 2]>,
    pub(crate) activation: Activation,
    pub(crate) form: ActivationForm,
    /// i32: the first place of each expert, then the choice at each place, then the place of each choice.
    pub(crate) order: View,
    /// Rows of x by place, prepared.
    pub(crate) inputs: View,
    /// `[places, ffn]` each.
    pub(crate) gated: View,
    pub(crate) upped: View,
    /// Rows of `gated` by place, prepared.
    pub(crate) inner: View,
    /// `[places, hidden]`.
    pub(crate) results: View,
    pub(crate) out: View,
}

impl Experts {
    pub(crate) fn scratch(&self) -> usize {
        product_scratch(&self.gate).max(product_scratch(&self.up)).max(product_scratch(&self.down))
    }

    pub(crate) fn run(&self, frame: &mut Frame<'_, '_>) -> Result<(), DeviceError> {
        let run = frame.run;
        let (hidden, ffn) = (self.gate.columns, self.down.columns);
        let views = [&self.order, &self.inputs, &self.gated, &self.upped, &self.inner, &self.results, &self.out];
        let ([order, prepared, gated, upped, inner, results, out], inputs, scratch) = frame.memory.split(views);
        let (x, chosen) = (inputs.rows(&self.x, hidden), inputs.integers(&self.chosen));
        let held = self.held.as_ref().map(|held| inputs.integers(held));
        // Where experts are is an input, which is checked with the call.
        within(chosen, held.map_or(self.experts, <[i32]>::len), "expert")?;
        let order: Order<'_> = Order::new(bytemuck::cast_slice_mut(order), self.experts, chosen, held);
        let places = order.choices.len();

        let width = prepared_width(self.form, hidden);
        let prepared = &mut prepared[..places * width];
        let unit = unit_rows(hidden);
        for_each(run.pool, Chunks::new(prepared, unit * width), scratch, |number, part, scratch| {
            for (i, part) in part.chunks_mut(width).enumerate() {
                let row = order.choices[number * unit + i] as usize / self.k;
                prepare_row(&run, self.form, None, x.row(row), part, scratch);
            }
        });
        let x = Prepared::new(self.form, hidden, Rows::dense(prepared, width));
        let [gated, upped] = [gated, upped].map(|all| &mut all[..places * ffn]);
        let cut = |out, weight| {
            Some(Grouped::new(out, ffn, order.starts, move |rows| tile_shape(run.instructions, rows, weight, ffn, self.form)))
        };
        let cuts = [cut(&mut *gated, &self.gate), cut(&mut *upped, &self.up)];
        for_each(run.pool, &cuts[..], scratch, |_, (place, (expert, mut tile)), scratch| {
            let weight = if place == 0 { &self.gate } else { &self.up };
            product(&run, weight, expert * ffn, &x, &mut tile, scratch);
            let bias = self.bias.as_ref().map(|bias| &bias[place].numbers()[expert * ffn..][..ffn]);
            finish(&run, bias, None, &mut tile);
        });

        let width = prepared_width(self.form, ffn);
        let inner = &mut inner[..places * width];
        let unit = unit_rows(4 * ffn);
        let (upped, gates) = (Rows::dense(upped, ffn), Chunks::new(gated, unit * ffn));
        for_each(run.pool, (gates, Chunks::new(inner, unit * width)), scratch, |number, (gates, inner), scratch| {
            for (i, (gate, inner)) in gates.chunks_mut(ffn).zip(inner.chunks_mut(width)).enumerate() {
                map::binary_into_left(run.instructions, Binary::Gate(self.activation), gate, upped.row(number * unit + i));
                prepare_row(&run, self.form, None, gate, inner, scratch);
            }
        });
        let inner = Prepared::new(self.form, ffn, Rows::dense(inner, width));
        let cut =
            Grouped::new(&mut *results, hidden, order.starts, |rows| tile_shape(run.instructions, rows, &self.down, hidden, self.form));
        for_each(run.pool, cut, scratch, |_, (expert, mut tile), scratch| {
            product(&run, &self.down, expert * hidden, &inner, &mut tile, scratch);
        });
        let counts = &mut frame.expert_rows[self.number];
        counts.iter_mut().enumerate().for_each(|(expert, rows)| *rows = order.rows(expert).len());
        let used = counts.iter().filter(|&&rows| rows > 0).count();
        let bytes = ffn * (self.gate.bytes_per_row() + self.up.bytes_per_row()) + hidden * self.down.bytes_per_row();
        run.reads(used * bytes);

        let (results, weights) = (Rows::dense(&results[..places * hidden], hidden), inputs.rows(&self.weights, self.k));
        self.combine(&run, &order, &results, &weights, out);
        Ok(())
    }

    /// `out[t] = Σ_j weight[t, j] · results[place of (t, j)]`, in the order of j.
    fn combine(&self, run: &Run<'_>, order: &Order<'_>, results: &Rows<'_>, weights: &Rows<'_>, out: &mut [f32]) {
        let hidden = results.width;
        let unit = unit_rows(hidden * self.k);
        for_each(run.pool, Chunks::new(out, unit * hidden), &mut [], |number, part, _| {
            for (i, part) in part.chunks_mut(hidden).enumerate() {
                let row = number * unit + i;
                part.fill(0.0);
                for (&weight, &place) in weights.row(row).iter().zip(&order.places[row * self.k..]) {
                    if let Ok(place) = usize::try_from(place) {
                        map::binary_into_left(run.instructions, Binary::AddScaled(weight), part, results.row(place));
                    }
                }
            }
        });
    }
}

/// Choices (row · k + j) sorted by expert, those of one expert in rising order.
struct Order<'a> {
    /// The first place of each expert, and the number of places.
    starts: &'a [i32],
    /// The choice at each place.
    choices: &'a [i32],
    /// The place of each choice; -1 where the expert is not there.
    places: &'a [i32],
}

/// Numbers of room for an [`Order`].
pub(crate) fn order_numbers(experts: usize, choices: usize) -> usize {
    experts + 1 + 2 * choices
}

impl<'a> Order<'a> {
    fn new(room: &'a mut [i32], experts: usize, chosen: &[i32], held: Option<&[i32]>) -> Self {
        let (starts, rest) = room.split_at_mut(experts + 1);
        let (choices, places) = rest.split_at_mut(chosen.len());
        let expert_of = |chosen: i32| usize::try_from(held.map_or(chosen, |held| held[chosen as usize])).ok();
        starts.fill(0);
        chosen.iter().filter_map(|&chosen| expert_of(chosen)).for_each(|e| starts[e + 1] += 1);
        (0..experts).for_each(|e| starts[e + 1] += starts[e]);
        let there = starts[experts] as usize;
        for (choice, &chosen) in chosen.iter().enumerate() {
            places[choice] = -1;
            if let Some(e) = expert_of(chosen) {
                let place = starts[e];
                starts[e] += 1;
                (choices[place as usize], places[choice]) = (choice as i32, place);
            }
        }
        // Each start has moved to the next one's.
        (1..=experts).rev().for_each(|e| starts[e] = starts[e - 1]);
        starts[0] = 0;
        Self { starts, choices: &choices[..there], places }
    }

    fn rows(&self, expert: usize) -> std::ops::Range<usize> {
        self.starts[expert] as usize..self.starts[expert + 1] as usize
    }
}
