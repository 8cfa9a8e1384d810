//! The modules of a crate form layers: no module uses, by whatever way, one that uses it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The crates that are held to it.
const CRATES: [&str; 7] = ["qhx-ir", "qhx-bundle", "qhx-cpu", "qhx-gpu", "qhx-runtime", "qhx", "qhx-attack"];

/// Which modules each module uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_module_uses_one_that_uses_it() {
    for name in CRATES {
        let uses = uses(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src"));
        assert!(uses.len() > 1, "{name} has modules");
        assert_eq!(cycle(&uses), None, "the modules of {name} use each other in a circle");
    }
}

#[test]
fn circles_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| {
        let path = folder.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("lib.rs", "mod a;\nmod b;\nmod c;\npub use c::{Thing, other as renamed};\n");
    write("a.rs", "use crate::{\n    b::{self, Nested},\n};\n");
    write("b.rs", "// crate::a is only spoken of\nuse crate::c;\n#[cfg(test)]\nmod tests { use crate::a; }\n");
    write("c/mod.rs", "struct Thing;\n");
    assert_eq!(cycle(&uses(folder.path())), None);
    write("c/inner.rs", "fn f() -> super::super::a::A {}\n");
    assert_eq!(cycle(&uses(folder.path())).unwrap().len(), 3, "a, b and c");
    write("c/inner.rs", "");
    write("c/mod.rs", "use crate::a;\n");
    write("a.rs", "use crate::Thing;\n");
    assert_eq!(cycle(&uses(folder.path())).unwrap(), ["a", "c"], "through what the crate gives out");
}

fn uses(source: &Path) -> Uses {
    let mut files = Vec::new();
    find_sources(source, &mut files);
    let modules: BTreeMap<PathBuf, Vec<String>> = files.iter().map(|file| (file.clone(), module(source, file))).collect();
    let tops: BTreeSet<&str> = modules.values().filter_map(|module| module.first()).map(String::as_str).collect();
    let root = ["lib.rs", "main.rs"].map(|file| source.join(file)).into_iter().find(|file| file.is_file()).unwrap();
    let given_out = given_out(&code(&fs::read_to_string(root).unwrap()));
    let mut uses = Uses::new();
    for (file, module) in modules.iter().filter(|(_, module)| !module.is_empty()) {
        let own = &module[0];
        let up = "super::".repeat(module.len());
        let text = code(&fs::read_to_string(file).unwrap()).replace(&up, "crate::");
        let used = names_after(&text, "crate::").into_iter().map(|name| given_out.get(&name).cloned().unwrap_or(name));
        uses.entry(own.clone()).or_default().extend(used.filter(|name| tops.contains(&**name) && name != own));
    }
    uses
}

fn find_sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.file_stem().unwrap().to_str().unwrap() {
            "tests" => {}
            _ if path.is_dir() => find_sources(&path, files),
            _ if path.extension().is_some_and(|ending| ending == "rs") => files.push(path),
            _ => {}
        }
    }
}

/// The path of a file's module in its crate.
fn module(source: &Path, file: &Path) -> Vec<String> {
    let parts = file.strip_prefix(source).unwrap().with_extension("");
    let names = parts.iter().map(|part| part.to_str().unwrap().to_owned());
    names.filter(|name| !matches!(&**name, "lib" | "main" | "mod")).collect()
}

/// A file without comments and without its tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The first names of all paths that follow `root`, those in braces included.
fn names_after(text: &str, root: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, _) in text.match_indices(root) {
        let rest = &text[at + root.len()..];
        match rest.strip_prefix('{') {
            Some(list) => names.extend(items(list).into_iter().filter_map(first_name)),
            None => names.extend(first_name(rest)),
        }
    }
    names
}

/// The items of a list up to its closing brace, nested lists as part of theirs.
fn items(list: &str) -> Vec<&str> {
    let (mut items, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, letter) in list.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => {
                items.push(&list[start..at]);
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items
}

fn first_name(path: &str) -> Option<String> {
    let name: String = path.trim_start().chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
    (!name.is_empty()).then_some(name)
}

/// The names that a crate's root gives out, and the modules that they are in.
fn given_out(root: &str) -> BTreeMap<String, String> {
    let mut given = BTreeMap::new();
    for (at, _) in root.match_indices("pub use ") {
        let statement = root[at + "pub use ".len()..].split(';').next().unwrap_or_default();
        let Some(module) = first_name(statement) else { continue };
        let words = statement.split(|letter: char| !letter.is_alphanumeric() && letter != '_').filter(|word| !word.is_empty());
        given.extend(words.skip(1).map(|word| (word.to_owned(), module.clone())));
    }
    given
}

/// The modules of a circle, if there is one.
fn cycle(uses: &Uses) -> Option<Vec<String>> {
    fn visit<'u>(module: &'u str, uses: &'u Uses, path: &mut Vec<&'u str>, done: &mut BTreeSet<&'u str>) -> Option<Vec<String>> {
        if let Some(at) = path.iter().position(|name| *name == module) {
            return Some(path[at..].iter().map(|name| (*name).to_owned()).collect());
        }
        if !done.insert(module) {
            return None;
        }
        path.push(module);
        let found = uses.get(module).into_iter().flatten().find_map(|used| visit(used, uses, path, done));
        path.pop();
        found
    }
    let mut done = BTreeSet::new();
    uses.keys().find_map(|module| visit(module, uses, &mut Vec::new(), &mut done))
}
