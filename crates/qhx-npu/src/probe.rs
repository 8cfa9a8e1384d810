//! Which parts of an NPU set-up this machine has: files, devices and versions, examined without opening the processor.

use crate::{
    Arch, Library,
    library::{Build, HTP, SYSTEM},
};
use memmap2::Mmap;
use std::{
    fmt,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

/// Where it also looks.
const DSP_FOLDERS: [&str; 5] = ["vendor/lib/rfsa/adsp", "vendor/dsp/cdsp", "vendor/lib64/rfs/dsp", "usr/lib/rfsa/adsp", "usr/lib/dsp/cdsp"];
/// Device nodes through which programs reach the DSP.
const DSP_NODES: [&str; 3] = ["dev/fastrpc-cdsp", "dev/fastrpc-cdsp-secure", "dev/adsprpc-smd"];
const RPC_LIBRARY: &str = "libcdsprpc.so";
const SYSTEM_FOLDERS: [&str; 6] =
    ["vendor/lib64", "system/vendor/lib64", "system/lib64", "usr/lib/aarch64-linux-gnu", "usr/lib", "usr/local/lib"];

/// Prefixes of chip names, and the generation of their Hexagon processor.
const CHIPS: [(&str, u32); 8] =
    [("SM8450", 69), ("SM8475", 69), ("SM8550", 73), ("SM7635", 73), ("SM7675", 73), ("SM8650", 75), ("SM8750", 79), ("SM8850", 81)];
/// Board names, which some systems report instead.
const BOARDS: [(&str, u32); 3] = [("KALAMA", 73), ("PINEAPPLE", 75), ("SUN", 79)];

/// Where to look: this machine, or a folder laid out like one.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// The root of the file system.
    pub root: PathBuf,
    /// The folder with QNN's libraries; absent: the system's library folders.
    pub libraries: Option<PathBuf>,
    /// Folders in which the DSP's loader looks for libraries.
    pub dsp_folders: Vec<PathBuf>,
    /// The chip's name, where the system reports it.
    pub chip: Option<String>,
    /// Whether this is a PC, on which the processor is emulated.
    pub emulated: bool,
}

/// How serious a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// As it should be.
    Fine,
    /// May cause problems.
    Doubtful,
    /// Prevents use of the NPU.
    Wrong,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fine => "fine",
            Self::Doubtful => "doubtful",
            Self::Wrong => "wrong",
        })
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was checked.
    pub subject: String,
    /// How serious it is.
    pub state: State,
    /// What was found.
    pub found: String,
    /// What to do, if anything.
    pub advice: Option<String>,
}

/// What a machine offers of an NPU.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Whether the processor is emulated; programs are then compiled when they are loaded.
    pub emulated: bool,
    /// The processor's generation; `None` on a PC, which emulates all of them, and for unknown chips.
    pub arch: Option<Arch>,
    /// The library, if it could be loaded.
    pub library: Option<Library>,
    /// The findings, in the order in which each part is needed.
    pub findings: Vec<Finding>,
}

/// The generation of this machine's processor, as reported by the system; `None` on a PC, which emulates all of them, and for unknown chips.
pub fn arch_here() -> Option<Arch> {
    let here = Surroundings::here(None, Vec::new());
    here.chip.filter(|_| !here.emulated).and_then(|chip| generation_of(&chip)).and_then(Arch::from_number)
}

/// The generation of a chip's Hexagon processor.
fn generation_of(chip: &str) -> Option<u32> {
    let chip = chip.to_uppercase();
    let board = || BOARDS.iter().find(|(name, _)| chip == *name);
    CHIPS.iter().find(|(name, _)| chip.starts_with(name)).or_else(board).map(|(_, generation)| *generation)
}

impl Surroundings {
    /// This machine, with QNN's libraries in the given folder and the DSP's in others.
    pub fn here(libraries: Option<&Path>, dsp_folders: Vec<PathBuf>) -> Self {
        let root = PathBuf::from("/");
        let machine = || named(fs::read_to_string(root.join("sys/devices/soc0/machine")).ok());
        let chip = property("ro.soc.model").or_else(machine).or_else(|| property("ro.board.platform"));
        Self { libraries: libraries.map(Path::to_path_buf), dsp_folders, chip, emulated: cfg!(target_arch = "x86_64"), root }
    }

    /// Runs all checks. The processor is not opened; QNN's library is loaded to query its version.
    pub fn probe(&self) -> Probe {
        let mut probe = Probe { emulated: self.emulated, arch: None, library: None, findings: Vec::new() };
        if self.emulated {
            let generations = Arch::ALL.map(|arch| arch.to_string()).join(" and ");
            probe.note("processor", State::Fine, format!("no Hexagon processor in this PC; {generations} are emulated"), None);
        } else {
            self.look_for_processor(&mut probe);
        }
        self.look_for_libraries(&mut probe);
        if let (false, Some(arch)) = (self.emulated, probe.arch) {
            self.look_for_dsp_libraries(arch, &mut probe);
        }
        probe
    }

