//! The bounds, each from both sides.

use super::*;

const LIMITS: Limits = Limits { depth: 28, elements: 1 << 14, bytes: 16 << 20, text: false };

fn tree(text: &str) -> Result<Element, XmlError> {
    super::tree(text, &LIMITS)
}

fn refusal(text: &str) -> String {
    let message = tree(text).unwrap_err().to_string();
    assert!(!message.contains('\n') && message.len() < 300, "not one short line: {message}");
    message
}

#[test]
fn elements_have_lines_and_values() {
    let text = "\u{feff}<?xml version='1.0'?>\n<!-- <x> -->\n<system version=\"1\">\n  <cpu numaid='0'\n    affinity=\"&quot;&#x41;\"/>\n\n  <cpu/>\n</system>\n<!-- end -->\n";
    let system = tree(text).unwrap();
    assert_eq!((system.name.as_str(), system.line, system.get("version")), ("system", 3, Some("1")));
    let lines: Vec<usize> = system.children.iter().map(|cpu| cpu.line).collect();
    assert_eq!(lines, [4, 7]);
    assert_eq!(system.children[0].get("affinity"), Some("\"A"));
    assert_eq!(system.children[1].get("affinity"), None);
    assert_eq!(root(text).unwrap(), "system");
}

#[test]
fn broken_text_is_refused_with_line() {
    for (text, line, word) in [
        ("<a>\n<b>\n</a>", 3, "b"),
        ("<a>\n<b", 2, "not closed"),
        ("<a>\n\n<b c=\"1>\n</a>", 3, "not closed"),
        ("<a>\n<b>\n", 3, "the text ends inside <b>, which opens on line 2"),
        ("<a>\n<b c></b></a>", 2, "not XML"),
        ("<a>\n<b c=1/></a>", 2, "not XML"),
        ("<a>\n<b c='&lol;'/></a>", 2, "lol"),
        ("<a>\n<b c='1' c='2'/></a>", 2, "'c' twice"),
        ("<a/>\n<a/>", 2, "more follows"),
        ("<a/>\nwords", 2, "more follows"),
        ("<a>\n\n  words\n</a>", 3, "'words'"),
        ("<!-- nothing -->\n", 2, "no element"),
        ("\n</a>", 2, "a"),
    ] {
        let message = refusal(text);
        assert!(message.starts_with(&format!("line {line}: ")) && message.contains(word), "{text:?}: {message}");
    }
}

#[test]
fn documents_beyond_limits_are_refused() {
    let laughs = "<!DOCTYPE a [\n<!ENTITY b \"ha\">\n<!ENTITY c \"&b;&b;\">\n]>\n<a d=\"&c;\"/>";
    assert!(refusal(laughs).contains("entities"));
    assert!(root(laughs).unwrap_err().to_string().contains("entities"));

    let nest = |depth: usize| "<a>".repeat(depth) + &"</a>".repeat(depth);
    assert!(tree(&nest(LIMITS.depth)).is_ok());
    assert!(refusal(&nest(LIMITS.depth + 1)).contains("elements nest deeper than 28"));
    assert!(refusal(&nest(1 << 20)).contains("deeper"));

    let wide = |count: usize| format!("<a>{}</a>", "<b/>".repeat(count - 1));
    assert!(tree(&wide(LIMITS.elements)).is_ok());
    assert!(refusal(&wide(LIMITS.elements + 1)).contains("more than 16384 elements"));

    let long = |bytes: usize| format!("<a>{}</a>", " ".repeat(bytes - 7));
    assert!(tree(&long(LIMITS.bytes)).is_ok());
    assert!(refusal(&long(LIMITS.bytes + 1)).contains("more than 16 MiB"));

    let words = "<a>1 2 3<b/></a>";
    assert!(super::tree(words, &Limits { text: true, ..LIMITS }).is_ok());
    assert!(refusal(words).contains("'1 2 3'"));

    let attributes =
        |count: usize| format!("<a {}/>", (0..count).map(|n| format!("b{n}=''")).collect::<Vec<_>>().join(" "));
    assert!(tree(&attributes(MAX_ATTRIBUTES)).is_ok());
    assert!(refusal(&attributes(MAX_ATTRIBUTES + 1)).contains("attributes"));
    assert!(refusal(&attributes(1 << 18)).contains("attributes"));

    let value = |length: usize| format!("<a b=\"{}\"/>", "x".repeat(length));
    assert!(tree(&value(MAX_VALUE)).is_ok());
    assert!(refusal(&value(MAX_VALUE + 1)).contains("longer than 4096"));
    refusal(&format!("<{}/>", "x".repeat(1 << 20)));
}

#[test]
fn large_nonsense_is_refused() {
    for junk in ["<", "<<a>", "<a ", "&", "<!", "<!--", "<![CDATA[", "\u{0}", "</a>", "<a/>", "<!DOCTYPE ["] {
        refusal(&format!("<system>{}", junk.repeat((8 << 20) / junk.len())));
        let text = junk.repeat((1 << 20) / junk.len());
        let _ = (tree(&text), root(&text));
    }
}

#[test]
fn truncated_documents_are_refused() {
    let text = "<?xml version=\"1.0\"?>\n<a b=\"&lt;\u{e9}\"><!-- c --><d e='1'/></a>";
    for cut in (0..text.len()).filter_map(|cut| text.get(..cut)) {
        assert!(tree(cut).is_err(), "{cut}");
    }
    assert!(tree(text).is_ok());
}
