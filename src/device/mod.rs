//! Owned devices: the TUN device and the UDP socket, with what each was probed to support.
