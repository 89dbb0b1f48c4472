//! Segmentation offload as pure functions: split super-packets, plan sends, coalesce receives.
