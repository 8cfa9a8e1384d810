//! The GPU's tools: a shader compiler, and Mesa's software Vulkan with the validation layer for tests. All come from Debian's packages.

use crate::{Failure, assets, debian, programs, root, run, suites::Tier};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::{Mutex, PoisonError},
    thread,
    time::Instant,
};

/// The compiler of shaders, with the C library that it was built for: the same bytes on every machine.
const COMPILER: [&str; 5] =
    ["glslang-tools=15.1.0+1.4.309.0-1", "spirv-tools=2025.1~rc1-1", "libc6/trixie", "libstdc++6/trixie", "libgcc-s1/trixie"];

/// Software Vulkan, its loader and the validation layer.
const DRIVER: [&str; 3] = ["mesa-vulkan-drivers/bookworm-backports", "libvulkan1/bookworm", "vulkan-validationlayers/bookworm"];

/// Software Vulkan that has cooperative matrices: of a newer release, with the C library that it was built for.
const NEWER_DRIVER: [&str; 3] = ["mesa-vulkan-drivers/trixie-backports", "libvulkan1/trixie", "vulkan-validationlayers/trixie"];

/// Variables of the environment that make Vulkan's loader find a driver.
type Variables = Vec<(&'static str, PathBuf)>;

/// The GPU device on software Vulkan, and whether shaders and SPIR-V agree.
pub(crate) fn test(tier: Tier) -> Result<(), Failure> {
    check_shaders()?;
    let mut driver = driver()?;
    if tier == Tier::Default {
        // They compile in half the time.
        driver.push((NARROW_VECTORS.0, NARROW_VECTORS.1.into()));
    }
    // With QNN's emulator, sessions also move between GPU and NPU.
    let qnn = assets::qnn().ok();
    for package in ["qhx-forge", "qhx-cli"] {
        let mut command = programs::suite(package)?.command();
        command.args(["--ignored", "gpu::"]).envs(driver.iter().map(|(name, value)| (name, value)));
        command.envs(qnn.iter().map(|folder| ("QHX_QNN_DIR", folder)));
        programs::run(&format!("{package} suite"), &mut command)?;
    }
    let program = programs::one("qhx-gpu", "vulkan")?;
    // Software Vulkan is slow: fewer cases of each kind.
    let cases = if tier == Tier::Extended { "8" } else { "1" };
    let with = |mut command: Command, driver: &Variables| {
        command.env("QHX_CONFORMANCE_CASES", cases).envs(driver.iter().map(|(name, value)| (name, value)));
        command
    };
    let older = || with(program.command(), &driver);
    let (driver, [starter, libraries]) = newer_driver()?;
    let newer = || {
        let mut command = Command::new(&starter);
        command.arg("--library-path").arg(&libraries);
        with(program.started_by(command), &driver)
    };
    let mut tests = DeviceTest::all(newer, |name| name.starts_with(COOPERATIVE))?;
    tests.extend(DeviceTest::all(older, |name| !name.starts_with(COOPERATIVE))?);
    DeviceTest::run_all(tests)
}

/// How the tests begin that need cooperative matrices, which the older Mesa does not have.
const COOPERATIVE: &str = "cooperative_matrices";

/// Compiles `crates/qhx-gpu/shaders` to `crates/qhx-gpu/spirv`.
pub(crate) fn shaders() -> Result<(), Failure> {
    let (fresh, committed) = (assets::place("spirv"), folder("spirv"));
    compile(&fresh)?;
    let io = |e: std::io::Error| format!("{}: {e}", committed.display());
    let _ = fs::remove_dir_all(&committed);
    fs::create_dir_all(&committed).map_err(io)?;
    contents(&fresh)?.iter().try_for_each(|(name, bytes)| fs::write(committed.join(name), bytes).map_err(io))
}

/// Whether the committed SPIR-V is what the sources give.
fn check_shaders() -> Result<(), Failure> {
    let fresh = assets::place("spirv-check");
    compile(&fresh)?;
    let committed = folder("spirv");
    let (fresh, committed) = (contents(&fresh)?, contents(&committed)?);
    let differs = |(name, bytes): &&(String, Vec<u8>)| !committed.iter().any(|(own, old)| own == name && old == bytes);
    let wrong: Vec<_> = fresh.iter().filter(differs).map(|(name, _)| name.as_str()).collect();
    match wrong.is_empty() && fresh.len() == committed.len() {
        true => Ok(()),
        false => Err(format!(
            "crates/qhx-gpu/spirv is not what crates/qhx-gpu/shaders gives ({} files, {} expected; differing: {wrong:?}): run `cargo xtask shaders`",
            committed.len(),
            fresh.len()
        )),
    }
}

/// Software Vulkan for a test run.
pub(crate) fn driver() -> Result<Variables, Failure> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("software Vulkan is fetched for Linux on x86-64 only".into());
    }
    let folder = assets::place("debian-vulkan");
    if !folder.exists() {
        eprintln!("fetching Mesa's software Vulkan (27 MB) …");
        let releases = ["bookworm-backports"];
        debian::unpack(&debian::Packages { releases: &releases, install: DRIVER.to_vec(), ..Default::default() }, &folder)?;
    }
    Ok(variables(&folder))
}

