//! Holds the imports of the core's files: no circle of more than four files, layers in order, values without logic.
//!
//! A small parser reads each file's paths: `use` trees, and `crate::`, `self::`, `super::` and paths into child modules
//! anywhere else. Comments, strings and what `#[cfg(test)]` marks are left out. A path counts as an import of the file
//! that defines the item, so that a re-export in a `mod.rs` hides no circle and makes none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The most files that may import each other in a circle.
const MOST_FILES: usize = 4;

/// The layers of the core: each imports itself, those before it, and the small mechanisms, which are no layer.
const LAYERS: [&str; 6] = ["topology", "allocation", "state", "publish", "claims", "benchmark"];

/// The files of `state` that hold values: they import each other and no other file of `state`.
const VALUES: [&str; 15] = [
    "device",
    "door",
    "event",
    "gpu_shares",
    "holdings",
    "mig_instance",
    "mps_share",
    "numa_hints",
    "plan",
    "poll",
    "prepared_claim",
    "problem",
    "reason",
    "record",
    "resource_name",
];

/// A module's path below the crate: `["state", "device"]`.
type ModulePath = Vec<String>;

/// One file of the crate, as far as its imports go.
#[derive(Default)]
struct Module {
    children: BTreeSet<String>,
    /// Names that `use` declarations bring in, each with its path as written.
    bound: BTreeMap<String, Vec<String>>,
    /// Paths that end in `::*`.
    globs: Vec<Vec<String>>,
    /// Paths in expressions and types.
    inline: Vec<Vec<String>>,
    /// Items that the file defines.
    defined: BTreeSet<String>,
}

type Crate = BTreeMap<ModulePath, Module>;

/// Splits a file into identifiers, `::` and single characters; comments and literals are dropped.
fn tokens(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let at = |place: usize| chars.get(place).copied().unwrap_or('\0');
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut place = 0;
    while place < chars.len() {
        match at(place) {
            '/' if at(place + 1) == '/' => {
                while place < chars.len() && at(place) != '\n' {
                    place += 1;
                }
            }
            '/' if at(place + 1) == '*' => {
                place += 2;
                while place < chars.len() && !(at(place - 1) == '*' && at(place) == '/') {
                    place += 1;
                }
                place += 1;
            }
            'r' if at(place + 1) == '#' && matches!(at(place + 2), '#' | '"') => {
                place += 1;
                let marks = chars[place..].iter().take_while(|c| **c == '#').count();
                let is_end = |place: usize| at(place) == '"' && (1..=marks).all(|mark| at(place + mark) == '#');
                place += marks + 1;
                while place < chars.len() && !is_end(place) {
                    place += 1;
                }
                place += marks + 1;
            }
            '"' => {
                place += 1;
                while place < chars.len() && at(place) != '"' {
                    place += if at(place) == '\\' { 2 } else { 1 };
                }
                place += 1;
            }
            // A character, unless it is a lifetime.
            '\'' if at(place + 1) == '\\' => {
                place += 3;
                while place < chars.len() && at(place) != '\'' {
                    place += 1;
                }
                place += 1;
            }
            '\'' if at(place + 2) == '\'' => place += 3,
            ':' if at(place + 1) == ':' => {
                found.push("::".to_owned());
                place += 2;
            }
            c if is_word(c) => {
                let start = place;
                while is_word(at(place)) {
                    place += 1;
                }
                found.push(chars[start..place].iter().collect());
            }
            c if c.is_whitespace() => place += 1,
            c => {
                found.push(c.to_string());
                place += 1;
            }
        }
    }
    found
}

