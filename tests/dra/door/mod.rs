//! The DRA plugin against the kubelet in the box and a cluster that is a table of claims, over real sockets. Every wait
//! is for a state; deadlines are run out only where a test wants that.

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
