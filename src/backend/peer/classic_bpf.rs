//! What filters of sockets are made of: instructions of classic BPF (include/uapi/linux/filter.h).

/// Loads a word.
pub(super) const WORD: u16 = 0x20;
/// Loads a byte.
pub(super) const BYTE: u16 = 0x30;
/// Loads a half.
pub(super) const HALF: u16 = 0x28;
/// Takes the length of the IPv4 header at such a place for the index.
pub(super) const HEADER: u16 = 0xb1;
/// Loads a half so far behind the index.
pub(super) const HALF_BEHIND: u16 = 0x48;
/// Masks what was loaded.
pub(super) const AND: u16 = 0x54;
/// Skips so many steps if it is equal, and so many if not.
pub(super) const EQUAL: u16 = 0x15;
/// Lets in so many bytes of the packet.
pub(super) const END: u16 = 0x06;
