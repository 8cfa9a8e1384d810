//! `qhx doctor`: whether a bundle will load here, on which device, and if not why and what to do.

use crate::{
    contexts, environment,
    failure::Failure,
    flags::{MAX_TOKENS, count},
    hints::advice,
    interrupt::Interrupt,
    open::{open_bundle, open_for},
    output,
    units::show_bytes,
};
use clap::Args;
use qhx::{Error, Source};
use qhx_bundle::{Bundle, manifest::TEXT_PROGRAM};
use qhx_forge::{Material, Precision};
use qhx_ir::{Checked, DeviceInfo};
use qhx_npu::probe::{Finding, Probe, State, Surroundings};
use qhx_runtime::{DeviceChoice, LoadOptions, LoadPlan, check_processor, registry};
use serde::Serialize;
use std::path::PathBuf;

/// Check whether a bundle will load on this machine and, if not, say why and what to do
///
/// Checks file checksums, memory, libraries and the metadata of context binaries. Loads no model and opens no NPU. Exit code 0: at least one device will load
/// the bundle; 1: none will.
#[derive(Args)]
#[command(after_help = "Example:\n  qhx doctor\n  qhx doctor smol\n  qhx doctor smol/v81/text_0.bin --qnn-dir ./onnxruntime_qnn")]
pub(crate) struct Doctor {
    /// A bundle, an arch folder of one, or a context binary; without it, only the machine is checked
    bundle: Option<PathBuf>,
    /// Folder with QNN's libraries [default: QHX_QNN_DIR, then the system's library folders]
    #[arg(long, value_name = "DIR")]
    qnn_dir: Option<PathBuf>,
    /// Context length in tokens that must fit into memory [default: the model's own limit, at most 4096]
    #[arg(long, value_name = "N", value_parser = count(MAX_TOKENS))]
    context: Option<usize>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    bundle: Option<String>,
    devices: Vec<DeviceReport>,
}

/// What was found for a device.
#[derive(Serialize)]
struct DeviceReport {
    device: &'static str,
    /// Whether it will load the bundle; without a bundle, whether it is there.
    ready: bool,
    findings: Vec<FindingReport>,
}

#[derive(Serialize)]
struct FindingReport {
    subject: String,
    state: String,
    found: String,
    advice: Option<String>,
}

impl Doctor {
    pub(crate) fn run(&self, interrupt: &Interrupt) -> Result<(), Failure> {
        let report = self.report(interrupt)?;
        let ready = report.devices.iter().any(|device| device.ready);
        if self.json {
            output::print_json(&report)?
        } else {
            output::print(&report.lines())?
        }
        match (&report.bundle, ready) {
            (Some(bundle), false) => Err(Failure::work(format!("no device of this machine will load {bundle}"))),
            _ => Ok(()),
        }
    }

    fn report(&self, interrupt: &Interrupt) -> Result<Report, Failure> {
        if let Some(path) = self.bundle.as_deref().filter(|path| !path.exists())
            && let Err(Error::NotFound(missing)) = Source::find(path, &environment::places())
        {
            return Err(Failure::work(format!("{} does not exist", path.display())).hint(advice(&missing)));
        }
        if let Some(checkpoint) = self.checkpoint() {
            return Ok(checkpoint);
        }
        // A manifest is a file too.
        let is_context = self.bundle.as_deref().is_some_and(|path| path.is_file() && path.extension().is_some_and(|kind| kind == "bin"));
        let (mut devices, mut prepared) = (Vec::new(), Vec::new());
        if !is_context {
            let cpu = self.cpu(interrupt)?;
            prepared = self.prepared(&cpu, interrupt)?;
            let gpu = self.gpu(&cpu);
            devices.push(DeviceReport::new(DeviceChoice::Cpu, cpu));
            devices.push(DeviceReport::new(DeviceChoice::GPU, gpu));
        }
        devices.push(DeviceReport::new(DeviceChoice::Npu, self.npu(prepared)));
        Ok(Report { bundle: self.bundle.as_ref().map(|path| path.display().to_string()), devices })
    }

