"""What touches a device: the device protocol, its two implementations, ledgers and the environment."""
