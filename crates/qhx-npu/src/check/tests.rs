//! Graphs with one mistake each, and the same graphs without.

use crate::graph::{DataType, Graph, Lazy, Node, Parameter, Quantization, Role, Tensor, TensorId};

fn tensor(name: &str, role: Role, dtype: DataType, dims: &[u32], quantization: Quantization) -> Tensor {
    Tensor { name: name.into(), role, dtype, dims: dims.into(), quantization }
}

/// `y [2, 4] = x [2, 64] · w [4, 64]ᵀ` with weights of one byte.
fn linear(quantization: Quantization, byte: u8) -> Graph {
    Graph {
        name: "graph".into(),
        tensors: vec![
            tensor("x", Role::Input, DataType::F16, &[2, 64], Quantization::None),
            tensor("w", Role::Constant(vec![byte; 4 * 64].into()), DataType::Fixed8, &[4, 64], quantization),
            tensor("y", Role::Output, DataType::F16, &[2, 4], Quantization::None),
        ],
        nodes: vec![node("FullyConnected", vec![], &[0, 1], &[2])],
    }
}

fn node(kind: &'static str, parameters: Vec<(&'static str, Parameter)>, inputs: &[usize], outputs: &[usize]) -> Node {
    let ids = |list: &[usize]| list.iter().map(|&id| TensorId(id)).collect();
    Node { name: "node".into(), kind, parameters, inputs: ids(inputs), outputs: ids(outputs) }
}

fn channel(axis: u32, scales: usize) -> Quantization {
    Quantization::Channel8 { axis, scales: vec![0.1; scales] }
}

fn good() -> Graph {
    linear(channel(0, 4), 9)
}

/// The graph with a change, and what is said of it.
fn refused(change: impl FnOnce(&mut Graph), expected: &str) {
    let mut graph = good();
    graph.check().unwrap();
    change(&mut graph);
    let error = graph.check().expect_err(expected).to_string();
    assert!(error.starts_with("graph `") && error.contains(expected), "{error} does not say: {expected}");
}

/// One node on f16 tensors of these shapes.
fn single(kind: &'static str, parameters: Vec<(&'static str, Parameter)>, inputs: &[&[u32]], outputs: &[&[u32]]) -> Graph {
    let float = |name: String, role, dims| tensor(&name, role, DataType::F16, dims, Quantization::None);
    let mut tensors: Vec<Tensor> = inputs.iter().enumerate().map(|(n, dims)| float(format!("in{n}"), Role::Input, dims)).collect();
    tensors.extend(outputs.iter().enumerate().map(|(n, dims)| float(format!("out{n}"), Role::Output, dims)));
    let (first, all): (Vec<usize>, Vec<usize>) = ((0..inputs.len()).collect(), (inputs.len()..tensors.len()).collect());
    Graph { name: "graph".into(), nodes: vec![node(kind, parameters, &first, &all)], tensors }
}

fn u32s(values: &[u32]) -> Parameter {
    Parameter::U32s { dims: vec![values.len() as u32], values: values.into() }
}

#[test]
fn names_and_order() {
    refused(|g| g.name.clear(), "needs a name");
    refused(|g| g.nodes.clear(), "needs a name and at least one node");
    refused(|g| g.tensors[1].name = "x".into(), "the name is already in use");
    refused(|g| g.tensors[1].name = "a\0b".into(), "zero byte");
    refused(|g| g.nodes[0].inputs[0] = TensorId(7), "tensor 7 does not exist; there are 3");
    refused(|g| g.tensors[0].role = Role::Inner, "reads `x` before it is written");
    refused(|g| g.tensors[2].role = Role::Input, "writes `y`, which already has a value");
    refused(|g| g.tensors.push(tensor("z", Role::Output, DataType::F16, &[1], Quantization::None)), "no node writes it");
    refused(|g| g.nodes[0].kind = "FullyConected", "has not been seen to work");
    refused(
        |g| {
            let again = Node { outputs: vec![TensorId(3)], ..g.nodes[0].clone() };
            g.tensors.push(tensor("z", Role::Output, DataType::F16, &[2, 4], Quantization::None));
            g.nodes.push(again);
        },
        "the name is already in use",
    );
    // A list becomes a tensor of the graph: its name must be free too.
    let mut graph = single("Transpose", vec![("perm", u32s(&[1, 0]))], &[&[2, 3]], &[&[3, 2]]);
    graph.check().unwrap();
    graph.tensors[0].name = "node:perm".into();
    assert!(graph.check().is_err());
}

