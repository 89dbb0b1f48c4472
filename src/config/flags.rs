//! The command line and the `FLANNELD_*` environment, parsed into [`Options`]. Pure: arguments
//! and a lookup of variables go in, an [`Outcome`] comes out; printing and exiting are the
//! program's.
//!
//! Differences from flanneld, on purpose: a bad flag exits 2 instead of 0, and complains in one
//! line with a hint instead of the whole usage text; a flag whose feature is not built refuses,
//! or warns when it only modifies such a feature; the password is never shown.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::config::build;
pub use crate::config::checked::Variable;
use crate::config::flag_table::FlagValues;
use crate::config::go_flags::{self, SyntaxError};
use crate::config::options::Options;
use crate::words::visible;

/// What the command line asks for.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// Run with these options, after logging the warnings.
    Run(Box<Options>, Vec<String>),
    /// Print the text on stderr and exit with the code: version, usage, or what is wrong.
    End(String, u8),
}

/// Exit code for values that make no sense, as in flanneld.
const EXIT_INVALID: u8 = 1;
/// Exit code for a malformed command line, as of every Go and GNU program.
const EXIT_USAGE: u8 = 2;

/// Parses `arguments`, the program's own name first, and the variables that `variable` finds.
///
/// The command line wins over the environment, which wins over the defaults. `--help` and
/// `--version` are answered before the environment is read and before values are checked.
pub fn parse(arguments: impl IntoIterator<Item = OsString>, variable: Variable<'_>) -> Outcome {
    let mut arguments = arguments.into_iter();
    let program = arguments.next().unwrap_or_else(|| OsString::from("weftd"));
    let program = program.to_string_lossy();
    let mut values = FlagValues::default();
    let ignored = match go_flags::read_arguments(arguments, &mut values) {
        Ok(ignored) => ignored,
        Err(SyntaxError::Help) => return Outcome::End(go_flags::usage(&program), 0),
        Err(SyntaxError::Complaint(text)) => {
            let text = format!("{}\nTry 'weftd --help'.\n", visible(&text));
            return Outcome::End(text, EXIT_USAGE);
        }
    };
    if values.version {
        return Outcome::End(format!("{}\n", env!("CARGO_PKG_VERSION")), 0);
    }
    let mut warnings: Vec<_> = ignored.into_iter().collect();
    warnings.extend(go_flags::read_environment(variable, &mut values));
    match build::options(&values, variable, &mut warnings) {
        Ok(options) => Outcome::Run(Box::new(options), warnings),
        Err(error) => Outcome::End(visible(&error.to_string()) + "\n", EXIT_INVALID),
    }
}

/// What tells one daemon of a host from another.
#[derive(Debug, Clone)]
pub struct Given {
    /// `--subnet-file`.
    pub subnet_file: PathBuf,
    /// `--kube-subnet-mgr`.
    pub is_kubernetes: bool,
}

impl Given {
    /// By the arguments, without the program's name, and variables of any weftd or flanneld, as far
    /// as this release knows them.
    pub fn of(arguments: impl IntoIterator<Item = OsString>, variable: Variable<'_>) -> Self {
        let mut values = FlagValues::default();
        // What stands in front of a mistake was read.
        go_flags::read_arguments(arguments, &mut values).ok();
        go_flags::read_environment(variable, &mut values);
        Self { subnet_file: values.subnet_file.into(), is_kubernetes: values.kube_subnet_mgr }
    }
}

#[cfg(test)]
mod tests;
