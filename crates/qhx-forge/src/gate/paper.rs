//! A model on paper: everything that its bundle will have but for the weights, so that prompts can be made and checked before anything is written.

use crate::{ForgeError, ForgeOptions, Material, families::Programs, plan::Plan};
use qhx_bundle::{BundlePath, Manifest};
use qhx_ir::{Call, Checked, Device, DeviceError, DeviceInfo, Executable, Op, State, WeightTensor, Weights};
use qhx_runtime::{LoadOptions, Model, ModelParts};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// The model that `programs` describe, and its manifest. It encodes text and counts soft rows; it cannot run.
pub(super) fn model(material: &Material, programs: &Programs, options: &ForgeOptions<'_>) -> Result<(Model, Manifest), ForgeError> {
    model_with(material, programs, options, &|_| {})
}

/// The same with a manifest that is changed first.
pub(super) fn model_with(
    material: &Material,
    programs: &Programs,
    options: &ForgeOptions<'_>,
    change: &dyn Fn(&mut Manifest),
) -> Result<(Model, Manifest), ForgeError> {
    let (mut manifest, files) = material.describe(&Plan::from(options.precision), programs, options)?;
    change(&mut manifest);
    let named: BTreeMap<String, Checked> =
        programs.programs.iter().map(|written| (written.program.name.to_string(), written.program.clone())).collect();
    let read = |path: &BundlePath| {
        let found = files.iter().find(|(name, _)| name == path).map(|(_, bytes)| bytes.to_vec());
        Ok(found.unwrap_or_default())
    };
    let weights: HashMap<String, WeightTensor> = HashMap::new();
    let parts = ModelParts::described(&manifest, &named, Arc::new(weights), "", &read)?;
    let model = Model::on_device(parts, Arc::new(Paper), &LoadOptions { overcommit: true, ..LoadOptions::default() })?;
    Ok((model, manifest))
}

/// Takes every op and runs none.
struct Paper;

impl Device for Paper {
    fn describe(&self) -> DeviceInfo {
        let description = "takes every operation and runs none".into();
        DeviceInfo { name: "paper".into(), description, memory_bytes: None, threads: 0, facts: BTreeMap::new() }
    }

    fn accepts(&self, _: &Checked, _: &Op) -> Result<(), DeviceError> {
        Ok(())
    }

    fn load(&self, program: &Checked, _: &Arc<dyn Weights>, _: &qhx_ir::LoadOptions) -> Result<Box<dyn Executable>, DeviceError> {
        Ok(Box::new(Sheet(program.clone())))
    }
}

struct Sheet(Checked);

impl Sheet {
    fn cannot<T>() -> Result<T, DeviceError> {
        Err(DeviceError::Call("a model on paper cannot run".into()))
    }
}

impl Executable for Sheet {
    fn program(&self) -> &Checked {
        &self.0
    }

    fn new_state(&self, _: usize) -> Result<Box<dyn State>, DeviceError> {
        Self::cannot()
    }

    fn run(&mut self, _: &mut Call<'_>) -> Result<(), DeviceError> {
        Self::cannot()
    }

    fn output(&self, _: &str) -> Option<&[f32]> {
        None
    }

    fn scratch_bytes(&self) -> u64 {
        0
    }
}
