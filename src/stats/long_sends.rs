//! Who was sent long datagrams since somebody last looked: marks, not counts, so that what watches
//! the paths of those in use need not watch those of all.

use std::sync::atomic::{AtomicU64, Ordering};

/// Datagrams beyond this length are long. A little less than the narrowest path that is reckoned
/// with takes (548 bytes), so that its full packets count as well, and those of 544 that TCP sends
/// when it fragments.
pub const LONG_BYTES: u16 = 512;

const BITS: usize = u64::BITS as usize;

/// The marks of one worker, a bit for each place of a peer: no two peers share one.
///
/// A mark is set by a load and seldom a locked instruction, and taken by another thread.
#[derive(Debug)]
pub(super) struct LongSends(Box<[AtomicU64]>);

impl LongSends {
    /// For so many places.
    pub(super) fn new(places: usize) -> Self {
        Self(std::iter::repeat_with(AtomicU64::default).take(places.div_ceil(BITS)).collect())
    }

    /// Marks a place.
    #[inline]
    pub(super) fn mark(&self, place: usize) {
        let bit = 1 << (place % BITS);
        if let Some(word) = self.0.get(place / BITS)
            && word.load(Ordering::Relaxed) & bit == 0
        {
            // Whoever takes the mark finds the peer in its place.
            word.fetch_or(bit, Ordering::Release);
        }
    }

    /// The places that are marked; forgets the marks.
    pub(super) fn take(&self) -> impl Iterator<Item = usize> {
        let marked = self.0.iter().enumerate().filter(|(_, it)| it.load(Ordering::Relaxed) != 0);
        marked.flat_map(|(index, word)| {
            let marks = word.swap(0, Ordering::Acquire);
            (0..BITS).filter(move |bit| marks >> bit & 1 != 0).map(move |bit| index * BITS + bit)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_taken_once() {
        let (sends, places) = (LongSends::new(130), [0, 63, 64, 127, 129]);
        places.iter().chain(&places).for_each(|place| sends.mark(*place));
        assert_eq!(sends.take().collect::<Vec<_>>(), places);
        assert_eq!(sends.take().count(), 0);
    }
}
