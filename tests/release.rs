//! The scripts that make a release (`release/`), run with programs of the test build; and the files of the repository
//! that `docker build` gets.

use std::fs;
use std::io::{BufRead, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use tempfile::TempDir;

use crate::chart::helm::{repository, tool};

#[path = "image/dockerfile.rs"]
#[expect(dead_code, reason = "the image's own tests use the rest")]
mod dockerfile;

fn run(command: &mut Command) -> Result<String, String> {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
    if status.success() { Ok(text(stdout)) } else { Err(text(stderr) + &text(stdout)) }
}

/// A repository with one commit of the files on which a release's version depends.
struct Tree {
    folder: TempDir,
    at: PathBuf,
}

impl Tree {
    fn new(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join(name);
        fs::create_dir_all(at.join("lab")).unwrap();
        fs::create_dir_all(at.join("charts")).unwrap();
        for path in [".gitignore", "release", "charts/linkwise", "Cargo.toml", "lab/Cargo.toml", "CHANGELOG.md"] {
            run(Command::new("cp").arg("-R").arg(repository(path)).arg(at.join(path))).unwrap();
        }
        let tree = Self { folder, at };
        tree.git(&["init", "--quiet"]);
        tree.commit();
        tree
    }

    fn git(&self, args: &[&str]) -> String {
        let named =
            ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"];
        let mut git = Command::new("git");
        git.current_dir(&self.at).args(named).args(args);
        git.env("GIT_COMMITTER_DATE", "2026-01-02T03:04:05Z").env("GIT_AUTHOR_DATE", "2026-01-02T03:04:05Z");
        run(&mut git).unwrap()
    }

    fn commit(&self) {
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "--message", "a release"]);
    }

    fn change(&self, path: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.at.join(path)).unwrap();
        assert!(text.contains(from), "{path} has no {from}");
        fs::write(self.at.join(path), text.replacen(from, to, 1)).unwrap();
    }

    fn script(&self, name: &str, args: &[&str]) -> Result<String, String> {
        run(Command::new(self.at.join("release").join(name)).args(args))
    }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[test]
#[cfg_attr(not(has_git), ignore = "no git here")]
fn release_refuses_versions_that_disagree() {
    let chart = "charts/linkwise/Chart.yaml";
    for (path, line, says) in [
        ("lab/Cargo.toml", format!("version = \"{VERSION}\""), "lab/Cargo.toml 9.9.9"),
        (chart, format!("\nversion: {VERSION}"), "version in charts/linkwise/Chart.yaml 9.9.9"),
        (chart, format!("appVersion: {VERSION}"), "appVersion in charts/linkwise/Chart.yaml 9.9.9"),
        ("CHANGELOG.md", format!("\n## {VERSION}"), "the newest section of CHANGELOG.md 9.9.9"),
    ] {
        let tree = Tree::new("clone");
        tree.change(path, &line, &line.replace(VERSION, "9.9.9"));
        let refused = tree.script("version.sh", &[]).unwrap_err();
        assert_eq!(refused, format!("release: Cargo.toml has version {VERSION}, {says}"));
    }
    let tree = Tree::new("clone");
    tree.git(&["tag", "v9.9.9"]);
    let refused = tree.script("version.sh", &[]).unwrap_err();
    assert_eq!(refused, format!("release: Cargo.toml has version {VERSION}, the tag 9.9.9"));
}

