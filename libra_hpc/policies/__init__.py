"""Pure decisions: snapshot in, decision out; no clock, no I/O."""
