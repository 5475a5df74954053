//! Checks the layers of the core: a file of a layer imports only this layer, inner layers, and modules of no layer,
//! which are not checked. Cargo forbids circles of crates.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The layers, from the inside out.
const LAYERS: [&str; 6] = ["topology", "allocation", "state", "publish", "claims", "benchmark"];

/// The layers that a file's text names in paths, without tests and comments.
fn named(text: &str) -> BTreeSet<&'static str> {
    let code = text.lines().take_while(|line| line.trim() != "#[cfg(test)]");
    let code: String = code.map(|line| line.split("//").next().unwrap_or(line)).collect::<Vec<_>>().join("\n");
    // `crate::state::X`, `crate::{state::X, ..}`, and `super::super::state` from a layer's folder.
    let layers = LAYERS.into_iter().filter(|layer| {
        [format!("crate::{layer}::"), format!("crate::{{{layer}::"), format!("super::super::{layer}::")]
            .iter()
            .any(|path| code.contains(path.as_str()))
    });
    layers.collect()
}

fn check(layer: &str, path: &Path, wrong: &mut Vec<String>) -> usize {
    if path.is_dir() {
        let entries = fs::read_dir(path).expect("the sources can be listed");
        return entries.map(|entry| check(layer, &entry.expect("an entry").path(), wrong)).sum();
    }
    if path.file_name().is_some_and(|name| name == "tests.rs")
        || path.components().any(|part| part.as_os_str() == "tests")
    {
        return 0;
    }
    let own = LAYERS.iter().position(|name| *name == layer).expect("a layer");
    let text = fs::read_to_string(path).expect("source is text");
    let outer = named(&text).into_iter().filter(|name| LAYERS[own + 1..].contains(name));
    wrong.extend(outer.map(|name| format!("{}: imports {name}, a layer outside of {layer}", path.display())));
    1
}

#[test]
fn layers_import_inwards() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut wrong, mut files) = (Vec::new(), 0);
    for layer in LAYERS {
        files += check(layer, &sources.join(layer), &mut wrong);
    }
    assert!(files > 50, "{files} files");
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    assert_eq!(named("use crate::state::Event;\n// crate::claims::X\n"), ["state"].into());
    assert_eq!(named("use crate::topology::Gpu;\n#[cfg(test)]\nuse crate::claims::X;\n"), ["topology"].into());
}

#[test]
fn layers_are_the_folders_of_the_core() {
    let sources = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).expect("the sources can be listed");
    let folders = sources.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_dir());
    let folders: BTreeSet<String> = folders.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect();
    assert_eq!(folders, LAYERS.map(str::to_owned).into());
}
