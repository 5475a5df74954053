//! The pages, and the commands in them.
//!
//! A code block with a command has only commands and comments; if its commands begin with `$ `, also their output. A
//! comment such as `# Needs a cluster; not tried.` marks the commands that follow it in its block.

use std::path::Path;

use crate::commands::helm::repository;
use crate::commands::shell::{is_command, pipeline};

/// A command of a page.
#[derive(Clone, Debug)]
pub struct Typed {
    /// The page and line: `docs/chart.md:10`.
    pub place: String,
    /// The whole text; continued lines are joined.
    pub text: String,
    /// The mark, if any: what the command needs, then where it was tried or which test runs it.
    pub mark: Option<String>,
    /// The output in the page.
    pub prints: Option<String>,
    /// The number of its block in its page.
    pub block: usize,
}

impl Typed {
    /// The words of each command of the pipeline.
    pub fn parts(&self) -> Vec<Vec<String>> {
        pipeline(&self.text)
    }
}

/// Every page but the changelog, which describes earlier versions.
pub fn pages() -> Vec<String> {
    let mut pages = Vec::new();
    for folder in ["", "docs", "benches", "manifests", "manifests/examples", "tests"] {
        let entries = std::fs::read_dir(repository(folder)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names = names.filter(|name| name.ends_with(".md") && name != "CHANGELOG.md");
        pages.extend(names.map(|name| Path::new(folder).join(name).to_str().unwrap().to_owned()));
    }
    pages.sort();
    assert!(pages.len() > 30, "{pages:?}");
    pages
}

/// The lines of a page's code blocks with their numbers. An item of a list indents its blocks further.
fn blocks(text: &str) -> Vec<Vec<(usize, String)>> {
    let mut blocks: Vec<Vec<(usize, String)>> = Vec::new();
    let mut last = 0;
    let mut fenced = None;
    let mut is_text_before = false;
    for (number, line) in text.lines().enumerate().map(|(number, line)| (number + 1, line)) {
        if line.trim_start().starts_with("```") {
            fenced = if fenced.is_some() { None } else { Some(number) };
            last = 0;
            continue;
        }
        let is_code = fenced.is_some() || (line.starts_with("    ") && !is_text_before);
        if is_code && !line.trim().is_empty() {
            if last == 0 || (last + 1 != number && fenced.is_none()) {
                blocks.push(Vec::new());
            }
            blocks.last_mut().unwrap().push((number, line.to_owned()));
            last = number;
        }
        // An indented line right below text continues its paragraph.
        is_text_before = !line.trim().is_empty() && !is_code;
    }
    blocks
}

/// Reads a mark ([`Typed::mark`]). Panics at a bad one.
fn mark(comment: &str) -> Option<String> {
    let text = comment.trim_start_matches(['#', ' ']);
    if !text.starts_with("Needs ") && !text.starts_with("Takes ") {
        return None;
    }
    let tried = text.strip_suffix('.').and_then(|text| text.split_once("; ")).map(|(_, tried)| tried);
    let test = |tried: &str| {
        let path = tried.split_once(" runs ").map(|(path, _)| path);
        path.is_some_and(|path| repository(path).is_file())
    };
    let is_good = tried.is_some_and(|tried| {
        ["tried on ", "not tried", "run by hand"].iter().any(|words| tried.starts_with(words)) || test(tried)
    });
    assert!(is_good, "a mark needs `; tried on`, `; not tried`, `; run by hand` or a test: {comment}");
    Some(text.to_owned())
}

/// The commands of a page.
pub fn commands(page: &str, text: &str) -> Vec<Typed> {
    let mut all: Vec<Typed> = Vec::new();
    for (block, lines) in blocks(text).into_iter().enumerate() {
        let command = |line: &str| is_command(line.trim_start().trim_start_matches("$ "));
        if lines.iter().all(|(_, line)| !command(line)) {
            continue;
        }
        let has_prompts = lines.iter().any(|(_, line)| line.trim_start().starts_with("$ "));
        let mut last_mark = None;
        let mut is_continued = false;
        let first = all.len();
        for (number, line) in &lines {
            let place = format!("{page}:{number}");
            let line = line.as_str();
            let typed = line.trim_start().trim_start_matches("$ ");
            let is_in_quote = all[first..].last().is_some_and(|command| command.text.matches('\'').count() % 2 == 1);
            if is_continued || (is_in_quote && !has_prompts) {
                let command = all.last_mut().unwrap();
                command.text = format!("{} {}", command.text.trim_end_matches('\\').trim_end(), line.trim());
            } else if line.trim_start().starts_with('#') {
                last_mark = mark(line.trim_start()).or(last_mark);
                continue;
            } else if has_prompts && !line.trim_start().starts_with("$ ") {
                let printed = line.strip_prefix("    ").unwrap_or(line);
                let prints = all.last_mut().unwrap().prints.get_or_insert_default();
                prints.push_str(printed);
                prints.push('\n');
                continue;
            } else {
                assert!(
                    command(line),
                    "{place}: neither a command of {:?} nor a comment: {line}",
                    crate::commands::shell::PROGRAMS
                );
                let (text, mark) = (typed.to_owned(), last_mark.clone());
                all.push(Typed { place, text, mark, prints: None, block });
            }
            is_continued = all.last().unwrap().text.ends_with('\\');
        }
    }
    all
}

/// The commands in backticks within a page's text, with page and line. Tests check their names only.
pub fn inline(page: &str, text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with("    ")) {
        let spans = line.split('`').skip(1).step_by(2).filter(|span| is_command(span));
        found.extend(spans.map(|span| (format!("{page}:{}", number + 1), span.to_owned())));
    }
    found
}
