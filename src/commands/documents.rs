//! `linkwise completions` and `linkwise man`: the shell completions and the manual pages, generated from the
//! definitions of the command line.

use std::fs;

use crate::config::{CompletionsArgs, ManArgs, PLACEHOLDER, completable, documented};
use anyhow::{Context, Result};
use clap_complete::aot::Shell;
use clap_mangen::Man;
use linkwise_host::machines;
use linkwise_system::output::print;

const NAME: &str = "linkwise";

/// Prints the completions of a shell.
pub fn completions(args: &CompletionsArgs) -> Result<()> {
    let names: Vec<&str> = machines::built_in_names().collect();
    Ok(print(&text(args.shell, &names.join(" ")))?)
}

fn text(shell: Shell, machines: &str) -> String {
    let mut bytes = Vec::new();
    clap_complete::generate(shell, &mut completable(), NAME, &mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    // A machine is a built-in name or a file, so a fixed list lacks values. bash looks for files by itself if no name
    // fits.
    match shell {
        Shell::Zsh => text.replace(
            &format!("({PLACEHOLDER})"),
            &format!("{{_alternative \"machines:machine:({machines})\" \"files:file:_files\"}}"),
        ),
        Shell::Fish => text.replace(&format!("-r -f -a \"{PLACEHOLDER}\\t''\""), &format!("-r -F -a \"{machines}\"")),
        _ => text.replace(PLACEHOLDER, machines),
    }
}

/// Writes the pages, one for each command, into a folder.
pub fn man(args: &ManArgs) -> Result<()> {
    let folder = &args.folder;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for command in documented() {
        // Without a date the pages of a version are always the same. The date is a blank, because an empty one would
        // shift the text after it.
        let page =
            Man::new(command).date(" ").source(concat!("linkwise ", env!("CARGO_PKG_VERSION"))).manual("linkwise");
        let file = folder.join(page.get_filename());
        let mut bytes = Vec::new();
        page.render(&mut bytes)
            .and_then(|()| fs::write(&file, bytes))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_completed_in_each_shell() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = text(shell, "dgx-a100 dgx-h100");
            assert!(!text.contains(PLACEHOLDER), "{shell:?}");
            // At least five commands have --node.
            assert!(text.matches("dgx-a100 dgx-h100").count() >= 5, "{shell:?}");
        }
    }
}
