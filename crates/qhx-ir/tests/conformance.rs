//! The reference passes its own suite: no case of it is ill-formed.

use qhx_ir::{
    conformance::{self, Options},
    reference::ReferenceDevice,
};

#[test]
fn the_reference_passes() {
    let summary = conformance::run(&ReferenceDevice, &Options::from_environment(), &mut |_| {});
    println!("{summary}");
    assert!(summary.failed.is_empty() && summary.refused.is_empty(), "{summary}");
}
