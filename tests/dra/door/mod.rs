//! The DRA plugin with the kubelet in the box, over real sockets; a table of claims stands in for the API server. Tests
//! wait for states. A deadline passes only where a test is about it.

mod bad_input;
mod crash;
mod health;
mod http2;
mod life;
mod mig;
mod mps;
mod names;
mod node;
mod off;
mod prepare;
mod shares;
mod unreadable;
