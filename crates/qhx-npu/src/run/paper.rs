//! The NPU on a machine without QNN: reports which ops it supports and where they run, but loads nothing.

use super::device::{accepts, host_weights, on_host};
use crate::Arch;
use qhx_ir::{Checked, Device, DeviceError, DeviceInfo, Executable, LoadOptions, Name, Op, Weights};
use std::{collections::BTreeMap, sync::Arc};

/// The Hexagon NPU without QNN's libraries, for planning.
pub struct NpuOnPaper(pub Arch);

impl Device for NpuOnPaper {
    fn describe(&self) -> DeviceInfo {
        let facts = BTreeMap::from([("arch".into(), self.0.to_string()), ("soc".into(), self.0.soc_name().into())]);
        let description = format!("Hexagon NPU ({}), without QNN's libraries", self.0);
        DeviceInfo { name: "npu".into(), description, memory_bytes: None, threads: 1, facts }
    }

    fn accepts(&self, program: &Checked, op: &Op) -> Result<(), DeviceError> {
        accepts(program, op)
    }

    fn on_host(&self, program: &Checked, op: &Op) -> bool {
        on_host(program, op)
    }

    fn host_weights(&self, program: &Checked) -> Vec<Name> {
        host_weights(program)
    }

    fn load(&self, program: &Checked, _: &Arc<dyn Weights>, _: &LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        Err(DeviceError::Resources(format!(
            "program `{}` cannot run here: QNN's libraries were not found; set QHX_QNN_DIR to their folder",
            program.name
        )))
    }
}
