"""Software environments: pinned requirement sets and their installer."""