/// Drops each item that `#[cfg(test)]` marks.
fn without_tests(tokens: Vec<String>) -> Vec<String> {
    const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut place = 0;
    while place < tokens.len() {
        if !tokens[place..].iter().take(MARK.len()).eq(MARK.iter()) {
            kept.push(tokens[place].clone());
            place += 1;
            continue;
        }
        let mut depth = 0;
        while place < tokens.len() {
            match tokens[place].as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            place += 1;
            if depth == 0 && matches!(tokens[place - 1].as_str(), ";" | "}") {
                break;
            }
        }
    }
    kept
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

impl Module {
    fn read(text: &str) -> Self {
        let tokens = without_tests(tokens(text));
        let token = |place: usize| tokens.get(place).map_or("", String::as_str);
        let mut module = Self::default();
        // Children first: a path may come before the `mod` that it goes into.
        for place in 0..tokens.len() {
            match (token(place), token(place + 2)) {
                ("mod", ";") => drop(module.children.insert(token(place + 1).to_owned())),
                ("mod", "{") => panic!("module '{}' is not in a file of its own", token(place + 1)),
                ("struct" | "enum" | "fn" | "const" | "static" | "type" | "trait", _) => {
                    module.defined.insert(token(place + 1).to_owned());
                }
                _ => {}
            }
        }
        let mut place = 0;
        while place < tokens.len() {
            if token(place) == "use" && is_name(token(place + 1)) {
                place = module.read_tree(&tokens, place + 1, &[]);
            } else if is_name(token(place)) && token(place + 1) == "::" && (place == 0 || token(place - 1) != "::") {
                let mut path = vec![token(place).to_owned()];
                while token(place + 1) == "::" && is_name(token(place + 2)) {
                    path.push(token(place + 2).to_owned());
                    place += 2;
                }
                let is_ours = ["crate", "self", "super"].contains(&path[0].as_str());
                if is_ours || module.children.contains(&path[0]) {
                    module.inline.push(path);
                }
            }
            place += 1;
        }
        module
    }

    /// Reads one `use` tree below `prefix`; returns the place of the token after it.
    fn read_tree(&mut self, tokens: &[String], mut place: usize, prefix: &[String]) -> usize {
        let token = |place: usize| tokens.get(place).map_or("", String::as_str);
        let mut path = prefix.to_vec();
        loop {
            match token(place) {
                "{" => {
                    place += 1;
                    while token(place) != "}" {
                        place = self.read_tree(tokens, place, &path);
                        if token(place) == "," {
                            place += 1;
                        }
                    }
                    return place + 1;
                }
                "*" => {
                    self.globs.push(path);
                    return place + 1;
                }
                "self" if !path.is_empty() => {}
                name if is_name(name) => path.push(name.to_owned()),
                other => panic!("'{other}' in a use tree after {path:?}"),
            }
            place += 1;
            match token(place) {
                "::" => place += 1,
                "as" => {
                    self.bind(token(place + 1), path);
                    return place + 2;
                }
                _ => {
                    let name = path.last().cloned().unwrap_or_default();
                    self.bind(&name, path);
                    return place;
                }
            }
        }
    }

    /// Notes an import under its name; a name that two namespaces share, or `_`, counts as a path of its own.
    fn bind(&mut self, name: &str, path: Vec<String>) {
        if name == "_" || self.bound.contains_key(name) {
            self.inline.push(path);
        } else {
            self.bound.insert(name.to_owned(), path);
        }
    }
}

/// The module whose file defines what a path names; `None` for what is not ours. `within` guards against names that lead
/// to each other.
fn defining(ours: &Crate, from: &[String], path: &[String], within: usize) -> Option<ModulePath> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => Some(named_in(ours, &[], rest, within)),
        "self" => Some(named_in(ours, from, rest, within)),
        "super" => {
            let (_, mut parent) = from.split_last()?;
            let mut rest = rest;
            while let Some(("super", after)) = rest.split_first().map(|(first, after)| (first.as_str(), after)) {
                (parent, rest) = (parent.split_last()?.1, after);
            }
            Some(named_in(ours, parent, rest, within))
        }
        name => {
            let module = ours.get(from)?;
            let is_ours = module.children.contains(name) || module.bound.contains_key(name) && within > 0;
            // `use serde::Serialize` binds `Serialize`, and no crate is named as what it exports.
            let is_itself = module.bound.get(name).is_some_and(|bound| bound.first() == Some(first));
            (is_ours && (!is_itself || module.children.contains(name))).then(|| named_in(ours, from, path, within))
        }
    }
}

