//! Which queues of a device are used, and counting what is submitted to them.

use ash::vk;
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

/// What work is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// Shaders, and copies among them.
    Compute,
    /// Copies from the host's memory, while shaders run.
    Transfer,
}

impl Lane {
    pub(super) fn stages(self) -> vk::PipelineStageFlags {
        match self {
            Self::Compute => vk::PipelineStageFlags::COMPUTE_SHADER | vk::PipelineStageFlags::TRANSFER,
            Self::Transfer => vk::PipelineStageFlags::TRANSFER,
        }
    }

    pub(super) fn reads(self) -> vk::AccessFlags {
        match self {
            Self::Compute => vk::AccessFlags::SHADER_READ | vk::AccessFlags::TRANSFER_READ,
            Self::Transfer => vk::AccessFlags::TRANSFER_READ,
        }
    }

    pub(super) fn writes(self) -> vk::AccessFlags {
        match self {
            Self::Compute => vk::AccessFlags::SHADER_WRITE | vk::AccessFlags::TRANSFER_WRITE,
            Self::Transfer => vk::AccessFlags::TRANSFER_WRITE,
        }
    }
}

/// Something that was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Submission {
    pub(super) lane: Lane,
    pub(super) number: u64,
}

/// A queue: the number of its family, and its own among those of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueuePlace {
    pub(super) family: u32,
    pub(super) index: u32,
}

/// The queues of both lanes: one queue where a device has no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Queues {
    pub(super) compute: QueuePlace,
    pub(super) transfer: QueuePlace,
}

impl Queues {
    /// The best of some families: compute without graphics; for transfers a family that does nothing else, or a second queue for compute, or the same one.
    pub(super) fn choose(families: &[vk::QueueFamilyProperties]) -> Option<Self> {
        use vk::QueueFlags as Flags;
        let find = |wanted: &dyn Fn(Flags) -> bool| families.iter().position(|f| f.queue_count > 0 && wanted(f.queue_flags));
        let computes = |flags: Flags| flags.contains(Flags::COMPUTE);
        let family = find(&|flags| computes(flags) && !flags.contains(Flags::GRAPHICS)).or_else(|| find(&computes))?;
        // Families for video can copy, too.
        let only_copies = |flags: Flags| flags & !(Flags::SPARSE_BINDING | Flags::PROTECTED) == Flags::TRANSFER;
        let compute = QueuePlace { family: family as u32, index: 0 };
        let transfer = match find(&only_copies) {
            Some(family) => QueuePlace { family: family as u32, index: 0 },
            None => QueuePlace { index: u32::from(families[family].queue_count > 1), ..compute },
        };
        Some(Self { compute, transfer })
    }

    /// The same without a queue for transfers.
    pub(super) fn one(self) -> Self {
        Self { transfer: self.compute, ..self }
    }

    /// Whether copies can be made while shaders run.
    pub(super) fn are_apart(&self) -> bool {
        self.compute != self.transfer
    }

    /// The families, and how many queues of each are used.
    pub(super) fn families(&self) -> Vec<(u32, usize)> {
        match self.compute.family == self.transfer.family {
            true => vec![(self.compute.family, 1 + self.transfer.index as usize)],
            false => vec![(self.compute.family, 1), (self.transfer.family, 1)],
        }
    }
}

/// A lane's queue, which the other one may share, and its own count of submissions.
pub(super) struct Line {
    pub(super) family: u32,
    pub(super) queue: Arc<Mutex<vk::Queue>>,
    /// Changed by whoever has locked the queue.
    submitted: AtomicU64,
    /// Counts submissions that have ended.
    pub(super) done: vk::Semaphore,
}

impl Line {
    pub(super) fn new(family: u32, queue: Arc<Mutex<vk::Queue>>, done: vk::Semaphore) -> Self {
        Self { family, queue, submitted: AtomicU64::new(0), done }
    }

    /// The number of the next submission.
    pub(super) fn next(&self) -> u64 {
        self.submitted.load(Ordering::Relaxed) + 1
    }

    /// It was submitted.
    pub(super) fn count(&self, number: u64) {
        self.submitted.store(number, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vk::QueueFlags as Flags;

    fn chosen(families: &[(Flags, u32)]) -> Option<[(u32, u32); 2]> {
        let family = |&(flags, count): &(Flags, u32)| vk::QueueFamilyProperties::default().queue_flags(flags).queue_count(count);
        let queues = Queues::choose(&families.iter().map(family).collect::<Vec<_>>())?;
        assert_eq!(queues.are_apart(), queues != queues.one());
        Some([queues.compute, queues.transfer].map(|place| (place.family, place.index)))
    }

    #[test]
    fn the_queues_of_several_kinds_of_devices() {
        let (copies, computes) = (Flags::TRANSFER | Flags::SPARSE_BINDING, Flags::COMPUTE | Flags::TRANSFER);
        let all = computes | Flags::GRAPHICS;
        let video = Flags::TRANSFER | Flags::VIDEO_DECODE_KHR;
        let many = [(all, 16), (copies, 2), (computes, 8), (video, 1)];
        assert_eq!(chosen(&many), Some([(2, 0), (1, 0)]), "each its own family");
        assert_eq!(chosen(&[(all, 1), (computes, 4), (video, 1)]), Some([(1, 0), (1, 1)]), "two queues of a family");
        assert_eq!(chosen(&[(all, 1)]), Some([(0, 0), (0, 0)]), "software has one");
        assert_eq!(chosen(&[(all, 1), (copies, 1)]), Some([(0, 0), (1, 0)]));
        assert_eq!(chosen(&[(copies, 1), (Flags::GRAPHICS, 1)]), None);
    }

    #[test]
    fn queues_are_asked_for_by_family() {
        let at = |family, index| QueuePlace { family, index };
        let families = |compute, transfer| Queues { compute, transfer }.families();
        assert_eq!(families(at(2, 0), at(1, 0)), [(2, 1), (1, 1)]);
        assert_eq!(families(at(2, 0), at(2, 1)), [(2, 2)]);
        assert_eq!(families(at(0, 0), at(0, 0)), [(0, 1)]);
    }
}
