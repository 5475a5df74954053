//! The bounds of XML files, and broken texts.

use super::*;

const LIMITS: Limits = Limits { depth: 28, elements: 1 << 14, can_have_text: false };

fn read(text: &str) -> Result<(), XmlError> {
    check(document(text)?.root_element(), &LIMITS)
}

fn refusal(text: &str) -> String {
    let message = read(text).unwrap_err().to_string();
    assert!(!message.contains('\n') && message.len() < 300, "not one short line: {message}");
    message
}

#[test]
fn elements_have_lines_and_values() {
    let text = "\u{feff}<?xml version='1.0'?>\n<!-- <x> =========================================== -->\n\
                <system version=\"1\">\n  <cpu numaid='0'\n    affinity=\"&quot;&#x41;\"/>\n\n  <cpu/>\n</system>\n\
                <!-- end -->\n";
    let document = document(text).unwrap();
    let system = document.root_element();
    assert_eq!((name(system), line(system), system.attribute("version")), ("system", 3, Some("1")));
    let cpus: Vec<Element<'_>> = below(system).collect();
    assert_eq!(cpus.iter().map(|cpu| line(*cpu)).collect::<Vec<_>>(), [4, 7]);
    assert_eq!(cpus.iter().map(|cpu| cpu.attribute("affinity")).collect::<Vec<_>>(), [Some("\"A"), None]);
    assert!(read(text).is_ok());
}

#[test]
fn broken_text_is_refused_with_line() {
    for (text, line, word) in [
        ("<a>\n<b>\n</a>", 3, "b"),
        ("<a>\n<b", 2, "the text ends"),
        ("<a>\n\n<b c=\"1>\n</a>", 4, "not XML: expected"),
        ("<a>\n<b>\n", 3, "the text ends before its elements are closed"),
        ("<a>\n<b c></b></a>", 2, "not XML"),
        ("<a>\n<b c=1/></a>", 2, "not XML"),
        ("<a>\n<b c='&lol;'/></a>", 2, "lol"),
        ("<a>\n<b c='1' c='2'/></a>", 2, "attribute 'c'"),
        ("<a/>\n<a/>", 2, "not XML"),
        ("<a/>\nwords", 2, "not XML"),
        ("<a>\n\n  words\n</a>", 3, "'words'"),
        ("<!-- nothing -->\n", 2, "no element"),
        ("\n</a>", 2, "not XML"),
    ] {
        let message = refusal(text);
        assert!(message.starts_with(&format!("line {line}: ")) && message.contains(word), "{text:?}: {message}");
    }
}

#[test]
fn documents_beyond_limits_are_refused() {
    let laughs = "<!DOCTYPE a [\n<!ENTITY b \"ha\">\n<!ENTITY c \"&b;&b;\">\n]>\n<a d=\"&c;\"/>";
    assert!(refusal(laughs).contains("entities"));

    let nest = |depth: usize| "<a>".repeat(depth) + &"</a>".repeat(depth);
    assert!(read(&nest(LIMITS.depth)).is_ok());
    assert!(refusal(&nest(LIMITS.depth + 1)).contains("elements nest deeper than 28"));
    assert!(refusal(&nest(1 << 17)).contains("deeper"));
    assert!(refusal(&nest(1 << 20)).contains("more than 262144 elements"));

    let wide = |count: usize| format!("<a>{}</a>", "<b/>".repeat(count - 1));
    assert!(read(&wide(LIMITS.elements)).is_ok());
    assert!(refusal(&wide(LIMITS.elements + 1)).contains("more than 16384 elements"));

    let long = |bytes: usize| format!("<a>{}</a>", " ".repeat(bytes - 7));
    assert!(read(&long(MAX_BYTES)).is_ok());
    assert!(refusal(&long(MAX_BYTES + 1)).contains("more than 16 MiB"));

    let words = "<a>1 2 3<b/></a>";
    let worded = Limits { can_have_text: true, ..LIMITS };
    assert!(check(document(words).unwrap().root_element(), &worded).is_ok());
    assert!(refusal(words).contains("'1 2 3'"));

    let attributes =
        |count: usize| format!("<a {}/>", (0..count).map(|n| format!("b{n}=''")).collect::<Vec<_>>().join(" "));
    assert!(read(&attributes(MAX_ATTRIBUTES)).is_ok());
    assert!(refusal(&attributes(MAX_ATTRIBUTES + 1)).contains("attributes"));
    assert!(refusal(&attributes(1 << 18)).contains("attributes"));

    assert!(read(&format!("<{}/>", "x".repeat(1 << 20))).is_ok());
    assert!(refusal(&format!("<a><{}/>", "x".repeat(1 << 20))).contains("ends"));
}

#[test]
fn large_nonsense_is_refused() {
    for junk in ["<", "<<a>", "<a ", "&", "<!", "<!--", "<![CDATA[", "\u{0}", "</a>", "<a/>", "<!DOCTYPE ["] {
        refusal(&format!("<system>{}", junk.repeat((8 << 20) / junk.len())));
        // Without an element around it, junk may be accepted, but each read ends.
        let _ = read(&junk.repeat((1 << 20) / junk.len()));
    }
}

#[test]
fn truncated_documents_are_refused() {
    let text = "<?xml version=\"1.0\"?>\n<a b=\"&lt;\u{e9}\"><!-- c --><d e='1'/></a>";
    for cut in (0..text.len()).filter_map(|cut| text.get(..cut)) {
        assert!(read(cut).is_err(), "{cut}");
    }
    assert!(read(text).is_ok());
}