    /// What holds for a checkpoint, which is forged before it runs; none where it is something else.
    fn checkpoint(&self) -> Option<Report> {
        let path = self.bundle.as_ref()?;
        let Ok(Source::Checkpoint(checkpoint)) = Source::find(path, &environment::places()) else { return None };
        let found = Material::open(&checkpoint.path).and_then(|material| material.checked_programs(Precision::Native));
        let findings = match found {
            Ok((programs, context)) => {
                let plan = programs.first().map(|program| LoadPlan::new(program, context, &self.options()));
                let forged = fine("checkpoint", "the first command that runs it forges a bundle into the cache".into());
                [Some(forged), plan.map(memory)].into_iter().flatten().collect()
            }
            Err(error) => vec![wrong("checkpoint", error.to_string(), "name another file, or use a newer qhx")],
        };
        // The memory is the processor's.
        let of_gpu: Vec<Finding> = findings.iter().filter(|finding| finding.subject != "memory").cloned().collect();
        let npu = wrong("arch folder", "the NPU runs what was forged for it".into(), "forge it: qhx forge SRC --out DIR --target v81");
        let devices = vec![
            DeviceReport::new(DeviceChoice::Cpu, [processor()].into_iter().chain(findings).collect()),
            DeviceReport::new(DeviceChoice::GPU, [graphics().0].into_iter().chain(of_gpu).collect()),
            DeviceReport::new(DeviceChoice::Npu, vec![npu]),
        ];
        Some(Report { bundle: Some(path.display().to_string()), devices })
    }

    fn cpu(&self, interrupt: &Interrupt) -> Result<Vec<Finding>, Failure> {
        let processor = processor();
        if processor.state == State::Wrong {
            return Ok(vec![processor]);
        }
        let mut findings = vec![processor];
        let Some(path) = &self.bundle else { return Ok(findings) };
        let (bundle, files) = whole(open_bundle(path, interrupt), interrupt)?;
        findings.push(files);
        findings.extend(bundle.map(|bundle| self.plan(&bundle)));
        Ok(findings)
    }

    /// Whether there is a graphics processor, and it takes the bundle.
    fn gpu(&self, cpu: &[Finding]) -> Vec<Finding> {
        let (graphics, memory) = graphics();
        if graphics.state == State::Wrong {
            return vec![graphics];
        }
        let bundle = self.bundle.as_ref().and_then(|path| Bundle::open(path).ok());
        let planned = bundle.and_then(|bundle| self.estimate(bundle.program(TEXT_PROGRAM)?, &bundle).ok());
        let memory = memory.zip(planned).map(|(memory, plan)| {
            let shown = format!("{} of {} available on the GPU", show_bytes(plan.memory.total_bytes), show_bytes(memory));
            match plan.memory.total_bytes <= memory {
                true => fine("memory", shown),
                false => wrong("memory", shown, "choose a smaller --context, a bundle of lower precision, or the CPU"),
            }
        });
        [graphics].into_iter().chain(of_the_bundle(cpu)).chain(memory).collect()
    }

    /// What the NPU would run of the bundle: whether its files are whole, and made for this machine. What was found for the CPU is not looked for again.
    fn prepared(&self, cpu: &[Finding], interrupt: &Interrupt) -> Result<Vec<Finding>, Failure> {
        let Some(path) = &self.bundle else { return Ok(Vec::new()) };
        let opened = open_for(path, DeviceChoice::Npu, interrupt);
        let known = cpu.iter().find(|finding| finding.subject == "files");
        let (bundle, files) = match (opened, known) {
            (Ok(bundle), Some(known)) if bundle.folder() == Some(path) => (Some(bundle), known.clone()),
            (opened, _) => whole(opened, interrupt)?,
        };
        let (mut findings, npu) = (vec![files], environment::npu()?);
        if let Some(error) = bundle.as_ref().and_then(|bundle| check_processor(bundle, &npu).err()) {
            findings.push(wrong("arch folder", error.to_string(), "use the folder that the message names"));
        }
        Ok(findings)
    }