#[test]
#[cfg_attr(not(has_git), ignore = "no git here")]
fn untagged_tree_is_a_snapshot_and_is_not_published() {
    let tree = Tree::new("clone");
    let commit = tree.git(&["rev-parse", "--short=12", "HEAD"]);
    assert_eq!(tree.script("version.sh", &[]).unwrap(), format!("{VERSION}-snapshot.g{commit}"));
    let owner = fs::read_to_string(tree.at.join("release/owner")).unwrap();
    fs::write(tree.at.join("release/owner"), "OWNER\n").unwrap();
    let refused = tree.script("publish.sh", &["image"]).unwrap_err();
    assert!(refused.contains("release/owner is still the placeholder"), "{refused}");
    fs::write(tree.at.join("release/owner"), "somebody\n").unwrap();
    if owner.trim() != "somebody" {
        assert_eq!(tree.script("version.sh", &[]).unwrap(), format!("{VERSION}-snapshot.g{commit}.dirty"));
    }
    let refused = tree.script("publish.sh", &["image"]).unwrap_err();
    assert!(refused.contains("is a snapshot"), "{refused}");
    tree.git(&["commit", "--quiet", "--all", "--allow-empty", "--message", "an owner"]);
    tree.git(&["tag", &format!("v{VERSION}")]);
    assert_eq!(tree.script("version.sh", &[]).unwrap(), VERSION);
    assert_eq!(tree.script("publish.sh", &["image"]).unwrap(), format!("ghcr.io/somebody/linkwise:v{VERSION}"));
    // bash imports these functions from its environment; they replace the programs.
    let mut push = Command::new(tree.at.join("release/publish.sh"));
    push.env("BASH_FUNC_docker%%", "() { echo \"$@\"; }").env("BASH_FUNC_jq%%", "() { :; }");
    let docker = run(push.args(["push-image", "linux/amd64"])).unwrap();
    assert!(docker.contains(" --sbom=true --provenance=mode=max --push "), "{docker}");
    tree.change("CHANGELOG.md", "# Changelog", "# Changes");
    assert!(tree.script("version.sh", &[]).unwrap_err().contains("files were changed"));
}

#[test]
#[cfg_attr(not(all(has_git, has_helm)), ignore = "git or helm is missing: make tools brings helm")]
fn chart_package_depends_on_the_commit_alone() {
    let helm = tool("helm");
    let packed = ["clone", "another-clone"].map(|name| {
        let tree = Tree::new(name);
        let pack = tree.at.join("release/chart.sh");
        run(Command::new(pack).args([VERSION, "out"]).env("HELM", &helm).current_dir(tree.folder.path())).unwrap();
        fs::read(tree.folder.path().join(format!("out/linkwise-chart-{VERSION}.tgz"))).unwrap()
    });
    assert!(packed[0] == packed[1]);
}

/// Debian's docker-registry on the loopback, with its files in a folder.
struct Registry {
    process: Child,
    address: String,
    // If this were closed, the registry would end when it logs.
    _log: BufReader<ChildStderr>,
}

