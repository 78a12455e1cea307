"""Software environments: pinned requirement sets and the one installer that turns them into a virtual environment."""