/// The module whose file defines the item that a path names within a module.
fn named_in(ours: &Crate, within_module: &[String], path: &[String], within: usize) -> ModulePath {
    let here = within_module.to_vec();
    let (Some(module), Some((first, rest))) = (ours.get(within_module), path.split_first()) else { return here };
    if module.children.contains(first) {
        let child: ModulePath = here.into_iter().chain([first.clone()]).collect();
        return named_in(ours, &child, rest, within);
    }
    if within == 0 || module.defined.contains(first) {
        return here;
    }
    if let Some(bound) = module.bound.get(first) {
        let whole: Vec<String> = bound.iter().chain(rest).cloned().collect();
        return defining(ours, within_module, &whole, within - 1).unwrap_or(here);
    }
    let globs = module.globs.iter().filter_map(|glob| defining(ours, within_module, glob, within - 1));
    let mut sources = globs.filter(|source| {
        ours.get(source).is_some_and(|source| source.defined.contains(first) || source.bound.contains_key(first))
    });
    sources.next().map_or(here, |source| named_in(ours, &source, path, within - 1))
}

/// The files that each file imports.
fn imports(ours: &Crate) -> BTreeMap<&ModulePath, BTreeSet<ModulePath>> {
    let of = |(path, module): (_, &Module)| {
        let path: &ModulePath = path;
        let named = module.bound.values().chain(&module.globs).chain(&module.inline);
        let files = named.filter_map(|named| defining(ours, path, named, 16)).filter(|file| file != path);
        (path, files.collect())
    };
    ours.iter().map(of).collect()
}

/// Tarjan's strongly connected components.
struct Tarjan<'a> {
    edges: &'a BTreeMap<&'a ModulePath, BTreeSet<ModulePath>>,
    index: BTreeMap<&'a ModulePath, usize>,
    low: BTreeMap<&'a ModulePath, usize>,
    stack: Vec<&'a ModulePath>,
    components: Vec<Vec<&'a ModulePath>>,
}

impl<'a> Tarjan<'a> {
    fn components(edges: &'a BTreeMap<&'a ModulePath, BTreeSet<ModulePath>>) -> Vec<Vec<&'a ModulePath>> {
        let (index, low, stack, components) = Default::default();
        let mut search = Self { edges, index, low, stack, components };
        for file in edges.keys() {
            if !search.index.contains_key(file) {
                search.visit(file);
            }
        }
        search.components
    }

    fn visit(&mut self, file: &'a ModulePath) {
        let number = self.index.len();
        self.index.insert(file, number);
        self.low.insert(file, number);
        self.stack.push(file);
        for other in self.edges.get(file).into_iter().flatten() {
            let reached = match self.index.get(other) {
                None => {
                    self.visit(other);
                    self.low[other]
                }
                Some(number) if self.stack.contains(&other) => *number,
                Some(_) => continue,
            };
            let low = self.low[file].min(reached);
            self.low.insert(file, low);
        }
        if self.low[file] == number {
            let start = self.stack.iter().position(|other| *other == file).expect("a file on the stack");
            self.components.push(self.stack.split_off(start));
        }
    }
}

/// Reads the files below a crate's `src/`, each under its module's path.
fn read_crate(folder: &Path, module: &[String], ours: &mut Crate) {
    for entry in fs::read_dir(folder).expect("src/ can be read") {
        let path = entry.expect("src/ can be listed").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a plain name").to_owned();
        let inner: ModulePath = module.iter().cloned().chain([name.clone()]).collect();
        if path.is_dir() {
            read_crate(&path, &inner, ours);
        } else if name != "tests" {
            let file = if name == "mod" || name == "lib" { module.to_vec() } else { inner };
            ours.insert(file, Module::read(&fs::read_to_string(&path).expect("source is text")));
        }
    }
}

