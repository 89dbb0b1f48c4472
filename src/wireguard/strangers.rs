//! Hosts that have begun a handshake before this one knew of their leases.

use std::collections::VecDeque;

use super::keys::PublicKey;

/// As many as may join in the moment that a lease takes.
pub(super) const STRANGERS_MAX: usize = 16;

/// Who has begun a handshake without being a peer, and when. It has proved that it has the key.
#[derive(Default)]
pub(super) struct Strangers(VecDeque<(PublicKey, u64)>);

impl Strangers {
    /// Remembers one, and forgets the one that came first if there are too many.
    pub(super) fn remember(&mut self, key: PublicKey, now_ns: u64) {
        self.take(&key);
        self.0.truncate(STRANGERS_MAX - 1);
        self.0.push_front((key, now_ns));
    }

    /// When it came, if it did; once.
    pub(super) fn take(&mut self, key: &PublicKey) -> Option<u64> {
        let at = self.0.iter().position(|(known, _)| known == key)?;
        Some(self.0.remove(at)?.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wireguard::keys::PrivateKey;

    #[test]
    fn the_last_ones_are_known_once() {
        let key = |number: usize| PrivateKey::from_random([number as u8; 32]).public();
        let mut strangers = Strangers::default();
        for number in 1..=STRANGERS_MAX + 2 {
            strangers.remember(key(number), number as u64);
        }
        strangers.remember(key(3), 99);
        assert_eq!((strangers.take(&key(1)), strangers.take(&key(2))), (None, None));
        assert_eq!((strangers.take(&key(3)), strangers.take(&key(3))), (Some(99), None));
        assert_eq!(strangers.take(&key(4)), Some(4));
    }
}