    /// Whether the processor takes the program, and the memory suffices.
    fn plan(&self, bundle: &Bundle) -> Finding {
        let Some(program) = bundle.program(TEXT_PROGRAM) else {
            return wrong("program", "the bundle has no text program".into(), "forge it again");
        };
        let options = self.options();
        if let Err(error) = options.of_bundle(bundle) {
            return wrong("weights", error.to_string(), "use the NPU, or the bundle that this is a folder of");
        }
        memory(self.estimate(program, bundle))
    }

    fn options(&self) -> LoadOptions {
        LoadOptions { device: DeviceChoice::Cpu, context: self.context, ..LoadOptions::default() }
    }

    fn estimate(&self, program: &Checked, bundle: &Bundle) -> Result<LoadPlan, qhx_runtime::Error> {
        LoadPlan::new(program, bundle.manifest().model.context_length, &self.options())
    }

    fn npu(&self, prepared: Vec<Finding>) -> Vec<Finding> {
        let probe = Surroundings::here(self.qnn_dir.clone().or_else(environment::qnn_dir).as_deref(), environment::dsp_folders()).probe();
        let mut contexts = self.bundle.as_deref().map(|path| contexts::examine(path, &probe)).unwrap_or_default();
        // What is no bundle may have context binaries all the same; that it has none is no news.
        let is_bundle = prepared.iter().all(|finding| finding.subject != "bundle");
        contexts.retain(|finding| is_bundle || finding.subject != contexts::NONE);
        let Probe { findings: machine, .. } = probe;
        machine.into_iter().chain(prepared).chain(contexts).collect()
    }
}

/// The processor of this machine.
fn processor() -> Finding {
    let opened = registry::candidates(DeviceChoice::Cpu, None).and_then(|devices| {
        let machines = devices.iter().map(|device| Ok(device.open()?.describe().description));
        machines.collect::<Result<Vec<_>, qhx_runtime::Error>>()
    });
    match opened {
        Ok(described) => fine("processor", described.join(", ")),
        Err(error) => wrong("processor", error.to_string(), "use a build of qhx with the feature `cpu`"),
    }
}

/// What was found of a bundle's files for the CPU and holds for the GPU, which runs the same ones: it is not looked for again.
fn of_the_bundle(cpu: &[Finding]) -> impl Iterator<Item = Finding> {
    cpu.iter().filter(|finding| matches!(&*finding.subject, "bundle" | "files" | "weights" | "program")).cloned()
}

/// Its graphics processors, and the memory that the first has to give.
fn graphics() -> (Finding, Option<u64>) {
    let opened = registry::candidates(DeviceChoice::GPU, None)
        .and_then(|devices| devices.iter().map(|device| Ok(device.open()?.describe())).collect::<Result<Vec<_>, qhx_runtime::Error>>());
    let found = match opened {
        Ok(found) => found,
        Err(qhx_runtime::Error::NoDevice { reason, .. }) => {
            return (wrong("GPU", reason, "install a Vulkan driver, or use the CPU"), None);
        }
        Err(error) => return (wrong("GPU", error.to_string(), "use the CPU"), None),
    };
    let finding = of_graphics(&found);
    (finding, found.first().and_then(|device| device.number("memory_available_bytes").or(device.memory_bytes)))
}

/// What is said of graphics processors.
fn of_graphics(found: &[DeviceInfo]) -> Finding {
    let kind = |device: &DeviceInfo| device.text("type").map_or_else(String::new, |kind| format!(" ({kind})"));
    let names: Vec<_> = found.iter().map(|device| format!("{}{}", device.description, kind(device))).collect();
    match found.iter().all(DeviceInfo::is_software) {
        false => fine("GPU", names.join(", ")),
        true => Finding {
            state: State::Doubtful,
            advice: Some("a test device, which computes on the processor: for speed, use the CPU or install the driver of a GPU".into()),
            ..fine("GPU", names.join(", "))
        },
    }
}

/// Whether the memory suffices for what is loaded.
fn memory(plan: Result<LoadPlan, qhx_runtime::Error>) -> Finding {
    match plan {
        Err(error) => wrong("program", error.to_string(), "use a newer qhx, or another device"),
        Ok(plan) if plan.memory.fits() => fine("memory", plan.memory.to_string()),
        Ok(plan) => {
            wrong("memory", plan.memory.to_string(), "close other programs, choose a smaller --context, or a bundle of lower precision")
        }
    }
}