#[test]
fn sizes_and_stored_numbers() {
    refused(|g| g.tensors[0].dims = vec![2, 0], "none of them 0");
    refused(|g| g.tensors[0].dims = vec![], "one to 5 axes");
    refused(|g| g.tensors[0].dims = vec![1; 6], "one to 5 axes");
    refused(|g| g.tensors[0].dims = vec![u32::MAX, u32::MAX, 64], "32-bit sizes");
    refused(|g| g.tensors[1].role = Role::Constant(vec![9; 4 * 64 - 1].into()), "needs 256 bytes, but 255 are given");
    refused(
        |g| g.tensors[1].quantization = Quantization::Channel4 { axis: 0, scales: vec![0.1; 4] },
        "contains 9, but 4-bit values must be -8 to 7",
    );
    linear(Quantization::Channel4 { axis: 0, scales: vec![0.1; 4] }, 0xf8).check().unwrap();
    let lazy = Tensor { role: Role::Lazy(Lazy::new(|| Ok(vec![]))), ..good().tensors[1].clone() };
    lazy.check().unwrap();
    assert!(lazy.check_constant(&[0; 3]).unwrap_err().contains("3 are given"));
}

#[test]
fn scales() {
    refused(|g| g.tensors[1].quantization = Quantization::None, "tensors of type Fixed8, and only those");
    refused(|g| g.tensors[0].quantization = Quantization::Tensor(1.0), "tensors of type Fixed8, and only those");
    refused(|g| g.tensors[1].quantization = channel(0, 3), "has 3 scales, but needs 4");
    refused(|g| g.tensors[1].quantization = channel(2, 4), "along axis 2");
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused(|g| g.tensors[1].quantization = Quantization::Channel8 { axis: 0, scales: vec![scale; 4] }, "scales must be positive");
    }
    // The library silently computes garbage from these, or crashes.
    let narrow = |g: &mut Graph| {
        (g.tensors[0].dims[1], g.tensors[1].dims[1]) = (62, 62);
        g.tensors[1].role = Role::Constant(vec![9; 4 * 62].into());
    };
    refused(narrow, "wrongly unless their length is a multiple of 4");
    refused(|g| g.tensors[1].quantization = channel(1, 64), "scales along axis 1, but its output channels are along axis 0");
    refused(|g| g.tensors[1].quantization = Quantization::Tensor(0.1), "weights need one per output channel");
    refused(|g| (g.tensors[0].dtype, g.tensors[2].dtype) = (DataType::F32, DataType::F32), "all other tensors must be F16");
    refused(|g| g.tensors[1].role = Role::Input, "only constants may have");
    let blocks = |block, scales| linear(Quantization::Block4 { block, scales: vec![0.1; scales] }, 7);
    blocks(32, 8).check().unwrap();
    for (graph, expected) in [(blocks(32, 4), "needs 8"), (blocks(48, 8), "blocks of 48"), (blocks(128, 4), "blocks of 128")] {
        let error = graph.check().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let mut product = blocks(32, 8);
    product.nodes[0] = node("MatMul", vec![("transpose_in1", Parameter::Bool(true))], &[0, 1], &[2]);
    assert!(product.check().unwrap_err().to_string().contains("only FullyConnected"));
    product.tensors[1].quantization = channel(0, 4);
    product.check().unwrap();
    product.tensors[1].quantization = channel(1, 64);
    assert!(product.check().unwrap_err().to_string().contains("output channels are along axis 0"));
}

