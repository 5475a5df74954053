//! Makes the image's root file system once for all tests: Debian's packages by mmdebstrap, the rest by the Dockerfile's
//! own steps. The programs are those of `make build`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use crate::dockerfile::{Image, Step};
use crate::helm::repository;

/// The folder of the files that outlast a test: packages, the root file system and runc's state.
const FOLDER: &str = "target/image";

/// The image and the folder with its root file system.
#[derive(Clone, Debug)]
pub struct Unpacked {
    pub image: Image,
    pub folder: PathBuf,
    /// Held until the process ends, because another run would replace the folder under running containers.
    _lock: Arc<File>,
}

/// Makes the root file system on the first call; panics with the command that failed.
pub fn unpacked() -> &'static Unpacked {
    static MADE: OnceLock<Unpacked> = OnceLock::new();
    MADE.get_or_init(|| {
        fs::create_dir_all(repository(FOLDER)).unwrap();
        let lock = File::create(repository(FOLDER).join("lock")).unwrap();
        lock.lock().unwrap();
        let image = Image::read();
        let folder = make(&image);
        Unpacked { image, folder, _lock: Arc::new(lock) }
    })
}

fn make(image: &Image) -> PathBuf {
    let base = base(&image.packages);
    let root = repository(FOLDER).join("root");
    run("rm", ["-rf".as_ref(), "--one-file-system".as_ref(), root.as_os_str()]);
    fs::create_dir(&root).unwrap();
    run("tar", ["-xf".as_ref(), base.as_os_str(), "-C".as_ref(), root.as_os_str()]);
    for step in &image.steps {
        match step {
            Step::CopyInstalled => copy(&installed(image).join("."), &root),
            Step::CopyFile(from, to) => {
                let to = below(&root, to);
                fs::create_dir_all(to.parent().unwrap()).unwrap();
                fs::copy(repository(from), to).unwrap();
            }
            Step::Run(command) => run("chroot", [root.as_os_str(), "sh".as_ref(), "-c".as_ref(), command.as_ref()]),
        }
    }
    root
}

/// A tar file of Debian's packages: those of minbase, as in debian:bookworm-slim, and the image's. The file's name
/// lists the image's packages, so that later calls find the file and fetch nothing.
fn base(packages: &[String]) -> PathBuf {
    let file = repository(FOLDER).join(format!("base-{}.tar", packages.join("-")));
    if !file.exists() {
        // The output is a tar file, because a killed mmdebstrap leaves the host's /proc mounted in a folder.
        let (draft, tool) = (repository(FOLDER).join("draft.tar"), repository("target/tools/mmdebstrap"));
        assert!(tool.exists(), "no mmdebstrap: run `make tools`");
        let include = format!("--include={}", packages.join(","));
        let args: [&OsStr; 5] =
            ["--quiet".as_ref(), "--variant=minbase".as_ref(), include.as_ref(), "bookworm".as_ref(), draft.as_ref()];
        run(tool, args);
        fs::rename(&draft, &file).unwrap();
    }
    file
}

/// Runs the build stage's install command into a folder of the tests, which it returns. LINKWISE_IMAGE_BUILT can
/// name another folder of programs, such as target/debug.
fn installed(image: &Image) -> PathBuf {
    #[expect(clippy::disallowed_methods, reason = "the environment names the folder of programs")]
    let built = std::env::var("LINKWISE_IMAGE_BUILT").unwrap_or_else(|_| "target/release".to_owned());
    let folder = repository(FOLDER).join("installed");
    run("rm", ["-rf".as_ref(), folder.as_os_str()]);
    let (command, destination) = &image.install;
    let command = command
        .replace(&format!("DESTDIR={destination}"), &format!("DESTDIR={}", folder.display()))
        .replace("BUILT=target/release", &format!("BUILT={built}"));
    run("sh", ["-c", &format!("cd '{}' && MAKEFLAGS= {command}", repository("").display())]);
    folder
}

fn copy(from: &Path, to: &Path) {
    run("cp", ["-a".as_ref(), from.as_os_str(), to.as_os_str()]);
}

/// An absolute path of the image, below a folder.
pub fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// Runs a program that has to succeed.
pub fn run<A: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = A>) {
    let mut command = Command::new(program);
    command.args(args);
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{stderr}", output.status);
}
