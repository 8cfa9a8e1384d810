//! Cores, which the models have none of.

#[derive(Clone, Copy)]
pub(crate) struct Core;

pub(crate) struct Held;

impl Core {
    pub(crate) fn keep(self) {}

    pub(crate) fn hold(self) -> Held {
        Held
    }
}
