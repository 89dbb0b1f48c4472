//! Worker threads that move packets between the TUN device and the UDP socket.