impl Registry {
    fn start(program: &Path, folder: &Path) -> Self {
        let configuration = folder.join("registry.yml");
        let files = folder.join("registry");
        let text = format!(
            "{{version: 0.1, storage: {{filesystem: {{rootdirectory: {files:?}}}}}, http: {{addr: '127.0.0.1:0'}}}}"
        );
        fs::write(&configuration, text).unwrap();
        let mut serve = Command::new(program);
        serve.arg("serve").arg(configuration).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = serve.spawn().unwrap();
        let mut log = BufReader::new(process.stderr.take().unwrap());
        let mut lines = log.by_ref().lines().map(Result::unwrap);
        let address = lines.find_map(|line| Some(line.split_once("listening on ")?.1.split('"').next()?.to_owned()));
        let address = address.expect("the registry ended");
        Self { process, address, _log: log }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[cfg_attr(
    not(all(has_git, has_helm, has_docker_registry)),
    ignore = "git, helm or docker-registry is missing: make tools brings the last two"
)]
fn pushed_chart_is_pulled_as_it_was_packed() {
    let (helm, registry) = (tool("helm"), tool("docker-registry"));
    let tree = Tree::new("clone");
    fs::write(tree.at.join("release/owner"), "somebody\n").unwrap();
    tree.git(&["commit", "--quiet", "--all", "--message", "an owner"]);
    tree.git(&["tag", &format!("v{VERSION}")]);
    let registry = Registry::start(&registry, tree.folder.path());
    let script = |name: &str, args: &[&str]| {
        let mut command = Command::new(tree.at.join("release").join(name));
        run(command.args(args).current_dir(&tree.at).env("HELM", &helm).env("LINKWISE_REGISTRY", &registry.address))
    };
    script("chart.sh", &[VERSION, "target/release-files"]).unwrap();
    script("publish.sh", &["push-chart", "--plain-http"]).unwrap();
    let chart = format!("oci://{}/charts/linkwise", registry.address);
    let pulled = tree.folder.path();
    let mut pull = Command::new(helm);
    pull.args(["pull", &chart, "--version", VERSION, "--plain-http", "--destination"]).arg(pulled);
    let Output { status, stderr, .. } = pull.output().unwrap();
    let printed = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{printed}");
    let files = tree.at.join("target/release-files");
    let packed = fs::read(files.join(format!("linkwise-chart-{VERSION}.tgz"))).unwrap();
    assert!(fs::read(pulled.join(format!("linkwise-{VERSION}.tgz"))).unwrap() == packed);
    let named = fs::read_to_string(files.join("chart.digest")).unwrap();
    let digest = named.trim().strip_prefix(&format!("{}/charts/linkwise@", registry.address)).unwrap();
    assert!(digest.starts_with("sha256:") && printed.contains(digest), "{named}: {printed}");
}

#[test]
#[cfg_attr(
    not(all(has_git, has_clone, has_helm, has_jq)),
    ignore = "git, a clone, helm or jq is missing: make tools brings helm"
)]
fn packed_release_is_reproducible_with_valid_sums() {
    let helm = tool("helm");
    let folder = tempfile::tempdir().unwrap();
    let built = folder.path().join("built");
    fs::create_dir(&built).unwrap();
    // Scripts stand for the programs of this build, which have all their symbols and take long to compress.
    let program = format!("#!/bin/sh\nexec '{}' \"$@\"\n", env!("CARGO_BIN_EXE_linkwise"));
    for name in ["linkwise", "linkwise-lab"] {
        fs::write(built.join(name), &program).unwrap();
        fs::set_permissions(built.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let packed = ["one", "other"].map(|name| {
        let out = folder.path().join(name);
        let mut pack = Command::new(repository("release/pack.sh"));
        pack.arg(&out).arg(format!("x86_64={}", built.display())).arg(format!("aarch64={}", built.display()));
        pack.env("HELM", &helm).env_remove("MAKEFLAGS").env_remove("MAKELEVEL").env("CARGO_NET_OFFLINE", "true");
        run(&mut pack).unwrap();
        run(Command::new("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).current_dir(&out)).unwrap();
        (fs::read_to_string(out.join("SHA256SUMS")).unwrap(), out)
    });
    let [(sums, out), (other_sums, _)] = &packed;
    assert_eq!(sums, other_sums);
    assert_eq!(sums.lines().count(), 4, "{sums}");
    let archive = sums.split_whitespace().find(|word| word.ends_with("-aarch64.tar.gz")).unwrap();
    let files = run(Command::new("tar").arg("-tzf").arg(out.join(archive))).unwrap();
    for file in
        ["bin/linkwise-lab", "share/man/man1/linkwise.1", "third-parties/LICENCES", "third-parties/rust-library.html"]
    {
        assert!(files.lines().any(|line| line.ends_with(file)), "{file}");
    }
    let sbom = sums.split_whitespace().find(|word| word.ends_with(".cdx.json")).unwrap();
    let sbom: serde_json::Value = serde_json::from_slice(&fs::read(out.join(sbom)).unwrap()).unwrap();
    let tokio = sbom["components"].as_array().unwrap().iter().find(|one| one["name"] == "tokio").unwrap();
    assert_eq!(tokio["hashes"][0]["content"].as_str().unwrap().len(), 64, "{tokio}");
}

#[test]
#[cfg_attr(not(all(has_shellcheck, has_actionlint)), ignore = "no shellcheck or no actionlint: make tools brings them")]
fn workflows_and_scripts_of_a_release_are_sound() {
    let scripts = fs::read_dir(repository("release")).unwrap().map(|entry| entry.unwrap().path());
    let scripts: Vec<PathBuf> = scripts.filter(|path| path.extension().is_some_and(|name| name == "sh")).collect();
    let shellcheck = tool("shellcheck");
    run(Command::new(&shellcheck).arg("-x").args(&scripts).current_dir(repository(""))).unwrap();
    let workflows = fs::read_dir(repository(".github/workflows")).unwrap().map(|entry| entry.unwrap().path());
    let workflows: Vec<PathBuf> = workflows.collect();
    // Actions are named by commit, because a tag can be moved. The same Rust builds programs and image.
    let dockerfile = dockerfile::text();
    let rust = rust_versions(&dockerfile).next().expect("the Dockerfile names no Rust image");
    assert_eq!(rust.split('.').count(), 3, "a tag that moves: {rust}");
    for path in &workflows {
        let text = fs::read_to_string(path).unwrap();
        rust_versions(&text).for_each(|other| assert_eq!(other, rust, "{}", path.display()));
        let uses = text.lines().filter_map(|line| line.trim().trim_start_matches("- ").strip_prefix("uses: "));
        for action in uses {
            let commit = action.split_once('@').unwrap().1.split(' ').next().unwrap();
            assert!(commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit()), "{action}");
        }
    }
    run(Command::new(tool("actionlint")).arg("-shellcheck").arg(shellcheck).args(&workflows)).unwrap();
}

/// The Rust versions of the images that a text names.
fn rust_versions(text: &str) -> impl Iterator<Item = &str> {
    text.split("docker.io/library/rust:").skip(1).filter_map(|rest| rest.split('-').next())
}

/// The sources and the target of a COPY from the repository; `None` for a COPY with options.
fn copied(rest: &str) -> Option<(Vec<&str>, &str)> {
    let mut words: Vec<&str> = rest.split_whitespace().collect();
    let place = words.pop()?;
    (!words.iter().any(|word| word.starts_with("--"))).then_some((words, place))
}

/// All files at a path of the repository.
fn files(path: &Path) -> Vec<PathBuf> {
    if !path.is_dir() {
        return vec![path.to_owned()];
    }
    fs::read_dir(path).unwrap().flat_map(|entry| files(&entry.unwrap().path())).collect()
}

/// Returns true if docker sends this path: no pattern of .dockerignore matches the path or a folder above it, or the
/// last that does begins with `!`.
fn is_let_through(patterns: &str, path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    let is_at = |pattern: &str| {
        let mut pairs = pattern.split('/').zip(&parts);
        pattern.split('/').count() <= parts.len() && pairs.all(|(glob, part)| glob == "*" || glob == *part)
    };
    let mut lines = patterns.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let last = lines.rfind(|line| is_at(line.trim_start_matches('!')));
    last.is_none_or(|line| line.starts_with('!'))
}

#[test]
fn dockerignore_keeps_nothing_from_the_dockerfile() {
    let ignored = fs::read_to_string(repository(".dockerignore")).unwrap();
    let text = dockerfile::text();
    let mut sent = 0;
    for (_, rest) in dockerfile::instructions(&text).iter().filter(|(word, _)| word == "COPY") {
        for source in copied(rest).map_or_else(Vec::new, |(sources, _)| sources) {
            assert!(repository(source).exists(), "no {source}");
            for file in files(&repository(source)) {
                let path = file.strip_prefix(repository("")).unwrap().to_str().unwrap();
                assert!(is_let_through(&ignored, path), ".dockerignore keeps {path} from COPY {rest}");
                sent += 1;
            }
        }
    }
    assert!(sent > 100, "{sent}");
    for kept in ["target/release/linkwise", "manifests/base/kustomization.yaml", "release/build.sh", ".git/HEAD"] {
        assert!(!is_let_through(&ignored, kept), "{kept}");
    }
}

#[test]
fn dockerfile_layer_of_dependencies_is_a_workspace() {
    let (folder, text) = (tempfile::tempdir().unwrap(), dockerfile::text());
    let at = |place: &str| folder.path().join(place);
    let mut built = String::new();
    for (word, rest) in dockerfile::instructions(&text) {
        match word.as_str() {
            "COPY" => {
                let (sources, place) = copied(&rest).unwrap();
                for source in sources {
                    let to = if place.ends_with('/') { at(place).join(source) } else { at(place) };
                    fs::create_dir_all(to.parent().unwrap()).unwrap();
                    run(Command::new("cp").arg("-R").arg(repository(source)).arg(to)).unwrap();
                }
            }
            "RUN" if rest.contains("cargo build") => {
                built = rest;
                break;
            }
            _ => {}
        }
    }
    let (layout, _) = built.split_once("&& cargo build --release --locked --bin linkwise").unwrap();
    run(Command::new("sh").args(["-euc", layout.trim()]).current_dir(folder.path())).unwrap();
    let mut metadata = Command::new(env!("CARGO"));
    metadata.args(["metadata", "--format-version=1", "--no-deps", "--offline", "--locked"]).current_dir(folder.path());
    let read: serde_json::Value = serde_json::from_str(&run(&mut metadata).unwrap()).unwrap();
    let members = read["packages"].as_array().unwrap();
    let linkwise = members.iter().find(|package| package["name"] == "linkwise").unwrap();
    for target in linkwise["targets"].as_array().unwrap().iter().filter(|target| target["kind"][0] != "test") {
        assert!(Path::new(target["src_path"].as_str().unwrap()).exists(), "{target}");
    }
    // If the versions were not those of Cargo.lock, a build of the layer would fail because of --locked.
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--workspace", "--offline", "--locked", "--quiet"]).current_dir(folder.path());
    run(&mut tree).unwrap();
}
