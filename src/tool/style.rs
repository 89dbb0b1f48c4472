//! Standard output: text, and colour on a terminal only.

use std::io::{self, IsTerminal, Write as _};

use anyhow::Context;

/// Prints, and whether anybody reads it: `head` goes away when it has what it wanted.
pub(super) fn print(text: &str) -> anyhow::Result<bool> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        printed => printed.map(|()| true).context("cannot write to standard output"),
    }
}

/// Whether text is coloured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    is_coloured: bool,
}

impl Style {
    /// No colour.
    #[cfg(test)]
    pub(super) const PLAIN: Self = Self { is_coloured: false };

    /// Colour if standard output is a terminal, and nobody objects (<https://no-color.org>).
    pub(super) fn of_output() -> Self {
        let objection = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { is_coloured: io::stdout().is_terminal() && !objection }
    }

    pub(super) fn good(self, text: &str) -> String {
        self.coloured(text, 32)
    }

    pub(super) fn doubtful(self, text: &str) -> String {
        self.coloured(text, 33)
    }

    pub(super) fn bad(self, text: &str) -> String {
        self.coloured(text, 31)
    }

    fn coloured(self, text: &str, colour: u8) -> String {
        if self.is_coloured { format!("\x1b[1;{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }
}
