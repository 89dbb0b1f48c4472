//! The numbers by which peers name sessions and handshakes to this host.

use std::collections::BTreeSet;

use super::cookie::Randomness;
use super::sessions::{PLACE_BITS, place_of};

/// Those that are given, by their low bits, and whose they are.
#[derive(Debug, Default)]
pub(super) struct Numbers(Vec<Option<(u32, u32)>>);

impl Numbers {
    /// Whose session or handshake has this number.
    pub(super) fn owner(&self, number: u32) -> Option<u32> {
        let (given, owner) = (*self.0.get(place_of(number))?)?;
        (given == number).then_some(owner)
    }

    /// A number for a session or a handshake of this peer.
    pub(super) fn give(&mut self, owner: u32, random: &mut impl Randomness) -> u32 {
        let Self(places) = self;
        let free = places.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            places.push(None);
            places.len() - 1
        });
        let mut bytes = [0; 4];
        random.fill(&mut bytes);
        let number = u32::from_le_bytes(bytes) << PLACE_BITS | place as u32;
        if let Some(at) = places.get_mut(place) {
            *at = Some((number, owner));
        }
        number
    }

    /// Has this one be given again.
    pub(super) fn free(&mut self, number: u32) {
        if let Some(place) = self.0.get_mut(place_of(number)) {
            *place = place.filter(|(given, _)| *given != number);
        }
    }

    /// Has all but those in `used` be given again.
    pub(super) fn keep(&mut self, used: &BTreeSet<u32>) {
        for place in &mut self.0 {
            *place = place.filter(|(number, _)| used.contains(number));
        }
    }

    /// How many places there are.
    pub(super) fn places(&self) -> usize {
        self.0.len()
    }
}
