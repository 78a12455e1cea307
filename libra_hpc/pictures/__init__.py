"""Charts of runs, plans and simulations, and the report as a page: all drawn by `svg_chart`."""