#[test]
fn quantised_activations_are_dequantised_first() {
    let mut graph = single("ElementWiseAdd", vec![], &[&[4], &[4]], &[&[4]]);
    for tensor in &mut graph.tensors {
        (tensor.dtype, tensor.quantization) = (DataType::Fixed8, Quantization::Tensor(0.5));
    }
    assert!(graph.check().unwrap_err().to_string().contains("put a Dequantize before it"));
    graph.nodes[0].kind = "Concat";
    graph.nodes[0].parameters = vec![("axis", Parameter::U32(0))];
    graph.tensors[2].dims = vec![8];
    graph.check().unwrap();
    graph.tensors[2].quantization = Quantization::Tensor(0.25);
    assert!(graph.check().unwrap_err().to_string().contains("the same single scale"));
    let mut graph = single("Dequantize", vec![], &[&[4]], &[&[4]]);
    assert!(graph.check().unwrap_err().to_string().contains("needs an input with one scale"));
    (graph.tensors[0].dtype, graph.tensors[0].quantization) = (DataType::Fixed8, Quantization::Tensor(0.5));
    graph.check().unwrap();
}

#[test]
fn parameters() {
    let softmax = |parameters| single("Softmax", parameters, &[&[2, 3]], &[&[2, 3]]).check();
    softmax(vec![("axis", Parameter::U32(1)), ("beta", Parameter::F32(1.0))]).unwrap();
    let cases: [(_, &str); 6] = [
        (vec![], "needs the parameter `axis`"),
        (vec![("axis", Parameter::I32(1))], "is I32(1), but must be U32"),
        (vec![("axis", Parameter::U32(2))], "`axis` is 2, but there are 2 axes"),
        (vec![("axis", Parameter::U32(1)), ("axis", Parameter::U32(1))], "given twice"),
        (vec![("axis", Parameter::U32(1)), ("gamma", Parameter::F32(1.0))], "no parameter `gamma`"),
        (vec![("axis", Parameter::U32(1)), ("beta", Parameter::F32(f32::NAN))], "must be F32"),
    ];
    for (parameters, expected) in cases {
        let error = softmax(parameters).unwrap_err().to_string();
        assert!(error.contains(expected), "{error} does not say: {expected}");
    }
    let short = Parameter::U32s { dims: vec![2], values: vec![0] };
    assert!(single("Transpose", vec![("perm", short)], &[&[2, 3]], &[&[3, 2]]).check().is_err());
}

