"""Records of a run on disk: events, metrics, status, result, and what is read from them."""