    fn look_for_processor(&self, probe: &mut Probe) {
        let Some(name) = &self.chip else {
            let advice = "if it has a Hexagon v79 or v81 processor, set QHX_NPU_ARCH to its generation".to_owned();
            return probe.note("processor", State::Doubtful, "the system does not report its chip".into(), Some(advice));
        };
        let generation = generation_of(name);
        probe.arch = generation.and_then(Arch::from_number);
        match (generation, probe.arch) {
            (_, Some(arch)) => probe.note("processor", State::Fine, format!("{name}: Hexagon {arch}"), None),
            (Some(generation), None) => {
                let advice = "qhx supports v79 and v81: use the CPU instead";
                probe.note("processor", State::Wrong, format!("{name}: Hexagon v{generation}"), Some(advice.into()));
            }
            (None, None) => {
                let advice = "qhx knows SM8750 (v79) and SM8850 (v81): use the CPU on other chips";
                probe.note("processor", State::Doubtful, format!("{name}, a chip that qhx does not know"), Some(advice.into()));
            }
        }
        match DSP_NODES.iter().map(|node| self.root.join(node)).find(|node| node.exists()) {
            Some(node) => probe.note("DSP device node", State::Fine, node.display().to_string(), None),
            None => probe.note(
                "DSP device node",
                State::Doubtful,
                "neither /dev/fastrpc-cdsp nor /dev/adsprpc-smd is visible".into(),
                Some("apps on a phone reach the DSP through a service; elsewhere, the kernel's FastRPC driver is missing".into()),
            ),
        }
        let folders = SYSTEM_FOLDERS.iter().map(|folder| self.root.join(folder));
        match folders.map(|folder| folder.join(RPC_LIBRARY)).find(|file| file.is_file()) {
            Some(file) => probe.note("FastRPC library", State::Fine, file.display().to_string(), None),
            None => probe.note(
                "FastRPC library",
                State::Wrong,
                format!("{RPC_LIBRARY} was not found in /vendor/lib64, /system/lib64 or /usr/lib"),
                Some("it is part of the phone's system image or of Qualcomm's FastRPC package".into()),
            ),
        }
    }

    fn look_for_libraries(&self, probe: &mut Probe) {
        let name = |file: &str| self.libraries.as_ref().map_or_else(|| PathBuf::from(file), |folder| folder.join(file));
        let (htp, system) = (name(HTP), name(SYSTEM));
        match Library::open_files(&htp, &system) {
            Ok(library) => {
                probe.note(HTP, State::Fine, format!("{}, {}", library.build(), htp.display()), None);
                match library.system() {
                    Ok(_) => probe.note(SYSTEM, State::Fine, system.display().to_string(), None),
                    Err(e) => probe.note(SYSTEM, State::Wrong, e.to_string(), None),
                }
                probe.library = Some(library);
            }
            Err(e) => {
                // A library for another architecture cannot be loaded, but its header names the architecture.
                let other = elf_machine(&htp).filter(|machine| *machine != THIS_MACHINE);
                let found = other.map_or_else(
                    || e.to_string(),
                    |machine| format!("{} is for {machine}, but this machine is {THIS_MACHINE}", htp.display()),
                );
                let advice = other.map(|_| format!("use a folder with the {THIS_MACHINE} libraries"));
                probe.note(HTP, State::Wrong, found, advice);
            }
        }
    }

    /// The library's two halves for one generation: a stub on the host and a skel on the DSP.
    fn look_for_dsp_libraries(&self, arch: Arch, probe: &mut Probe) {
        let own = self.libraries.iter().cloned();
        let system = SYSTEM_FOLDERS.iter().map(|folder| self.root.join(folder));
        let (stub, skel) = (format!("libQnnHtpV{}Stub.so", arch.number()), format!("libQnnHtpV{}Skel.so", arch.number()));
        let release = probe.library.as_ref().map(|library| library.build().clone());
        let found = own.clone().chain(system).map(|folder| folder.join(&stub)).find(|file| file.is_file());
        probe.note_half(&stub, found, release.as_ref(), "copy it next to libQnnHtp.so");
        let dsp = self.dsp_folders.iter().cloned().chain(own).chain(DSP_FOLDERS.iter().map(|folder| self.root.join(folder)));
        let found = dsp.map(|folder| folder.join(&skel)).find(|file| file.is_file());
        let listed = found.as_ref().and_then(|file| file.parent()).is_none_or(|folder| self.is_searched(folder));
        probe.note_half(&skel, found, release.as_ref(), "copy it to the phone and set ADSP_LIBRARY_PATH to its folder");
        if !listed {
            let advice = "run `export ADSP_LIBRARY_PATH=FOLDER` before starting qhx (separate several folders with `;`)";
            probe.note("ADSP_LIBRARY_PATH", State::Wrong, format!("does not name the folder that contains {skel}"), Some(advice.into()));
        }
    }

