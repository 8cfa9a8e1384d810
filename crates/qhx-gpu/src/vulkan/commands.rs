//! Command buffers: recorded once, submitted any number of times.

use super::{Buffer, Fault, Gpu, Lane, Pipeline};
use ash::vk;
use std::{sync::Arc, time::Instant};

/// One command.
#[derive(Clone)]
pub(crate) enum Command {
    /// Runs a shader.
    Dispatch {
        pipeline: Arc<Pipeline>,
        groups: [u32; 3],
        /// At most 128 bytes.
        arguments: Vec<u8>,
    },
    /// What follows sees all that was written before.
    Barrier,
    /// Tells the host that everything before is done, and where it `waits` goes on when the host has answered.
    Pause { events: PauseEvents, waits: bool },
    /// Copies bytes.
    Copy { from: Arc<Buffer>, from_offset: u64, to: Arc<Buffer>, to_offset: u64, bytes: u64 },
}

/// A recorded command buffer. It keeps its pipelines and the buffers that it copies.
pub(crate) struct Recording {
    gpu: Arc<Gpu>,
    pub(super) lane: Lane,
    pool: vk::CommandPool,
    pub(super) buffer: vk::CommandBuffer,
    /// Times after each dispatch, where the device is profiled; of copies, before and after all of them.
    times: Option<vk::QueryPool>,
    commands: Vec<Command>,
}

impl Recording {
    /// Records commands. A submission sees what earlier ones wrote, and the host sees what it writes.
    pub(crate) fn new(gpu: &Arc<Gpu>, commands: Vec<Command>) -> Result<Self, Fault> {
        let dispatches = commands.iter().filter(|command| matches!(command, Command::Dispatch { .. })).count() as u32;
        Self::record(gpu, Lane::Compute, commands, (gpu.is_profiled() && dispatches > 0).then_some(dispatches + 1))
    }

    /// Records copies that are made while shaders run; `timed`: [`Recording::span`] is asked for.
    pub(crate) fn of_copies(gpu: &Arc<Gpu>, copies: Vec<Command>, timed: bool) -> Result<Self, Fault> {
        assert!(copies.iter().all(|command| !matches!(command, Command::Dispatch { .. })), "shaders among copies");
        Self::record(gpu, Lane::Transfer, copies, (timed && gpu.tells_time()).then_some(2))
    }

    /// With so many times.
    fn record(gpu: &Arc<Gpu>, lane: Lane, commands: Vec<Command>, times: Option<u32>) -> Result<Self, Fault> {
        let wrong = |e| Fault::of("recording commands", e);
        let device = &gpu.device;
        // SAFETY: the device lives, held by `gpu`; the pool is destroyed by `drop`; offsets of copies are checked here.
        unsafe {
            let pool = vk::CommandPoolCreateInfo::default().queue_family_index(gpu.family(lane));
            let pool = device.create_command_pool(&pool, None).map_err(wrong)?;
            let mut recording = Self { gpu: gpu.clone(), lane, pool, buffer: vk::CommandBuffer::null(), times: None, commands: Vec::new() };
            let allocate = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
            let buffer = device.allocate_command_buffers(&allocate).map_err(wrong)?[0];
            recording.buffer = buffer;
            device.begin_command_buffer(buffer, &vk::CommandBufferBeginInfo::default()).map_err(wrong)?;
            if let Some(times) = times {
                let create = vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(times);
                let pool = device.create_query_pool(&create, None).map_err(wrong)?;
                recording.times = Some(pool);
                match lane {
                    Lane::Compute => device.cmd_reset_query_pool(buffer, pool, 0, times),
                    // Submitted once, to a queue that may not be able to.
                    Lane::Transfer => device.reset_query_pool(pool, 0, times),
                }
            }
            barrier(gpu, lane, buffer);
            let mut stamps = 0;
            let mut stamp = |times: Option<vk::QueryPool>| {
                if let Some(pool) = times {
                    let stage = match lane {
                        Lane::Compute => vk::PipelineStageFlags::BOTTOM_OF_PIPE,
                        Lane::Transfer => vk::PipelineStageFlags::TRANSFER,
                    };
                    device.cmd_write_timestamp(buffer, stage, pool, stamps);
                    stamps += 1;
                }
            };
            stamp(recording.times);
            let mut bound = vk::Pipeline::null();
            for command in &commands {
                match command {
                    Command::Dispatch { pipeline, groups, arguments } => {
                        assert!(arguments.len() <= 128 && arguments.len() % 4 == 0, "arguments of {} bytes", arguments.len());
                        if bound != pipeline.handle {
                            bound = pipeline.handle;
                            device.cmd_bind_pipeline(buffer, vk::PipelineBindPoint::COMPUTE, bound);
                        }
                        device.cmd_push_constants(buffer, gpu.layout, vk::ShaderStageFlags::COMPUTE, 0, arguments);
                        device.cmd_dispatch(buffer, groups[0], groups[1], groups[2]);
                        stamp(recording.times);
                    }
                    Command::Barrier => barrier(gpu, lane, buffer),
                    Command::Pause { events: PauseEvents { reached, answered }, waits } => {
                        let (host, work) = (vk::PipelineStageFlags::HOST, lane.stages());
                        to_host(gpu, lane, buffer);
                        device.cmd_set_event(buffer, reached.handle, work);
                        if *waits {
                            let seen = vk::MemoryBarrier::default().src_access_mask(vk::AccessFlags::HOST_WRITE);
                            let seen = [seen.dst_access_mask(lane.reads())];
                            device.cmd_wait_events(buffer, &[answered.handle], host, work, &seen, &[], &[]);
                        }
                    }
                    Command::Copy { from, from_offset, to, to_offset, bytes } => {
                        assert!(from_offset + bytes <= from.bytes() && to_offset + bytes <= to.bytes(), "a copy beyond a buffer");
                        let region = vk::BufferCopy::default().src_offset(*from_offset).dst_offset(*to_offset).size(*bytes);
                        device.cmd_copy_buffer(buffer, from.handle, to.handle, &[region]);
                    }
                }
            }
            if lane == Lane::Transfer {
                stamp(recording.times);
            }
            to_host(gpu, lane, buffer);
            device.end_command_buffer(buffer).map_err(wrong)?;
            recording.commands = commands;
            Ok(recording)
        }
    }

