"""Pictures of runs, plans and simulations, in one style."""

import logging

# Without a writable home matplotlib takes a temporary folder, and its warning says nothing to a user.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
