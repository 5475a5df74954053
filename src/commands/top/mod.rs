//! `linkwise top`: shows the GPUs of the linkwise on this host, their pods and the quality of their sets, live in a
//! terminal.
//!
//! The command asks the admin socket (`GET /state`) repeatedly and draws the answer: `page` is
//! the shown part, `line` fits it to a terminal, `terminal` is the terminal itself. It changes nothing on the node.

mod line;
mod page;
mod terminal;

use std::io::{self, IsTerminal, Write};
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::stream::{Stream, StreamExt, unfold};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use super::since::now;
use super::{admin, print};
use crate::config::{Format, TopArgs};
use line::{Line, Piece, Tint, cut, written};
use linkwise_node::admin::State;
use page::{Shown, page};
use terminal::{Key, Size, Terminal};

/// Runs the command.
pub async fn top(args: &TopArgs) -> Result<()> {
    let terminal = io::stdout().is_terminal();
    let drawn = terminal && args.term.as_deref() != Some("dumb");
    let color = drawn && !args.color.no_color;
    match args.format {
        Format::Json => objects(args).await,
        Format::Text if args.once || !drawn => once(args, terminal, color).await,
        Format::Text => live(args, color).await,
    }
}

async fn look(args: &TopArgs) -> Result<String> {
    admin::order(&args.socket, "GET /state", admin::LOOK).await
}

fn read<T: serde::de::DeserializeOwned>(args: &TopArgs, answer: &str) -> Result<T> {
    admin::read_state(&args.socket, answer)
}

/// Asks for the state now and after each interval, for ever.
fn looks(args: &TopArgs) -> impl Stream<Item = Result<String>> {
    unfold(Duration::ZERO, move |pause| async move {
        sleep(pause).await;
        Some((look(args).await, Duration::from_secs(args.interval.into())))
    })
}

async fn once(args: &TopArgs, terminal: bool, color: bool) -> Result<()> {
    let state: State = read(args, &look(args).await?)?;
    // A pipe or a file has no width.
    let room = if terminal { Size::now().columns } else { usize::MAX };
    let shown = Shown { state: Some((state, now())), trouble: None };
    let lines = page(&shown, now(), room);
    let lines = lines.iter().map(|line| written(&cut(line, room), color) + "\n");
    Ok(print(&lines.collect::<String>())?)
}

/// Prints one object a line for each answer, until the reader is gone.
async fn objects(args: &TopArgs) -> Result<()> {
    let mut looks = pin!(looks(args));
    while let Some(answer) = looks.next().await {
        let time = now().as_secs();
        let object = match answer.and_then(|answer| read::<Value>(args, &answer)) {
            Ok(state) => json!({ "time": time, "state": state }),
            Err(error) if args.once => return Err(error),
            Err(error) => json!({ "time": time, "error": format!("{error:#}") }),
        };
        let mut out = io::stdout().lock();
        match writeln!(out, "{}", escaped(&object.to_string())).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
            written => written?,
        }
        if args.once {
            break;
        }
    }
    Ok(())
}

/// JSON with escapes for control characters that JSON allows and that terminals obey.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for char in json.chars() {
        match char {
            char if char.is_control() => text += &format!("\\u{:04x}", u32::from(char)),
            char => text.push(char),
        }
    }
    text
}

async fn live(args: &TopArgs, color: bool) -> Result<()> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let (mut hangup, mut resized) = (listen(SignalKind::hangup())?, listen(SignalKind::window_change())?);
    let mut terminal = Terminal::enter().context("cannot use this terminal")?;
    let mut looks = pin!(looks(args));
    let mut screen = Screen { color, ..Screen::default() };
    loop {
        let keys = tokio::select! {
            answer = looks.next() => {
                screen.saw(answer.context("no more looks")?.and_then(|answer| read(args, &answer)));
                Vec::new()
            }
            keys = terminal.keys() => keys?,
            _ = resized.recv() => Vec::new(),
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        };
        for key in keys {
            match key {
                Key::Quit => return Ok(()),
                Key::Suspend => terminal.suspend()?,
                key => screen.scroll(key),
            }
        }
        terminal.draw(&screen.lines(Size::now()))?;
    }
}

#[derive(Default)]
struct Screen {
    shown: Shown,
    color: bool,
    first: usize,
    /// The number of existing lines and of drawn lines, at the last drawing.
    drawn: (usize, usize),
}

impl Screen {
    fn saw(&mut self, answer: Result<State>) {
        match answer {
            Ok(state) => self.shown = Shown { state: Some((state, now())), trouble: None },
            // The last state stays, and its age is shown.
            Err(error) => self.shown.trouble = Some(format!("{error:#}")),
        }
    }

    fn scroll(&mut self, key: Key) {
        let (all, drawn) = self.drawn;
        let last = all.saturating_sub(drawn);
        let to = match key {
            Key::Up => self.first.saturating_sub(1),
            Key::Down => self.first + 1,
            Key::PageUp => self.first.saturating_sub(drawn),
            Key::PageDown => self.first + drawn,
            Key::End => last,
            Key::Home | Key::Quit | Key::Suspend => 0,
        };
        self.first = to.min(last);
    }

    /// The lines of a screen; the last one lists the keys.
    fn lines(&mut self, size: Size) -> Vec<String> {
        let page = page(&self.shown, now(), size.columns);
        let room = size.rows.saturating_sub(1);
        self.drawn = (page.len(), room);
        self.first = self.first.min(page.len().saturating_sub(room));
        let below = page.len().saturating_sub(self.first + room);
        let mut keys = "q ends".to_owned();
        if page.len() > room {
            keys += &format!(", j and k scroll: {} lines above, {below} below", self.first);
        }
        let mut lines: Vec<Line> = page.into_iter().skip(self.first).take(room).collect();
        lines.resize(room, Line::new());
        lines.push(vec![Piece::new(Tint::Dim, &keys)]);
        lines.iter().map(|line| written(&cut(line, size.columns), self.color)).collect()
    }
}
