//! Closed sets of words, each of which is spelled one way everywhere, and how texts of others are
//! shown.

/// An enum whose variants are words: in flags, in JSON, in labels of metrics, and to people. Mark
/// one with `#[serde(other)]` to have it stand for words that a later release adds.
macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        #[derive(serde::Serialize, serde::Deserialize, derive_more::Display)]
        #[display("{}", self.name())]
        pub enum $name {
            $($(#[$doc])* #[serde(rename = $word)] $variant,)+
        }

        impl $name {
            /// Each of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// As it is spelled.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }
    };
}

pub(crate) use words;

/// `text` without control characters: values come from outside, and line breaks would forge lines
/// of the log, escape sequences drive terminals.
pub(crate) fn visible(text: &str) -> String {
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(shown).collect()
}