    /// Whether the DSP's loader searches a folder.
    fn is_searched(&self, folder: &Path) -> bool {
        self.dsp_folders.iter().any(|searched| searched == folder) || DSP_FOLDERS.iter().any(|searched| self.root.join(searched) == folder)
    }
}

impl Probe {
    /// The first finding that prevents use of the NPU, if any.
    pub fn obstacle(&self) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.state == State::Wrong)
    }

    fn note(&mut self, subject: &str, state: State, found: String, advice: Option<String>) {
        self.findings.push(Finding { subject: subject.into(), state, found, advice });
    }

    /// A library that must exist and come from the same release as the main one.
    fn note_half(&mut self, name: &str, found: Option<PathBuf>, release: Option<&Build>, advice: &str) {
        let Some(file) = found else {
            return self.note(name, State::Wrong, "not found".into(), Some(format!("{advice}; it is part of the same QAIRT release")));
        };
        let build = build_of(&file);
        match (&build, release) {
            (Some(build), Some(release)) if build.release != release.release => {
                let advice = "use libraries from one QAIRT release only: a mixture fails with error 1008";
                self.note(name, State::Wrong, format!("{}, {build}, but {HTP} is {release}", file.display()), Some(advice.into()));
            }
            (Some(build), _) => self.note(name, State::Fine, format!("{build}, {}", file.display()), None),
            (None, _) => self.note(name, State::Fine, file.display().to_string(), None),
        }
    }
}

const THIS_MACHINE: &str = if cfg!(target_arch = "x86_64") {
    "x86-64"
} else if cfg!(target_arch = "aarch64") {
    "64-bit Arm"
} else {
    "another architecture"
};

/// The architecture that a library is built for.
fn elf_machine(file: &Path) -> Option<&'static str> {
    use std::io::Read;
    let mut header = [0; 20];
    File::open(file).ok()?.read_exact(&mut header).ok()?;
    match (header.starts_with(b"\x7fELF"), u16::from_le_bytes([header[18], header[19]])) {
        (true, 62) => Some("x86-64"),
        (true, 183) => Some("64-bit Arm"),
        (true, 164) => Some("the Hexagon DSP"),
        (true, 40) => Some("32-bit Arm"),
        _ => None,
    }
}

/// The QAIRT release named inside a library file, `v2.51.0.260929181845`.
#[allow(unsafe_code)] // Maps a file.
fn build_of(file: &Path) -> Option<Build> {
    let open = File::open(file).ok().filter(|open| open.metadata().is_ok_and(|data| data.len() > 0))?;
    // SAFETY: an installed library is not written to; the mapping ends with this function.
    let map = unsafe { Mmap::map(&open) }.ok()?;
    let starts = map.windows(3).enumerate().filter(|(_, window)| window == b"v2.").map(|(at, _)| at);
    starts.filter_map(|at| build_at(&map[at..map.len().min(at + 40)])).next()
}

/// Parses a build string at the start of some bytes: three numbers and a date.
fn build_at(bytes: &[u8]) -> Option<Build> {
    let end = bytes.iter().skip(1).position(|byte| !byte.is_ascii_digit() && *byte != b'.')? + 1;
    let text = std::str::from_utf8(&bytes[..end]).ok()?;
    let dated = text.split('.').count() == 4 && text.rsplit('.').next().is_some_and(|date| date.len() >= 6);
    Some(Build::parse(text)).filter(|build| dated && build.release.is_some())
}

