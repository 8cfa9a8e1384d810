//! aarch64 on a machine of another kind: cross-compiled, run by qemu. The CPU kernels are tested on three CPUs, so that each level of instructions meets one that has no more.
//!
//! Tools are those of the machine where it has them. What is missing comes from Debian's packages, unpacked into the target folder: nothing is installed, no rights are needed.

use crate::{Failure, assets, cargo, debian, programs, programs::PROFILE, run, suites::Tier, target};
use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// CPUs that qemu can be, with the best instruction set of each.
const CPUS: [(&str, &str); 3] = [("cortex-a72", "neon"), ("neoverse-n1", "neon+dotprod"), ("max", "neon+dotprod+i8mm")];

/// What builds and runs programs for aarch64.
pub(crate) struct Tools {
    /// Packages that were unpacked for what the machine does not have.
    unpacked: Option<PathBuf>,
    /// Whether the Rust compiler is one of them.
    compiler: bool,
}

/// Finds the tools, or fetches them.
pub(crate) fn tools() -> Result<Tools, Failure> {
    if !cfg!(target_os = "linux") {
        return Err("programs of another CPU are run by qemu-user, which exists for Linux only".into());
    }
    let compiler = !has_library() && {
        eprintln!("adding Rust's library for aarch64 to the toolchain: `rustup target add {TARGET}` …");
        !Command::new("rustup")
            .args(["target", "add", TARGET])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success())
    };
    if !compiler && answers("aarch64-linux-gnu-gcc") && answers("qemu-aarch64") {
        return Ok(Tools { unpacked: None, compiler });
    }
    let folder = assets::place(if compiler { "debian-aarch64-rust" } else { "debian-aarch64" });
    if !folder.exists() {
        eprintln!("fetching tools for aarch64 ({} MB) …", if compiler { 180 } else { 55 });
        let mut packages = debian::Packages {
            architectures: &["arm64"],
            install: vec!["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"],
            ..Default::default()
        };
        if compiler {
            packages.install.push("rustc-web");
            // Alone: nothing of it is run here.
            packages.alone.push("libstd-rust-web-dev:arm64");
        }
        debian::unpack(&packages, &folder).map_err(|e| format!("{e}\n{HELP}"))?;
    }
    Ok(Tools { unpacked: Some(folder), compiler })
}

const HELP: &str = "Tools for aarch64 are fetched as Debian packages. Elsewhere install a Rust library for it (`rustup target add aarch64-unknown-linux-gnu`), \
                    `aarch64-linux-gnu-gcc` with its C library, and `qemu-aarch64`, so that they are found on the path.";

/// The kernels' tests and the conformance suite, on every CPU.
pub(crate) fn test(tier: Tier) -> Result<(), Failure> {
    // On such a machine the suite of the crate has run these tests.
    if cfg!(target_arch = "aarch64") {
        return Ok(());
    }
    let tools = tools()?;
    let mut build = tools.cargo("test");
    build.args(PROFILE).args(["--package", "qhx-cpu", "--lib", "--test", "suite"]);
    let programs = programs::built(build)?;
    let work = |(cpu, instructions): (&str, &str)| {
        programs.iter().try_for_each(|program| {
            let mut command = program.started_by(tools.emulator());
            if program.name != "lib" {
                command.args(["conformance::", "cuts::", "threads::"]);
            }
            // An emulated CPU is slow: fewer cases of each kind, shorter calls, and each op cut only with the best instructions.
            let cases = if tier == Tier::Extended { "4" } else { "1" };
            if tier == Tier::Default && cpu != CPUS[CPUS.len() - 1].0 {
                command.args(["--skip", "cuts::every_op"]);
            }
            command.envs([("QEMU_CPU", cpu), ("QHX_INSTRUCTIONS", instructions), ("QHX_CONFORMANCE_CASES", cases), ("QHX_EMULATED", "1")]);
            programs::run(&format!("{cpu} ({instructions}) {}", program.name), &mut command)
        })
    };
    CPUS.into_iter().try_for_each(work)
}

/// Any command of cargo for aarch64: `run` and `test` go through qemu.
pub(crate) fn pass_on(arguments: &[&str]) -> Result<(), Failure> {
    let Some((command, rest)) = arguments.split_first() else { return Err("which command of cargo?".into()) };
    run(tools()?.cargo(command).args(rest))
}

impl Tools {
    /// A tool, and the folder with the C library of its programs.
    fn tool(&self, name: &str) -> (PathBuf, PathBuf) {
        match &self.unpacked {
            Some(root) => (root.join("usr/bin").join(name), root.join("usr/aarch64-linux-gnu")),
            None => (name.into(), "/usr/aarch64-linux-gnu".into()),
        }
    }

    /// What starts a program for aarch64.
    fn emulator(&self) -> Command {
        let (qemu, libraries) = self.tool("qemu-aarch64");
        let mut command = Command::new(qemu);
        command.env("QEMU_LD_PREFIX", libraries);
        if let Some(root) = &self.unpacked {
            command.env("LD_LIBRARY_PATH", own_libraries(root));
        }
        command
    }

    /// `cargo COMMAND` for aarch64 with these tools.
    fn cargo(&self, command: &str) -> Command {
        let mut cargo = cargo();
        cargo.args([command, "--target", TARGET]);
        let variable = |name: &str| format!("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_{name}");
        let (linker, (qemu, libraries)) = (self.tool("aarch64-linux-gnu-gcc").0, self.tool("qemu-aarch64"));
        if let Some(root) = &self.unpacked {
            cargo.env(variable("RUSTFLAGS"), format!("-Clink-arg=--sysroot={}", root.display()));
            cargo.env("CFLAGS_aarch64_unknown_linux_gnu", format!("--sysroot={}", root.display()));
            cargo.env("LD_LIBRARY_PATH", own_libraries(root));
            if self.compiler {
                cargo.env("RUSTC", root.join("usr/bin/rustc"));
            }
        }
        // Of TLS a part is in C.
        cargo.env("CC_aarch64_unknown_linux_gnu", &linker);
        cargo.env(variable("LINKER"), linker).env(variable("RUNNER"), qemu).env("QEMU_LD_PREFIX", libraries);
        // A folder of its own: another compiler may be at work.
        cargo.env("CARGO_TARGET_DIR", target().join("aarch64"));
        cargo
    }
}

/// Libraries of tools that were unpacked, for this machine.
fn own_libraries(root: &Path) -> PathBuf {
    root.join(format!("usr/lib/{}-linux-gnu", env::consts::ARCH))
}

/// Whether the Rust compiler at hand has the target's library.
fn has_library() -> bool {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]).output();
    output.is_ok_and(|o| o.status.success() && Path::new(String::from_utf8_lossy(&o.stdout).trim()).exists())
}

fn answers(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