/// [`driver`] with cooperative matrices, and what starts a program with its C library.
pub(crate) fn newer_driver() -> Result<(Variables, [PathBuf; 2]), Failure> {
    let folder = assets::place("debian-vulkan-newer");
    if !folder.exists() {
        eprintln!("fetching a newer Mesa with cooperative matrices (69 MB) …");
        let releases = ["trixie", "trixie-backports"];
        let packages = debian::Packages { releases: &releases, install: NEWER_DRIVER.to_vec(), complete: true, ..Default::default() };
        debian::unpack(&packages, &folder)?;
    }
    let libraries = folder.join("usr/lib/x86_64-linux-gnu");
    // Its libraries are for its own programs: what else runs keeps this machine's.
    let variables = variables(&folder).into_iter().filter(|(name, _)| *name != "LD_LIBRARY_PATH").collect();
    Ok((variables, [libraries.join("ld-linux-x86-64.so.2"), libraries]))
}

/// Has the software driver compile shaders for vectors of 128 bits, not for the widest that the CPU has. The newer one then has no cooperative matrices.
const NARROW_VECTORS: (&str, &str) = ("LP_NATIVE_VECTOR_WIDTH", "128");

/// What tells Vulkan's loader where the driver and the validation layer are.
fn variables(folder: &Path) -> Variables {
    vec![
        ("MESA_SHADER_CACHE_DIR", folder.join("shader-cache")),
        ("LD_LIBRARY_PATH", folder.join("usr/lib/x86_64-linux-gnu")),
        ("VK_DRIVER_FILES", folder.join("usr/share/vulkan/icd.d/lvp_icd.json")),
        // The name of the same variable for older loaders.
        ("VK_ICD_FILENAMES", folder.join("usr/share/vulkan/icd.d/lvp_icd.json")),
        ("VK_LAYER_PATH", folder.join("usr/share/vulkan/explicit_layer.d")),
    ]
}

fn folder(name: &str) -> PathBuf {
    root().join("crates/qhx-gpu").join(name)
}

/// The files of a folder with their names, in order.
fn contents(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, Failure> {
    let io = |e: std::io::Error| format!("{}: {e}", folder.display());
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        all.push((name, fs::read(&path).map_err(io)?));
    }
    all.sort();
    Ok(all)
}

/// The folder with the compiler of shaders.
pub(crate) fn compiler() -> Result<PathBuf, Failure> {
    let folder = assets::place("debian-glslang");
    if !folder.exists() {
        eprintln!("fetching a shader compiler (10 MB) …");
        debian::unpack(&debian::Packages { releases: &["trixie"], alone: COMPILER.to_vec(), ..Default::default() }, &folder)?;
    }
    Ok(folder)
}

