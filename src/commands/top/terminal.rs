//! The terminal: its size, its keys, the second screen, and at the end the restored first screen.
//!
//! The few escape sequences here are those of every terminal since the VT100, and xterm's for the second screen.

use std::io::{self, Write, stdin, stdout};

use rustix::process::{Signal, kill_current_process_group};
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use tokio::io::{AsyncReadExt, Stdin};

/// Switches to the second screen, without cursor and line wrap.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// Moves to the first column of the first line.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_REST: &str = "\x1b[J";

/// The size if the terminal does not report it: that of a VT100.
const UNKNOWN_SIZE: Size = Size { columns: 80, rows: 24 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub columns: usize,
    pub rows: usize,
}

impl Size {
    /// The size of standard output's terminal.
    pub fn now() -> Self {
        match tcgetwinsize(stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                Self { columns: size.ws_col.into(), rows: size.ws_row.into() }
            }
            _ => UNKNOWN_SIZE,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    Suspend,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
}

/// A terminal on which `top` draws, until this is dropped.
pub(super) struct Terminal {
    /// The input, and its former settings; `None` if standard input is not a terminal.
    keys: Option<(Stdin, Termios)>,
}

impl Terminal {
    /// Takes the terminal.
    pub fn enter() -> io::Result<Self> {
        let keys = tcgetattr(stdin()).ok().map(|before| (tokio::io::stdin(), before));
        let terminal = Self { keys };
        terminal.set()?;
        Ok(terminal)
    }

    fn set(&self) -> io::Result<()> {
        if let Some((_, before)) = &self.keys {
            let mut raw = before.clone();
            raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG | LocalModes::IEXTEN;
            raw.input_modes -= InputModes::IXON;
            // A read takes the available bytes.
            raw.special_codes[SpecialCodeIndex::VMIN] = 1;
            raw.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        }
        write(ENTER)
    }

    /// Restores all settings; a failure has no remedy.
    fn reset(&self) {
        let _ = write(LEAVE);
        if let Some((_, before)) = &self.keys {
            let _ = tcsetattr(stdin(), OptionalActions::Now, before);
        }
    }

    /// Stops this process as Ctrl-Z does, and takes the terminal again when it goes on.
    pub fn suspend(&self) -> io::Result<()> {
        self.reset();
        kill_current_process_group(Signal::TSTP)?;
        self.set()
    }

    /// The keys pressed since the last call; waits for one. Read keys are not lost if the future is dropped.
    pub async fn keys(&mut self) -> io::Result<Vec<Key>> {
        let mut bytes = [0; 256];
        let read = match &mut self.keys {
            Some((input, _)) => input.read(&mut bytes).await?,
            None => 0,
        };
        match bytes.get(..read) {
            // No more keys can come: signals still can.
            None | Some([]) => std::future::pending().await,
            Some(bytes) => Ok(keys(bytes)),
        }
    }

    /// Draws the whole screen; the lines fit in it.
    pub fn draw(&self, lines: &[String]) -> io::Result<()> {
        let lines = lines.iter().map(|line| format!("{line}{CLEAR_LINE}")).collect::<Vec<_>>().join("\r\n");
        write(&format!("{HOME}{lines}{CLEAR_REST}"))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.reset();
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// The keys of a piece of input; unknown bytes are skipped.
fn keys(mut bytes: &[u8]) -> Vec<Key> {
    const KEYS: [(&[u8], Key); 23] = [
        (b"q", Key::Quit),
        (b"Q", Key::Quit),
        (b"\x03", Key::Quit),
        (b"\x1a", Key::Suspend),
        (b"k", Key::Up),
        (b"\x1b[A", Key::Up),
        (b"\x1bOA", Key::Up),
        (b"j", Key::Down),
        (b"\x1b[B", Key::Down),
        (b"\x1bOB", Key::Down),
        (b"b", Key::PageUp),
        (b"\x1b[5~", Key::PageUp),
        (b" ", Key::PageDown),
        (b"\x1b[6~", Key::PageDown),
        (b"g", Key::Home),
        (b"\x1b[H", Key::Home),
        (b"\x1bOH", Key::Home),
        (b"\x1b[1~", Key::Home),
        (b"G", Key::End),
        (b"\x1b[F", Key::End),
        (b"\x1bOF", Key::End),
        (b"\x1b[4~", Key::End),
        (b"\r", Key::Down),
    ];
    let mut found = Vec::new();
    while let Some((first, rest)) = bytes.split_first() {
        let known = KEYS.iter().find_map(|(code, key)| Some((*key, bytes.strip_prefix(*code)?)));
        bytes = match known {
            Some((key, rest)) => {
                found.push(key);
                rest
            }
            None if *first == b'\x1b' => after_sequence(rest),
            None => rest,
        };
    }
    found
}

/// The input after an unknown escape sequence: its last letter must not be taken for a key.
fn after_sequence(bytes: &[u8]) -> &[u8] {
    match bytes.split_first() {
        Some((b'[', rest)) => {
            let end = rest.iter().position(|byte| (0x40..=0x7e).contains(byte)).map_or(rest.len(), |end| end + 1);
            rest.get(end..).unwrap_or_default()
        }
        Some((b'O', rest)) => rest.get(1..).unwrap_or_default(),
        _ => bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_among_sequences() {
        assert_eq!(keys(b"q"), [Key::Quit]);
        assert_eq!(keys(b"\x1b[Ajx\x1b[6~\x03"), [Key::Up, Key::Down, Key::PageDown, Key::Quit]);
        // Alt and an arrow, a function key, a mouse: none of them gives a key.
        assert_eq!(keys(b"\x1b[1;3B\x1b[15~\x1bOQ\x1b[<0;1;1M"), []);
        assert_eq!(keys(b"\x1b"), []);
        assert_eq!(keys(b"\x1b[12"), []);
    }
}
