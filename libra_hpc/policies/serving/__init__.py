"""When an engine may use a device on which somebody else's server answers users."""
