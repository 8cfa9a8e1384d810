//! Single ops, on both processors, against plain arithmetic.

use crate::support::*;
use qhx_npu::{
    Arch,
    graph::{DataType, Parameter, Quantization, Role},
};

/// `x [rows, depth]` times `w [out, depth]` transposed.
fn linear(x: &[f32], w: &[f32], depth: usize) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    x.chunks(depth).flat_map(|row| w.chunks(depth).map(move |column| dot(row, column))).collect()
}

#[test]
#[ignore = "needs QNN's library: cargo xtask test"]
fn a_linear_of_f16_weights() {
    let (rows, depth, out) = (3, 100, 33);
    let (x, w) = (noise(rows * depth, 1), noise(out * depth, 2));
    let mut pen = Pen::new("linear");
    let input = pen.input("x", &[rows as u32, depth as u32]);
    let weight = pen.constant("w", &[out as u32, depth as u32], &w);
    let output = pen.output("y", &[rows as u32, out as u32]);
    pen.node("FullyConnected", &[], &[input, weight], &[output]);
    for arch in Arch::ALL {
        let context = compile(&device(arch), &pen.0);
        let found = execute(&context, &[("x", &f16_bytes(&x))]);
        close(&f16_numbers(&found[0]), &linear(&x, &w, depth), 1e-3, &format!("{arch}"));
    }
}

#[test]
#[ignore = "needs QNN's library: cargo xtask test"]
fn linears_of_quantised_weights() {
    let (rows, depth, out) = (2, 128, 48);
    let x = noise(rows * depth, 3);
    let quants = |limit: f32| -> Vec<i8> { noise(out * depth, 4).iter().map(|n| (n * limit).round() as i8).collect() };
    let scales = |count: usize| -> Vec<f32> { noise(count, 5).iter().map(|n| 0.01 + 0.005 * n).collect() };
    let cases = [
        (Quantization::Channel8 { axis: 0, scales: scales(out) }, quants(127.0), depth),
        (Quantization::Channel4 { axis: 0, scales: scales(out) }, quants(7.4), depth),
        (Quantization::Block4 { block: 32, scales: scales(out * depth / 32) }, quants(7.4), 32),
    ];
    for (quantization, quants, per_scale) in cases {
        let (Quantization::Channel8 { scales, .. } | Quantization::Channel4 { scales, .. } | Quantization::Block4 { scales, .. }) =
            &quantization
        else {
            unreachable!()
        };
        let real: Vec<f32> =
            quants.chunks(per_scale).zip(scales).flat_map(|(quants, scale)| quants.iter().map(move |&q| f32::from(q) * scale)).collect();
        let mut pen = Pen::new("linear");
        let input = pen.input("x", &[rows as u32, depth as u32]);
        let bytes: Vec<u8> = quants.iter().map(|q| q.cast_unsigned()).collect();
        let weight = pen.tensor("w", Role::Constant(bytes.into()), DataType::Fixed8, &[out as u32, depth as u32], quantization.clone());
        let output = pen.output("y", &[rows as u32, out as u32]);
        pen.node("FullyConnected", &[], &[input, weight], &[output]);
        for arch in Arch::ALL {
            let context = compile(&device(arch), &pen.0);
            let found = execute(&context, &[("x", &f16_bytes(&x))]);
            close(&f16_numbers(&found[0]), &linear(&x, &real, depth), 2e-3, &format!("{arch} {quantization:?}"));
        }
    }
}

#[test]
#[ignore = "needs QNN's library: cargo xtask test"]
fn softmax_and_rms_norm() {
    let (rows, width) = (4, 96);
    let (x, gamma) = (noise(rows * width, 6), noise(width, 7));
    let mut pen = Pen::new("norms");
    let dims = [rows as u32, width as u32];
    let input = pen.input("x", &dims);
    let weight = pen.constant("gamma", &[width as u32], &gamma);
    let bias = pen.constant("beta", &[width as u32], &vec![0.0; width]);
    let (norm, softmax) = (pen.output("norm", &dims), pen.output("softmax", &dims));
    let axes = Parameter::U32s { dims: vec![1], values: vec![1] };
    pen.node("RmsNorm", &[("epsilon", Parameter::F32(1e-6)), ("axes", axes)], &[input, weight, bias], &[norm]);
    pen.node("Softmax", &[("axis", Parameter::U32(1))], &[input], &[softmax]);
    let expected_norm = x.chunks(width).flat_map(|row| {
        let scale = 1.0 / (row.iter().map(|n| n * n).sum::<f32>() / width as f32 + 1e-6).sqrt();
        row.iter().zip(&gamma).map(move |(n, g)| n * scale * g).collect::<Vec<_>>()
    });
    let expected_softmax = x.chunks(width).flat_map(|row| {
        let sum: f32 = row.iter().map(|n| n.exp()).sum();
        row.iter().map(move |n| n.exp() / sum)
    });
    let (expected_norm, expected_softmax): (Vec<f32>, Vec<f32>) = (expected_norm.collect(), expected_softmax.collect());
    for arch in Arch::ALL {
        let context = compile(&device(arch), &pen.0);
        let found = execute(&context, &[("x", &f16_bytes(&x))]);
        close(&f16_numbers(&found[0]), &expected_norm, 2e-3, &format!("{arch} norm"));
        close(&f16_numbers(&found[1]), &expected_softmax, 5e-3, &format!("{arch} softmax"));
    }
}
