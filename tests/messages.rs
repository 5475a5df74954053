//! The golden file of messages: each log line of the levels WARN and ERROR and each error text, in the order of the
//! sources, so that a reader sees side by side what operators read.
//!
//! A message says 'cannot VERB OBJECT: cause', and where a person can act, '; DO THIS'. A state has a short name
//! ('NVML unavailable'). The same event has the same words.

use std::fmt::Write as _;

use proc_macro2::{Delimiter, Group, Literal, TokenStream, TokenTree};

use crate::architecture::sources;

/// Macros that have a message among their arguments.
const MACROS: [&str; 5] = ["anyhow", "bail", "ensure", "error", "warn"];

/// Methods of `anyhow::Context`.
const METHODS: [&str; 2] = ["context", "with_context"];

/// The messages of a file without its tests, each with its kind.
fn messages(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    walk(text.parse().expect("a source file has tokens"), &mut found);
    found
}

fn walk(tokens: TokenStream, found: &mut Vec<(String, String)>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let next = |further: usize| tokens.get(at + further);
        let is_sign = |further, sign| matches!(next(further), Some(TokenTree::Punct(is)) if is.as_char() == sign);
        match (token, next(1), next(2)) {
            (TokenTree::Punct(_), Some(TokenTree::Group(attribute)), _) if is_sign(0, '#') => {
                let parts: Vec<TokenTree> = attribute.stream().into_iter().collect();
                match parts.as_slice() {
                    [TokenTree::Ident(name), TokenTree::Group(condition)]
                        if name == "cfg" && condition.stream().to_string() == "test" =>
                    {
                        let is_end = |token: &TokenTree| match token {
                            TokenTree::Group(body) => body.delimiter() == Delimiter::Brace,
                            TokenTree::Punct(sign) => sign.as_char() == ';',
                            _ => false,
                        };
                        at += tokens.iter().skip(at).position(is_end).unwrap_or(tokens.len());
                    }
                    [TokenTree::Ident(name), TokenTree::Group(arguments)] if name == "error" => {
                        found.extend(message(arguments).map(|text| ("#[error]".to_owned(), text)));
                    }
                    _ => {}
                }
                at += 1;
            }
            (TokenTree::Ident(name), Some(_), Some(TokenTree::Group(arguments)))
                if is_sign(1, '!') && MACROS.iter().any(|known| name == known) =>
            {
                found.extend(message(arguments).map(|text| (format!("{name}!"), text)));
            }
            (TokenTree::Ident(name), Some(TokenTree::Group(arguments)), _)
                if METHODS.iter().any(|known| name == known) =>
            {
                found.extend(message(arguments).or_else(|| of_closure(arguments)).map(|text| (name.to_string(), text)));
            }
            _ => {}
        }
        if let Some(TokenTree::Group(group)) = tokens.get(at) {
            walk(group.stream(), found);
        }
        at += 1;
    }
}

/// The first argument that is a string and nothing else.
fn message(arguments: &Group) -> Option<String> {
    let tokens: Vec<TokenTree> = arguments.stream().into_iter().collect();
    let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(sign) if sign.as_char() == ',');
    tokens.split(is_comma).find_map(|argument| match argument {
        [TokenTree::Literal(literal)] => text(literal),
        _ => None,
    })
}

/// The string of `|| format!("…")`.
fn of_closure(arguments: &Group) -> Option<String> {
    arguments.stream().into_iter().find_map(|token| match token {
        TokenTree::Group(inner) => message(&inner),
        _ => None,
    })
}

fn text(literal: &Literal) -> Option<String> {
    let source = literal.to_string();
    let inner = source.strip_prefix('"')?.strip_suffix('"')?;
    let mut lines = inner.split("\\\n");
    let first = lines.next()?.to_owned();
    Some(lines.fold(first, |text, line| text + line.trim_start()).replace("\\\"", "\"").replace('\n', "\\n"))
}

#[test]
fn messages_are_those_of_the_golden_file() {
    let mut shown = String::new();
    let files = sources(&["src", "crates"]).into_iter().filter(|(path, _)| !path.contains("tests"));
    for (path, text) in files {
        let found = messages(&text);
        if !found.is_empty() {
            writeln!(shown, "\n{path}").unwrap();
        }
        for (kind, text) in found {
            writeln!(shown, "  {kind:<12} {text}").unwrap();
        }
    }
    insta::assert_snapshot!("messages", shown);
}

#[test]
fn messages_are_found_in_macros_attributes_and_contexts() {
    let text = "fn f() {\n  tracing::warn!(gpu = \"x\", %cause, \"cannot read {gpu}: \\\n        too \\\"long\\\"\");\n\
                bail!(\"no\");\n}\n#[error(\"cannot {0}\")]\nstruct E;\nfn g() { h().with_context(|| format!(\"at {x}\
                \"))?; }\n#[cfg(test)]\nmod tests { fn f() { warn!(\"hidden\"); } }\nfn i() { error!(\"seen\"); }\n";
    let found: Vec<String> = messages(text).into_iter().map(|(kind, text)| format!("{kind} {text}")).collect();
    let expected = [
        "warn! cannot read {gpu}: too \"long\"",
        "bail! no",
        "#[error] cannot {0}",
        "with_context at {x}",
        "error! seen",
    ];
    assert_eq!(found, expected);
}
