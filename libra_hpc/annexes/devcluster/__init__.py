"""The embedded Slurm: Debian 12's packages unpacked for one user, eight virtual nodes on the loopback address."""
