//! The only module with unsafe code: one wrapper per kernel interface, no policy.
