//! Who makes, reads and uses what in a program, found once when it is checked: a question about one stage, value or slot then costs what its answer
//! has, never a walk over the whole program. Everything that goes through a program stage by stage stays linear in its length that way.

use super::Reason;
use crate::{Name, Op, Program};
use std::collections::HashMap;

/// The longest path of an op, in bytes: the stage of a path is looked up word by word.
const MOST_PATH: usize = 1024;

/// Places (in the program's lists) by name.
#[derive(Debug, Default)]
pub(super) struct Index {
    pub(super) stages: StageNames,
    /// The stage of each op.
    pub(super) stage_of_op: Vec<usize>,
    /// The ops of each stage, rising.
    pub(super) ops_of_stage: Vec<Vec<usize>>,
    /// The stages that each value shows.
    pub(super) taps: HashMap<Name, Vec<usize>>,
    pub(super) inputs: HashMap<Name, usize>,
    /// The program's outputs by value.
    pub(super) outputs: HashMap<Name, Vec<usize>>,
    /// The op that makes each value; inputs are not there.
    pub(super) makers: HashMap<Name, usize>,
    /// The ops that read each value, rising.
    pub(super) readers: HashMap<Name, Vec<usize>>,
    /// The ops that name each slot, rising: the first of them writes it.
    pub(super) slot_users: HashMap<Name, Vec<usize>>,
}

impl Index {
    /// Of a program whose ops lie under these stages.
    pub(super) fn new(program: &Program, stages: StageNames, stage_of_op: Vec<usize>) -> Self {
        let mut index = Self { ops_of_stage: vec![Vec::new(); program.stages.len()], stages, stage_of_op, ..Self::default() };
        for (place, stage) in program.stages.iter().enumerate() {
            if let Some(tap) = &stage.tap {
                index.taps.entry(tap.clone()).or_default().push(place);
            }
        }
        index.inputs = program.inputs.iter().enumerate().map(|(place, input)| (input.name.clone(), place)).collect();
        for (place, output) in program.outputs.iter().enumerate() {
            index.outputs.entry(output.value.clone()).or_default().push(place);
        }
        for (place, op) in program.ops.iter().enumerate() {
            index.ops_of_stage[index.stage_of_op[place]].push(place);
            index.add(place, op);
        }
        index
    }

    fn add(&mut self, place: usize, op: &Op) {
        self.makers.extend(op.outputs().into_iter().map(|name| (name, place)));
        for name in op.op.inputs() {
            let readers = self.readers.entry(name.clone()).or_default();
            if readers.last() != Some(&place) {
                readers.push(place);
            }
        }
        if let Some(slot) = op.op.slot() {
            self.slot_users.entry(slot.clone()).or_default().push(place);
        }
    }
}

/// The places of a program's stages by name.
#[derive(Debug, Default)]
pub(super) struct StageNames(HashMap<Name, usize>);

impl StageNames {
    pub(super) fn new(program: &Program) -> Reason<Self> {
        let mut names = HashMap::new();
        for (place, stage) in program.stages.iter().enumerate() {
            if names.insert(stage.name.clone(), place).is_some() {
                return Err(format!("stage `{}` is declared twice", stage.name));
            }
        }
        Ok(Self(names))
    }

    /// The stage under which a path lies: the longest one that is a dotted prefix of it.
    pub(super) fn of(&self, path: &str) -> Option<usize> {
        if path.len() > MOST_PATH {
            return None;
        }
        let mut prefix = path;
        loop {
            if let Some(&place) = self.0.get(prefix) {
                return Some(place);
            }
            prefix = prefix.rsplit_once('.')?.0;
        }
    }
}

/// Why a path has no stage.
pub(super) fn no_stage(path: &str) -> String {
    match path.len() > MOST_PATH {
        true => format!("its path has {} bytes; at most {MOST_PATH} are allowed", path.len()),
        false => "lies under no stage of the program".into(),
    }
}
