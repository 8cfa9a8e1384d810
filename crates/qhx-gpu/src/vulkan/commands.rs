//! Command buffers: recorded once, submitted any number of times.

use super::{Buffer, Fault, Gpu, Pipeline};
use ash::vk;
use std::sync::Arc;

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
    /// Copies bytes.
    Copy { from: Arc<Buffer>, from_offset: u64, to: Arc<Buffer>, to_offset: u64, bytes: u64 },
}

/// A recorded command buffer. It keeps its pipelines and the buffers that it copies.
pub(crate) struct Recording {
    gpu: Arc<Gpu>,
    pool: vk::CommandPool,
    pub(super) buffer: vk::CommandBuffer,
    /// Times after each dispatch, where the device is profiled.
    times: Option<vk::QueryPool>,
    commands: Vec<Command>,
}

impl Recording {
    /// Records commands. A submission sees what earlier ones wrote, and the host sees what it writes.
    pub(crate) fn new(gpu: &Arc<Gpu>, commands: Vec<Command>) -> Result<Self, Fault> {
        let wrong = |e| Fault::of("recording commands", e);
        let device = &gpu.device;
        // SAFETY: the device lives, held by `gpu`; the pool is destroyed by `drop`; offsets of copies are checked here.
        unsafe {
            let pool = vk::CommandPoolCreateInfo::default().queue_family_index(gpu.queue_family);
            let pool = device.create_command_pool(&pool, None).map_err(wrong)?;
            let mut recording = Self { gpu: gpu.clone(), pool, buffer: vk::CommandBuffer::null(), times: None, commands: Vec::new() };
            let allocate = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
            let buffer = device.allocate_command_buffers(&allocate).map_err(wrong)?[0];
            recording.buffer = buffer;
            device.begin_command_buffer(buffer, &vk::CommandBufferBeginInfo::default()).map_err(wrong)?;
            let dispatches = commands.iter().filter(|command| matches!(command, Command::Dispatch { .. })).count() as u32;
            if gpu.is_profiled() && dispatches > 0 {
                let create = vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(dispatches + 1);
                let pool = device.create_query_pool(&create, None).map_err(wrong)?;
                recording.times = Some(pool);
                device.cmd_reset_query_pool(buffer, pool, 0, dispatches + 1);
            }
            barrier(gpu, buffer);
            let mut stamps = 0;
            let mut stamp = |times: Option<vk::QueryPool>| {
                if let Some(pool) = times {
                    device.cmd_write_timestamp(buffer, vk::PipelineStageFlags::BOTTOM_OF_PIPE, pool, stamps);
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
                    Command::Barrier => barrier(gpu, buffer),
                    Command::Copy { from, from_offset, to, to_offset, bytes } => {
                        assert!(from_offset + bytes <= from.bytes() && to_offset + bytes <= to.bytes(), "a copy beyond a buffer");
                        let region = vk::BufferCopy::default().src_offset(*from_offset).dst_offset(*to_offset).size(*bytes);
                        device.cmd_copy_buffer(buffer, from.handle, to.handle, &[region]);
                    }
                }
            }
            let to_host = vk::MemoryBarrier::default()
                .src_access_mask(vk::AccessFlags::SHADER_WRITE | vk::AccessFlags::TRANSFER_WRITE)
                .dst_access_mask(vk::AccessFlags::HOST_READ);
            let work = vk::PipelineStageFlags::COMPUTE_SHADER | vk::PipelineStageFlags::TRANSFER;
            device.cmd_pipeline_barrier(buffer, work, vk::PipelineStageFlags::HOST, Default::default(), &[to_host], &[], &[]);
            device.end_command_buffer(buffer).map_err(wrong)?;
            recording.commands = commands;
            Ok(recording)
        }
    }

    /// Of a submission that has ended: the name of each dispatch's shader, and the nanoseconds from the end of the one before to its own.
    pub(super) fn times(&self) -> Vec<(&'static str, f64)> {
        let Some(pool) = self.times else { return Vec::new() };
        let names = self.commands.iter().filter_map(|command| match command {
            Command::Dispatch { pipeline, .. } => Some(pipeline.name),
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

/// # Safety
/// The command buffer is being recorded.
unsafe fn barrier(gpu: &Gpu, buffer: vk::CommandBuffer) {
    use vk::{AccessFlags as Access, PipelineStageFlags as Stage};
    let work = Stage::COMPUTE_SHADER | Stage::TRANSFER;
    let memory = vk::MemoryBarrier::default()
        .src_access_mask(Access::SHADER_WRITE | Access::TRANSFER_WRITE)
        .dst_access_mask(Access::SHADER_READ | Access::SHADER_WRITE | Access::TRANSFER_READ | Access::TRANSFER_WRITE);
    // SAFETY: as the caller promises.
    unsafe { gpu.device.cmd_pipeline_barrier(buffer, work, work, Default::default(), &[memory], &[], &[]) };
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
