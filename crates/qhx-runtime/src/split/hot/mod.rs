//! Experts that do not all fit on an accelerator: it holds those that are chosen most often, and the processor computes the others from where they lie, at the same time.
//!
//! The unit is a *choice*: a row and one of its experts. The accelerator's program has slots for experts of all layers that are alike ([`pool`]); which expert lies in which slot is
//! decided here ([`residency`]) from how often each was chosen ([`counts`]), and told when a step begins. In each layer, the program shows what its router has chosen and goes on with those
//! experts that lie there, while the processor computes the others ([`shared`]).

mod counts;
mod forecast;
mod kind;
mod pool;
mod residency;
mod shared;

pub(in crate::split) use kind::expert_ops;
pub(super) use pool::Pool;
pub(super) use shared::SharedExperts;

use kind::Kind;
use qhx_ir::{Checked, DeviceError};
use serde::{Deserialize, Serialize};

/// The experts that an accelerator holds though not all of them fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HotExperts {
    /// How many, of all layers together.
    pub count: usize,
    /// An expert that is not there is transferred for a call in which so many rows chose it; with fewer the processor computes it. Absent: nothing is transferred
    /// for a call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer_from: Option<usize>,
}

/// Where they are.
#[derive(Clone, Debug)]
pub(super) struct Hot {
    /// The accelerator's place among the devices.
    pub(super) device: usize,
    pub(super) experts: HotExperts,
}

/// Bytes that so many experts of a program take on the accelerator.
pub(crate) fn pool_bytes(program: &Checked, count: usize) -> Result<u64, DeviceError> {
    let ops: Vec<usize> = kind::expert_ops(program).collect();
    let kinds = Kind::all(program, &ops, count)?;
    let weights = kinds.iter().enumerate().flat_map(|(number, (kind, slots))| kind.slots(number, *slots));
    Ok(weights.map(|(_, weight)| crate::memory::tensor_bytes(weight.encoding, &weight.shape)).fold(0, u64::saturating_add))
}

/// How many experts a program has, and what one of them stores and multiplies on average.
pub(crate) fn all_experts(program: &Checked) -> Option<AllExperts> {
    let mut all = AllExperts { count: 0, bytes: 0.0, products: 0.0 };
    for place in kind::expert_ops(program) {
        let weights = program.ops[place].op.weights();
        let declared = weights.iter().filter_map(|name| program.weights.get(*name));
        for weight in declared.clone() {
            all.bytes += crate::memory::tensor_bytes(weight.encoding, &weight.shape) as f64;
            all.products += weight.shape.iter().map(|&n| n as f64).product::<f64>();
        }
        all.count += declared.clone().next().map_or(0, |weight| weight.shape[0]);
    }
    let count = all.count.max(1) as f64;
    (all.count > 0).then(|| AllExperts { bytes: all.bytes / count, products: all.products / count, ..all })
}

/// The experts of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllExperts {
    pub(crate) count: usize,
    pub(crate) bytes: f64,
    pub(crate) products: f64,
}
