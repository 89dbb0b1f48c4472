//! VICI, by which programs configure charon (strongSwan's src/libcharon/plugins/vici/README.md):
//! its packets, without the length before each. Pure.

use std::collections::BTreeMap;
use std::str::FromStr;

use zeroize::Zeroizing;

/// The longest packet that charon sends or takes.
pub const PACKET_BYTES_MAX: usize = 512 * 1024;

/// A listing of connections has four levels.
const DEPTH_MAX: usize = 8;

/// What follows is a request for a command, or for an event from now on.
const COMMAND: u8 = 0;
const REGISTER: u8 = 3;

const SECTION_START: u8 = 1;
const SECTION_END: u8 = 2;
const KEY_VALUE: u8 = 3;
const LIST_START: u8 = 4;
const LIST_ITEM: u8 = 5;
const LIST_END: u8 = 6;

/// A packet to charon, which may hold a secret.
#[derive(Debug)]
pub struct Request {
    /// What it asks for.
    pub command: &'static str,
    bytes: Zeroizing<Vec<u8>>,
}

impl Request {
    /// Has this done; what with is added.
    pub fn command(command: &'static str) -> Self {
        Self::new(COMMAND, command)
    }

    /// Asks for an event each time from now on.
    pub fn register(event: &'static str) -> Self {
        Self::new(REGISTER, event)
    }

    fn new(kind: u8, command: &'static str) -> Self {
        // As it grows, memory would be left with what is in it.
        let bytes = Zeroizing::new(Vec::with_capacity(2 * usize::from(u16::MAX)));
        let mut request = Self { command, bytes };
        request.bytes.push(kind);
        request.name(command);
        request
    }

    /// Adds a value.
    pub fn text(mut self, name: &str, value: &str) -> Self {
        self.bytes.push(KEY_VALUE);
        self.name(name);
        self.value(value);
        self
    }

    /// Adds a list of one value.
    pub fn list_of(mut self, name: &str, value: &str) -> Self {
        self.bytes.push(LIST_START);
        self.name(name);
        self.bytes.push(LIST_ITEM);
        self.value(value);
        self.bytes.push(LIST_END);
        self
    }

    /// Adds a section with what `fill` adds.
    pub fn section(mut self, name: &str, fill: impl FnOnce(Self) -> Self) -> Self {
        self.bytes.push(SECTION_START);
        self.name(name);
        self = fill(self);
        self.bytes.push(SECTION_END);
        self
    }

    /// The packet.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Ours are shorter than its length can say: two addresses and two subnets at most.
    fn name(&mut self, name: &str) {
        let length = u8::try_from(name.len()).unwrap_or(u8::MAX);
        self.bytes.push(length);
        self.bytes.extend_from_slice(&name.as_bytes()[..length.into()]);
    }

    /// Ours are shorter than its length can say: a network configuration is.
    fn value(&mut self, value: &str) {
        let length = u16::try_from(value.len()).unwrap_or(u16::MAX);
        self.bytes.extend_from_slice(&length.to_be_bytes());
        self.bytes.extend_from_slice(&value.as_bytes()[..length.into()]);
    }
}

/// A packet from charon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Packet {
    /// What became of a command.
    Response(Message),
    /// charon has no such command.
    UnknownCommand,
    /// Events were registered.
    Registered,
    /// charon has no such event.
    UnknownEvent,
    /// Something happened, or is part of a listing.
    Event(String, Message),
}

/// What a packet says: values by name, of which the last of equal names counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message(BTreeMap<String, Value>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Value {
    Text(String),
    List(Vec<String>),
    Section(Message),
}

/// Bytes are no packet of VICI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not as VICI has it")]
pub struct MalformedPacket;

impl Packet {
    /// Reads a whole packet.
    pub fn parse(bytes: &[u8]) -> Result<Self, MalformedPacket> {
        let mut rest = Rest(bytes);
        match rest.byte()? {
            1 => rest.section(0).map(Self::Response),
            2 => Ok(Self::UnknownCommand),
            5 => Ok(Self::Registered),
            6 => Ok(Self::UnknownEvent),
            7 => Ok(Self::Event(rest.name()?, rest.section(0)?)),
            _ => Err(MalformedPacket),
        }
    }
}

impl Message {
    /// A value.
    pub fn text(&self, name: &str) -> Option<&str> {
        if let Value::Text(text) = self.0.get(name)? { Some(text) } else { None }
    }

    /// A value that is a number.
    pub fn number<T: FromStr>(&self, name: &str) -> Option<T> {
        self.text(name)?.parse().ok()
    }

    /// The values of a list; none if there is no such list.
    pub fn list(&self, name: &str) -> &[String] {
        if let Some(Value::List(items)) = self.0.get(name) { items } else { &[] }
    }

    /// What a section says.
    pub fn section(&self, name: &str) -> Option<&Self> {
        if let Value::Section(section) = self.0.get(name)? { Some(section) } else { None }
    }