/// Compiles every `*.comp`, once for each of its lines `// variant NAME DEFINITION…`, or once if it has none.
fn compile(out: &Path) -> Result<(), Failure> {
    let tools = compiler()?;
    let io = |e: std::io::Error| format!("{}: {e}", out.display());
    let _ = fs::remove_dir_all(out);
    fs::create_dir_all(out).map_err(io)?;
    let libraries = tools.join("usr/lib/x86_64-linux-gnu");
    let tool = |name: &str| {
        let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&libraries).arg(tools.join("usr/bin").join(name));
        command
    };
    let sources = contents(&folder("shaders"))?;
    for (name, source) in sources.iter().filter(|(name, _)| name.ends_with(".comp")) {
        let text = String::from_utf8_lossy(source);
        let mut variants: Vec<Vec<&str>> =
            text.lines().filter_map(|line| line.strip_prefix("// variant ")).map(|line| line.split_whitespace().collect()).collect();
        if variants.is_empty() {
            variants.push(vec![name.trim_end_matches(".comp")]);
        }
        for variant in variants {
            let Some((own, definitions)) = variant.split_first() else { return Err(format!("{name}: a variant without a name")) };
            let (raw, done) = (out.join(format!("{own}.raw")), out.join(format!("{own}.spv")));
            let mut compiler = tool("glslangValidator");
            compiler.args(["--quiet", "--target-env", "vulkan1.2"]).args(definitions.iter().map(|d| format!("-D{d}")));
            run(compiler.arg("-o").arg(&raw).arg(folder("shaders").join(name)))?;
            run(tool("spirv-opt").args(["-O", "--strip-debug"]).arg(&raw).arg("-o").arg(&done))?;
            run(tool("spirv-val").args(["--target-env", "vulkan1.2"]).arg(&done))?;
            fs::remove_file(&raw).map_err(io)?;
        }
    }
    fs::write(out.join("SOURCES"), format!("{:016x}\n", fingerprint(&sources))).map_err(io)
}

/// FNV-1a over names and contents: a test compares it with the sources, so that it needs no compiler to see that one was changed alone.
fn fingerprint(sources: &[(String, Vec<u8>)]) -> u64 {
    let bytes = sources.iter().flat_map(|(name, content)| name.bytes().chain([0]).chain(content.iter().copied()).chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x100_0000_01b3))
}

/// A test of the GPU device itself, for a process of its own: tests that lose their device on purpose leave it at work.
struct DeviceTest {
    name: String,
    command: Command,
}

impl DeviceTest {
    /// The tests that `command` runs, which gives new commands that start the program with a driver, and whose names are wanted.
    fn all(command: impl Fn() -> Command, wanted: impl Fn(&str) -> bool) -> Result<Vec<Self>, Failure> {
        let mut list = command();
        list.args(["--ignored", "--list", "--format", "terse"]);
        let listed = list.output().map_err(|e| format!("cannot start {list:?}: {e}"))?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test")).filter(|name| wanted(name));
        let tests = names.map(|name| {
            let mut command = command();
            command.args(["--ignored", "--exact", name]);
            Self { name: name.to_owned(), command }
        });
        let tests: Vec<Self> = tests.collect();
        if tests.is_empty() { Err(format!("{list:?} lists no such test")) } else { Ok(tests) }
    }

    /// Runs tests, two at a time.
    fn run_all(tests: Vec<Self>) -> Result<(), Failure> {
        let queue = Mutex::new(tests.into_iter());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || std::iter::from_fn(next).try_for_each(Self::run);
        let results = thread::scope(|scope| [0, 1].map(|_| scope.spawn(work)).map(|worker| worker.join()));
        results.into_iter().try_for_each(|result| result.unwrap_or_else(|_| Err("a test's runner has panicked".into())))
    }

    fn run(mut self) -> Result<(), Failure> {
        let Self { name, command } = &mut self;
        let start = Instant::now();
        let mut output = programs::timed(command)?;
        if let Some(signal) = signal(output.status) {
            // The driver compiles shaders for the CPU that it finds, and some of what it makes of wide vectors crashes on some CPUs. A wrong result fails as ever.
            let cpu = cpu();
            eprintln!(
                "the software driver was ended by signal {signal} in {name} on {cpu}: once more, with shaders for plainer instructions"
            );
            command.envs([NARROW_VECTORS, ("MESA_SHADER_CACHE_DISABLE", "true")]);
            output = programs::timed(command)?;
        }
        programs::judge(&format!("qhx-gpu vulkan {name}"), &output, start.elapsed())
    }
}

/// What ended a process from outside.
#[cfg_attr(not(unix), allow(unused_variables))]
fn signal(status: ExitStatus) -> Option<i32> {
    #[cfg(unix)]
    return std::os::unix::process::ExitStatusExt::signal(&status);
    #[cfg(not(unix))]
    return None;
}

/// The CPU's name.
fn cpu() -> String {
    let facts = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = facts.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name.to_owned()));
    name.unwrap_or_else(|| "an unknown CPU".into())
}
