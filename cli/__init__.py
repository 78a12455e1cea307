"""The command line: one module per verb; installed as the private package `libra_hpc_cli`, so that no top-level
`cli` appears on a user's machine."""
