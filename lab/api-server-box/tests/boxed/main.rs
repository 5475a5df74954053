//! The API server in a box, as its clients see it.

mod policies;
