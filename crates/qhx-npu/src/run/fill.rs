//! Fills a graph's inputs and reads its outputs.

use super::{
    state::{NpuState, Which},
    values::Values,
};
use crate::lower::{Drain, Feed, Keys, MASKED, Turn};
use half::f16;
use qhx_ir::{Checked, DeviceError, Mask, Name};

/// One execution of a graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// Its first row in the call.
    pub(super) first: usize,
    /// Valid rows; the graph has at least as many.
    pub(super) valid: usize,
    /// Rows of the session before it.
    pub(super) before: usize,
    /// The most rows that attention over a slot sees.
    pub(super) window: usize,
    /// The program's epoch.
    pub(super) epoch: usize,
}

/// Writes what `feed` names into `buffer` of shape `dims`.
pub(super) fn fill(
    program: &Checked,
    values: &Values<'_>,
    state: Option<&mut NpuState>,
    chunk: Chunk,
    feed: &Feed,
    dims: &[usize],
    buffer: &mut [f16],
) {
    match feed {
        Feed::Value(name) => rows_of(values, name, chunk, buffer),
        Feed::Scattered { rows, at } => {
            buffer.fill(f16::ZERO);
            let width = values.width(rows);
            for (&at, row) in values.i32s(at).iter().zip(values.f32s(rows).chunks_exact(width.max(1))) {
                if let Some(place) = (at as usize).checked_sub(chunk.first).filter(|&place| place < chunk.valid) {
                    write(&mut buffer[place * width..][..width], row);
                }
            }
        }
        Feed::Mask { mask, keys, past } => write_mask(*mask, *keys, *past, chunk, dims, buffer),
        Feed::Cosine(turn) => write_turn(program, values, turn, chunk, buffer, false),
        Feed::Sine(turn) => write_turn(program, values, turn, chunk, buffer, true),
        Feed::Fifo(slot) | Feed::Delta(slot) => match state {
            Some(state) => write(buffer, state.recurrent(slot)),
            None => unreachable!("checked: a program with slots has states"),
        },
        Feed::PastKeys(_) | Feed::PastValues(_) => unreachable!("graphs read KV rows where the state keeps them"),
        Feed::Valid(per_row) => {
            let valid = chunk.valid.div_ceil(*per_row);
            buffer.iter_mut().enumerate().for_each(|(row, x)| *x = if row < valid { f16::ONE } else { f16::ZERO });
        }
        Feed::Pooled { per_row, size } => {
            let valid = chunk.valid.div_ceil(*per_row);
            for (group, x) in buffer.iter_mut().enumerate() {
                let count = valid.saturating_sub(group * size).clamp(1, *size);
                *x = f16::from_f32(*size as f32 / count as f32);
            }
        }
    }
}

/// Stores the content of an output.
pub(super) fn drain(
    values: &mut Values<'_>,
    state: Option<&mut NpuState>,
    chunk: Chunk,
    drain: &Drain,
    dims: &[usize],
    buffer: &[f16],
    decays: &mut Vec<f16>,
) -> Result<(), DeviceError> {
    let width: usize = dims[1..].iter().product();
    let valid = &buffer[..buffer.len().min(chunk.valid * width)];
    let Some(state) = state else {
        let Drain::Value(name) = drain else { unreachable!("checked: a program with slots has states") };
        return take_rows(values, name, chunk, width, buffer);
    };
    match drain {
        Drain::Value(name) => return take_rows(values, name, chunk, width, buffer),
        Drain::Keys(slot) => state.kv_mut(slot).write(Which::Keys, chunk.before, valid),
        Drain::Values(slot) => state.kv_mut(slot).write(Which::Values, chunk.before, valid),
        Drain::Fifo(slot) => {
            let fifo = state.recurrent(slot);
            let length = fifo.len();
            fifo.extend(valid.iter().map(|x| x.to_f32()));
            fifo.drain(..fifo.len() - length);
        }
        // A slot decays before anything is added to it.
        Drain::Decay(_) => *decays = valid.to_vec(),
        Drain::Delta(slot) => {
            let heads = dims[0];
            let own = state.recurrent(slot).chunks_exact_mut(width).zip(buffer.chunks_exact(width));
            for (head, (state, added)) in own.enumerate() {
                let decay: f32 = decays.iter().skip(head).step_by(heads).map(|g| g.to_f32()).sum::<f32>().exp();
                state.iter_mut().zip(added).for_each(|(s, a)| *s = *s * decay + a.to_f32());
            }
        }
    }
    Ok(())
}

