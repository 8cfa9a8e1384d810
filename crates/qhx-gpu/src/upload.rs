//! Brings bytes to the device: straight where the host sees its memory, else through two staging buffers, one of which is copied while the other is filled.

use crate::vulkan::{Buffer, Command, Fault, Gpu, Recording, Submission, Use};
use std::sync::Arc;

/// Bytes of a staging buffer.
const STAGING: u64 = 32 << 20;

/// What is on its way.
pub(crate) struct Upload {
    gpu: Arc<Gpu>,
    staging: Vec<Stage>,
    turn: usize,
    /// The device has to be done with this before anything is copied.
    after: Option<Submission>,
    timed: bool,
}

struct Stage {
    buffer: Arc<Buffer>,
    used: u64,
    commands: Vec<Command>,
    under_way: Option<Copies>,
}

/// Copies that were submitted.
#[derive(Clone)]
pub(crate) struct Copies {
    pub(crate) submission: Submission,
    pub(crate) recording: Arc<Recording>,
}

impl Upload {
    /// `timed`: somebody wants to know when copies begin and end.
    pub(crate) fn new(gpu: &Arc<Gpu>, timed: bool) -> Self {
        Self { gpu: gpu.clone(), staging: Vec::new(), turn: 0, after: None, timed }
    }

    /// What is written from now on replaces what a submission still reads.
    pub(crate) fn wait_for(&mut self, after: Option<Submission>) {
        self.after = after;
    }

    /// Writes bytes to a place of a buffer: they are there when what [`Upload::flush`] gives has ended.
    pub(crate) fn write(&mut self, to: &Arc<Buffer>, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        if to.is_mapped() {
            // No copy waits in the host's place.
            if let Some(after) = self.after.take() {
                self.gpu.wait(after)?;
            }
            to.write(offset, bytes);
            return Ok(());
        }
        if self.staging.is_empty() {
            for _ in 0..2 {
                let buffer = Arc::new(Buffer::new(&self.gpu, STAGING, Use::Staging)?);
                self.staging.push(Stage { buffer, used: 0, commands: Vec::new(), under_way: None });
            }
        }
        let (mut done, mut offset) = (0, offset);
        while done < bytes.len() {
            if self.staging[self.turn].used == STAGING {
                self.flush()?;
            }
            self.ready(self.turn)?;
            let stage = &mut self.staging[self.turn];
            let size = (bytes.len() - done).min((STAGING - stage.used) as usize);
            stage.buffer.write(stage.used, &bytes[done..done + size]);
            let (from, from_offset) = (stage.buffer.clone(), stage.used);
            stage.commands.push(Command::Copy { from, from_offset, to: to.clone(), to_offset: offset, bytes: size as u64 });
            stage.used = (stage.used + size as u64).next_multiple_of(16).min(STAGING);
            (done, offset) = (done + size, offset + size as u64);
        }
        Ok(())
    }

    /// Has what was written copied, and turns to the other buffer.
    pub(crate) fn flush(&mut self) -> Result<Option<Copies>, Fault> {
        let Some(stage) = self.staging.get_mut(self.turn).filter(|stage| !stage.commands.is_empty()) else { return Ok(None) };
        let recording = Arc::new(Recording::of_copies(&self.gpu, std::mem::take(&mut stage.commands), self.timed)?);
        let submission = self.gpu.submit(&[&recording], self.after)?;
        let copies = Copies { submission, recording };
        stage.under_way = Some(copies.clone());
        self.turn = 1 - self.turn;
        Ok(Some(copies))
    }

    /// Waits until a buffer is copied, if that is under way.
    fn ready(&mut self, turn: usize) -> Result<(), Fault> {
        let stage = &mut self.staging[turn];
        if let Some(Copies { submission, .. }) = &stage.under_way {
            self.gpu.wait(*submission)?;
            (stage.under_way, stage.used) = (None, 0);
        }
        Ok(())
    }

    /// Waits until all that was written is copied.
    pub(crate) fn finish(mut self) -> Result<(), Fault> {
        self.flush()?;
        (0..self.staging.len()).try_for_each(|turn| self.ready(turn))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // Buffers stay until nothing is copied from them any more; what is lost is left alone.
        for turn in 0..self.staging.len() {
            let _ = self.ready(turn);
        }
    }
}
