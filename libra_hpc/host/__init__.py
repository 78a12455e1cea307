"""The environment host process: episodes, tools and their sandbox."""
