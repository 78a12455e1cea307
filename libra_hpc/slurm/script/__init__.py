"""Parts of the batch script that a site chooses: its container, and a template of its own."""