/// An Android system property.
fn property(name: &str) -> Option<String> {
    if !cfg!(target_os = "android") {
        return None;
    }
    let output = Command::new("getprop").arg(name).output().ok()?;
    named(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// The name without surrounding white space; `None` where nothing is left.
fn named(text: Option<String>) -> Option<String> {
    text.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn write(folder: &Path, file: &str, content: &[u8]) {
        let file = folder.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
    }

    /// A phone with everything in place except a library that this machine could load.
    fn phone(chip: &str) -> (TempDir, Surroundings) {
        let root = TempDir::new().unwrap();
        let arch = if chip.starts_with("SM8750") { 79 } else { 81 };
        write(root.path(), "dev/fastrpc-cdsp", b"");
        write(root.path(), "vendor/lib64/libcdsprpc.so", b"x");
        write(root.path(), &format!("qnn/libQnnHtpV{arch}Stub.so"), b"..v2.51.0.260929181845\0..");
        write(root.path(), &format!("dsp/libQnnHtpV{arch}Skel.so"), b"..v2.51.0.260929181845\0..");
        let surroundings = Surroundings {
            libraries: Some(root.path().join("qnn")),
            dsp_folders: vec![root.path().join("dsp")],
            chip: Some(chip.into()),
            emulated: false,
            root: root.path().to_path_buf(),
        };
        (root, surroundings)
    }

    fn states(probe: &Probe) -> Vec<(&str, State)> {
        probe.findings.iter().map(|finding| (&*finding.subject, finding.state)).collect()
    }

    fn finding<'a>(probe: &'a Probe, subject: &str) -> &'a Finding {
        probe.findings.iter().find(|finding| finding.subject == subject).unwrap_or_else(|| panic!("{subject} in {probe:?}"))
    }

    #[test]
    fn a_phone_is_described_in_the_order_of_need() {
        let (_root, surroundings) = phone("SM8850-AC");
        let probe = surroundings.probe();
        assert_eq!(probe.arch, Some(Arch::V81));
        let expected = [
            ("processor", State::Fine),
            ("DSP device node", State::Fine),
            ("FastRPC library", State::Fine),
            (HTP, State::Wrong),
            ("libQnnHtpV81Stub.so", State::Fine),
            ("libQnnHtpV81Skel.so", State::Fine),
        ];
        assert_eq!(states(&probe), expected);
        assert!(finding(&probe, "libQnnHtpV81Stub.so").found.starts_with("QAIRT 2.51.0, "));
        assert_eq!(probe.obstacle().unwrap().subject, HTP);
    }

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        let (root, mut surroundings) = phone("SM8750");
        for file in ["dev/fastrpc-cdsp", "vendor/lib64/libcdsprpc.so", "qnn/libQnnHtpV79Stub.so", "dsp/libQnnHtpV79Skel.so"] {
            fs::remove_file(root.path().join(file)).unwrap();
        }
        let probe = surroundings.probe();
        assert_eq!(finding(&probe, "DSP device node").state, State::Doubtful);
        for subject in ["FastRPC library", "libQnnHtpV79Stub.so", "libQnnHtpV79Skel.so"] {
            let finding = finding(&probe, subject);
            assert!(finding.state == State::Wrong && finding.advice.is_some(), "{finding:?}");
        }
        // Next to the library, where the DSP's loader does not look.
        write(root.path(), "qnn/libQnnHtpV79Skel.so", b"x");
        assert_eq!(finding(&surroundings.probe(), "ADSP_LIBRARY_PATH").state, State::Wrong);
        surroundings.dsp_folders = vec![root.path().join("qnn")];
        assert!(surroundings.probe().findings.iter().all(|finding| finding.subject != "ADSP_LIBRARY_PATH"));
    }

    #[test]
    fn chips() {
        let arch = |chip: Option<&str>| {
            let (_root, mut surroundings) = phone("SM8850");
            surroundings.chip = chip.map(str::to_owned);
            let probe = surroundings.probe();
            (probe.arch, finding(&probe, "processor").state)
        };
        assert_eq!(arch(Some("SM8750P")), (Some(Arch::V79), State::Fine));
        assert_eq!(arch(Some("SM8650")), (None, State::Wrong));
        assert_eq!(arch(Some("sun")), (Some(Arch::V79), State::Fine));
        assert_eq!(arch(Some("sun50iw9")), (None, State::Doubtful), "another maker's");
        assert_eq!(arch(Some("MT6989")), (None, State::Doubtful));
        assert_eq!(arch(None), (None, State::Doubtful));
    }

    #[test]
    fn libraries_of_other_machines_and_releases() {
        let (root, surroundings) = phone("SM8850");
        let mut header = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0".to_vec();
        header.extend(if cfg!(target_arch = "x86_64") { 183u16 } else { 62 }.to_le_bytes());
        write(root.path(), &format!("qnn/{HTP}"), &header);
        let probe = surroundings.probe();
        let found = finding(&probe, HTP);
        assert!(found.found.contains("is for ") && found.advice.is_some(), "{found:?}");
        let mut other = Probe { emulated: false, arch: None, library: None, findings: vec![] };
        other.note_half("half", Some(root.path().join("qnn/libQnnHtpV81Stub.so")), Some(&Build::parse("v2.47.0.260601")), "");
        assert!(other.findings[0].state == State::Wrong && other.findings[0].found.contains("but libQnnHtp.so is QAIRT 2.47.0"));
    }

    #[test]
    fn builds_in_texts() {
        let build = |text: &str| build_at(text.as_bytes()).map(|build| build.to_string());
        assert_eq!(build("v2.51.0.260929181845\0").as_deref(), Some("QAIRT 2.51.0"));
        for text in ["v2.51.0\0", "v2.51\0", "v2.x.0.260929181845\0", "v2.51.0.260929181845"] {
            assert_eq!(build(text), None, "{text}");
        }
    }
}
