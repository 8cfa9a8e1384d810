//! The conformance suite on the GPU that Vulkan offers: in CI, Mesa's software Vulkan with the validation layer. Run by `cargo xtask gpu`.

use qhx_gpu::{Features, GpuDevice, GpuOptions};
use qhx_ir::{Device, conformance};

fn options() -> GpuOptions {
    GpuOptions { validate: std::env::var_os("QHX_GPU_NO_VALIDATION").is_none(), ..Default::default() }
}

fn conforms(options: GpuOptions, suite: &conformance::Options) {
    let device = GpuDevice::new(options);
    println!("{:?}", device.open().unwrap().describe());
    let summary = conformance::run(&device, suite, &mut |case| {
        if matches!(case.outcome, conformance::Outcome::Failed(_)) {
            println!("{case}");
        }
    });
    println!("{summary}");
    let messages = device.machine().unwrap().messages();
    assert!(messages.is_empty(), "the validation layer says: {messages:#?}");
    assert!(summary.failed.is_empty(), "{} cases failed", summary.failed.len());
}

#[test]
#[ignore = "needs Vulkan: cargo xtask gpu"]
fn agrees_with_the_reference() {
    let suite = conformance::Options { strict: true, ..conformance::Options::from_environment() };
    conforms(options(), &suite);
}

/// Products, experts and attention by small matrices, in calls of any number of rows. Run apart, for it takes a newer Mesa.
#[test]
#[ignore = "needs Vulkan with cooperative matrices: cargo xtask gpu"]
fn cooperative_matrices_agree_with_the_reference() {
    let options = GpuOptions { features: Features { matrix_rows: 1, ..Default::default() }, ..options() };
    let features = format!("{:?}", GpuDevice::new(options.clone()).open().unwrap().describe().facts["features"]);
    assert!(features.contains("cooperative matrices"), "{features}");
    // A weight of each kind with each form of rows that is multiplied so.
    let products = [3, 7, 8, 9, 12, 13, 21, 28, 37, 43, 45, 53, 59, 61].map(|number| format!("linear/{number}"));
    let experts = [3, 8, 45].map(|number| format!("experts/{number}"));
    let attention = (0..6).map(|number| format!("attend/{number}"));
    let others = ["attend_long/0", "attend_shared/0", "model.mixture/0", "model.decoder/3"].map(str::to_owned);
    for name in products.into_iter().chain(experts).chain(attention).chain(others) {
        let suite = conformance::Options { cases: 8, strict: true, only: Some(name), ..Default::default() };
        conforms(options.clone(), &suite);
    }
}

/// Steps of one row as lists of instructions: software takes them only here.
#[test]
#[ignore = "needs Vulkan: cargo xtask gpu"]
fn agrees_with_the_reference_by_instructions() {
    for name in ["model.decoder", "model.hybrid", "model.mixture"] {
        let suite = conformance::Options { cases: 1, strict: true, only: Some(name.into()), ..Default::default() };
        conforms(GpuOptions { features: Features { streams: Some(true), ..Default::default() }, ..options() }, &suite);
    }
}

/// The ways that devices with fewer features take. Software Vulkan compiles shaders slowly, so that only some cases of each kind are run.
#[test]
#[ignore = "needs Vulkan: cargo xtask gpu"]
fn agrees_with_the_reference_without_features() {
    let without = |features: Features, names: &[&str]| {
        for name in names {
            let suite = conformance::Options { cases: 4, strict: true, only: Some((*name).into()), ..Default::default() };
            conforms(GpuOptions { features, ..options() }, &suite);
        }
    };
    let products = ["linear/1", "linear/9", "linear/20", "linear/45", "linear/60", "experts/8", "experts/14", "model.mixture"];
    without(Features { integer_dot: false, cooperative_matrix: false, ..Default::default() }, &products);
    let others = ["rms_norm", "layer_norm", "attend/0", "attend/1", "attend/2", "gated_delta/0", "gated_delta/1", "model.decoder/3"];
    let plain =
        Features { subgroups: false, host_memory: false, max_buffer: Some(4 << 20), shared_memory: Some(16 << 10), ..Default::default() };
    without(plain, &[&products[..], &others].concat());
}