/// The circles of more than `most` files, the largest first, a line each.
fn circles(ours: &Crate, most: usize) -> Vec<String> {
    let edges = imports(ours);
    let mut found = Tarjan::components(&edges);
    found.retain(|files| files.len() > most);
    found.sort_by_key(|files| (std::cmp::Reverse(files.len()), files.iter().min().copied().cloned()));
    let line = |files: Vec<&ModulePath>| {
        let mut names: Vec<String> = files.iter().map(|path| path.join("::")).collect();
        names.sort_unstable();
        format!("{} files: {}", names.len(), names.join(", "))
    };
    found.into_iter().map(line).collect()
}

fn core() -> Crate {
    let mut ours = Crate::new();
    read_crate(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut ours);
    ours
}

#[test]
fn no_circle_of_imports_above_four_files() {
    let ours = core();
    let edges: usize = imports(&ours).values().map(BTreeSet::len).sum();
    assert!(ours.len() > 60 && edges > 200, "{} files, {edges} imports", ours.len());
    let found = circles(&ours, MOST_FILES);
    assert!(found.is_empty(), "files import each other in a circle:\n{}", found.join("\n"));
}

#[test]
fn layers_import_only_layers_before_them() {
    let layer = |path: &ModulePath| LAYERS.iter().position(|layer| path.first().is_some_and(|name| name == layer));
    let ours = core();
    for (file, imported) in imports(&ours) {
        let later: Vec<_> = imported.iter().filter(|other| layer(other) > layer(file)).collect();
        assert!(layer(file).is_none() || later.is_empty(), "{file:?} imports {later:?}");
    }
}

#[test]
fn values_of_the_state_import_no_logic() {
    let ours = core();
    let edges = imports(&ours);
    for value in VALUES {
        let file = ModulePath::from(["state", value].map(str::to_owned));
        let of_state = edges[&file].iter().filter(|other| other.first().is_some_and(|layer| layer == "state"));
        let logic: Vec<_> = of_state.filter(|other| !VALUES.contains(&other[1].as_str())).collect();
        assert!(logic.is_empty(), "state::{value} imports {logic:?}");
    }
}

/// A crate of files given as text; `""` is `lib.rs`.
fn made(files: &[(&str, &str)]) -> Crate {
    let path = |name: &str| name.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
    files.iter().map(|(name, text)| (path(name), Module::read(text))).collect()
}

#[test]
fn circle_is_found_however_a_path_is_written() {
    for back in [
        "use crate::a::b::B;",
        "use super::b::{self, B};",
        "use crate::{a::{b::{B as Other, C}, d}, x};",
        "use crate::a::B;",
        "use super::B;",
        "use crate::B;",
        "use super::b::*;",
        "fn f(_: super::b::B) {}",
        "fn f() -> &'static str { let _ = ('\\'', '\"', \"\\\"\"); crate::a::b::g() }",
        "use super::super::a::b::B as _;",
    ] {
        let ours = made(&[
            ("", "mod a; mod x; pub use a::B;"),
            ("a", "mod b; mod c; mod d; pub use b::B;"),
            ("a::b", "use super::c::C; pub struct B;"),
            ("a::c", back),
            ("a::d", ""),
            ("x", ""),
        ]);
        assert_eq!(circles(&ours, 1), ["2 files: a::b, a::c"], "{back}");
    }
}

#[test]
fn words_that_import_nothing_make_no_circle() {
    for no_path in [
        "// use super::b::B;",
        "/* use super::b::B; */",
        "/// [`super::b::B`]\nfn f() {}",
        "const TEXT: &str = \"use super::b::B;\";",
        "const TEXT: &str = r#\"use \"super::b::B\";\"#;",
        "#[cfg(test)]\nmod tests { use super::super::b::B; fn f() { if true {} } }",
        "#[cfg(test)]\nuse super::b::B;",
        "use other::b::B;",
    ] {
        let ours = made(&[("", "mod a;"), ("a", "mod b; mod c;"), ("a::b", "use super::c::C;"), ("a::c", no_path)]);
        assert_eq!(circles(&ours, 1), Vec::<String>::new(), "{no_path}");
    }
}
