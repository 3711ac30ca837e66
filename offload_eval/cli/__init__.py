"""The command line: one module a command, each imported when it is called."""
