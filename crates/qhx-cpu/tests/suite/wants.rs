//! Log probabilities of many rows, with memory for the logits of a few: the output head is computed for some rows after the others, and the answers are those that the logits give.

use crate::decoder::{Sizes, decoder};
use qhx_cpu::{CpuDevice, CpuOptions};
use qhx_ir::*;
use std::sync::Arc;

const ROWS: usize = 23;

/// What is wanted of all rows of a session, computed in one call.
fn answers(program: &Checked, weights: &Arc<dyn Weights>, max_wanted: usize, wants: &[Want<'_>]) -> Result<Outputs, DeviceError> {
    let device = CpuDevice::new(CpuOptions { threads: Some(2), ..Default::default() })?;
    let mut executable = device.load(program, weights, &LoadOptions { max_rows: ROWS, max_wanted, ..Default::default() })?;
    let mut state = executable.new_state(ROWS)?;
    let ids: Vec<i32> = (0..ROWS as i32).map(|row| row * 7919 % 300).collect();
    let rows: Vec<i32> = (0..ROWS as i32).collect();
    let inputs = [&ids, &rows, &rows].map(|numbers| InputData::I32(numbers));
    let (mut segments, mut outputs) = ([Segment::new(Some(&mut *state), 0, ROWS)], Outputs::new());
    let mut call = Call::new(Bindings { rows: ROWS, soft_rows: 0, wanted: ROWS }, &inputs, &mut segments, &mut outputs);
    call.wants = wants;
    executable.run(&mut call)?;
    Ok(outputs)
}

#[test]
fn more_rows_than_there_is_memory_for() {
    let sizes = Sizes { layers: 2, hidden: 96, ffn: 128, heads: 4, kv_heads: 2, head_dim: 32, vocab: 300, experts: 0 };
    for (encoding, form) in [(Encoding::F32, ActivationForm::F32), (Encoding::I8Row, ActivationForm::I8Row)] {
        let (program, weights) = decoder(&sizes, encoding, form).unwrap();
        let weights: Arc<dyn Weights> = Arc::new(weights);
        let whole = answers(&program, &weights, ROWS, &[]).unwrap();
        let logits = whole.value("logits").unwrap();
        let wants: Vec<Want<'_>> = (0..ROWS)
            .map(|row| match row % 4 {
                0 => Want::Largest,
                _ => Want::LogProbs { target: (row * 13 % 300) as u32, top: row % 4 },
            })
            .collect();
        let expected: Vec<RowResult> =
            wants.iter().zip(logits.chunks(300)).map(|(want, logits)| want.of(logits).unwrap().unwrap()).collect();
        for max_wanted in [1, 4, ROWS - 1, ROWS] {
            let found = answers(&program, &weights, max_wanted, &wants).unwrap();
            assert_eq!(found.rows(), expected, "{encoding}, {max_wanted} at a time");
            assert_eq!(found.value("logits"), Some(&[][..]), "nobody wanted them");
        }
        let refused = answers(&program, &weights, 4, &[]).err().unwrap().to_string();
        assert!(refused.contains("L = 23"), "{refused}");
    }
}
