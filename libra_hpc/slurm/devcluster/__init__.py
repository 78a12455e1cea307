"""The embedded Slurm: Debian 12's packages unpacked for one user, six virtual nodes on the loopback address."""
