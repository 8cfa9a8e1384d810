//! Executions: buffers, threads, lifetimes, failures of the library.

use crate::emulator::{linears::linear, support::*};
use qhx_npu::{
    Arch, CompileOptions,
    graph::{Graph, Parameter},
};

fn weights() -> Vec<f32> {
    noise(32 * 64, 11)
}

fn graph() -> Graph {
    let mut pen = Pen::new("linear");
    let input = pen.input("x", &[2, 64]);
    let weight = pen.constant("w", &[32, 64], &weights());
    let product = pen.inner("product", &[2, 32]);
    let output = pen.output("y", &[2, 32]);
    let bias = pen.input("bias", &[32]);
    pen.node("FullyConnected", &[], &[input, weight], &[product]);
    pen.node("ElementWiseAdd", &[], &[product, bias], &[output]);
    pen.0
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn buffers_must_be_those_of_the_graph() {
    let context = compile(&device(Arch::V79), &graph());
    let graph = context.graph("linear").unwrap();
    let names: Vec<&str> = graph.inputs().iter().chain(graph.outputs()).map(|port| &*port.name).collect();
    assert_eq!(names, ["x", "bias", "y"]);
    assert_eq!((graph.inputs()[0].bytes, &graph.inputs()[0].dims[..]), (2 * 64 * 2, &[2, 64][..]));
    let (x, bias) = (vec![0u8; 256], vec![0u8; 64]);
    let run = |inputs: &[(&str, &[u8])], outputs: &[(&str, usize)]| {
        let mut buffers: Vec<Vec<u8>> = outputs.iter().map(|(_, size)| vec![0; *size]).collect();
        let mut outputs: Vec<(&str, &mut [u8])> = outputs.iter().zip(&mut buffers).map(|((name, _), b)| (*name, &mut **b)).collect();
        graph.execute(inputs, &mut outputs).map_err(|e| e.to_string())
    };
    let inputs: [(&str, &[u8]); 2] = [("bias", &bias), ("x", &x)];
    run(&inputs, &[("y", 128)]).unwrap();
    let wrong = [
        (run(&inputs[..1], &[("y", 128)]), "input `x` is missing"),
        (run(&[inputs[0], inputs[1], ("z", &x)], &[("y", 128)]), "has no input `z`; it has x, bias"),
        (run(&[inputs[0], inputs[1], inputs[1]], &[("y", 128)]), "`x` is given twice"),
        (run(&[inputs[0], ("x", &x[..255])], &[("y", 128)]), "`x` [2, 64] needs 256 bytes, but 255 are given"),
        (run(&inputs, &[]), "output `y` is missing"),
        (run(&inputs, &[("y", 127)]), "`y` [2, 32] needs 128 bytes, but 127 are given"),
    ];
    for (result, expected) in wrong {
        let error = result.expect_err(expected);
        assert!(error.contains("graph `linear`") && error.contains(expected), "{error}");
    }
    assert!(graph.execute_in_order(&[&x], &mut []).unwrap_err().to_string().contains("1 inputs are given, but it has 2"));
    assert!(context.graph("other").err().unwrap().to_string().contains("contains linear"));
}

#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn a_graph_outlives_what_it_came_from_and_runs_in_many_threads() {
    let graph = {
        let context = compile(&device(Arch::V81), &graph());
        context.graphs()[0].clone()
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let graph = &graph;
            scope.spawn(move || {
                let (x, bias) = (noise(2 * 64, 20 + thread), noise(32, 30 + thread));
                let product = linear(&x, &weights(), 64);
                let expected: Vec<f32> = product.iter().zip(bias.iter().cycle()).map(|(a, b)| a + b).collect();
                for _ in 0..3 {
                    let mut y = vec![0; 128];
                    graph.execute(&[("x", &f16_bytes(&x)), ("bias", &f16_bytes(&bias))], &mut [("y", &mut y)]).unwrap();
                    close(&f16_numbers(&y), &expected, 1e-3, "thread");
                }
            });
        }
    });
}

/// An op that passes our rules and not the library's: its own words arrive.
#[test]
#[ignore = "needs QNN: cargo xtask test npu"]
fn what_the_library_refuses_is_told_with_its_reasons() {
    let mut pen = Pen::new("odd");
    let input = pen.input("x", &[2, 8]);
    let output = pen.output("y", &[2, 8]);
    pen.node("ElementWiseNeuron", &[("operation", Parameter::U32(77))], &[input], &[output]);
    let error = device(Arch::V81).compile(&[pen.0], &CompileOptions::default()).err().expect("refused").to_string();
    for part in ["ElementWiseNeuron `node0` of graph `odd`", "error 3110", "another device", "\n  library: "] {
        assert!(error.contains(part), "{error}");
    }
}
