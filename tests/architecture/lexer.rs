//! As much of Rust's syntax as the layering test needs: names and paths, with comments and
//! literals gone, `use` groups spread out, and test code marked.

/// A path as the code says it: `std::time::Instant` out of `use std::time::{self, Instant}`.
#[derive(Debug)]
pub struct Name {
    /// The line it starts on, from 1.
    pub line: usize,
    /// Whether it stands in `#[cfg(test)]` code.
    pub test: bool,
    /// Whether `!` follows.
    pub is_macro: bool,
    /// Whether it is called on something: `.name` or `Type::name`.
    pub is_member: bool,
    segments: Vec<String>,
}

impl Name {
    /// Whether the segments of `run` follow one another in it.
    pub fn has(&self, run: &[&str]) -> bool {
        self.segments.windows(run.len()).any(|window| window.iter().zip(run).all(|(a, b)| a == b))
    }

    /// Its last segment.
    pub fn last(&self) -> Option<&str> {
        self.segments.last().map(String::as_str)
    }

    /// As one would write it.
    pub fn text(&self) -> String {
        self.segments.join("::")
    }

    /// Whether it starts at the crate's root.
    pub fn is_rooted(&self) -> bool {
        self.segments.first().is_some_and(|first| first == "crate")
    }

    /// The top-level module it leads to, seen from a file `depth` modules below the root.
    pub fn target(&self, depth: usize) -> Option<&str> {
        let after = if self.is_rooted() {
            1
        } else {
            let start = self.segments.iter().take_while(|segment| *segment == "self").count();
            let supers = self.segments.iter().skip(start).take_while(|segment| *segment == "super").count();
            if supers == 0 || supers < depth {
                return None;
            }
            start + supers
        };
        self.segments.get(after).map(String::as_str)
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Path,
    Sign(char),
}

/// All names of a file's text.
pub fn names(text: &str) -> Vec<Name> {
    let tokens = tokens(text);
    let test = test_code(&tokens);
    let mut found = Vec::new();
    let mut at = 0;
    while let Some((line, token)) = tokens.get(at) {
        if !matches!(token, Token::Word(_)) {
            at += 1;
            continue;
        }
        let member = at > 0 && tokens[at - 1].1 == Token::Sign('.');
        let first = found.len();
        let end = path(&tokens, at, &[], &mut |segments, line| {
            let is_member = member || segments.len() > 1;
            found.push(Name { line, test: test[at], is_macro: false, is_member, segments });
        });
        if let (Some((_, Token::Sign('!'))), [name]) = (tokens.get(end), &mut found[first..]) {
            name.is_macro = true;
        }
        debug_assert!(end > at, "line {line}");
        at = end;
    }
    found
}

/// Reads one path from `at`, groups spread out, and gives each to `give`; returns where it ends.
fn path(
    tokens: &[(usize, Token)],
    mut at: usize,
    prefix: &[String],
    give: &mut dyn FnMut(Vec<String>, usize),
) -> usize {
    let mut segments = prefix.to_vec();
    let line = tokens[at].0;
    while let Some((_, Token::Word(word))) = tokens.get(at) {
        segments.push(word.clone());
        at += 1;
        if !matches!(tokens.get(at), Some((_, Token::Path))) {
            break;
        }
        match tokens.get(at + 1) {
            Some((_, Token::Word(_))) => at += 1,
            Some((_, Token::Sign('{'))) => return group(tokens, at + 2, &segments, give),
            _ => break,
        }
    }
    give(segments, line);
    at
}

/// Reads a `use` group from behind its brace; returns where it ends.
fn group(
    tokens: &[(usize, Token)],
    mut at: usize,
    prefix: &[String],
    give: &mut dyn FnMut(Vec<String>, usize),
) -> usize {
    while let Some((line, token)) = tokens.get(at) {
        at = match token {
            Token::Sign('}') => return at + 1,
            Token::Word(word) if word == "as" => at + 2,
            Token::Word(_) => path(tokens, at, prefix, give),
            Token::Sign('*') => {
                give(prefix.to_vec(), *line);
                at + 1
            }
            _ => at + 1,
        };
    }
    at
}

/// Which tokens belong to items under `#[cfg(test)]` or `#[test]`.
fn test_code(tokens: &[(usize, Token)]) -> Vec<bool> {
    let mut test = vec![false; tokens.len()];
    let mut at = 0;
    while at < tokens.len() {
        if !is_test_attribute(&tokens[at..]) {
            at += 1;
            continue;
        }
        // The item ends at its `;` or with its braces.
        let mut depth = 0_usize;
        while let Some((_, token)) = tokens.get(at) {
            test[at] = true;
            at += 1;
            match token {
                Token::Sign('{' | '(' | '[') => depth += 1,
                Token::Sign(')' | ']') => depth = depth.saturating_sub(1),
                Token::Sign('}') if depth <= 1 => break,
                Token::Sign('}') => depth -= 1,
                Token::Sign(';') if depth == 0 => break,
                _ => {}
            }
        }
    }
    test
}

fn is_test_attribute(tokens: &[(usize, Token)]) -> bool {
    let text: String = tokens
        .iter()
        .take(7)
        .map(|(_, token)| match token {
            Token::Word(word) => word.clone(),
            Token::Path => "::".to_owned(),
            Token::Sign(sign) => sign.to_string(),
        })
        .collect();
    text == "#[cfg(test)]" || text.starts_with("#[test]")
}

fn tokens(text: &str) -> Vec<(usize, Token)> {
    let chars: Vec<char> = text.chars().collect();
    let peek = |at: usize| chars.get(at).copied().unwrap_or('\0');
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < chars.len() {
        let start = at;
        match (peek(at), peek(at + 1)) {
            ('/', '/') => {
                while at < chars.len() && peek(at) != '\n' {
                    at += 1;
                }
            }
            ('/', '*') => at = after_comment(&chars, at),
            ('"', _) => at = after_string(&chars, at),
            ('\'', '\\') => {
                at += 3;
                while at < chars.len() && peek(at) != '\'' {
                    at += 1;
                }
                at += 1;
            }
            ('\'', _) if peek(at + 2) == '\'' => at += 3,
            // A lifetime: its name is none of ours.
            ('\'', _) => {
                at += 1;
                while is_word(peek(at)) {
                    at += 1;
                }
            }
            (':', ':') => {
                tokens.push((line, Token::Path));
                at += 2;
            }
            (digit, _) if digit.is_ascii_digit() => {
                // A suffix such as 0.5f64 is a type that the code names.
                while is_word(peek(at)) || (peek(at) == '.' && peek(at + 1).is_ascii_digit()) {
                    at += 1;
                }
                let number: String = chars[start..at].iter().collect();
                for float in ["f32", "f64"] {
                    if number.ends_with(float) && !number.starts_with("0x") {
                        tokens.push((line, Token::Word(float.to_owned())));
                    }
                }
            }
            (letter, _) if is_word(letter) => {
                while is_word(peek(at)) {
                    at += 1;
                }
                let word: String = chars[start..at].iter().collect();
                match (word.as_str(), peek(at)) {
                    ("r" | "br" | "cr", '"' | '#') => match after_raw_string(&chars, at) {
                        Some(end) => at = end,
                        None => {
                            // A raw identifier, r#async, is a name like any other and no keyword.
                            at += 1;
                            while is_word(peek(at)) {
                                at += 1;
                            }
                        }
                    },
                    ("b" | "c", '"') => at = after_string(&chars, at),
                    // b'x' goes on as a char literal.
                    ("b", '\'') => {}
                    _ => tokens.push((line, Token::Word(word))),
                }
            }
            (space, _) if space.is_whitespace() => at += 1,
            (sign, _) => {
                tokens.push((line, Token::Sign(sign)));
                at += 1;
            }
        }
        let end = at.min(chars.len());
        line += chars[start..end].iter().filter(|char| **char == '\n').count();
    }
    tokens
}

fn is_word(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

fn after_comment(chars: &[char], mut at: usize) -> usize {
    let mut depth = 0;
    while at < chars.len() {
        match chars.get(at..at + 2) {
            Some(['/', '*']) => (depth, at) = (depth + 1, at + 2),
            Some(['*', '/']) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn after_string(chars: &[char], mut at: usize) -> usize {
    at += 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// Behind the raw string whose hashes or quote are at `at`; `None` if it is none.
fn after_raw_string(chars: &[char], at: usize) -> Option<usize> {
    let hashes = chars[at..].iter().take_while(|char| **char == '#').count();
    let mut end = at + hashes;
    if chars.get(end) != Some(&'"') {
        return None;
    }
    loop {
        end += 1;
        let closing = chars.get(end)? == &'"';
        if closing && chars[end + 1..].iter().take(hashes).filter(|char| **char == '#').count() == hashes {
            return Some(end + 1 + hashes);
        }
    }
}
