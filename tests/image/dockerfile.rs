//! Reads the image's contents: the Dockerfile's last stage, and the build stage's install command.

/// The image's configuration, and the steps that make its root file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Debian's packages beyond those of the base.
    pub packages: Vec<String>,
    /// The steps after the installation of the packages, in order.
    pub steps: Vec<Step>,
    /// Variables as `NAME=VALUE`.
    pub env: Vec<String>,
    /// The uid and gid of the image's user.
    pub user: (u32, u32),
    pub entrypoint: Vec<String>,
    pub command: Vec<String>,
    /// The build stage's command that installs the files for the last stage, and the folder that it fills.
    pub install: (String, String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Copies to the root all files that the build stage has installed.
    CopyInstalled,
    /// Copies a file of the repository to a path of the image.
    CopyFile(String, String),
    Run(String),
}

impl Image {
    /// The image of the repository's Dockerfile.
    pub fn read() -> Self {
        Self::parse(&text())
    }

    fn parse(text: &str) -> Self {
        let instructions = instructions(text);
        let last = instructions.iter().rposition(|(word, _)| word == "FROM").expect("the Dockerfile has a stage");
        assert_eq!(instructions[last].1, "docker.io/library/debian:bookworm-slim", "the base that rootfs.rs packs");
        let mut image = Self { install: install(&instructions[..last]), ..Self::default() };
        for (word, rest) in &instructions[last + 1..] {
            match word.as_str() {
                "RUN" => match packages(rest) {
                    Some(packages) => image.packages.extend(packages),
                    None => image.steps.push(Step::Run(rest.clone())),
                },
                "COPY" => image.steps.push(copy(rest, &image.install.1)),
                "ENV" => image.env.extend(rest.split_whitespace().map(str::to_owned)),
                "USER" => {
                    let (uid, gid) = rest.split_once(':').expect("USER uid:gid");
                    image.user = (uid.parse().unwrap(), gid.parse().unwrap());
                }
                "ENTRYPOINT" => image.entrypoint = serde_json::from_str(rest).expect("ENTRYPOINT is a list"),
                "CMD" => image.command = serde_json::from_str(rest).expect("CMD is a list"),
                "ARG" | "LABEL" => {}
                other => panic!("tests/image does not know {other} of the Dockerfile"),
            }
        }
        image
    }
}

pub fn text() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Dockerfile")).unwrap()
}

/// The instructions, each on one line, without comments.
pub fn instructions(text: &str) -> Vec<(String, String)> {
    let mut lines: Vec<String> = Vec::new();
    let mut continues = false;
    for line in text.lines().filter(|line| !line.trim_start().starts_with('#') && !line.trim().is_empty()) {
        let (part, more) = line.strip_suffix('\\').map_or((line, false), |part| (part, true));
        if continues {
            lines.last_mut().unwrap().push_str(part);
        } else {
            lines.push(part.to_owned());
        }
        continues = more;
    }
    let split = |line: String| {
        let (word, rest) = line.split_once(char::is_whitespace).expect("an instruction has arguments");
        (word.to_owned(), rest.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    lines.into_iter().map(split).collect()
}

/// The packages of an `apt-get install`.
fn packages(run: &str) -> Option<Vec<String>> {
    let (_, after) = run.split_once("apt-get install ")?;
    let words = after.split(" && ").next().unwrap().split_whitespace();
    Some(words.filter(|word| !word.starts_with('-')).map(str::to_owned).collect())
}

/// The build stage's `make install`, and its DESTDIR.
fn install(build: &[(String, String)]) -> (String, String) {
    let is_install = |(word, rest): &&(String, String)| word == "RUN" && rest.starts_with("make install ");
    let (_, run) = build.iter().find(is_install).expect("the build stage installs the programs");
    let folder =
        run.split_whitespace().find_map(|word| word.strip_prefix("DESTDIR=")).expect("make install has a DESTDIR");
    (run.clone(), folder.to_owned())
}

fn copy(rest: &str, installed: &str) -> Step {
    match rest.split_whitespace().collect::<Vec<_>>()[..] {
        ["--from=build", from, "/"] if from == installed => Step::CopyInstalled,
        [from, to] if !from.starts_with("--") => Step::CopyFile(from.to_owned(), to.to_owned()),
        _ => panic!("tests/image does not know COPY {rest}"),
    }
}
