//! Explicit Congestion Notification (RFC 3168), and what becomes of it where a packet leaves a
//! tunnel (RFC 6040).

/// The ECN field: the lowest two bits of the second byte of an IPv4 header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Ecn {
    /// Not-ECT: the sender would not react to a mark, so congested routers drop.
    NotEct = 0b00,
    /// ECT(1), set by senders that react to marks.
    Ect1 = 0b01,
    /// ECT(0), set by senders that react to marks.
    Ect0 = 0b10,
    /// CE: a congested router has marked the packet.
    Ce = 0b11,
}

impl Ecn {
    /// The field within the whole byte, the type of service.
    #[inline]
    pub const fn of(type_of_service: u8) -> Self {
        match type_of_service & 0b11 {
            0b00 => Self::NotEct,
            0b01 => Self::Ect1,
            0b10 => Self::Ect0,
            _ => Self::Ce,
        }
    }

    /// The field of a packet that leaves the tunnel, from its own and that of the `outer` header
    /// (RFC 6040, section 4.2, figure 4). `None` if the packet has to be dropped, which is all
    /// that its sender understands of congestion.
    #[inline]
    pub const fn after_tunnel(self, outer: Self) -> Option<Self> {
        match (outer, self) {
            (Self::Ce, Self::NotEct) => None,
            (Self::Ce, Self::Ect1 | Self::Ect0 | Self::Ce) => Some(Self::Ce),
            (Self::Ect1, Self::Ect0) => Some(Self::Ect1),
            (Self::NotEct | Self::Ect1 | Self::Ect0, inner) => Some(inner),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figure 4 of RFC 6040: a row for each inner field, a column for each outer one.
    #[test]
    fn every_pair_is_as_in_the_rfc() {
        use Ecn::{Ce, Ect0, Ect1, NotEct};
        let outer = [NotEct, Ect0, Ect1, Ce];
        let figure = [
            (NotEct, [Some(NotEct), Some(NotEct), Some(NotEct), None]),
            (Ect0, [Some(Ect0), Some(Ect0), Some(Ect1), Some(Ce)]),
            (Ect1, [Some(Ect1), Some(Ect1), Some(Ect1), Some(Ce)]),
            (Ce, [Some(Ce), Some(Ce), Some(Ce), Some(Ce)]),
        ];
        for (inner, row) in figure {
            for (outer, expected) in outer.into_iter().zip(row) {
                assert_eq!(inner.after_tunnel(outer), expected, "{inner:?} in {outer:?}");
            }
        }
    }

    #[test]
    fn the_field_is_the_lowest_two_bits() {
        for byte in 0..=u8::MAX {
            assert_eq!(Ecn::of(byte) as u8, byte & 3, "{byte:#04x}");
        }
    }
}
