"""New weights in another cluster: only what its engines' slices need."""