    /// All sections with their names.
    pub fn sections(&self) -> impl Iterator<Item = (&str, &Self)> {
        self.0.iter().filter_map(|(name, value)| match value {
            Value::Section(section) => Some((name.as_str(), section)),
            Value::Text(_) | Value::List(_) => None,
        })
    }
}

/// What is not read yet.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn byte(&mut self) -> Result<u8, MalformedPacket> {
        let (first, rest) = self.0.split_first().ok_or(MalformedPacket)?;
        self.0 = rest;
        Ok(*first)
    }

    fn string(&mut self, length: usize) -> Result<String, MalformedPacket> {
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(MalformedPacket)?;
        self.0 = rest;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    fn name(&mut self) -> Result<String, MalformedPacket> {
        let length = self.byte()?;
        self.string(length.into())
    }

    fn value(&mut self) -> Result<String, MalformedPacket> {
        let length = u16::from_be_bytes([self.byte()?, self.byte()?]);
        self.string(length.into())
    }

    fn items(&mut self) -> Result<Vec<String>, MalformedPacket> {
        let mut items = Vec::new();
        loop {
            match self.byte()? {
                LIST_ITEM => items.push(self.value()?),
                LIST_END => return Ok(items),
                _ => return Err(MalformedPacket),
            }
        }
    }

    /// A message, at depth 0, ends with the packet, a section in it where it says so.
    fn section(&mut self, depth: usize) -> Result<Message, MalformedPacket> {
        let mut message = Message::default();
        while depth > 0 || !self.0.is_empty() {
            let kind = self.byte()?;
            if kind == SECTION_END && depth > 0 {
                break;
            }
            let name = self.name()?;
            let value = match kind {
                SECTION_START if depth < DEPTH_MAX => Value::Section(self.section(depth + 1)?),
                KEY_VALUE => Value::Text(self.value()?),
                LIST_START => Value::List(self.items()?),
                _ => return Err(MalformedPacket),
            };
            message.0.insert(name, value);
        }
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of VICI's README, as bytes.
    const EXAMPLE: &[u8] = b"\x03\x04key1\x00\x06value1\
        \x01\x08section1\
        \x01\x0bsub-section\x03\x04key2\x00\x06value2\x02\
        \x04\x05list1\x05\x00\x05item1\x05\x00\x05item2\x06\
        \x02";

    fn packet(kind: &[u8], message: &[u8]) -> Result<Packet, MalformedPacket> {
        Packet::parse(&[kind, message].concat())
    }

    #[test]
    fn strongswans_example_is_read() {
        let Ok(Packet::Response(message)) = packet(b"\x01", EXAMPLE) else { panic!("no answer") };
        assert_eq!(message.text("key1"), Some("value1"));
        let section = message.section("section1").unwrap();
        assert_eq!(section.section("sub-section").unwrap().text("key2"), Some("value2"));
        assert_eq!(section.list("list1"), ["item1", "item2"]);
        assert_eq!(message.sections().map(|(name, _)| name).collect::<Vec<_>>(), ["section1"]);
        let event = packet(b"\x07\x07list-sa", EXAMPLE).unwrap();
        assert_eq!(event, Packet::Event("list-sa".to_owned(), message));
        for (kind, expected) in
            [(2, Packet::UnknownCommand), (5, Packet::Registered), (6, Packet::UnknownEvent)]
        {
            assert_eq!(Packet::parse(&[kind]), Ok(expected));
        }
    }

    #[test]
    fn the_same_example_is_written() {
        let request = Request::command("version").text("key1", "value1");
        let request = request.section("section1", |it| {
            it.section("sub-section", |it| it.text("key2", "value2")).list_of("list1", "item1")
        });
        let one_item = EXAMPLE[..].strip_suffix(b"\x05\x00\x05item2\x06\x02").unwrap();
        let expected = [&b"\x00\x07version"[..], one_item, b"\x06\x02"].concat();
        assert_eq!(request.bytes(), expected);
        assert_eq!(Request::register("child-updown").bytes(), b"\x03\x0cchild-updown");
    }

    #[test]
    fn what_is_cut_or_too_deep_is_refused() {
        for length in 0..EXAMPLE.len() {
            let whole = [0, 14, EXAMPLE.len()].contains(&length);
            assert_eq!(packet(b"\x01", &EXAMPLE[..length]).is_ok(), whole, "{length}");
        }
        for bad in [&b"\x02"[..], b"\x05\x00\x01x", b"\x06", b"\x09", b"\x04\x01l\x03\x01x\x00\x00"]
        {
            assert!(packet(b"\x01", bad).is_err(), "{bad:?}");
        }
        for kind in [b"\x00", b"\x08"] {
            assert_eq!(packet(kind, EXAMPLE), Err(MalformedPacket));
        }
        let nested = |depth| [b"\x01\x01s".repeat(depth), b"\x02".repeat(depth)].concat();
        assert!(packet(b"\x01", &nested(DEPTH_MAX)).is_ok());
        assert!(packet(b"\x01", &nested(DEPTH_MAX + 1)).is_err());
        assert!(packet(b"\x01", &nested(100_000)).is_err(), "the stack is not its measure");
    }
}
