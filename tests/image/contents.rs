//! Tests of the image's contents.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::helm::repository;
use crate::rootfs::{below, unpacked};

/// The section that release/hot.ld makes.
const SECTION: &str = ".text.hot_linkwise";

#[test]
fn image_has_no_certificates_of_its_own() {
    let root = &unpacked().folder;
    assert!(!below(root, "/etc/ssl/certs").exists(), "the image must trust the cluster's CA only");
    assert!(!below(root, "/usr/share/ca-certificates").exists());
}

#[test]
fn image_has_every_program_with_its_libraries() {
    let root = &unpacked().folder;
    let nvidias = ["nvidia-device-plugin", "gpu-kubelet-plugin", "gpu-feature-discovery", "config-manager"];
    for name in ["linkwise", "mps-control-daemon"].into_iter().chain(nvidias) {
        let program = below(root, "/usr/bin").join(name);
        let mode = std::fs::metadata(&program).unwrap_or_else(|error| panic!("{name}: {error}")).permissions().mode();
        assert_eq!(mode & 0o111, 0o111, "{name}");
        let linked = Command::new("chroot").arg(root).args(["ldd", &format!("/usr/bin/{name}")]).output().unwrap();
        let libraries = String::from_utf8_lossy(&linked.stdout);
        assert!(linked.status.success() && !libraries.contains("not found"), "{name}: {libraries}");
    }
    let entrypoint = &unpacked().image.entrypoint;
    assert!(below(root, &entrypoint[0]).exists(), "{entrypoint:?}");
}

#[test]
fn hot_functions_lie_in_one_section() {
    let program = below(&unpacked().folder, "/usr/bin/linkwise");
    let sections = tool("readelf", &["--sections", "--wide"], &program);
    // The columns: number, name, type, address, offset, size.
    let place = sections.lines().find_map(|line| line.split_once(SECTION)).map(|(_, rest)| rest);
    let place = place.unwrap_or_else(|| panic!("built without release/hot.ld, see the Dockerfile's RUSTFLAGS"));
    let [_, start, _, size] = place.split_whitespace().take(4).collect::<Vec<_>>()[..] else { panic!("{place}") };
    let [start, size] = [start, size].map(|number| u64::from_str_radix(number, 16).unwrap());
    let symbols = tool("nm", &["--defined-only"], &program);
    let functions = symbols.lines().filter_map(|line| {
        let (address, rest) = line.split_once(' ')?;
        let address = u64::from_str_radix(address, 16).ok()?;
        (start..start + size).contains(&address).then(|| rest.split_once(' ').unwrap().1)
    });
    let functions: Vec<&str> = functions.collect();
    let script = std::fs::read_to_string(repository("release/hot.ld")).unwrap();
    let words = script.split_whitespace().filter_map(|word| word.strip_prefix(".text."));
    let patterns: Vec<&str> = words.filter(|pattern| pattern.starts_with('_')).collect();
    assert!(patterns.len() > 100, "release/hot.ld has only {} patterns", patterns.len());
    let absent = |pattern: &&str| !functions.iter().any(|function| is_match(pattern, function));
    let absent: Vec<&str> = patterns.iter().copied().filter(absent).collect();
    assert!(
        absent.len() * 10 <= patterns.len(),
        "{} of {} patterns match no function of the section; make release/hot.ld again as it says: {absent:#?}",
        absent.len(),
        patterns.len()
    );
}

fn tool(name: &str, args: &[&str], program: &std::path::Path) -> String {
    let output = Command::new(name).args(args).arg(program).output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Compares names as the linker does: `*` is any text.
fn is_match(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut last = None;
    for part in parts {
        if let Some(between) = last.replace(part) {
            let Some((_, after)) = rest.split_once(between) else { return false };
            rest = after;
        }
    }
    last.map_or(rest.is_empty(), |part: &str| rest.ends_with(part))
}
