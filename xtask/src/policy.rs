//! Whether the crates of others are such as `deny.toml` allows: their licences, versions and sources.
//!
//! `cargo deny` reads the same file. What is read here needs no tool and no network.

use crate::{
    Failure, assets,
    graph::{self, Id, Package},
    root, run, suites,
};
use std::{collections::BTreeMap, fs, process::Command};
use toml::{Table, Value};

/// Where crates come from if `deny.toml` names nothing else.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";
/// The version of `cargo deny` that is fetched.
const CARGO_DENY: &str = "0.20.2";

/// The crates of Cargo.lock against `deny.toml`.
pub(crate) fn check() -> Result<(), Failure> {
    let policy = Policy::read()?;
    let packages = graph::packages()?;
    let others: BTreeMap<&Id, &Package> = packages.iter().filter(|(_, package)| package.source.is_some()).collect();
    let mut problems = Vec::new();
    for (id, package) in &others {
        let (name, version) = id;
        if !policy.allows(name, &package.license)? {
            problems.push(format!("{name} {version}: the licence `{}` is not allowed", package.license));
        }
        if policy.denied.contains(name) {
            problems.push(format!("{name} {version}: is denied"));
        }
        if package.source.as_deref() != Some(CRATES_IO) {
            problems.push(format!("{name} {version}: comes from {}", package.source.as_deref().unwrap_or_default()));
        }
        let versions = others.keys().filter(|other| other.0 == *name && !policy.skipped.contains(other)).count();
        if versions > 1 && !policy.skipped.contains(id) {
            problems.push(format!("{name} {version}: there are {versions} versions of it; skip the older ones if they cannot be helped"));
        }
    }
    for (name, version) in policy.skipped.iter().filter(|id| !others.contains_key(id)) {
        problems.push(format!("{name} {version}: is skipped and not there"));
    }
    for name in policy.exceptions.iter().map(|(name, _)| name).filter(|name| others.keys().all(|id| id.0 != **name)) {
        problems.push(format!("{name}: has an exception and is not there"));
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!("crates against deny.toml:\n{}", problems.join("\n"))),
    }
}

/// Everything that `cargo deny` checks. Security advisories need the network: in CI (CI=true) they must be checked.
pub(crate) fn deny() -> Result<(), Failure> {
    let program = assets::cargo_tool("cargo-deny", CARGO_DENY)?;
    let deny = |arguments: &[&str]| {
        let mut deny = Command::new(&program);
        deny.current_dir(root()).args(arguments);
        run(&mut deny)
    };
    deny(&["check", "--show-stats", "bans", "licenses", "sources"])?;
    match deny(&["fetch", "db"]) {
        Ok(()) => deny(&["--offline", "check", "--show-stats", "advisories"]),
        Err(e) if suites::in_ci() => Err(e),
        Err(_) => {
            println!("not checked: security advisories: their list cannot be fetched");
            Ok(())
        }
    }
}

/// What is read of `deny.toml`.
struct Policy {
    licenses: Vec<String>,
    /// Further licences of single crates.
    exceptions: Vec<(String, Vec<String>)>,
    denied: Vec<String>,
    /// Versions beside which there may be another.
    skipped: Vec<Id>,
}

impl Policy {
    fn read() -> Result<Self, Failure> {
        let text = fs::read_to_string(root().join("deny.toml")).map_err(|e| format!("deny.toml: {e}"))?;
        let policy: Table = text.parse().map_err(|e| format!("deny.toml: {e}"))?;
        let list = |section: &str, key: &str| {
            let found = policy.get(section).and_then(|section| section.get(key)).and_then(Value::as_array);
            found.ok_or_else(|| format!("deny.toml: [{section}] has no list `{key}`"))
        };
        let crates = |section: &str, key: &str| -> Result<Vec<(String, &Value)>, Failure> {
            let name = |value: &Value| value.get("crate").and_then(Value::as_str).map(str::to_owned);
            let named =
                |value| name(value).map(|name| (name, value)).ok_or_else(|| format!("deny.toml: an entry of `{key}` names no `crate`"));
            list(section, key)?.iter().map(named).collect()
        };
        let skipped = crates("bans", "skip")?.into_iter().map(|(spec, _)| {
            let (name, version) = spec.split_once('@').ok_or_else(|| format!("deny.toml: `skip` expects NAME@VERSION, found `{spec}`"))?;
            Ok((name.to_owned(), version.to_owned()))
        });
        let allow = |value: &Value| strings(value.get("allow").and_then(Value::as_array).map_or(&[], Vec::as_slice));
        Ok(Self {
            licenses: strings(list("licenses", "allow")?),
            exceptions: crates("licenses", "exceptions")?.into_iter().map(|(name, value)| (name, allow(value))).collect(),
            denied: crates("bans", "deny")?.into_iter().map(|(name, _)| name).collect(),
            skipped: skipped.collect::<Result<_, Failure>>()?,
        })
    }

    fn allows(&self, name: &str, license: &str) -> Result<bool, Failure> {
        let more = self.exceptions.iter().filter(|(of, _)| of == name).flat_map(|(_, more)| more);
        let allowed: Vec<&str> = self.licenses.iter().chain(more).map(String::as_str).collect();
        satisfied(license, &allowed).ok_or_else(|| format!("{name}: the licence `{license}` is no expression of SPDX"))
    }
}

fn strings(values: &[Value]) -> Vec<String> {
    values.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Whether some of these licences satisfy an SPDX expression; `None`: it is none. Before there were such expressions, `/` was `OR`.
pub(crate) fn satisfied(expression: &str, allowed: &[&str]) -> Option<bool> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let found = either(&mut words, allowed)?;
    words.next().is_none().then_some(found)
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn either(words: &mut Words<'_>, allowed: &[&str]) -> Option<bool> {
    let mut found = both(words, allowed)?;
    while words.next_if_eq(&"OR").is_some() {
        found |= both(words, allowed)?;
    }
    Some(found)
}

fn both(words: &mut Words<'_>, allowed: &[&str]) -> Option<bool> {
    let mut found = one(words, allowed)?;
    while words.next_if_eq(&"AND").is_some() {
        found &= one(words, allowed)?;
    }
    Some(found)
}

fn one(words: &mut Words<'_>, allowed: &[&str]) -> Option<bool> {
    match words.next()? {
        "(" => {
            let found = either(words, allowed)?;
            words.next_if_eq(&")").map(|_| found)
        }
        ")" | "AND" | "OR" | "WITH" => None,
        license => match words.next_if_eq(&"WITH") {
            Some(_) => words.next().map(|exception| allowed.contains(&format!("{license} WITH {exception}").as_str())),
            None => Some(allowed.contains(&license)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::satisfied;

    #[test]
    fn expressions() {
        let check = |expression| satisfied(expression, &["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"]);
        for yes in ["MIT", "GPL-3.0/MIT", "(MIT OR X) AND ISC", "X AND Y OR MIT", "Apache-2.0 WITH LLVM-exception"] {
            assert_eq!(check(yes), Some(true), "{yes}");
        }
        for no in ["X", "MIT AND X", "(MIT OR X) AND Y", "Apache-2.0", "MIT WITH Classpath-exception-2.0"] {
            assert_eq!(check(no), Some(false), "{no}");
        }
        for none in ["", "MIT OR", "(MIT", "MIT)", "AND", "MIT ISC", "MIT WITH"] {
            assert_eq!(check(none), None, "{none}");
        }
    }
}