fn take_rows(values: &mut Values<'_>, name: &Name, chunk: Chunk, width: usize, buffer: &[f16]) -> Result<(), DeviceError> {
    values.entry(name)?;
    let rows = values.rows(name, chunk.first, chunk.valid);
    let target = &mut values.entry(name)?[rows.start * width..rows.end * width];
    for (to, from) in target.iter_mut().zip(buffer) {
        *to = from.to_f32();
        if !to.is_finite() {
            return Err(DeviceError::Call(format!("`{name}` left the range of f16 on the NPU: place its stage on the CPU")));
        }
    }
    Ok(())
}

/// The chunk's rows of a value; padding repeats the last row, so that its values are as ordinary.
fn rows_of(values: &Values<'_>, name: &Name, chunk: Chunk, buffer: &mut [f16]) {
    let (width, rows) = (values.width(name), values.rows(name, chunk.first, chunk.valid));
    let numbers = &values.f32s(name)[rows.start * width..rows.end * width];
    write(&mut buffer[..numbers.len()], numbers);
    repeat_last(buffer, numbers.len(), width);
}

fn repeat_last(buffer: &mut [f16], written: usize, width: usize) {
    for start in (written..buffer.len()).step_by(width.max(1)) {
        buffer.copy_within(written - width..written, start);
    }
}

fn write(buffer: &mut [f16], numbers: &[f32]) {
    use half::slice::HalfFloatSliceExt;
    buffer.convert_from_f32_slice(numbers);
}

fn write_mask(mask: Mask, keys: Keys, past: usize, chunk: Chunk, dims: &[usize], buffer: &mut [f16]) {
    let [_, count] = dims[..] else { unreachable!("a mask is [rows, keys]") };
    let (valid, before) = match keys {
        Keys::Rows(per_row) => (chunk.valid.div_ceil(per_row), 0),
        Keys::Past | Keys::PastAndNew => (chunk.valid, chunk.before),
    };
    // The session's row in a column; `None`: not written yet.
    // A slot's buffer is a ring: a column contains the latest of all rows before `end` that map to it.
    let latest = |column: usize, end: usize| (column < end).then(|| end - 1 - (end - 1 - column) % past);
    let position = |column: usize| match keys {
        Keys::Rows(_) => (column < valid).then_some(column),
        Keys::Past => latest(column, before + valid),
        Keys::PastAndNew => match column.checked_sub(past) {
            None => latest(column, before),
            Some(new) => (new < valid).then_some(before + new),
        },
    };
    let (seen, hidden) = (f16::ZERO, f16::from_f32(MASKED));
    for (row, buffer) in buffer.chunks_exact_mut(count).take(valid).enumerate() {
        let index = before + row;
        for (column, x) in buffer.iter_mut().enumerate() {
            let sees = position(column).is_some_and(|j| match mask {
                Mask::Full => true,
                Mask::Causal => j <= index && index - j < chunk.window,
                Mask::Window(window) => j <= index && index - j < window.min(chunk.window),
            });
            *x = if sees { seen } else { hidden };
        }
    }
    repeat_last(buffer, valid * count, count);
}

