//! A program on a terminal: a pseudo terminal with the program on one side, and on the other a screen that knows the few
//! sequences that the program may write. Anything else, a line that wraps and a screen that scrolls are failures.

#![allow(clippy::string_slice, reason = "a test may panic; what is cut are sequences of ASCII")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

/// Longer than any state here takes to come.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a person would see.
#[derive(Debug, Default)]
pub struct Screen {
    columns: usize,
    rows: usize,
    lines: Vec<String>,
    row: usize,
    /// The columns before the cursor.
    column: usize,
    /// Sequences of colour that were written.
    pub colors: usize,
    /// The modes that are set, by their numbers.
    modes: Vec<u32>,
    /// How often the screen was drawn to its end.
    pub drawn: usize,
    /// How often the second screen was entered.
    pub entered: usize,
    unread: Vec<u8>,
}

/// A program on a terminal.
pub struct Terminal {
    master: File,
    /// The program's side, as it was.
    slave: OwnedFd,
    before: Termios,
    output: Receiver<Vec<u8>>,
    pub child: Child,
    pub screen: Screen,
}

fn winsize(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Terminal {
    /// Starts a program on a terminal of its own.
    pub fn start(command: &Command, columns: u16, rows: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave = File::options().read(true).write(true).open(name).unwrap();
        tcsetwinsize(&slave, winsize(columns, rows)).unwrap();
        let before = tcgetattr(&slave).unwrap();
        let side = || Stdio::from(slave.try_clone().unwrap());
        // Without it, the kernel would tell nobody of a new size.
        let mut on_terminal = Command::new("setsid");
        on_terminal.arg("--ctty").arg(command.get_program()).args(command.get_args()).env_clear();
        on_terminal.env("PATH", "/usr/bin:/bin").env("TERM", "xterm");
        on_terminal.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let child = on_terminal.stdin(side()).stdout(side()).stderr(side()).spawn().expect("setsid of util-linux");
        let mut master = File::from(master);
        let (found, output) = channel();
        let mut reading = master.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = reading.read(&mut bytes) {
                if found.send(bytes[..read].to_vec()).is_err() {
                    break;
                }
            }
        });
        master.flush().unwrap();
        let screen = Screen::new(columns.into(), rows.into());
        Self { master, slave: slave.into(), before, output, child, screen }
    }

    /// Waits until the screen is so.
    pub fn wait(&mut self, what: &str, is: impl Fn(&Screen) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is(&self.screen) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.screen.feed(&bytes),
                Err(_) => panic!("no {what} on the screen:\n{}", self.screen.text()),
            }
        }
    }

    /// Waits until these words are on the screen.
    pub fn wait_for(&mut self, words: &str) {
        self.wait(words, |screen| screen.text().contains(words));
    }

    pub fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Makes the terminal another size, cleared.
    pub fn resize(&mut self, columns: u16, rows: u16) {
        self.screen.lines = vec![String::new(); usize::from(rows)];
        (self.screen.columns, self.screen.rows) = (columns.into(), rows.into());
        tcsetwinsize(&self.slave, winsize(columns, rows)).unwrap();
    }

    /// Waits for the program's end, and that the terminal is as it was before.
    pub fn ends(mut self) -> ExitStatus {
        self.wait("first screen", |screen| screen.entered > 0 && screen.modes == Screen::MODES);
        let status = self.child.wait().unwrap();
        while let Ok(bytes) = self.output.try_recv() {
            self.screen.feed(&bytes);
        }
        assert_eq!(self.screen.modes, Screen::MODES);
        let now = tcgetattr(&self.slave).unwrap();
        assert_eq!(format!("{now:?}"), format!("{:?}", self.before));
        status
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Screen {
    /// Line wrap and cursor: what is set on a terminal before.
    const MODES: [u32; 2] = [7, 25];
    const SECOND: u32 = 1049;

    fn new(columns: usize, rows: usize) -> Self {
        Self { columns, rows, lines: vec![String::new(); rows], modes: Self::MODES.to_vec(), ..Self::default() }
    }

    pub fn text(&self) -> String {
        self.lines.join("\n")
    }

    fn feed(&mut self, bytes: &[u8]) {
        self.unread.extend(bytes);
        let valid = match std::str::from_utf8(&self.unread) {
            Ok(_) => self.unread.len(),
            Err(error) => error.valid_up_to(),
        };
        let text = String::from_utf8(self.unread[..valid].to_vec()).unwrap();
        let mut rest = text.as_str();
        while let Some(char) = rest.chars().next() {
            rest = if char == '\x1b' {
                let Some(end) = rest[1..].find(|c: char| c.is_ascii_alphabetic()) else { break };
                self.obey(&rest[1..end + 2]);
                &rest[end + 2..]
            } else {
                self.put(char);
                &rest[char.len_utf8()..]
            };
        }
        let read = valid - rest.len();
        self.unread.drain(..read);
    }

    fn obey(&mut self, sequence: &str) {
        match sequence {
            "[H" => (self.row, self.column) = (0, 0),
            "[K" => self.keep(self.row),
            "[J" => {
                self.keep(self.row);
                self.lines[self.row + 1..].fill(String::new());
                self.drawn += 1;
            }
            color if color.starts_with('[') && color.ends_with('m') => self.colors += 1,
            mode if mode.starts_with("[?") => {
                let (number, set) = mode[2..].split_at(mode.len() - 3);
                let number: u32 = number.parse().unwrap();
                assert!([7, 25, Self::SECOND].contains(&number), "mode {number}");
                self.modes.retain(|mode| *mode != number);
                match set {
                    "h" => self.modes.push(number),
                    "l" => {}
                    other => panic!("{other} of mode {number}"),
                }
                self.modes.sort_unstable();
                self.entered += usize::from((number, set) == (Self::SECOND, "h"));
            }
            other => panic!("the terminal is told {other:?}"),
        }
    }

    /// Keeps of a line what is before the cursor.
    fn keep(&mut self, row: usize) {
        let column = self.column;
        let mut at = 0;
        let line = self.lines[row].chars().take_while(|char| {
            at += width(*char);
            at <= column
        });
        self.lines[row] = line.collect();
    }

    fn put(&mut self, char: char) {
        match char {
            '\r' => self.column = 0,
            '\n' => {
                self.row += 1;
                assert!(self.row < self.rows, "the screen scrolls:\n{}", self.text());
            }
            char => {
                assert!(!char.is_control(), "{char:?} is written");
                let end = self.column + width(char);
                assert!(end <= self.columns, "{char:?} is beyond column {}:\n{}", self.columns, self.text());
                // Lines are written from their start.
                let mut at = 0;
                let (column, line) = (self.column, self.lines[self.row].clone());
                let before: String = line
                    .chars()
                    .take_while(|char| {
                        at += width(*char);
                        at <= column
                    })
                    .collect();
                let mut at = 0;
                let after: String = line
                    .chars()
                    .skip_while(|char| {
                        at += width(*char);
                        at <= end
                    })
                    .collect();
                self.lines[self.row] = format!("{before}{char}{after}");
                self.column = end;
            }
        }
    }
}

/// East Asian letters are two columns wide.
fn width(char: char) -> usize {
    if ('\u{2e80}'..='\u{ffdc}').contains(&char) { 2 } else { 1 }
}
