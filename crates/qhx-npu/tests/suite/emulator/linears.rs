//! Linears of every weight encoding, and the sizes of what they become.

use crate::emulator::support::*;
use qhx_npu::{
    Arch, CompileOptions,
    graph::{DataType, Graph, Lazy, Quantization, Role},
};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// `x [rows, depth]` times `w [out, depth]` transposed.
pub(crate) fn linear(x: &[f32], w: &[f32], depth: usize) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    x.chunks(depth).flat_map(|row| w.chunks(depth).map(move |column| dot(row, column))).collect()
}

/// Whole numbers within a limit, positive ones below 8 if there are four bits, and scales.
fn quants(count: usize, limit: f32) -> Vec<u8> {
    let most = if limit < 9.0 { 7.0 } else { 127.0 };
    noise(count, 4).iter().map(|n| ((n * limit).round().min(most) as i8).cast_unsigned()).collect()
}

fn scales(count: usize) -> Vec<f32> {
    noise(count, 5).iter().map(|n| 0.01 + 0.005 * n).collect()
}

fn signed(count: usize) -> Vec<f32> {
    scales(count).iter().enumerate().map(|(n, scale)| if n % 3 == 0 { -scale } else { *scale }).collect()
}

fn graph(rows: u32, weight: Role, dtype: DataType, dims: [u32; 2], quantization: Quantization) -> Graph {
    let mut pen = Pen::new(&format!("rows{rows}"));
    let [out, depth] = dims;
    let input = pen.input("x", &[rows, depth]);
    let weight = pen.tensor("w", weight, dtype, &dims, quantization);
    let output = pen.output("y", &[rows, out]);
    pen.node("FullyConnected", &[], &[input, weight], &[output]);
    pen.0
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn weights_of_f16_also_with_odd_sizes() {
    let (rows, depth, out) = (3, 100, 33);
    let (x, w) = (noise(rows * depth, 1), noise(out * depth, 2));
    let weight = Role::Constant(f16_bytes(&w).into());
    let graph = graph(rows as u32, weight, DataType::F16, [out as u32, depth as u32], Quantization::None);
    for arch in Arch::ALL {
        let found = execute(&compile(&device(arch), &graph), &[("x", &f16_bytes(&x))]);
        close(&f16_numbers(&found[0]), &linear(&x, &w, depth), 1e-3, &format!("{arch}"));
    }
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn quantised_weights() {
    let (rows, depth, out) = (2, 128, 48);
    let x = noise(rows * depth, 3);
    let cases = [
        (Quantization::Channel8 { axis: 0, scales: scales(out) }, 127.0, depth),
        (Quantization::Channel4 { axis: 0, scales: scales(out) }, 7.4, depth),
        (Quantization::Block4 { block: 32, scales: scales(out * depth / 32) }, 7.4, 32),
        // As the forge has them: the largest number of a block at −8, whatever its sign.
        (Quantization::Block4 { block: 32, scales: signed(out * depth / 32) }, 8.4, 32),
        (Quantization::Block4 { block: 8, scales: scales(out * depth / 8) }, 7.4, 8),
    ];
    for (quantization, limit, per_scale) in cases {
        let (Quantization::Channel8 { scales, .. } | Quantization::Channel4 { scales, .. } | Quantization::Block4 { scales, .. }) =
            &quantization
        else {
            unreachable!()
        };
        let bytes = quants(out * depth, limit);
        let real = |(quants, scale): (&[u8], &f32)| quants.iter().map(|q| f32::from(q.cast_signed()) * scale).collect::<Vec<_>>();
        let real: Vec<f32> = bytes.chunks(per_scale).zip(scales).flat_map(real).collect();
        let weight = Role::Constant(bytes.into());
        let graph = graph(rows as u32, weight, DataType::Fixed8, [out as u32, depth as u32], quantization.clone());
        for arch in Arch::ALL {
            let found = execute(&compile(&device(arch), &graph), &[("x", &f16_bytes(&x))]);
            close(&f16_numbers(&found[0]), &linear(&x, &real, depth), 2e-3, &format!("{arch} {quantization:?}"));
        }
    }
}

/// A constant is asked for once, and the library keeps a copy: what becomes of the source afterwards does not matter.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn weights_made_when_needed() {
    let (depth, out) = (128, 64);
    let (x, w) = (noise(depth, 1), noise(out * depth, 2));
    let asked = Arc::new(AtomicUsize::new(0));
    let (counter, bytes) = (asked.clone(), f16_bytes(&w));
    let lazy = Lazy::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        Ok(bytes.clone())
    });
    let dims = [out as u32, depth as u32];
    let context = compile(&device(Arch::V81), &graph(1, Role::Lazy(lazy), DataType::F16, dims, Quantization::None));
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    // Takes the memory that the constant had.
    let mut over: Vec<Vec<u8>> = (0..64).map(|_| vec![0x7e; out * depth * 2]).collect();
    let found = execute(&context, &[("x", &f16_bytes(&x))]);
    over.clear();
    close(&f16_numbers(&found[0]), &linear(&x, &w, depth), 1e-3, "lazy");
    let refused = |lazy| {
        let graph = graph(1, Role::Lazy(lazy), DataType::F16, dims, Quantization::None);
        device(Arch::V81).compile(&[graph], &CompileOptions::default()).err().expect("refused").to_string()
    };
    assert!(refused(Lazy::new(|| Ok(vec![0; 5]))).contains("5 are given"));
    assert!(refused(Lazy::new(|| Err("the disk is gone".into()))).contains("tensor `w`: the disk is gone"));
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn four_bits_take_half_of_eight() {
    let (depth, out) = (1024, 2048);
    let size = |quantization, limit| {
        let weight = Role::Constant(quants(out * depth, limit).into());
        let graph = graph(1, weight, DataType::Fixed8, [out as u32, depth as u32], quantization);
        compile(&device(Arch::V81), &graph).binary().unwrap().len() as f64
    };
    let eight = size(Quantization::Channel8 { axis: 0, scales: scales(out) }, 127.0);
    let four = size(Quantization::Channel4 { axis: 0, scales: scales(out) }, 7.4);
    let blocks = size(Quantization::Block4 { block: 32, scales: scales(out * depth / 32) }, 7.4);
    println!("w8 {eight}, w4 {four} ({:.3}), w4 in blocks of 32 {blocks} ({:.3})", four / eight, blocks / eight);
    assert!(four <= 0.55 * eight, "{four} of {eight}");
    // A scale of 16 bits for 32 weights of 4 is an eighth more.
    assert!(blocks <= 0.65 * eight, "{blocks} of {eight}");
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn graphs_of_a_context_share_their_weights() {
    let (depth, out) = (1024, 1024);
    let w = noise(out * depth, 2);
    let weight = Role::Constant(f16_bytes(&w).into());
    let graphs = [1, 32].map(|rows| graph(rows, weight.clone(), DataType::F16, [out as u32, depth as u32], Quantization::None));
    let device = device(Arch::V81);
    let one = compile(&device, &graphs[0]).binary().unwrap().len();
    let options = CompileOptions { share_weights: true, ..CompileOptions::default() };
    let context = device.compile(&graphs, &options).unwrap_or_else(|e| panic!("{e}"));
    let binary = context.binary().unwrap();
    println!("one graph {one} bytes, two that share {}", binary.len());
    assert!((binary.len() as f64) < 1.1 * one as f64, "{} of {one}", binary.len());
    // It runs where it was compiled.
    for (graph, rows) in context.graphs().iter().zip([1, 32]) {
        let x = noise(rows * depth, 7);
        let mut y = vec![0; rows * out * 2];
        graph.execute(&[("x", &f16_bytes(&x))], &mut [("y", &mut y)]).unwrap();
        close(&f16_numbers(&y), &linear(&x, &w, depth), 1e-3, graph.name());
    }
    // To load it the emulator would die: it is not given it.
    assert!(device.library().inspect("shared", &binary).unwrap().shared_weights);
    let error = device.load(&binary, &Default::default()).err().expect("refused").to_string();
    assert!(error.contains("cannot load") && error.contains("phone"), "{error}");
}
