"""Search for settings: the space, trials shared by several processes, and `tune`."""
