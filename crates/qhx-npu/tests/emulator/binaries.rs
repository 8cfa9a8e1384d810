//! Context binaries: written, read back, refused.

use crate::support::*;
use qhx_npu::{Arch, Expected, graph::Graph};

/// A linear that has something to get wrong.
fn graph() -> Graph {
    let mut pen = Pen::new("linear");
    let input = pen.input("x", &[2, 64]);
    let weight = pen.constant("w", &[32, 64], &noise(32 * 64, 11));
    let output = pen.output("y", &[2, 32]);
    pen.node("FullyConnected", &[], &[input, weight], &[output]);
    pen.0
}

#[test]
#[ignore = "needs QNN's library: cargo xtask test"]
fn a_binary_tells_what_it_is_and_runs_the_same() {
    for arch in Arch::ALL {
        let device = device(arch);
        let context = compile(&device, &graph());
        let x = f16_bytes(&noise(2 * 64, 12));
        let before = execute(&context, &[("x", &x)]);
        let binary = context.binary().unwrap();
        let metadata = device.library().inspect("linear.bin", &binary).unwrap();
        assert_eq!((metadata.arch, metadata.soc_model), (arch.number(), arch.soc_model()));
        assert_eq!(metadata.build, *device.library().build());
        let found = &metadata.graphs[0];
        assert_eq!((&*found.name, &*found.inputs[0].name, &*found.inputs[0].dims), ("linear", "x", &[2, 64][..]));
        let compiled = found.compiled.unwrap();
        assert_eq!((compiled.vtcm_bytes, compiled.optimization, compiled.hvx_threads), (8 << 20, 3, 4));
        let loaded = device.load(&binary, &Expected { name: "linear.bin".into(), ..Expected::default() }).unwrap();
        assert!(execute(&loaded, &[("x", &x)]) == before, "{arch}");
    }
}