/// Every line: an op that is right, and the output shapes that would be wrong.
#[test]
fn shapes() {
    let number = |name, n: u32| (name, Parameter::U32(n));
    let ranges = |values: &[i32]| Parameter::I32s { dims: vec![values.len() as u32 / 3, 3], values: values.into() };
    let pads = |values: &[u32]| Parameter::U32s { dims: vec![values.len() as u32 / 2, 2], values: values.into() };
    let turned = vec![("transpose_in1", Parameter::Bool(true))];
    let norm = vec![("epsilon", Parameter::F32(1e-6)), ("axes", u32s(&[1]))];
    let convolution = vec![("stride", u32s(&[2, 2])), ("pad_amount", pads(&[1, 1, 1, 1]))];
    let zeros = vec![("scheme", Parameter::U32(0)), ("pad_amount", pads(&[0, 1, 2, 0]))];
    let keep = vec![("axes", u32s(&[1])), ("keep_dims", Parameter::Bool(true))];
    type Shapes<'a> = &'a [&'a [u32]];
    type Case<'a> = (&'static str, Vec<(&'static str, Parameter)>, Shapes<'a>, Shapes<'a>);
    let cases: Vec<Case<'_>> = vec![
        ("MatMul", vec![], &[&[3, 2, 4, 8], &[1, 8, 5]], &[&[3, 2, 4, 5]]),
        ("MatMul", turned, &[&[3, 4, 8], &[3, 5, 8]], &[&[3, 4, 5]]),
        ("Conv2d", convolution.clone(), &[&[1, 8, 9, 3], &[3, 3, 3, 5], &[5]], &[&[1, 4, 5, 5]]),
        ("DepthWiseConv2d", convolution, &[&[1, 8, 9, 6], &[3, 3, 1, 6]], &[&[1, 4, 5, 6]]),
        ("RmsNorm", norm.clone(), &[&[2, 8], &[8], &[8]], &[&[2, 8]]),
        ("LayerNorm", norm, &[&[2, 8], &[8]], &[&[2, 8]]),
        ("ElementWiseAdd", vec![], &[&[3, 1, 5], &[4, 1]], &[&[3, 4, 5]]),
        ("ElementWiseExp", vec![], &[&[3, 5]], &[&[3, 5]]),
        ("Reshape", vec![], &[&[3, 4]], &[&[2, 6]]),
        ("Transpose", vec![("perm", u32s(&[2, 0, 1]))], &[&[2, 3, 4]], &[&[4, 2, 3]]),
        ("Concat", vec![number("axis", 1)], &[&[2, 3], &[2, 4]], &[&[2, 7]]),
        ("Split", vec![number("axis", 1), ("split_index", u32s(&[3]))], &[&[2, 7]], &[&[2, 3], &[2, 4]]),
        ("StridedSlice", vec![("ranges", ranges(&[0, 2, 1, 1, 7, 3]))], &[&[2, 7]], &[&[2, 2]]),
        ("Tile", vec![("multiples", u32s(&[2, 1]))], &[&[2, 7]], &[&[4, 7]]),
        ("ExpandDims", vec![number("axis", 1)], &[&[2, 7]], &[&[2, 1, 7]]),
        ("Pack", vec![number("axis", 0)], &[&[7], &[7]], &[&[2, 7]]),
        ("Pad", zeros, &[&[2, 7]], &[&[3, 9]]),
        ("ReduceSum", vec![("axes", u32s(&[0, 1]))], &[&[2, 7]], &[&[1]]),
        ("ReduceMean", keep, &[&[2, 7]], &[&[2, 1]]),
    ];
    for (kind, parameters, inputs, outputs) in cases {
        let right = single(kind, parameters.clone(), inputs, outputs);
        right.check().unwrap_or_else(|e| panic!("{e}"));
        for output in 0..outputs.len() {
            let mut wrong = right.clone();
            wrong.tensors[inputs.len() + output].dims[0] += 1;
            let error = wrong.check().expect_err(kind).to_string();
            assert!(error.contains("computes") || error.contains("different numbers"), "{error}");
        }
        let mut wrong = right.clone();
        wrong.tensors[0].dims.insert(0, 11);
        assert!(wrong.check().is_err(), "{kind} with another input shape");
    }
}

#[test]
fn ranges_axes_and_kernels_that_do_not_fit() {
    let slice = |values: [i32; 3]| {
        let ranges = Parameter::I32s { dims: vec![1, 3], values: values.into() };
        single("StridedSlice", vec![("ranges", ranges)], &[&[8]], &[&[4]]).check()
    };
    slice([2, 6, 1]).unwrap();
    for range in [[-1, 3, 1], [6, 2, 1], [5, 9, 1], [0, 4, 0], [6, 2, -1], [i32::MIN, i32::MAX, 1]] {
        assert!(slice(range).unwrap_err().to_string().contains("is not within 8"), "{range:?}");
    }
    let gather = |axis| {
        let mut graph = single("Gather", vec![("axis", Parameter::I32(axis))], &[&[5, 3], &[2]], &[&[2, 3]]);
        graph.tensors[1].dtype = DataType::I32;
        graph.check()
    };
    gather(0).unwrap();
    assert!(gather(2).is_err() && gather(-1).is_err());
    let pads = Parameter::U32s { dims: vec![2, 2], values: vec![0; 4] };
    let convolution = |stride: u32, dilation: u32, kernel: u32| {
        let parameters = vec![("stride", u32s(&[stride, 1])), ("pad_amount", pads.clone()), ("dilation", u32s(&[dilation, 1]))];
        single("Conv2d", parameters, &[&[1, 4, 1, 1], &[kernel, 1, 1, 1]], &[&[1, 1, 1, 1]]).check()
    };
    convolution(1, 1, 4).unwrap();
    for (stride, dilation, kernel) in [(0, 1, 4), (1, 1, 5), (1, u32::MAX, 4)] {
        assert!(convolution(stride, dilation, kernel).is_err(), "{stride} {dilation} {kernel}");
    }
    let mut scatter = single("ScatterNd", vec![], &[&[6, 4], &[2, 1], &[2, 4]], &[&[6, 4]]);
    scatter.tensors[1].dtype = DataType::I32;
    scatter.check().unwrap();
    scatter.tensors[1].dims = vec![2, 3];
    assert!(scatter.check().is_err());
}
