//! The pages that tell a person to type something, and what they say to type.
//!
//! A code block with a command in it has nothing but commands, comments, and where commands begin with `$ ` what they
//! print. A comment such as `# Needs a cluster; not tried.` marks what follows it in its block.

use std::path::Path;

use crate::commands::helm::repository;
use crate::commands::shell::{is_command, pipeline};

/// A command of a page.
#[derive(Clone, Debug)]
pub struct Typed {
    /// Where it is: `docs/chart.md:10`.
    pub place: String,
    /// The whole text, lines that go on joined.
    pub text: String,
    /// What it needs, and where it was tried, where no test can run it.
    pub mark: Option<String>,
    /// What the page says that it prints.
    pub prints: Option<String>,
    /// The number of its block in its page.
    pub block: usize,
}

impl Typed {
    /// The commands of its pipeline.
    pub fn parts(&self) -> Vec<Vec<String>> {
        pipeline(&self.text)
    }
}

/// Every page but the changelog, which says what was.
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
        // Indented text right below text goes on with it.
        is_text_before = !line.trim().is_empty() && !is_code;
    }
    blocks
}

/// Whether a comment is a mark, and a good one: what is needed, then where it was tried or which test comes close.
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
    assert!(is_good, "no mark: {comment}");
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
        let prompts = lines.iter().any(|(_, line)| line.trim_start().starts_with("$ "));
        let mut marked = None;
        let mut goes_on = false;
        let first = all.len();
        for (number, line) in &lines {
            let place = format!("{page}:{number}");
            let line = line.as_str();
            let typed = line.trim_start().trim_start_matches("$ ");
            let open = all[first..].last().is_some_and(|command| command.text.matches('\'').count() % 2 == 1);
            if goes_on || (open && !prompts) {
                let command = all.last_mut().unwrap();
                command.text = format!("{} {}", command.text.trim_end_matches('\\').trim_end(), line.trim());
            } else if line.trim_start().starts_with('#') {
                marked = mark(line.trim_start()).or(marked);
                continue;
            } else if prompts && !line.trim_start().starts_with("$ ") {
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
                let (text, mark) = (typed.to_owned(), marked.clone());
                all.push(Typed { place, text, mark, prints: None, block });
            }
            goes_on = all.last().unwrap().text.ends_with('\\');
        }
    }
    all
}

/// The commands in backticks within a page's text, with their line. They are checked by name only.
pub fn inline(page: &str, text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with("    ")) {
        let spans = line.split('`').skip(1).step_by(2).filter(|span| is_command(span));
        found.extend(spans.map(|span| (format!("{page}:{}", number + 1), span.to_owned())));
    }
    found
}
