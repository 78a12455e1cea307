"""The command line: one module per verb; installed as the package `libra_hpc_cli`."""