/// Cosines or sines over the whole width of a head.
fn write_turn(program: &Checked, values: &Values<'_>, turn: &Turn, chunk: Chunk, buffer: &mut [f16], sine: bool) {
    let rotary = &program.rotaries[&turn.rotary];
    let variant = rotary.variant(chunk.epoch);
    let positions = values.i32s(&turn.positions);
    let all = values.get(&turn.positions).shape[1];
    let per_row = program.value_type(&turn.positions).shape[1].rows_per_row().unwrap_or(1);
    let (first, valid) = (chunk.first / per_row, chunk.valid.div_ceil(per_row));
    buffer.fill(if sine { f16::ZERO } else { f16::ONE });
    for (row, buffer) in buffer.chunks_exact_mut(turn.dim).take(valid).enumerate() {
        let mut f = 0;
        for &(start, length) in &rotary.blocks {
            for i in 0..length / 2 {
                // The angle is rounded to f32, as in every implementation of these models: large positions depend on it.
                let angle = (positions[rotary.stream(f) * all + first + row] as f32 * variant.inv_freq[f]) as f64;
                let number = |x: f64| f16::from_f32(x as f32 * variant.amplitude);
                let (low, high) =
                    if sine { (number(-angle.sin()), number(angle.sin())) } else { (number(angle.cos()), number(angle.cos())) };
                buffer[start + i] = low;
                buffer[start + i + length / 2] = high;
                f += 1;
            }
        }
    }
    repeat_last(buffer, valid * turn.dim, turn.dim);
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_ir::{Bindings, InputData, Program};

    fn program() -> Checked {
        let text = r#"{"program_version": 1, "name": "rope",
            "inputs": [
                {"name": "x", "dtype": "f32", "shape": ["T", 1, 10], "generator": "carried"},
                {"name": "positions", "dtype": "i32", "shape": [2, "T"], "generator": "positions.mrope"}],
            "outputs": [{"name": "y", "value": "op.rope"}],
            "rotaries": {"turn": {"blocks": [[2, 4]], "streams": [0, 1], "variants": [{"inv_freq": [1, 0.5], "amplitude": 2}]}},
            "stages": [{"name": "op"}],
            "weights": {},
            "ops": [{"path": "op.rope", "op": {"rope": {"x": "x", "positions": "positions", "rotary": "turn"}}}]}"#;
        Checked::new(Program::from_json(text).unwrap()).unwrap()
    }

    /// Cosines and sines over the whole width of a head and all rows of a graph, whatever stood there before.
    #[test]
    fn rotary_tables_are_written_over_their_whole_width() {
        let program = program();
        let (x, positions) = (vec![0.0; 50], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let bindings = Bindings { rows: 5, ..Default::default() };
        let values = Values::new(&program, bindings, &[InputData::F32(&x), InputData::I32(&positions)]).unwrap();
        let turn = Turn { rotary: "turn".into(), positions: "positions".into(), dim: 10 };
        // Rows 1 and 2 of the call, in a graph of four rows.
        let chunk = Chunk { first: 1, valid: 2, before: 0, window: usize::MAX, epoch: 0 };
        let table = |feed: Feed| {
            let mut buffer = vec![f16::NAN; 40];
            fill(&program, &values, None, chunk, &feed, &[4, 1, 10], &mut buffer);
            buffer
        };
        let (cosine, sine) = (table(Feed::Cosine(turn.clone())), table(Feed::Sine(turn)));
        let row = |row: usize| {
            let angles = [(row + 1) as f32, (row + 6) as f32 * 0.5];
            let [c0, c1] = angles.map(|a| f16::from_f32(2.0 * a.cos()).to_f32());
            let [s0, s1] = angles.map(|a| f16::from_f32(2.0 * a.sin()).to_f32());
            ([1.0, 1.0, c0, c1, c0, c1, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, -s0, -s1, s0, s1, 0.0, 0.0, 0.0, 0.0])
        };
        for (at, expected) in [(0, row(0)), (1, row(1)), (2, row(1)), (3, row(1))] {
            let of = |table: &[f16]| table[at * 10..][..10].iter().map(|x| x.to_f32()).collect::<Vec<_>>();
            let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 2e-3);
            assert!(near(&of(&cosine), &expected.0), "row {at}: {:?}", of(&cosine));
            assert!(near(&of(&sine), &expected.1), "row {at}: {:?}", of(&sine));
        }
    }

    #[test]
    fn masks_show_what_is_there_and_within_reach() {
        let seen = |mask: Mask, keys: Keys, chunk: Chunk, dims: [usize; 2]| {
            let mut buffer = vec![f16::NAN; dims[0] * dims[1]];
            let past = match keys {
                Keys::Rows(_) => 0,
                Keys::Past => dims[1],
                Keys::PastAndNew => dims[1] - dims[0],
            };
            write_mask(mask, keys, past, chunk, &dims, &mut buffer);
            buffer.iter().map(|x| if *x == f16::ZERO { '1' } else { '.' }).collect::<String>()
        };
        let chunk = Chunk { first: 0, valid: 2, before: 3, window: usize::MAX, epoch: 0 };
        // Five places of the slot, three of them filled; three new rows, of which two count; padding sees what the last valid row sees.
        assert_eq!(seen(Mask::Causal, Keys::PastAndNew, chunk, [3, 8]), "111..1..111..11.111..11.");
        assert_eq!(seen(Mask::Window(3), Keys::PastAndNew, chunk, [3, 8]), ".11..1....1..11...1..11.");
        assert_eq!(seen(Mask::Causal, Keys::Past, chunk, [2, 6]), "1111..11111.");
        assert_eq!(seen(Mask::Full, Keys::Rows(1), chunk, [3, 3]), "11.11.11.");
        // Two rows of the call for each row: one of them counts.
        assert_eq!(seen(Mask::Full, Keys::Rows(2), chunk, [2, 2]), "1.1.");
        // Rings. Rows 3 to 7 stand in places 3, 4, 0, 1, 2; rows 8 and 9 come, and see four rows at most.
        let late = Chunk { before: 8, window: 4, ..chunk };
        assert_eq!(seen(Mask::Causal, Keys::PastAndNew, late, [2, 7]), "111..1..11..11");
        assert_eq!(seen(Mask::Window(3), Keys::PastAndNew, late, [2, 7]), ".11..1...1..11");
        // A graph that only reads finds rows 4 to 9 in places 4, 5, 0, 1, 2, 3.
        assert_eq!(seen(Mask::Causal, Keys::Past, late, [2, 6]), "111..11111..");
    }
}
