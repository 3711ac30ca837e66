"""One file per cache strategy, and a registry from kind to class. Importing this package imports no framework."""
