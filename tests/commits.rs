//! `.ci/commits`, which checks the form of commits, run on repositories with one commit since a release.

use std::path::Path;
use std::process::Command;

use crate::chart::helm::repository;

fn git(folder: &Path, words: &[&str]) {
    let identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"];
    let output = Command::new("git").arg("-C").arg(folder).args(identity).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
}

/// The complaints about a commit with this message, the only one since a release.
fn complaints(message: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    git(folder.path(), &["init", "--quiet"]);
    for message in ["of any form; and before the release", message] {
        git(folder.path(), &["commit", "--quiet", "--allow-empty", "--message", message]);
        if message.starts_with("of any form") {
            git(folder.path(), &["tag", "v1.0.0"]);
        }
    }
    let output = Command::new(repository(".ci/commits")).current_dir(folder.path()).output().unwrap();
    let lines: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(output.status.success(), lines == ["commits: 1 since v1.0.0 have their form"], "{lines:?}");
    if output.status.success() { Vec::new() } else { lines }
}

#[test]
fn misformed_commit_is_refused_with_its_fault() {
    let body = "\n\nA claim without a checkpoint lost its spec. The sweep keeps it now.";
    let subject = "claims: keep CDI specs of claims without a checkpoint";
    assert_eq!(complaints(&format!("{subject}{body}")), [""; 0]);
    for (message, complaint) in [
        (format!("{subject}, and of those with one{body}"), "72 are allowed"),
        (format!("keep CDI specs of claims{body}"), "does not begin with 'PART: '"),
        (format!("claims: keep specs; sweep others{body}"), "a semicolon"),
        (format!("claims: keep specs.{body}"), "a full stop"),
        (format!("claims: words of errors{body}"), "'words'"),
        ("claims: keep specs".to_owned(), "the body does not say"),
        (format!("claims: keep specs\n\n{}", "long line ".repeat(9)), "80 are allowed"),
    ] {
        let complaints = complaints(&message);
        assert!(complaints.len() == 1 && complaints[0].contains(complaint), "{message}: {complaints:?}");
    }
}
