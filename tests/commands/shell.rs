//! Parses a shell's line: words, pipes and redirections.

/// The programs whose commands in pages are checked.
pub const PROGRAMS: [&str; 10] =
    ["linkwise", "linkwise-lab", "helm", "kubectl", "make", "cargo", "oc", "curl", "docker", "nvidia-smi"];

/// Splits a line into the commands of its pipeline, without comment and redirections.
pub fn pipeline(line: &str) -> Vec<Vec<String>> {
    let mut parts = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    for character in line.chars() {
        match (quote, character) {
            (Some(end), _) if character == end => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(character),
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, '|') => {
                parts.last_mut().unwrap().extend(word.take());
                parts.push(Vec::new());
            }
            (None, _) if character.is_whitespace() => parts.last_mut().unwrap().extend(word.take()),
            (None, _) => word.get_or_insert_default().push(character),
        }
    }
    assert!(quote.is_none(), "a quote is not closed: {line}");
    parts.last_mut().unwrap().extend(word);
    for part in &mut parts {
        if let Some(end) = part.iter().position(|word| word.starts_with('>')) {
            part.truncate(end);
        }
    }
    parts
}

/// The words of a command without the variables before it.
pub fn without_variables(words: &[String]) -> &[String] {
    let is_variable = |word: &&String| {
        word.split_once('=').is_some_and(|(name, _)| name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_'))
    };
    &words[words.iter().take_while(is_variable).count()..]
}

/// Returns true if a line is a command with an argument.
pub fn is_command(line: &str) -> bool {
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    without_variables(&words).first().is_some_and(|word| PROGRAMS.contains(&word.as_str())) && words.len() > 1
}

/// The values of an option, as `--name VALUE`, `--name=VALUE` or `-n VALUE`.
pub fn options<'a>(words: &'a [String], names: &[&str]) -> Vec<&'a str> {
    let mut found = Vec::new();
    for (word, next) in words.iter().zip(words.iter().skip(1).map(Some).chain([None])) {
        if names.contains(&word.as_str()) {
            found.extend(next.map(String::as_str));
        } else if let Some((name, value)) = word.split_once('=')
            && names.contains(&name)
        {
            found.push(value);
        }
    }
    found
}

/// Returns true if the reader has to replace a word: `NODE`, `REGISTRY/linkwise:TAG`, `<pod>`.
pub fn is_placeholder(word: &str) -> bool {
    word.contains('<')
        || (word.len() > 2 && word.bytes().all(|byte| byte.is_ascii_uppercase() || b"_-".contains(&byte)))
}
