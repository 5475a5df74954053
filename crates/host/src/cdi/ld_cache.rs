//! The dynamic linker's cache of the host, `/etc/ld.so.cache`: finds a library that lies in no usual folder.
//!
//! Called by `libraries`. The format is that of glibc since 2.2, alone or behind the older one
//! (`sysdeps/generic/dl-cache.h` of glibc): a header of 48 bytes, entries of 24, and texts at offsets from the header.

use std::collections::BTreeSet;
use std::path::Path;

use linkwise_system::files;

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";

/// The mask of the architecture in an entry's flags; for 32-bit x86 these bits are 0.
const ARCHITECTURE: usize = 0xff00;

/// The longest file that is read. A host with 10,000 libraries has 1 MiB.
const LONGEST: u64 = 16 << 20;

/// The folders from `root` that have the 64-bit library of this soname; empty if there is no cache of this format.
pub(super) fn folders(root: &Path, soname: &str) -> BTreeSet<String> {
    let bytes = files::read(&root.join("etc/ld.so.cache"), LONGEST).unwrap_or_default();
    let start = bytes.windows(MAGIC.len()).position(|part| part == MAGIC);
    let cache = start.and_then(|start| bytes.get(start..)).unwrap_or_default();
    let number = |at: usize| -> Option<usize> {
        let bytes: [u8; 4] = cache.get(at..)?.first_chunk().copied()?;
        usize::try_from(u32::from_ne_bytes(bytes)).ok()
    };
    let text = |at: usize| {
        let mut texts = cache.get(at..)?.split(|byte| *byte == 0);
        str::from_utf8(texts.next()?).ok()
    };
    let entry = |at: usize| Some((number(at)?, text(number(at + 4)?)?, text(number(at + 8)?)?));
    let entries = (0..number(20).unwrap_or(0)).map_while(|place| entry(48 + 24 * place));
    let paths = entries.filter(|(flags, name, _)| flags & ARCHITECTURE != 0 && *name == soname);
    paths.filter_map(|(_, _, path)| Some(path.rsplit_once('/')?.0.trim_start_matches('/').to_owned())).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A cache with these entries: flags, soname, path.
    pub fn cache(entries: &[(u32, &str, &str)]) -> Vec<u8> {
        let mut texts = Vec::new();
        let mut place = |text: &str| {
            let at = 48 + 24 * entries.len() + texts.len();
            texts.extend(text.bytes().chain([0]));
            u32::try_from(at).unwrap()
        };
        let header = [u32::try_from(entries.len()).unwrap(), 0, 0, 0, 0, 0, 0];
        let numbers = entries.iter().flat_map(|(flags, name, path)| [*flags, place(name), place(path), 0, 0, 0]);
        let numbers: Vec<u8> = header.into_iter().chain(numbers).flat_map(u32::to_ne_bytes).collect();
        [MAGIC, &numbers, &texts].concat()
    }

    #[test]
    fn library_is_found_where_the_linker_finds_it() {
        let root = tempfile::tempdir().unwrap();
        let write = |bytes: &[u8]| {
            std::fs::create_dir_all(root.path().join("etc")).unwrap();
            std::fs::write(root.path().join("etc/ld.so.cache"), bytes).unwrap();
        };
        let found = || folders(root.path(), "libcuda.so.1").into_iter().collect::<Vec<_>>();
        assert_eq!(found(), [""; 0], "no cache");
        let new = cache(&[
            (0x0303, "libc.so.6", "/usr/lib/libc.so.6"),
            (0x0303, "libcuda.so.1", "/opt/nvidia/lib64/libcuda.so.1"),
            (0x0003, "libcuda.so.1", "/opt/nvidia/lib32/libcuda.so.1"),
        ]);
        write(&new);
        assert_eq!(found(), ["opt/nvidia/lib64"]);
        write(&[b"ld.so-1.7.0\0\0\0\0\0".as_slice(), &new].concat());
        assert_eq!(found(), ["opt/nvidia/lib64"], "behind the older format");
        // A cache that is cut anywhere, or has other bytes in it, causes no failure.
        for length in 0..new.len() {
            write(&new[..length]);
            found();
            let mut broken = new.clone();
            broken[length] = 0xff;
            write(&broken);
            found();
        }
    }

    #[test]
    fn cache_of_this_machine_is_read() {
        let text = std::process::Command::new("/sbin/ldconfig").arg("-p").output();
        let Ok(text) = text else {
            println!("skipped: no /sbin/ldconfig");
            return;
        };
        // `	libc.so.6 (libc6,x86-64, ...) => /lib/x86_64-linux-gnu/libc.so.6`
        let text = String::from_utf8(text.stdout).unwrap();
        let line = text.lines().find(|line| line.trim().starts_with("libc.so.6 (libc6,")).unwrap();
        let folder = line.rsplit_once(" => /").unwrap().1.rsplit_once('/').unwrap().0;
        assert!(folders(Path::new("/"), "libc.so.6").contains(folder), "{text}");
    }
}
