//! Debian's packages, unpacked into the target folder: nothing is installed, no rights are needed.

use crate::Failure;
use std::{env, ffi::OsString, fs, path::Path, process::Command};

/// What is to be unpacked.
#[derive(Default)]
pub(crate) struct Packages<'a> {
    /// Further architectures.
    pub(crate) architectures: &'a [&'a str],
    /// Releases beside those that the machine uses (`trixie`).
    pub(crate) releases: &'a [&'a str],
    /// Packages with what they need beyond what is installed.
    pub(crate) install: Vec<&'a str>,
    /// Packages without what they need.
    pub(crate) alone: Vec<&'a str>,
    /// What is installed does not count: the folder has all that the packages need, the C library too.
    pub(crate) complete: bool,
}

/// Unpacks packages; the folder appears only when it is complete.
pub(crate) fn unpack(packages: &Packages<'_>, folder: &Path) -> Result<(), Failure> {
    let download = folder.with_extension("download");
    let io = |e: std::io::Error| format!("{}: {e}", download.display());
    let _ = fs::remove_dir_all(&download);
    let (archives, root) = (download.join("cache/archives"), download.join("root"));
    for folder in [archives.join("partial"), download.join("state/lists/partial"), root.clone()] {
        fs::create_dir_all(folder).map_err(io)?;
    }
    // apt with lists and archives of its own: it reads what is installed and changes nothing.
    let configuration = download.join("apt.conf");
    let architecture = output(Command::new("dpkg").arg("--print-architecture"))?;
    let architectures = [architecture.trim()].iter().chain(packages.architectures).map(|name| format!("\"{name}\"; ")).collect::<String>();
    let shown = download.canonicalize().map_err(io)?.display().to_string();
    let status = if packages.complete { format!("{shown}/status") } else { "/var/lib/dpkg/status".into() };
    if packages.complete {
        fs::write(&status, "").map_err(io)?;
    }
    let text = format!(
        "Dir::State \"{shown}/state\";\nDir::State::status \"{status}\";\nDir::Cache \"{shown}/cache\";\n\
         Dir::Etc::sourcelist \"{shown}/sources.list\";\nAPT::Architectures {{ {architectures}}};\nAPT::Sandbox::User \"\";\nDebug::NoLocking \"1\";\n"
    );
    fs::write(&configuration, text).map_err(io)?;
    let own = fs::read_to_string("/etc/apt/sources.list").unwrap_or_default();
    fs::write(download.join("sources.list"), format!("{own}\n{}", sources(packages.releases)?)).map_err(io)?;
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.env("APT_CONFIG", &configuration).current_dir(&archives).args(["-q", "-y", "--no-install-recommends"]);
        apt
    };
    // Where one of many sources does not answer, the others may do.
    let update = output(apt().arg("update")).err().unwrap_or_default();
    if !packages.alone.is_empty() {
        output(apt().arg("download").args(&packages.alone)).map_err(|e| format!("{update}{e}"))?;
    }
    if !packages.install.is_empty() {
        output(apt().args(["install", "--download-only"]).args(&packages.install)).map_err(|e| format!("{update}{e}"))?;
    }
    for archive in fs::read_dir(&archives).map_err(io)? {
        let archive = archive.map_err(io)?.path();
        if archive.extension().is_some_and(|extension| extension == "deb") {
            output(Command::new("dpkg").arg("-x").arg(archive).arg(&root))?;
        }
    }
    let _ = fs::remove_dir_all(folder);
    fs::rename(&root, folder).map_err(io)?;
    fs::remove_dir_all(&download).map_err(io)
}

/// The folders with libraries of what was unpacked, as `LD_LIBRARY_PATH` has them: the machine's own architecture, and the folders that some libraries keep to themselves.
pub(crate) fn libraries(folder: &Path) -> Result<OsString, Failure> {
    let triplet = folder.join(format!("usr/lib/{}-linux-gnu", env::consts::ARCH));
    let io = |e: std::io::Error| format!("{}: {e}", triplet.display());
    let mut folders = vec![triplet.clone()];
    for entry in fs::read_dir(&triplet).map_err(io)? {
        folders.extend(Some(entry.map_err(io)?.path()).filter(|path| path.is_dir()));
    }
    env::join_paths(folders).map_err(|e| e.to_string())
}

/// Source lines for other releases, from where the machine has its own.
fn sources(releases: &[&str]) -> Result<String, Failure> {
    if releases.is_empty() {
        return Ok(String::new());
    }
    let targets = output(Command::new("apt-get").args(["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]))?;
    let archive = targets.lines().find(|uri| uri.trim_end_matches('/').ends_with("/debian"));
    let archive = archive.ok_or("apt knows no archive of Debian on this machine")?;
    let line = |release: &&str| format!("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {archive} {release} main\n");
    Ok(releases.iter().map(line).collect())
}

/// What a command prints; all of it where it fails.
fn output(command: &mut Command) -> Result<String, Failure> {
    let shown = format!("{command:?}");
    let output = command.output().map_err(|e| format!("cannot start {shown}: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() {
        true => Ok(text),
        false => Err(format!("{shown} ended with {}:\n{text}{}", output.status, String::from_utf8_lossy(&output.stderr))),
    }
}
