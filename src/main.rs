//! The `linkwise` binary: a thin shell around the library.

fn main() {}
