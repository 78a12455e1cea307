"""The run file: TOML in, one frozen `RunConfig` out, every mistake one clear sentence."""
