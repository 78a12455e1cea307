"""The train leader: membership generations, global batches, commits, saves."""