    /// Of a submission that has ended: the name of each dispatch's shader, and the nanoseconds from the end of the one before to its own.
    pub(crate) fn times(&self) -> Vec<(String, f64)> {
        let Some(pool) = self.times else { return Vec::new() };
        let names = self.commands.iter().filter_map(|command| match command {
            Command::Dispatch { pipeline, .. } => Some(pipeline.name.to_owned()),
            _ => None,
        });
        let names: Vec<_> = names.collect();
        let mut ticks = vec![0u64; names.len() + 1];
        // SAFETY: the pool has as many queries, all of them written, and lives as long as the recording.
        let read = unsafe { self.gpu.device.get_query_pool_results(pool, 0, &mut ticks, vk::QueryResultFlags::TYPE_64) };
        if read.is_err() {
            return Vec::new();
        }
        let tick = f64::from(self.gpu.adapter.tick_ns);
        names.into_iter().zip(ticks.windows(2).map(|pair| pair[1].saturating_sub(pair[0]) as f64 * tick)).collect()
    }
}

impl Recording {
    /// Of copies whose submission has ended: when the device began with them, and when it was done, where it tells.
    pub(crate) fn span(&self) -> Option<[Instant; 2]> {
        let pool = self.times.filter(|_| self.lane == Lane::Transfer)?;
        let mut ticks = [0u64; 2];
        // SAFETY: the pool has two queries, both of them written, and lives as long as the recording.
        unsafe { self.gpu.device.get_query_pool_results(pool, 0, &mut ticks, vk::QueryResultFlags::TYPE_64) }.ok()?;
        self.gpu.at(ticks)
    }
}

/// # Safety
/// The command buffer is being recorded.
unsafe fn barrier(gpu: &Gpu, lane: Lane, buffer: vk::CommandBuffer) {
    let work = lane.stages();
    let memory = vk::MemoryBarrier::default().src_access_mask(lane.writes()).dst_access_mask(lane.reads() | lane.writes());
    // SAFETY: as the caller promises.
    unsafe { gpu.device.cmd_pipeline_barrier(buffer, work, work, Default::default(), &[memory], &[], &[]) };
}

/// # Safety
/// The command buffer is being recorded.
unsafe fn to_host(gpu: &Gpu, lane: Lane, buffer: vk::CommandBuffer) {
    let memory = vk::MemoryBarrier::default().src_access_mask(lane.writes()).dst_access_mask(vk::AccessFlags::HOST_READ);
    let host = vk::PipelineStageFlags::HOST;
    // SAFETY: as the caller promises.
    unsafe { gpu.device.cmd_pipeline_barrier(buffer, lane.stages(), host, Default::default(), &[memory], &[], &[]) };
}

/// Something that happens once: the device tells the host, or the host the device.
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    handle: vk::Event,
}

/// The events of a pause.
#[derive(Clone)]
pub(crate) struct PauseEvents {
    pub(crate) reached: Arc<Event>,
    pub(crate) answered: Arc<Event>,
}

impl PauseEvents {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, Fault> {
        Ok(Self { reached: Arc::new(Event::new(gpu)?), answered: Arc::new(Event::new(gpu)?) })
    }

    /// Nothing has happened yet. No submission may be waiting.
    pub(crate) fn reset(&self) -> Result<(), Fault> {
        self.reached.reset()?;
        self.answered.reset()
    }
}

impl Event {
    fn new(gpu: &Arc<Gpu>) -> Result<Self, Fault> {
        // SAFETY: the device lives, held by `gpu`; the event is destroyed by `drop`.
        let handle = unsafe { gpu.device.create_event(&vk::EventCreateInfo::default(), None) };
        Ok(Self { gpu: gpu.clone(), handle: handle.map_err(|e| Fault::of("making an event", e))? })
    }

    fn reset(&self) -> Result<(), Fault> {
        // SAFETY: the event lives, and no submission uses it, as the caller promises.
        unsafe { self.gpu.device.reset_event(self.handle) }.map_err(|e| self.gpu.fault("resetting an event", e))
    }

    /// It happens: the device sees what the host wrote before.
    pub(crate) fn set(&self) -> Result<(), Fault> {
        // Writes that are gathered on their way to the device's memory.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        // SAFETY: the event lives.
        unsafe { self.gpu.device.set_event(self.handle) }.map_err(|e| self.gpu.fault("telling the device", e))
    }

    /// Whether it has happened.
    pub(crate) fn has_happened(&self) -> Result<bool, Fault> {
        // SAFETY: the event lives.
        unsafe { self.gpu.device.get_event_status(self.handle) }.map_err(|e| self.gpu.fault("waiting for the device", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.gpu.is_lost() {
            // SAFETY: recordings that use it hold it.
            unsafe { self.gpu.device.destroy_event(self.handle, None) };
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.gpu.is_lost() {
            return;
        }
        // SAFETY: owners wait for their submissions before they let go of a recording.
        unsafe {
            self.gpu.device.destroy_command_pool(self.pool, None);
            if let Some(times) = self.times {
                self.gpu.device.destroy_query_pool(times, None);
            }
        }
    }
}