/// A bundle whose files are whole, or what is wrong with it.
fn whole(opened: Result<Bundle, Failure>, interrupt: &Interrupt) -> Result<(Option<Bundle>, Finding), Failure> {
    let bundle = match opened {
        Ok(bundle) => bundle,
        Err(failure) => {
            let advice = failure.advice().unwrap_or("fetch or forge the bundle again").to_owned();
            return Ok((None, wrong("bundle", failure.message().to_owned(), &advice)));
        }
    };
    let files = match bundle.verify_all(Some(&interrupt.flag())) {
        Ok(()) => fine("files", format!("the checksums of all {} match", bundle.manifest().files.len())),
        Err(_) if interrupt.flag().load(std::sync::atomic::Ordering::Relaxed) => return Err(Failure::work("cancelled")),
        Err(error) => wrong("files", error.to_string(), "fetch or forge the bundle again"),
    };
    Ok((Some(bundle), files))
}

impl Report {
    fn lines(&self) -> String {
        let device = |device: &DeviceReport| {
            let verdict = match (self.bundle.is_some(), device.ready) {
                (true, true) => "will load it",
                (true, false) => "will not load it",
                (false, true) => "available",
                (false, false) => "not available",
            };
            let findings: String = device.findings.iter().map(FindingReport::lines).collect();
            format!("{}: {verdict}\n{findings}", device.device)
        };
        self.devices.iter().map(device).collect::<Vec<_>>().join("\n")
    }
}

impl DeviceReport {
    fn new(choice: DeviceChoice, findings: Vec<Finding>) -> Self {
        let ready = findings.iter().all(|finding| finding.state != State::Wrong);
        let findings = findings.into_iter().map(|Finding { subject, state, found, advice }| FindingReport {
            subject,
            state: state.to_string(),
            found,
            advice,
        });
        Self { device: choice.name(), ready, findings: findings.collect() }
    }
}

impl FindingReport {
    fn lines(&self) -> String {
        let Self { subject, state, found, advice } = self;
        let found = found.replace('\n', "\n      ");
        let advice = advice.as_ref().map_or_else(String::new, |advice| format!("      → {advice}\n"));
        format!("  {state:<8}  {subject}: {found}\n{advice}")
    }
}

fn fine(subject: &str, found: String) -> Finding {
    Finding { subject: subject.into(), state: State::Fine, found, advice: None }
}

fn wrong(subject: &str, found: String, advice: &str) -> Finding {
    Finding { subject: subject.into(), state: State::Wrong, found, advice: Some(advice.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(description: &str, kind: &str) -> DeviceInfo {
        let facts = [("type".to_owned(), kind.into())].into();
        DeviceInfo { name: "gpu".into(), description: description.into(), memory_bytes: None, threads: 1, facts }
    }

    #[test]
    fn software_alone_is_a_test_device() {
        let software = gpu("llvmpipe", "software");
        let found = of_graphics(std::slice::from_ref(&software));
        assert_eq!((found.state, &*found.found), (State::Doubtful, "llvmpipe (software)"));
        assert!(found.advice.unwrap().contains("test device"));
        let found = of_graphics(&[gpu("Iris Xe", "integrated"), software]);
        assert_eq!((found.state, found.advice), (State::Fine, None));
    }

    /// An arch folder has no weights for the CPU, nor for the GPU.
    #[test]
    fn the_gpu_loads_no_more_than_the_cpu_of_a_folder_without_weights() {
        let ready = |weights: Finding| {
            let cpu = [fine("processor", "a processor".into()), fine("files", "all match".into()), weights];
            let gpu: Vec<_> = [of_graphics(&[gpu("Iris Xe", "integrated")])].into_iter().chain(of_the_bundle(&cpu)).collect();
            [cpu.to_vec(), gpu].map(|findings| DeviceReport::new(DeviceChoice::GPU, findings).ready)
        };
        assert_eq!(ready(fine("weights", "there".into())), [true; 2]);
        assert_eq!(ready(wrong("weights", "it is prepared for the NPU".into(), "use the NPU")), [false; 2]);
    }
}
