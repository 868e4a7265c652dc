"""Load for a server over HTTP: a client like any other, which knows no engine and loads no JAX."""
